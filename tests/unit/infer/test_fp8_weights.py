"""An engine with weights in FP8 computes with the rounded weights, and with nothing else rounded."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from petatron.base.errors import ConfigError
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.generate import generate
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.step import run_model_step
from petatron.infer.step.cuda_graph_capture import GraphCapture
from petatron.layers.linear import Linear
from petatron.layers.ops import fp8_weight
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.build_run import build_loader, build_model, build_optimizer
from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import tiny_run
from tests.unit.infer.test_sample import model_in

PROMPTS = [[5, 17, 90, 3, 3], [1], [2, 3, 4, 5, 6, 7, 8, 9]]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=1, prompt_logprobs=1)
FP8 = EngineOptions(fp8_weights=True, page_size=4, max_step_tokens=7)


def weights_of(model: ParallelModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.module.named_parameters()}


def test_answers_are_those_of_the_rounded_weights():
    model = model_in("--fp64")
    before, linear = weights_of(model), next(m for m in model.module.modules() if isinstance(m, Linear))
    linear_op = linear.linear_op
    engine = Engine(model, options=FP8)
    assert linear.weight.untyped_storage().nbytes() == 0, "the originals take no memory"
    found = engine.complete(PROMPTS, GREEDY)
    engine.release()
    assert linear.linear_op is linear_op
    after = weights_of(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    large = {name for name in before if name.endswith(("qkv.weight", "out.weight", "gate_up.weight", "down.weight"))}
    assert changed == large | {"head.weight"} and len(large) == 8, "the GEMMs of two layers, and the output head"
    for name in changed:
        error = (before[name] - after[name]).norm() / before[name].norm()
        assert 0.005 < float(error) < 0.04, f"{name}: three bits of mantissa"
    wanted = Engine(model, options=EngineOptions()).complete(PROMPTS, GREEDY)
    for row, true in zip(found, wanted):
        assert row[0].ids == true[0].ids
        logprobs = [[each.logprob for each in (*a.prompt_logprobs, *a.logprobs)] for a in (row[0], true[0])]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-10)


def test_what_a_prompt_costs_is_told(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="petatron"):
        Engine(model_in("--fp64"), options=FP8).release()
    assert "GEMMs of more than 0 rows, as prompts have, dequantize them first" in caplog.text


def test_every_weight_is_where_it_was():
    """A second engine of the same model rounds rounded weights, which changes none; tied weights stay tied."""
    model = model_in("--fp64 --no-untie-embeddings-and-output-weights")
    tied = weights_of(model)["embedding.weight"]
    buffers = {param.untyped_storage()._cdata for param in model.module.parameters()}
    Engine(model, options=FP8).release()
    rounded = weights_of(model)
    engine = Engine(model, options=FP8)
    engine.complete(PROMPTS, GREEDY)
    engine.release()
    again = weights_of(model)
    assert torch.equal(again["embedding.weight"], tied), "a head that is tied to it is quantized as a copy"
    assert all(torch.equal(rounded[name], again[name]) for name in rounded)
    assert {param.untyped_storage()._cdata for param in model.module.parameters()} == buffers, "in the flat buffers"


def test_host_memory_that_a_checkpoint_was_read_into_stays():
    model = model_in("--fp64")
    for param in model.module.parameters():
        param.detach().numpy()  # after which it cannot be resized
    engine = Engine(model, options=FP8)
    found = engine.complete(PROMPTS, GREEDY)
    engine.release()
    assert [row[0].ids for row in Engine(model).complete(PROMPTS, GREEDY)] == [row[0].ids for row in found]


def continuations(flags: str, world_size: int) -> list[list[int]]:
    engine = Engine(model_in(flags, world_size=world_size), options=FP8)
    answers = engine.complete_on_all_ranks(PROMPTS, GREEDY)
    engine.release()
    return [row[0].ids for row in answers]


@pytest.mark.parametrize("layout", ["--tp 2 --sequence-parallel", "--pp 2"])
def test_layouts_agree(ranks: RankPool, layout: str):
    alone = continuations("--fp64", 1)
    assert ranks.run(continuations, 2, f"--fp64 --micro-batch-size 1 {layout}", 2) == [alone, alone]


def refused(flags: str) -> str:
    with pytest.raises(ConfigError) as found:
        Engine(model_in(flags, world_size=2), options=FP8)
    return str(found.value)


def test_fully_sharded_weights_are_refused(ranks: RankPool):
    flags = "--dp 2 --use-torch-fsdp2 --micro-batch-size 1"
    for text in ranks.run(refused, 2, flags):
        assert "--fp8-weights quantizes whole weights" in text and "--data-parallel-sharding-strategy" in text


FP8_RUN = (
    "--bf16 --hidden-size 64 --ffn-hidden-size 96 --seq-length 32 --lr-warmup-iters 0 --fp8-format hybrid --fp8-recipe"
)
PROMPT = list(range(16))
"""As many rows as an FP8 GEMM takes."""


@diagonal(3)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_a_model_that_trains_in_fp8_generates_with_the_weights_it_has_now(recipe: str):
    run = tiny_run(f"{FP8_RUN} {recipe}")
    model = build_model(run, ParallelMesh.single())
    optimizer = build_optimizer(run, model)
    model.train_step(next(build_loader(run, model.mesh)))
    engine, found = Engine(model), []
    for _ in range(2):
        answers = [generate(model, PROMPT, max_new_tokens=8, temperature=0.0)]
        engine.forget_prefixes()
        answers.append(engine.complete([PROMPT], SamplingParams(max_new_tokens=8, temperature=0.0))[0][0].ids)
        model.fp8_gemms.end_step()
        answers.append(generate(model, PROMPT, max_new_tokens=8, temperature=0.0))
        assert answers[0] == answers[1] == answers[2]
        found.append(answers[0])
        optimizer.step(lr=0.5)
    assert found[0] != found[1]


def test_generation_changes_no_amax_history():
    model = build_model(tiny_run(f"{FP8_RUN} delayed"), ParallelMesh.single())
    before = model.fp8_gemms.state()
    generate(model, PROMPT, max_new_tokens=2)
    for key, rows in model.fp8_gemms.state().items():
        assert torch.equal(rows, before[key])


class GraphStub:
    """A CUDA graph that captures nothing."""

    def reset(self) -> None:
        pass


@pytest.fixture
def capture_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Captures nothing, without a CUDA device; lists when workspaces are cleared, and when a capture begins and ends."""
    calls: list[str] = []

    @contextmanager
    def captured(*args: object, **options: object) -> Iterator[None]:
        calls.append("begin")
        yield
        calls.append("end")

    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda *args, **options: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", captured)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphStub)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("clear"), raising=False)
    return calls


