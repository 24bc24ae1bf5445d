"""The all-to-all of tokens overlaps with the shared expert: the order of host events, and the same bits as without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.kernels.linear_gemms import PLAIN_GEMM, WeightGrad
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.moe.moe_layer import MoELayer
from petatron.layers.ops.linear_op import GemmOp
from petatron.layers.ops.recompute_output import as_recomputable
from petatron.mesh import collectives, overlapped_all_to_all
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.overlapped_all_to_all import start_overlapped_all_to_all
from petatron.mesh.rank_layout import Layout
from petatron.mesh.rng import RandomStreams
from petatron.models.branch_specs import moe_spec
from petatron.parallel.activation_recompute import recomputed
from petatron.parallel.expert_parallel_token_dispatcher import apply_expert_parallel
from tests.dist import RankPool

S, B, D, F, E = 6, 2, 8, 4, 4
MODEL = ModelConfig(hidden_size=D, activation="swiglu", add_bias_linear=False)
MOE = MoEConfig(
    num_experts=E,
    moe_ffn_hidden_size=F,
    moe_shared_expert_intermediate_size=F,
    moe_shared_expert_gate=True,
    moe_token_dispatcher_type="alltoall",
)


@dataclass
class LoggedGemm:
    """A GEMM that logs when it runs, forward and backward."""

    log: list[str]
    name: str

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        self.log.append(self.name)
        return PLAIN_GEMM.forward(x_RD, weight)

    def backward(self, grad_RO: Tensor, weight: Tensor, kept: tuple[Tensor, ...]) -> tuple[Tensor, WeightGrad]:
        self.log.append(f"{self.name} grad")
        return PLAIN_GEMM.backward(grad_RO, weight, kept)


class LoggedExchanges:
    """Logs the start and the wait of every differentiable all-to-all while it is entered."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._patch = patch.object(overlapped_all_to_all, "start_all_to_all", self._start)

    def _start(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Handle]:
        out, handle = collectives.start_all_to_all(*args, **kwargs)
        self._log.append("start")

        def wait() -> None:
            self._log.append("wait")
            handle.wait()

        return out, Handle(on_complete=wait)

    def __enter__(self) -> None:
        self._patch.start()

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def build_layer(mesh: ParallelMesh, moe: MoEConfig, log: list[str]) -> MoELayer:
    layer = moe_spec(MODEL, moe).build(0).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    here = E // mesh.ep.size
    for product in (layer.experts.get_submodule("gate_up"), layer.experts.down):
        product.weight = torch.nn.Parameter(product.weight.data[mesh.ep.rank * here :][:here].clone())
    apply_expert_parallel(layer, mesh, moe)
    assert layer.shared is not None
    for name, linear in (("first", layer.shared.get_submodule("gate_up")), ("second", layer.shared.down)):
        assert isinstance(linear, Linear)
        multiply = GemmOp(LoggedGemm(log, name))  # pyright: ignore[reportArgumentType]
        linear.linear_op = lambda x, weight, bias, multiply=multiply: multiply(as_recomputable(x), weight, bias)
    layer.experts.register_forward_hook(lambda *_: log.append("experts"))
    layer.experts.register_full_backward_hook(lambda *_: log.append("experts grad"))
    return layer


@dataclass
class Outcome:
    log: list[str]
    tensors: dict[str, Tensor]
    events: list[tuple[str, int]]


def _run(moe: MoEConfig, *, recompute: str = "") -> Outcome:
    torch.set_num_threads(1)
    mesh = ParallelMesh(Layout(dp_shard=2, ep=2), dist.get_rank())
    log: list[str] = []
    layer = build_layer(mesh, moe, log)
    streams = RandomStreams.seeded(1, mesh, used_in_step=False)
    assert layer.shared is not None
    if recompute == "shared_experts":
        layer.shared.forward, layer.shared_runs_in_halves = recomputed(layer.shared.forward, streams), False
    elif recompute == "moe":
        layer.forward = recomputed(layer.forward, streams)
    generator = torch.Generator().manual_seed(10 + mesh.rank)
    x, grad = (torch.randn(S, B, D, dtype=torch.float64, generator=generator) for _ in range(2))
    x.requires_grad_()
    with LoggedExchanges(log):
        y = layer(x, ForwardContext())
        log.append("backward")
        y.backward(grad)
    tensors = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    assert x.grad is not None and len(tensors) == len(list(layer.parameters()))
    return Outcome(log, {"y": y.detach(), "x": x.grad, **tensors}, [(e.op, e.elements) for e in mesh.record.events()])


