"""Steps with prompts in the fixed shapes of CUDA graphs: padding and bounds on the device change no token. The graphs here call again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.step import prompt_cuda_graphs
from petatron.infer.step.cuda_graph_capture import GraphSizes
from petatron.infer.step.prompt_cuda_graphs import GraphShape, PromptGraphs
from tests.longform import diagonal
from tests.unit.infer.test_recurrent import DELTA, MAMBA
from tests.unit.infer.test_sample import LATENT, POSITIONS, VOCAB, model_in


class CalledGraph:
    """What a CUDA graph does, by calling the function again and writing to the tensors of the first time."""

    def __init__(self, function: Callable[[], Any], outputs: tuple[torch.Tensor, ...]) -> None:
        self._function, self._outputs = function, outputs

    def replay(self) -> None:
        for output, new in zip(self._outputs, self._function(), strict=True):
            output.copy_(new)


class CalledCapture:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.freed = 0

    def capture(self, function: Callable[[], Any]) -> tuple[CalledGraph, Any]:
        outputs = tuple(each.clone() for each in function())
        return CalledGraph(function, outputs), outputs

    def free(self, graphs: Iterable[CalledGraph]) -> None:
        self.freed += len(list(graphs))


def engine_of(flags: str = "", *, graphs: bool, **options: Any) -> Engine:
    """An engine whose steps with prompts are such graphs, of one shape for all numbers of decode rows above none."""
    engine = Engine(model_in(flags), options=EngineOptions(page_size=4, recorded_steps=False, **options))
    steps = engine._steps  # pyright: ignore[reportPrivateUsage]
    if graphs:
        steps._prompt_graphs = PromptGraphs(  # pyright: ignore[reportPrivateUsage]
            steps._run_last,  # pyright: ignore[reportPrivateUsage]
            CalledCapture(),  # type: ignore[arg-type]
            engine.options,
            GraphSizes(engine.max_length, multiple=1),
        )
    return engine


def captured(engine: Engine) -> set[GraphShape]:
    graphs = engine._steps._prompt_graphs  # pyright: ignore[reportPrivateUsage]
    assert graphs is not None
    return set(graphs._captured)  # pyright: ignore[reportPrivateUsage]


def prompts_of(seed: int, count: int) -> list[list[int]]:
    generator = random.Random(seed)
    shared = [generator.randrange(VOCAB) for _ in range(9)]
    prompts = []
    for _ in range(count):
        own = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 14))]
        prompts.append([*shared, *own] if generator.random() < 0.4 else own)
    return prompts


@diagonal(2)
@pytest.mark.parametrize("flags", ["", "--window-size 5", "--num-query-groups 2 --group-query-attention"])
@pytest.mark.parametrize(
    "options", [{"max_sequences": 4, "max_step_tokens": 40}, {"max_sequences": 9, "max_step_tokens": 12}], ids=str
)
def test_prompts_in_graphs_change_no_token(flags: str, options: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    """Prompts that share beginnings, are cut into chunks, and come while others decode."""
    monkeypatch.setattr(prompt_cuda_graphs, "_FIRST_STEPS", 0)
    params = [
        SamplingParams(max_new_tokens=5, temperature=0.0, logprobs=2),
        SamplingParams(max_new_tokens=3, temperature=1.0, seed=3),
    ]
    prompts = prompts_of(1, 12)
    plain, graphed = (engine_of(f"--fp64 {flags}", graphs=graphs, **options) for graphs in (False, True))
    wanted, found = plain.complete(prompts, params), graphed.complete(prompts, params)
    assert len(captured(graphed)) > 1
    for one, other in zip(wanted, found, strict=True):
        assert [each.ids for each in one] == [each.ids for each in other]
        for before, after in zip(one[0].logprobs, other[0].logprobs, strict=True):
            assert abs(before.logprob - after.logprob) < 1e-9
    assert graphed.stats.pages_used == 0


def test_pooled_hidden_states_are_those_of_the_prompts_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_cuda_graphs, "_FIRST_STEPS", 0)
    prompts = prompts_of(2, 7)
    found = []
    for graphs in (False, True):
        engine = engine_of("--fp64", graphs=graphs, max_sequences=4, max_step_tokens=20)
        engine.submit([1, 2, 3], SamplingParams(max_new_tokens=6, temperature=0.0))  # which decodes beside them
        params = [SamplingParams(max_new_tokens=0, pooling=pooling) for pooling in ("mean", "last")]
        answers = engine.complete(prompts, params)
        found.append(torch.tensor([[each.pooled for each in row] for row in answers], dtype=torch.float64))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_a_shape_is_captured_when_it_has_occurred_a_few_times():
    engine = engine_of(graphs=True)
    for number in range(3):
        assert not captured(engine), number
        engine.complete([[number, 2, 3, 4]], SamplingParams(max_new_tokens=1))
    assert captured(engine) == {GraphShape(0, 32)}


def test_steps_that_fit_no_graph_run_without(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_cuda_graphs, "_FIRST_STEPS", 0)
    monkeypatch.setattr(prompt_cuda_graphs, "MAX_LENGTH", 8)
    engine = engine_of(graphs=True, max_sequences=4)
    params = SamplingParams(max_new_tokens=1)
    engine.complete([[1] * 9], params)
    assert not captured(engine), "longer than attention in a graph is for"
    engine.complete([[1] * 6], SamplingParams(max_new_tokens=1, prompt_logprobs=0))
    assert not captured(engine), "more logits than sequences"
    engine.complete([[1] * 8], params)
    assert captured(engine)


def test_all_shapes_can_be_captured_beforehand_and_are_freed():
    engine = engine_of(graphs=True, max_sequences=5, max_step_tokens=POSITIONS)
    graphs = engine._steps._prompt_graphs  # pyright: ignore[reportPrivateUsage]
    assert graphs is not None
    with torch.no_grad():
        shapes = list(graphs.capture_all())
    assert set(shapes) == captured(engine) and {shape.decodes for shape in shapes} == {0, 5}
    engine.release()
    assert graphs._capture.freed == len(shapes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("flags", [LATENT, MAMBA, DELTA, "--attn-logit-softcapping 5"])
def test_layers_whose_prompts_the_host_cuts_are_not_in_graphs(flags: str):
    branches = [branch for layer in model_in(flags).spec.layers for branch in layer.branches]
    assert not all(branch.prompt_is_capturable for branch in branches)
