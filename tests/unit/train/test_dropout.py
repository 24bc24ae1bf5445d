"""Dropout: right on average, off in evaluation, equal where ranks hold the same activation and different elsewhere."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.config import RunConfig
from petatron.layers.dropout import Dropout
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.build_run import build_loader, build_model, build_optimizer
from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import tiny_run

ON = "--hidden-dropout 0.3 --attention-dropout 0.3 --train-iters 3"


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(2)], ids=["own", "shared"])
def test_drops_a_share_and_keeps_the_mean(generator: torch.Generator | None):
    torch.manual_seed(1)
    layer = Dropout(0.25)
    layer.generator = generator
    x = torch.ones(400, 500, requires_grad=True)
    y = layer(x)
    assert y.detach().unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float((y == 0).float().mean()) == pytest.approx(0.25, abs=5e-3)
    assert float(y.detach().mean()) == pytest.approx(1.0, abs=5e-3)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()), "the gradient passes where the value did"
    assert layer.eval()(x) is x
    assert Dropout(0.0)(x) is x


def _replicas(run: RunConfig) -> dict[str, Any]:
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    model = build_model(run, mesh)
    optimizer = build_optimizer(run, model)
    streams: list[Tensor] = []
    dropped: list[Tensor] = []
    model.module.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0].detach().clone()))
    model.module.embedding_dropout.register_forward_hook(lambda *x: dropped.append(x[2].detach() == 0))
    losses = []
    for batches in build_loader(run, mesh):
        losses.append(float(model.train_step(batches)))
        optimizer.step(lr=5e-3)
    training = len(streams)
    total, tokens = model.evaluate(batches)
    again, _ = model.evaluate(batches)
    return {
        "losses": losses,
        "streams": streams[:training],
        "dropped": dropped[:training],
        "dropped_in_evaluation": any(bool(mask.any()) for mask in dropped[training:]),
        "evaluation": (float(total / tokens), float(again / tokens)),
        "weights": {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()},
    }


def test_same_seed_same_layout_same_bits():
    first, second = (_replicas(tiny_run(ON)) for _ in range(2))
    other = _replicas(tiny_run(f"{ON} --seed 4"))
    without = _replicas(tiny_run("--train-iters 3"))
    assert first["losses"] == second["losses"] != other["losses"]
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert first["losses"] != without["losses"]


def test_evaluation_drops_nothing():
    found = _replicas(tiny_run(ON))
    assert not found["dropped_in_evaluation"] and found["evaluation"][0] == found["evaluation"][1]
    # The same first weights evaluate alike whether dropout is configured or not.
    runs = [tiny_run(flags) for flags in (ON, "--train-iters 3")]
    models = [build_model(run, ParallelMesh.single()) for run in runs]
    batches = next(iter(build_loader(runs[0], ParallelMesh.single())))
    assert len({float(model.evaluate(batches)[0]) for model in models}) == 1
    assert len({float(model.train_step(batches)) for model in models}) == 2


MODELS = {
    "llama-shared-heads": "--num-query-groups 1 --qk-layernorm",
    "gpt": "--position-embedding-type learned_absolute --normalization LayerNorm --activation gelu --add-bias-linear",
}


@diagonal(2)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_replicas_stay_equal_to_the_last_bit(ranks: RankPool, model: str):
    """tp 2 x dp 2, ranks numbered tp fastest: 0 and 1 share a residual stream, 0 and 2 share all weights."""
    found = ranks.run(_replicas, 4, tiny_run(f"{ON} {model} --tp 2 --dp 2", world_size=4))
    for pair in ((0, 1), (2, 3)):
        left, right = (found[rank] for rank in pair)
        assert all(torch.equal(a, b) for a, b in zip(left["streams"], right["streams"]))
        assert all(torch.equal(a, b) for a, b in zip(left["dropped"], right["dropped"]))
        for name in left["weights"]:
            if "norm" in name or name.endswith(("out.bias", "down.bias", "position.weight")):
                assert torch.equal(left["weights"][name], right["weights"][name]), name
    for pair in ((0, 2), (1, 3)):
        left, right = (found[rank] for rank in pair)
        assert all(torch.equal(left["weights"][name], right["weights"][name]) for name in left["weights"])
        assert not any(torch.equal(a, b) for a, b in zip(left["dropped"], right["dropped"])), "replicas drop alike"
    shares = [float(torch.stack(rank["dropped"]).float().mean()) for rank in found]
    assert shares == pytest.approx([0.3] * 4, abs=0.03)


def test_sequence_split_activations_drop_independently(ranks: RankPool):
    left, right = ranks.run(_replicas, 2, tiny_run(f"{ON} --tp 2 --sequence-parallel", world_size=2))
    assert not any(torch.equal(a, b) for a, b in zip(left["dropped"], right["dropped"]))
    assert left["losses"] == right["losses"]
    for name in left["weights"]:
        if "norm" in name:
            assert torch.equal(left["weights"][name], right["weights"][name]), name
