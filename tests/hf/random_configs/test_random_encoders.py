"""Folders of random encoders compute in Petatron what they do in transformers, padded, and come back as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import petatron
from petatron.kernels.attention.document_layout import Documents
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.hf import FAMILIES, from_hf_config
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from tests.hf.random_configs.encoder_families import ENCODER_FAMILIES, random_encoder_config
from tests.longform import diagonal, later

LENGTH, BOUND, CASES = 24, 1e-4, 25


def build(folder: Path, config: dict[str, Any], number: int) -> Any:
    """A folder with this config.json and random weights, and its model by transformers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    their_config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, FAMILIES[config["model_type"]].architecture)
    model = kind._from_config(their_config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.25)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_every_encoder_is_drawn():
    assert set(ENCODER_FAMILIES) == {name for name, family in FAMILIES.items() if family.model_type == "bert"}


@diagonal(3)
@pytest.mark.parametrize(
    ("family", "number"),
    [case for family in ENCODER_FAMILIES for case in ((family, 0), *(later(family, at) for at in range(1, CASES)))],
)
def test_a_random_encoder_is_that_of_transformers(family: str, number: int, tmp_path: Path):
    config = random_encoder_config(family, number)
    theirs = build(tmp_path / "theirs", config, number)
    drawn = torch.Generator().manual_seed(number)
    tokens = torch.randint(
        5, config["vocab_size"], (2, LENGTH), generator=drawn
    )  # no padding id, which positions go by
    lengths = torch.tensor([LENGTH, 9])
    is_token = torch.arange(LENGTH) < lengths[:, None]
    padding = 0 if config.get("pad_token_id") is None else config["pad_token_id"]
    tokens = torch.where(is_token, tokens, padding)
    with torch.no_grad():
        wanted = theirs(tokens, attention_mask=is_token.long())[0]
    ours = petatron.from_pretrained(tmp_path / "theirs", ParallelMesh.single(), dtype="float32")
    batch = Batch(tokens, documents=Documents.of_lengths(lengths.numpy(), LENGTH))
    ours.module.eval()
    with torch.no_grad():
        logits = ours.module(batch, collect=("logits",)).collected["logits"]
    bound = BOUND * max(1.0, wanted.std().item())
    torch.testing.assert_close(logits[is_token], wanted[is_token], rtol=0, atol=bound)
    convert(open_model_reader(tmp_path / "theirs"), tmp_path / "ours", ConversionOptions(target_format="petatron"))
    convert(open_model_reader(tmp_path / "ours"), tmp_path / "back", ConversionOptions(target_format="huggingface"))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert from_hf_config(json.loads((tmp_path / "back" / "config.json").read_text())) == from_hf_config(config)
