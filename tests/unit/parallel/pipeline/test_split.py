"""The decoder's own shards at every tensor-parallel size: weights tile, first values never depend on the layout."""

import logging

import pytest
import torch

import petatron
from petatron.models.registry import model_spec
from petatron.parallel.tensor_parallel import shard_params
from petatron.sharding.initial_values import NormalValues
from petatron.sharding.shard_spec import ModelParallelCoordinate
from tests.heard import heard
from tests.parity.harness import tiny_run

MODELS = {
    "llama": "",
    "gqa": "--num-query-groups 2 --qk-layernorm --add-qkv-bias",
    "mqa": "--num-query-groups 1",
    "gpt": "--position-embedding-type learned_absolute --normalization LayerNorm --activation gelu --add-bias-linear "
    "--no-untie-embeddings-and-output-weights --vocab-size 37",
}


def logical_tensors(flags: str, tp: int) -> tuple[dict[str, torch.Tensor], set[tuple[int, ...]]]:
    """Whole first weights assembled from every rank's primary pieces; and the local shapes of all ranks."""
    spec = model_spec(tiny_run(flags))
    params = spec.params()
    whole: dict[str, torch.Tensor] = {}
    shapes = set()
    for rank in range(tp):
        with torch.device("meta"):
            model = spec.build_stage(spec.whole_model)
        placements = shard_params(model, params, ModelParallelCoordinate(tp, rank, sequence_parallel=True))
        shapes.add(tuple(tuple(parameter.shape) for parameter in model.parameters()))
        for name, placement in placements.items():
            init = params[name].init
            for piece in placement.tensor_shards:
                if piece.primary:
                    target = whole.setdefault(piece.name, torch.full(piece.logical_shape, float("nan")))
                    assert target[piece.logical_slices()].isnan().all(), f"{piece.name} is held twice"
                    value = torch.zeros(piece.shape)
                    if isinstance(init, NormalValues):
                        init.fill(value, piece, seed=5)
                    target[piece.logical_slices()] = value
    return whole, shapes


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS.keys())
def test_every_layout_holds_the_same_logical_model(flags: str):
    reference, _ = logical_tensors(flags, 1)
    for tp in (2, 4):
        whole, shapes = logical_tensors(flags, tp)
        assert len(shapes) == 1, "local shapes differ between ranks"
        assert whole.keys() == reference.keys()
        assert all(torch.equal(whole[name], reference[name]) for name in whole), "NaN means a hole"


def test_fused_layers_learn_their_local_widths():
    spec = model_spec(tiny_run("--num-query-groups 2"))
    with torch.device("meta"):
        model = spec.build_stage(spec.whole_model)
    shard_params(model, spec.params(), ModelParallelCoordinate(4, 1))
    block = model.layers["0"]
    assert block.attention.qkv.sections == (8, 8, 8)  # one query head, one key and one value head shared by two ranks
    assert block.mlp.gate_up.sections == (12, 12)
    assert block.attention.out.sections == (32,) and tuple(block.attention.out.weight.shape) == (32, 8)


def test_a_plain_model_is_built_without_a_word():
    """How many elements a rank updates, padding included, is for who looks for a bug."""
    run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2", "--num-layers", "1"]).config
    for level, said in ((logging.INFO, False), (logging.DEBUG, True)):
        with heard("petatron", level=level) as messages:
            petatron.build_model(run, petatron.launch(run))
        assert any("elements of parameters" in message for message in messages) is said
