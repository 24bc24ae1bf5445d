"""The layer that is measured is the layer: against autograd in float64, and against the peer it is compared with."""

from __future__ import annotations

import pytest
import torch

from petatron.bench.ops import moe as bench_moe
from petatron.bench.ops.moe import ROUTINGS, SMALL_SHAPES, MoEShape, build_layer, measure, ours, peer
from tests.kernels.gemm.experts_by_loop import experts_by_loop

CPU = torch.device("cpu")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=lambda shape: shape.family)
def test_the_measured_layer(shape: MoEShape, routing: str):
    layer = build_layer(shape, routing, CPU, dtype=torch.float64)
    found = ours(layer)
    mine = [found.y_TD, found.grad_x_TD, found.grad_weights_TK, layer.gate_up_grad, layer.down_grad]
    for own, true in zip(mine, experts_by_loop(layer), strict=True):
        torch.testing.assert_close(own, true)


@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=lambda shape: shape.family)
def test_the_peer_computes_the_same(shape: MoEShape):
    pytest.importorskip("transformers")
    layer = build_layer(shape, "skewed", CPU, dtype=torch.float32)
    run = peer(layer)
    assert run is not None
    theirs, mine = run(), ours(layer)
    torch.testing.assert_close(mine.y_TD, theirs.y_TD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.grad_x_TD, theirs.grad_x_TD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.grad_weights_TK, theirs.grad_weights_TK, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_peer", [True, False])
def test_measure(with_peer: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_moe, "peer", lambda layer: (lambda: None) if with_peer else None)
    rows = dict(measure(CPU, shapes=SMALL_SHAPES[1:], repeat=1, warmup_s=0.0))
    label = "MoE qwen3_moe E16 K4 D32 F24"
    assert all(("transformers" in rows[f"{label}, {routing}"]) is with_peer for routing in ROUTINGS)
    assert "FLOP/s useful" in rows[f"{label}, even"]
    assert {f"{label}: permute", f"{label}: down, weight gradient"} <= rows.keys()


def test_flops_are_those_of_the_chosen_experts():
    assert MoEShape("mixtral", 8, 2, 4096, 14336, 32768).flops == 6 * 65536 * 3 * 4096 * 14336
