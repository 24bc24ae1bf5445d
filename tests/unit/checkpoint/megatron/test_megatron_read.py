"""Megatron checkpoints of every layout give the logical tensors they were made of."""

from __future__ import annotations

import enum
import pickle
import random
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from petatron.checkpoint.megatron import MegatronCheckpoint, open_megatron
from petatron.config.schema.model import ModelConfig, MoEConfig
from tests.longform import diagonal
from tests.unit.checkpoint.megatron.megatron_files import VOCAB, WIDTH, Case, truth, write_dist, write_legacy

LLAMA = Case()
GPT = Case(swiglu=False, bias=True, learned=True, tied=True, norm="LayerNorm")
MIXTRAL = Case(experts=4, groups=2)
CASES = {
    "one rank": LLAMA,
    "tp 2": replace(LLAMA, tp=2),
    "tp 4": replace(LLAMA, tp=4),
    "pp 2": replace(LLAMA, layers=4, pp=2),
    "tp 2 pp 2 vpp 2": replace(LLAMA, layers=8, tp=2, pp=2, vpp=2),
    "grouped queries tp 2": replace(LLAMA, heads=8, groups=2, tp=2),
    "multi-query": replace(LLAMA, groups=1),
    "tied over stages": replace(LLAMA, tied=True, pp=2),
    "query norms, local names": replace(LLAMA, qk_norm=True, names="local"),
    "gpt tp 2": replace(GPT, tp=2),
    "gpt pp 2": replace(GPT, pp=2, tp=2),
    "gpt before core": replace(GPT, names="old", tp=2),
    "llama before core": replace(LLAMA, names="old", tp=2, groups=2),
    "experts": MIXTRAL,
    "experts ep 2 tp 2": replace(MIXTRAL, ep=2, tp=2),
    "experts ep 2 pp 2": replace(MIXTRAL, ep=2, pp=2, expert_names="grouped"),
    "experts in one product": replace(MIXTRAL, ep=2, tp=2, expert_names="products"),
    "experts with biases": replace(MIXTRAL, bias=True, swiglu=False, expert_names="grouped", ep=2),
    "shared expert": replace(MIXTRAL, shared=8, tp=2),
}


