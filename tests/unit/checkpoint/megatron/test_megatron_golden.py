"""Checkpoints that real Megatron-Core wrote (`tests/golden/make_megatron.py`) load, and give the logits of its own model."""

from __future__ import annotations

import shutil
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from petatron.base.errors import ConfigError
from petatron.checkpoint.megatron import open_megatron
from petatron.checkpoint.megatron.read_megatron_pickles import load_torch_file
from petatron.config.schema.model import ModelConfig
from petatron.models.registry import spec_from_config
from petatron.pretrained.convert_model import ConversionOptions, MegatronLayout, convert
from petatron.pretrained.model_reader import open_model_reader
from tests.golden.make_megatron import CASES, ENCODERS, FOLDER
from tests.megatron_core.compare import logit_difference
from tests.megatron_core.models import VOCAB, arguments


@pytest.mark.parametrize("name", [*CASES, *ENCODERS])
def test_logits_are_those_of_megatron_core(tmp_path: Path, name: str):
    assert logit_difference(FOLDER / name, tmp_path / "converted") < 2e-6


def old_rank(tensors: dict[str, torch.Tensor], rank: int, version: float | None) -> dict[str, Any]:
    """The state of one of two ranks as in 2019: nested names, and all queries, all keys, all values (version 0) or these by element (1)."""
    layers, position = {}, tensors["position.weight"]
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    names |= {
        "attention.out": "attention.dense_attention",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
    for name, tensor in tensors.items():
        if not name.startswith("layers."):
            continue
        layer, module, leaf = name.split(".")[1], ".".join(name.split(".")[2:-1]), name.split(".")[-1]
        if module == "attention.q":
            parts = [tensors[name.replace("attention.q", f"attention.{part}")].chunk(2)[rank] for part in "qkv"]
            fused = torch.stack(parts, dim=1).flatten(0, 1) if version == 1 else torch.cat(parts)
            layers[f"layers.{layer}.attention.query_key_value.{leaf}"] = fused
        elif module in names:
            by_rows, by_columns = module == "mlp.up", leaf == "weight" and module in ("attention.out", "mlp.down")
            shard = tensor.chunk(2)[rank] if by_rows else tensor.chunk(2, 1)[rank] if by_columns else tensor
            layers[f"layers.{layer}.{names[module]}.{leaf}"] = shard.clone()
    layers |= {f"final_layernorm.{leaf}": tensors[f"norm.{leaf}"] for leaf in ("weight", "bias")}
    words = torch.cat((tensors["embedding.weight"], torch.ones(4, position.shape[1]))).chunk(2)[rank].clone()
    tables = {"word_embeddings": {"weight": words}, "position_embeddings": {"weight": position}}
    return {"language_model": {"embedding": tables, "transformer": layers}}


@pytest.mark.parametrize("version", [None, 1])
def test_files_of_2019_give_the_logits_of_megatron_core(tmp_path: Path, version: float | None):
    """No checkpoint version, torch.save from before its archives, the oldest order of queries, keys and values."""
    source = FOLDER / "gpt-legacy-tp2-pp2"
    tensors = {name: lazy.load() for name, lazy in open_megatron(source).tensors.items()}
    kept = {**arguments("gpt", 2, 1, 1, layers=2, width=16)}
    for rank in range(2):
        content = {"iteration": 10, "args": Namespace(**kept), "model": old_rank(tensors, rank, version)}
        content |= {} if version is None else {"checkpoint_version": version}
        (folder := tmp_path / "old" / f"mp_rank_{rank:02d}").mkdir(parents=True)
        torch.save(content, folder / "model_optim_rng.pt", _use_new_zipfile_serialization=version is not None)
    shutil.copy(source / "reference.safetensors", tmp_path / "old")
    assert logit_difference(tmp_path / "old", tmp_path / "converted") < 2e-6


def test_files_without_arguments_are_a_gpt2_by_their_shapes(tmp_path: Path):
    """As NVIDIA published its model of 345 million parameters."""
    model = ModelConfig(
        num_layers=2, hidden_size=128, ffn_hidden_size=512, num_attention_heads=2, num_query_groups=2, kv_channels=64, seq_length=16,
        max_position_embeddings=16, vocab_size=60,
    )  # fmt: skip
    tensors = {name: torch.randn(shape) for name, shape in spec_from_config(model).logical_shapes().items()}
    for rank in range(2):
        (folder := tmp_path / f"mp_rank_{rank:02d}").mkdir()
        torch.save(
            {"model": old_rank(tensors, rank, None)},
            folder / "model_optim_rng.pt",
            _use_new_zipfile_serialization=False,
        )
    with pytest.raises(
        ConfigError, match="vocab-size is not in the checkpoint's arguments; its embedding is padded to 64"
    ):
        open_megatron(tmp_path)
    opened = open_megatron(tmp_path, vocab_size=60)
    assert all(torch.equal(opened.tensors[name].load(), tensor) for name, tensor in tensors.items())
    assert opened.tensors.keys() == tensors.keys() and opened.model["activation"] == "gelu_tanh"


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
    convert(open_model_reader(source), tmp_path / "back", ConversionOptions(target_format="megatron", megatron=layout))
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


def test_a_bert_from_before_megatron_core_has_the_same_weights(tmp_path: Path):
    """The names of `megatron.model.BertModel`, of which NVIDIA's 345M files are."""
    source = FOLDER / "bert-torch_dist"
    tensors = {name: lazy.load() for name, lazy in open_megatron(source).tensors.items()}
    content = load_torch_file(source / "iter_0000010" / "common.pt")
    old = {"q": "query_key_value", "out": "dense", "up": "dense_h_to_4h", "down": "dense_4h_to_h"}
    layers: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith("layers."):
            continue
        layer, module, leaf = name.split(".")[1], ".".join(name.split(".")[2:-1]), name.split(".")[-1]
        place, _, last = module.partition(".")
        if last == "q":
            heads = [tensors[name.replace(".q.", f".{part}.")].unflatten(0, (4, -1)) for part in "qkv"]
            tensor = torch.cat(heads, dim=1).flatten(0, 1)
        elif last in ("k", "v"):
            continue
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        module = norms.get(module) or f"{'self_attention' if place == 'attention' else place}.{old[last]}"
        layers[f"layers.{layer}.{module}.{leaf}"] = tensor
    layers |= {f"final_layernorm.{leaf}": tensors[f"norm.{leaf}"] for leaf in ("weight", "bias")}
    words = torch.cat((tensors["embedding.weight"], torch.ones(4, 16)))
    tables = {"word": words, "position": tensors["position.weight"], "tokentype": tensors["token_type.weight"]}
    embedding = {f"{kind}_embeddings": {"weight": table} for kind, table in tables.items()}
    head = {
        f"{part}.{leaf}": tensors[f"transform.{part}.{leaf}"]
        for part in ("dense", "norm")
        for leaf in ("weight", "bias")
    }
    head = {name.replace("norm.", "layernorm."): tensor for name, tensor in head.items()}
    pooler, order = (
        {leaf: tensors[f"order_head.{part}.{leaf}"] for leaf in ("weight", "bias")} for part in ("pooler", "out")
    )
    model = {
        "language_model": {"embedding": embedding, "encoder": layers, "pooler": {"dense": pooler}},
        "lm_head": {**head, "bias": torch.cat((tensors["head.bias"], torch.zeros(4)))},
        "binary_head": order,
    }
    (folder := tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    kept = Namespace(**arguments("bert", 1, 1, 1, layers=2, width=16))
    saved = {"iteration": 10, "args": kept, "model": model, "checkpoint_version": content["checkpoint_version"]}
    torch.save(saved, folder / "model_optim_rng.pt")
    opened = open_megatron(tmp_path / "old")
    assert opened.model == open_megatron(source).model and opened.tensors.keys() == tensors.keys()
    assert all(torch.equal(opened.tensors[name].load(), tensor) for name, tensor in tensors.items())


def test_an_encoder_is_not_written_as_megatrons(tmp_path: Path):
    options = ConversionOptions(target_format="megatron", megatron=MegatronLayout(format="torch_dist"))
    with pytest.raises(
        ConfigError, match=r"--model-type bert is read from Megatron's files, if at all, and not written"
    ):
        convert(open_model_reader(FOLDER / "bert-torch_dist"), tmp_path / "back", options)
