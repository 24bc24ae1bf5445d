"""One step of recurrent layers on a CUDA device against float64, at the sizes of Mamba-2 2.7B, Qwen3-Next, Kimi-Linear: slots, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from petatron.kernels.registry import KernelContext, choose_kernel
from petatron.kernels.ssm.decode import conv_step as plain_conv
from petatron.kernels.ssm.decode import delta_step as plain_delta
from petatron.kernels.ssm.decode import scan_step as plain_scan
from petatron.kernels.ssm.decode.delta_step import DeltaGateInputs
from petatron.kernels.ssm.decode.scan_step import ScanParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BOUNDS = {torch.float32: 4e-6, torch.bfloat16: 4e-3}
"""Norm of the difference over the norm; outputs are rounded once."""
STATE_BOUND = 4e-6


class Step(NamedTuple):
    """An operation with its reference, the shape of a slot, and what draws its inputs for so many sequences."""

    operation: str
    plain: Callable[..., Tensor]
    states: str
    shape: tuple[int, ...]
    inputs: Callable[[int, torch.dtype], tuple[Any, ...]]


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def scan_inputs(count: int, dtype: torch.dtype) -> tuple[Any, ...]:
    heads = ScanParams(draw(80, dtype=dtype) + 1, draw(80, dtype=dtype) - 4, draw(80, dtype=dtype))
    rows = draw(count, 80 * 64 + 2 * 128 + 80, dtype=dtype)
    x, B, C, dt = rows.split((80 * 64, 128, 128, 80), dim=1)
    return x.unflatten(1, (80, 64)), dt, B.unsqueeze(1), C.unsqueeze(1), heads


def delta_inputs(count: int, dtype: torch.dtype) -> tuple[Any, ...]:
    q, k, v, b, a = draw(count, 2 * 2048 + 4096 + 64, dtype=dtype).split((2048, 2048, 4096, 32, 32), dim=1)
    q, k, v = (part.unflatten(1, (-1, 128)) for part in (q, k, v))
    return q, k, v, DeltaGateInputs(b, a, draw(32, dtype=dtype), draw(32, dtype=dtype))


def channel_delta_inputs(count: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Kimi-Linear's: as many key heads as value heads, and a decay of every key channel."""
    q, k, v, a, b = draw(count, 4 * 4096 + 32, dtype=dtype).split((4096, 4096, 4096, 4096, 32), dim=1)
    q, k, v, a = (part.unflatten(1, (-1, 128)) for part in (q, k, v, a))
    return q, k, v, DeltaGateInputs(b, a, draw(32, dtype=dtype), draw(32, 128, dtype=dtype))


def conv_inputs(count: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return draw(count, 8192 + 64, dtype=dtype)[:, :8192], draw(8192, 4, dtype=dtype), draw(8192, dtype=dtype)


SCAN = Step("selective scan step", plain_scan.scan_step, "states", (80, 64, 128), scan_inputs)
DELTA = Step("gated delta rule step", plain_delta.delta_step, "states", (32, 128, 128), delta_inputs)
CHANNEL_DELTA = Step("gated delta rule step", plain_delta.delta_step, "states", (32, 128, 128), channel_delta_inputs)
CONV = Step("causal convolution step", plain_conv.conv_step, "windows", (3, 8192), conv_inputs)
each_step = pytest.mark.parametrize("step", [SCAN, DELTA, CHANNEL_DELTA, CONV], ids=lambda step: step.inputs.__name__)


def kernel(step: Step, dtype: torch.dtype) -> Callable[..., Tensor]:
    choice = choose_kernel(step.operation, KernelContext.of(torch.device("cuda"), dtype, allow_compile=False))
    assert choice.name == "triton", str(choice)
    return getattr(choice.functions, step.plain.__name__)


def wide(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Everything in float64, named tuples too."""
    return tuple(each.double() if isinstance(each, Tensor) else type(each)(*wide(each)) for each in inputs)


def far(ours: Tensor, true: Tensor) -> float:
    assert ours.shape == true.shape and ours.isfinite().all()
    return float((ours.double() - true.double()).norm() / true.double().norm())


@each_step
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("count", [1, 5, 100])
def test_steps(step: Step, dtype: torch.dtype, count: int):
    states = draw(count + 3, *step.shape, dtype=dtype if step is CONV else torch.float32)
    exact, before = states.double(), states.clone()
    order = torch.randperm(count + 3, device="cuda")
    slots, others = order[:count], order[count:]
    for _ in range(3):
        inputs = step.inputs(count, dtype)
        found = kernel(step, dtype)(*inputs, **{step.states: states}, slots_B=slots)
        true = step.plain(*wide(inputs), **{step.states: exact}, slots_B=slots)
        assert found.dtype == dtype and far(found, true) <= BOUNDS[dtype]
    assert torch.equal(states[others], before[others]) and far(states[slots], exact[slots]) <= STATE_BOUND


@each_step
def test_a_graph_replays_for_other_slots(step: Step):
    run, inputs = kernel(step, torch.bfloat16), step.inputs(2, torch.bfloat16)
    states = draw(6, *step.shape, dtype=torch.bfloat16 if step is CONV else torch.float32)
    slots = torch.tensor([1, 2], device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*inputs, **{step.states: states}, slots_B=slots)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*inputs, **{step.states: states}, slots_B=slots)
    for chosen in ([5, 3], [3, 1]):
        exact = states.double()
        slots.copy_(torch.tensor(chosen))
        graph.replay()
        true = step.plain(*wide(inputs), **{step.states: exact}, slots_B=slots)
        assert far(out, true) <= BOUNDS[torch.bfloat16] and far(states, exact) <= STATE_BOUND


@each_step
def test_slots_beyond_two_to_the_31_elements(step: Step):
    num_slots = 2**31 // torch.Size(step.shape).numel() + 3
    states = torch.zeros(num_slots, *step.shape, device="cuda", dtype=torch.bfloat16 if step is CONV else torch.float32)
    states[-2:].normal_()
    exact, inputs = states[-2:].double(), step.inputs(1, torch.bfloat16)
    found = kernel(step, torch.bfloat16)(
        *inputs, **{step.states: states}, slots_B=torch.tensor([num_slots - 1], device="cuda")
    )
    true = step.plain(*wide(inputs), **{step.states: exact}, slots_B=torch.tensor([1], device="cuda"))
    assert far(found, true) <= BOUNDS[torch.bfloat16] and far(states[-2:], exact) <= STATE_BOUND
