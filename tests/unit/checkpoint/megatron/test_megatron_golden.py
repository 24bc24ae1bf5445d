"""Checkpoints that real Megatron-Core wrote (`tests/golden/make_megatron.py`) load, and give the logits of its own model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from petatron.checkpoint.megatron.pickle_allowlist import load_torch_file
from petatron.pretrained.convert_model import ConversionOptions, MegatronLayout, convert
from petatron.pretrained.open_weights import open_model_source
from tests.golden.make_megatron import CASES, FOLDER
from tests.megatron_core.compare import logit_difference
from tests.megatron_core.models import VOCAB


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_megatron_core(tmp_path: Path, name: str):
    assert logit_difference(FOLDER / name, tmp_path / "converted") < 2e-6


def stored_tensors(step: Path) -> dict[str, Any]:
    """What a step's files hold; of the objects in `torch_dist` the names."""
    if not (step / ".metadata").is_file():
        files = {path.parent.name: load_torch_file(path)["model"] for path in step.glob("*/*.pt")}
        return {f"{rank} {name}": value for rank, model in files.items() for name, value in model.items()}
    entries = FileSystemReader(step).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        load(state, storage_reader=FileSystemReader(step), no_dist=True)
    return {**{name: None for name in entries if not name.startswith("common_state")}, **state}


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_for_the_local_layers_is_what_megatron_core_wrote(tmp_path: Path, name: str):
    """The same names, `_extra_state` included, with the same values: so Megatron's loader finds all that it asks for."""
    case, source = CASES[name], FOLDER / name
    layout = MegatronLayout(
        format=case.get("format", "torch_dist"), tp=case.get("tp", 1), pp=case.get("pp", 1), layer_spec="local"
    )
    convert(open_model_source(source), tmp_path / "back", ConversionOptions(target_format="megatron", megatron=layout))
    theirs, ours = (stored_tensors(folder / "iter_0000010") for folder in (source, tmp_path / "back"))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if value is None:
            assert ours[key] is None, key
        elif "word_embeddings" in key or "output_layer" in key:
            rank = int(key[8:10]) if key.startswith("mp_rank") else 0  # padding is zero here, and anything there
            rows = min(len(value), VOCAB - rank * len(value))
            assert torch.equal(ours[key][:rows], value[:rows]), key
        else:
            assert torch.equal(ours[key], value), key