def assert_same_model(found: MegatronCheckpoint, case: Case) -> None:
    expected = truth(case)
    assert found.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        lazy = found.tensors[name]
        assert (lazy.shape, lazy.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(lazy.load(), tensor), name
    model = ModelConfig(**found.model)
    assert (model.num_layers, model.num_query_groups, model.vocab_size) == (case.layers, case.groups, VOCAB)
    assert (MoEConfig(**found.moe).num_experts or 0) == case.experts


@diagonal(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_legacy(tmp_path: Path, case: Case):
    write_legacy(tmp_path, case)
    found = open_megatron(tmp_path)
    assert found.iteration == 30
    assert_same_model(found, case)


DIST = (
    "one rank",
    "tp 2",
    "grouped queries tp 2",
    "gpt tp 2",
    "experts ep 2 tp 2",
    "experts with biases",
    "shared expert",
)


@diagonal(2)
@pytest.mark.parametrize("name", DIST)
@pytest.mark.parametrize("halves, per_layer", [(False, False), (True, True)])
def test_torch_dist(tmp_path: Path, name: str, halves: bool, per_layer: bool):
    made = write_dist(tmp_path, CASES[name], halves=halves and CASES[name].swiglu, per_layer=per_layer)
    made.finish(CASES[name].args())
    assert_same_model(open_megatron(made.step), CASES[name])


def test_torch_dist_reads_experts_that_are_one_product(tmp_path: Path):
    case = replace(MIXTRAL, layers=1)
    made, t = write_dist(tmp_path, case), truth(case)
    for key in [name for name in made.table if ".experts.experts." in name]:
        del made.table[key]
    both = torch.cat([t["layers.0.mlp.experts.gate.weight"], t["layers.0.mlp.experts.up.weight"]], dim=1)
    products = {"1": both.transpose(1, 2), "2": t["layers.0.mlp.experts.down.weight"].transpose(1, 2)}
    for which, value in products.items():
        made.add(
            f"decoder.layers.mlp.experts.experts.weight{which}",
            (1, *value.shape),
            [((0, 0, 0, 0), value[None].contiguous())],
        )
    made.finish(case.args())
    assert_same_model(open_megatron(made.step), case)


def test_torch_dist_reads_a_tensor_per_expert(tmp_path: Path):
    case = replace(MIXTRAL, layers=1)
    made, t = write_dist(tmp_path, case, per_layer=True, halves=True), truth(case)
    for key in [name for name in made.table if ".experts.experts." in name]:
        del made.table[key]
    for expert in range(case.experts):
        at = f"decoder.layers.0.mlp.experts.experts.{expert}.linear_fc"
        for suffix, logical in (("1.weight_w", "gate"), ("1.weight_v", "up"), ("2.weight", "down")):
            value = t[f"layers.0.mlp.experts.{logical}.weight"][expert].clone()
            made.add(f"{at}{suffix}", tuple(value.shape), [((0, 0), value)])
    made.finish(case.args())
    assert_same_model(open_megatron(made.step), case)


def test_only_the_chunks_of_a_tensor_are_read(tmp_path: Path):
    made = write_dist(tmp_path, LLAMA)
    made.finish(LLAMA.args())
    found = open_megatron(made.step)
    (made.step / "__1_0.distcp").unlink()
    assert torch.equal(found.tensors["norm.weight"].load(), truth(LLAMA)["norm.weight"])


def test_uneven_stages_follow_from_the_files(tmp_path: Path):
    case = replace(LLAMA, layers=4, pp=2)
    step = write_legacy(tmp_path, case)
    files = [step / f"mp_rank_00_00{pp}" / "model_optim_rng.pt" for pp in range(2)]
    first, second = (torch.load(file, weights_only=False) for file in files)
    moved = [name for name in second["model"] if name.startswith("decoder.layers.0.")]
    first["model"] |= {name.replace("layers.0.", "layers.2."): second["model"].pop(name) for name in moved}
    for name in [name for name in second["model"] if name.startswith("decoder.layers.1.")]:
        second["model"][name.replace("layers.1.", "layers.0.")] = second["model"].pop(name)
    torch.save(first, files[0])
    torch.save(second, files[1])
    assert_same_model(open_megatron(tmp_path), case)


def test_what_a_real_run_keeps_beside_its_weights_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Enums of Megatron's, random states of numpy and Python: read without importing anything of it."""
    module = types.ModuleType("megatron.core.enums")
    kinds = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module="megatron.core.enums")
    module.ModelType = kinds  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core.enums", module)

    def edit(content: dict) -> None:
        content["args"].model_type = kinds(1)
        content["rng_state"] = [
            {"np": np.random.get_state(), "python": random.getstate(), "torch": torch.get_rng_state()}
        ]

    write_legacy(tmp_path, LLAMA, edit=edit)
    monkeypatch.delitem(sys.modules, "megatron.core.enums")
    assert_same_model(open_megatron(tmp_path), LLAMA)


def test_release_and_vocabulary_by_hand(tmp_path: Path):
    step = write_legacy(tmp_path, LLAMA, edit=lambda content: setattr(content["args"], "vocab_size", None))
    step.rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    found = open_megatron(tmp_path, vocab_size=VOCAB)
    assert found.iteration == 0
    assert_same_model(found, LLAMA)
    assert open_megatron(tmp_path, vocab_size=40).tensors["embedding.weight"].load().shape == (40, WIDTH)


def test_arguments_in_our_words(tmp_path: Path):
    case = replace(GPT, extra={"window_size": (7, 0), "tokenizer_type": "NullTokenizer"})
    write_legacy(tmp_path, case, edit=lambda content: setattr(content["args"], "vocab_size", VOCAB - 1))
    model = open_megatron(tmp_path).model
    # Megatron's default GELU with biases is the fused one, which is the approximation by tanh.
    assert (model["activation"], model["window_size"], model["vocab_size"]) == ("gelu_tanh", 8, VOCAB)
    assert model["num_query_groups"] == case.heads and not model["group_query_attention"]


def test_experts_in_some_layers(tmp_path: Path):
    case, dense = replace(MIXTRAL, layers=1), replace(LLAMA, layers=1, groups=2)
    made = write_dist(tmp_path, dense, per_layer=True)
    mixed = write_dist(tmp_path / "mixed", case, per_layer=True)
    for name, facts in mixed.table.items():
        if name.startswith("decoder.layers.0."):
            chunks = [(tuple(index.offset), mixed.chunk(index)) for index in mixed.places if index.fqn == name]
            made.add(name.replace("layers.0.", "layers.1."), tuple(facts.size), chunks)
    made.finish(replace(case, layers=2, extra={"moe_layer_freq": [0, 1]}).args())
    found = open_megatron(made.step)
    assert found.moe["moe_layer_freq"] == "[0, 1]"
    name = "mlp.experts.up.weight"
    assert torch.equal(found.tensors[f"layers.1.{name}"].load(), truth(case)[f"layers.0.{name}"])
    assert "layers.0.mlp.up.weight" in found.tensors


def test_metadata_of_another_torch(tmp_path: Path):
    """Older tables have no version and keep plain attributes."""
    made = write_dist(tmp_path, LLAMA)
    made.finish(LLAMA.args())
    table = pickle.loads((made.step / ".metadata").read_bytes())
    del table.version, table.storage_meta
    (made.step / ".metadata").write_bytes(pickle.dumps(table, protocol=2))
    assert_same_model(open_megatron(made.step), LLAMA)


@pytest.mark.parametrize(
    "stored, ids", [(LLAMA.padded, LLAMA.padded), (LLAMA.padded - 1, LLAMA.padded), (VOCAB, VOCAB + 1)]
)
def test_the_null_tokenizer_has_one_id_more_if_the_embedding_has(tmp_path: Path, stored: int, ids: int):
    """It counted its end of a document on top up to version 0.16, and does not since."""
    write_legacy(
        tmp_path,
        LLAMA,
        edit=lambda content: vars(content["args"]).update(tokenizer_type="NullTokenizer", vocab_size=stored),
    )
    assert open_megatron(tmp_path).model["vocab_size"] == ids