def test_shared_expert_runs_between_start_and_wait(ranks: RankPool):
    """Forward, and by the order of autograd backward: the second GEMM beside the combine, the first beside the dispatch."""
    expected = [
        *("start", "first", "wait", "experts", "start", "second", "wait", "backward"),
        *("start", "second grad", "wait", "experts grad", "start", "first grad", "wait"),
    ]
    for outcome in ranks.run(_run, 2, MOE):
        assert outcome.log == expected


def test_without_overlap_it_runs_afterwards(ranks: RankPool):
    expected = [
        *("start", "wait", "experts", "start", "wait", "first", "second", "backward"),
        *("second grad", "first grad", "start", "wait", "experts grad", "start", "wait"),
    ]
    for outcome in ranks.run(_run, 2, replace(MOE, moe_shared_expert_overlap=False)):
        assert outcome.log == expected


@pytest.mark.parametrize("gate", [True, False])
def test_overlap_changes_no_bit_and_no_communication(ranks: RankPool, gate: bool):
    moe = replace(MOE, moe_shared_expert_gate=gate)
    without = ranks.run(_run, 2, replace(moe, moe_shared_expert_overlap=False))
    for found, expected in zip(ranks.run(_run, 2, moe), without, strict=True):
        assert found.events == expected.events
        for name, tensor in expected.tensors.items():
            assert torch.equal(found.tensors[name], tensor), name


def _recomputed(module: str) -> Outcome:
    return _run(MOE, recompute=module)


@pytest.mark.parametrize("module", ["shared_experts", "moe"])
def test_recompute_with_overlap_changes_no_bit(ranks: RankPool, module: str):
    """A recomputed shared expert runs as a whole beside the dispatch; in a recomputed layer every start is waited for."""
    for found, expected in zip(ranks.run(_recomputed, 2, module), ranks.run(_run, 2, MOE), strict=True):
        assert found.log.count("start") == found.log.count("wait")
        if module == "shared_experts":
            assert found.log[:4] == ["start", "first", "second", "wait"]
        for name, tensor in expected.tensors.items():
            assert torch.equal(found.tensors[name], tensor), name


def _exchange(apart: bool) -> tuple[Tensor, Tensor, list[tuple[str, int, str]]]:
    """Rank r sends r + 1 rows to every rank; in one node or in two."""
    rank = dist.get_rank()
    axis = (mesh := ParallelMesh(Layout(tp=3), rank)).tp
    send, receive = [rank + 1] * 3, [1, 2, 3]
    x = (torch.arange(6 * (rank + 1), dtype=torch.float64).view(-1, 2) + 100 * rank).requires_grad_()
    if apart:
        out = start_overlapped_all_to_all(x, axis, send=send, receive=receive).wait()
    else:
        out = collectives.differentiable_all_to_all(x, axis, send=send, receive=receive)
    (out * torch.arange(1.0, 7.0, dtype=torch.float64)[:, None] * (rank + 1)).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, [(e.op, e.elements, e.caller.split(":")[0]) for e in mesh.record.events()]


def test_start_and_wait_equal_one_exchange(ranks: RankPool):
    for (out, grad, events), expected in zip(ranks.run(_exchange, 3, True), ranks.run(_exchange, 3, False)):
        assert torch.equal(out, expected[0]) and torch.equal(grad, expected[1])
        assert events == expected[2] and {caller for _, _, caller in events} == {"parallel/test_expert_overlap.py"}


def _alone() -> bool:
    axis = ParallelMesh.single().tp
    x = torch.ones(2, 2)
    out, handle = collectives.start_all_to_all(x, axis, send=[2], receive=[2])
    handle.wait()
    return out is x and axis.record.count == 0


def test_one_rank_sends_nothing():
    assert _alone()
