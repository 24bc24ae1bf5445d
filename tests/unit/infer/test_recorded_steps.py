"""Recorded decode steps: the tokens and numbers of steps that are not, at the current weights, with a bounded number of calls."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.step.packed_step import CacheLocations
from petatron.infer.step.recorded_cpu_decode import RecordedSteps, padded_pages
from petatron.infer.step.recorded_tensor_ops import RecordedCalls, Unrecordable
from petatron.kernels.attention.paged_attention import PagedBatch
from tests.longform import diagonal
from tests.unit.infer.test_sample import model_in

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0, logprobs=2)
LEARNED_POSITIONS = "--fp64 --position-embedding-type learned_absolute --normalization LayerNorm"


def complete(flags: str, *, recorded: bool, num_layers: int = 2) -> list[Completion]:
    model = model_in(f"{flags} --num-layers {num_layers}")
    engine = Engine(model, options=EngineOptions(page_size=4, recorded_steps=recorded))
    params = [SamplingParams(max_new_tokens=11 + number, temperature=0.0, logprobs=2) for number in range(3)]
    return [each for [*row] in zip(*engine.complete(PROMPTS, params), strict=True) for each in row]


@diagonal(2)
@pytest.mark.parametrize("flags", ["--fp64", "--fp64 --window-size 5", "--fp64 --qk-layernorm", LEARNED_POSITIONS])
def test_recorded_steps_compute_what_others_do(flags: str):
    """Sequences of several lengths end one after the other, so several shapes are recorded."""
    for one, other in zip(complete(flags, recorded=True), complete(flags, recorded=False), strict=True):
        assert one.ids == other.ids
        for own, expected in zip(one.logprobs, other.logprobs, strict=True):
            assert own.logprob == pytest.approx(expected.logprob, abs=1e-10)


def recordings(engine: Engine) -> RecordedSteps:
    recorded = engine._steps._recorded
    assert recorded is not None
    return recorded


def test_recorded_steps_see_changed_weights():
    model = model_in("--fp64")
    engine = Engine(model, options=EngineOptions(prefix_caching=False))
    [[before]] = engine.complete([PROMPTS[0]], GREEDY)
    assert recordings(engine)._recorded, "this many steps are recorded"
    with torch.no_grad():
        for param in model.module.parameters():
            param.mul_(-1.5)
    [[after]] = engine.complete([PROMPTS[0]], GREEDY)
    fresh = Engine(model, options=EngineOptions(recorded_steps=False)).complete([PROMPTS[0]], GREEDY)[0][0]
    assert after.ids == fresh.ids != before.ids


def test_a_shape_is_recorded_when_it_has_occurred_a_few_times():
    engine = Engine(model_in())
    engine.complete([PROMPTS[0]], SamplingParams(max_new_tokens=4, temperature=0.0))
    assert not recordings(engine)._recorded
    engine.complete([PROMPTS[0]], SamplingParams(max_new_tokens=8, temperature=0.0))
    assert [shape.sequences for shape in recordings(engine)._recorded] == [1]


def test_the_oldest_recording_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("petatron.infer.step.recorded_cpu_decode._MAX_RECORDINGS", 2)
    engine = Engine(model_in())
    for count in (1, 2, 3):
        engine.complete([PROMPTS[0]] * count, GREEDY)
    assert [shape.sequences for shape in recordings(engine)._recorded] == [2, 3]


def test_long_sequences_are_not_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("petatron.infer.step.recorded_cpu_decode._MAX_GATHERED_TOKENS", 31)
    engine = Engine(model_in())
    engine.complete([PROMPTS[0]], GREEDY)
    assert not recordings(engine)._recorded and padded_pages(1) * engine.options.page_size == 32


def test_a_model_that_reads_values_is_not_recorded():
    """Steps whose Python depends on values run as they are, and are not tried again."""
    seen: list[PagedBatch] = []

    def run(inputs: tuple[Tensor, Tensor, PagedBatch, Tensor]) -> tuple[Tensor, Tensor]:
        seen.append(inputs[2])
        return (inputs[0] * inputs[0].sum().item(), inputs[1])

    steps = RecordedSteps(run, page_size=4)
    assert [steps.run(np.array([[1], [2], [3]]), [2], CacheLocations([[1]], [1])) for _ in range(12)] == [None] * 12
    assert len(seen) == 1


def test_values_that_python_reads_are_refused():
    x = torch.ones(2)
    with pytest.raises(Unrecordable, match=r"_local_scalar_dense.* gives a value to Python"):
        RecordedCalls(lambda: x * float(x.sum()))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.t() @ x).view(-1)[2:6].relu_(),
        lambda x: torch.cat((-x[:, 1:], x[:, :1]), dim=-1).mean(-1, keepdim=True).add_(1.0).rsqrt_() * x,
        lambda x: torch.zeros(4).add_(x.sum()),
        lambda x: x.topk(2, dim=-1).values + x.max(dim=-1, keepdim=True).values,
        lambda x: torch.arange(3) * x.double()[:, :3].contiguous(),
        lambda x: torch.nn.functional.silu(x.chunk(2, dim=-1)[0]).reshape(-1),
        lambda x: torch.nn.functional.scaled_dot_product_attention(*(x.view(1, 1, 2, 4) for _ in range(3))),
        lambda x: torch.index_select(x, 1, torch.tensor([1, 0]), out=torch.empty(2, 2)).exp(),
    ],
)
def test_repeated_calls_equal_the_function(function: Callable[[Tensor], Tensor]):
    x = torch.randn(2, 4)
    recorded = RecordedCalls(lambda: function(x))
    for _ in range(3):
        x.normal_()
        assert torch.equal(recorded.repeat(), function(x))


def test_views_and_constants_are_not_repeated():
    x = torch.randn(2, 4)
    recorded = RecordedCalls(lambda: x.t().contiguous().view(2, 4)[:, 1:] + torch.arange(3))
    assert len(recorded) == 2, "the copy and the sum"


def calls_of_a_step(num_layers: int, *, recorded: bool) -> int:
    """Counts calls of Python functions in one decode step of two sequences, after enough steps for a recording."""
    model = model_in(f"--num-layers {num_layers}")
    engine = Engine(model, options=EngineOptions(recorded_steps=recorded))
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, SamplingParams(max_new_tokens=16, temperature=0.0))
    for _ in range(10):
        engine.step()
    count = 0

    def count_call(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # whoever watches the collector, as hypothesis does, would be counted
    sys.setprofile(count_call)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_host_work_of_a_decode_step_is_bounded():
    """Times are noisy, numbers of calls are not. Of a repeated layer only attention, which has no `out`, runs any Python."""
    two, four = (calls_of_a_step(layers, recorded=True) for layers in (2, 4))
    assert (four - two) / 2 <= 1 and two <= 140
    two, four = (calls_of_a_step(layers, recorded=False) for layers in (2, 4))
    assert (four - two) / 2 <= 185


@pytest.mark.parametrize(("sequences", "bound"), [(1, 36), (3, 39)])
def test_operations_of_a_decode_step_are_bounded(sequences: int, bound: int):
    """Every operation that computes costs some microseconds of the host; views are free in a recording."""
    counts = []
    for layers in (2, 4):
        engine = Engine(model_in(f"--num-layers {layers}"))
        engine.complete([PROMPTS[0]] * sequences, GREEDY)
        [*_, last] = recordings(engine)._recorded.values()
        counts.append(len(last.calls))
    two, four = counts
    assert (four - two) / 2 <= bound
    assert two - (four - two) <= 24, "outside layers"