def test_a_capture_uses_no_workspace_of_the_process(capture_calls: list[str]):
    GraphCapture(torch.device("cpu")).capture(lambda: None)
    assert capture_calls == ["clear", "begin", "end", "clear"]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.usefixtures("capture_calls")
def test_what_is_cached_lives_as_long_as_the_graphs_that_read_it(cached: bool, monkeypatch: pytest.MonkeyPatch):
    """Weights, or their scales alone where each use casts them. An evaluation drops them; a graph knows their addresses alone."""
    monkeypatch.setattr(run_model_step, "can_capture", lambda model: True)
    monkeypatch.setattr(run_model_step, "can_capture_prompts", lambda model: False)
    model = build_model(tiny_run(f"{FP8_RUN} tensorwise"), ParallelMesh.single())
    steps = Engine(model, options=EngineOptions(cuda_graphs=True))._steps
    assert steps.graphs is not None
    capture = steps.graphs._graph_capture
    batch = Batch(torch.zeros(1, 32, dtype=torch.int64), torch.zeros(1, 32, dtype=torch.int64), torch.ones(1, 32))
    if not cached:
        monkeypatch.setattr(fp8_weight, "MIN_ROWS_TO_REQUANTIZE", 16)
        model.fp8_gemms.new_step(1)
    graph, _ = capture.capture(lambda: model.evaluate([batch]))
    memory = _cached_tensors(model)
    assert len(memory) == (16 if cached else 8)
    model.fp8_gemms.end_step()
    assert not _cached_tensors(model) and all(tensor() is not None for tensor in memory)
    capture.free([graph])
    assert all(tensor() is None for tensor in memory)


def _cached_tensors(model: ParallelModel) -> list[weakref.ref[Tensor]]:
    weights = [gemm._weight_cache.memory for gemm in model.fp8_gemms.linears.values()]
    tensors = [part for matrix, scale in weights for part in (matrix and matrix.rows.values, scale) if part is not None]
    return [weakref.ref(tensor) for tensor in tensors]
