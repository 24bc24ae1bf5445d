"""Compiled code of others in the same process: captured steps of generation and training own all the memory that they use.

`torch.compile` with CUDA graphs clears cuBLAS workspaces and empties the allocator's cache. The output head of a 1B model for a few rows is
a GEMM whose sums cuBLAS splits, with the parts in its workspace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from petatron.config import RunConfig
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.step.cuda_graph_capture import GraphCapture
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.parallel.pipeline.cuda_graph import CudaGraphCapture
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from petatron.validate import load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)
VOCABULARY = 128256
MODEL = (
    f"--preset llama-1b --num-layers 2 --vocab-size {VOCABULARY} --bf16 --mock-data --num-workers 0 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 100 --lr 1e-4 --eval-iters 0"
)
FEW_TOKENS = 128
"""So few that a step is host-bound, as steps are that are captured."""
MODES = ("default", "reduce-overhead")
"""The second is the one with CUDA graphs."""


def run_of(flags: str) -> RunConfig:
    return load_config([*MODEL.split(), *flags.split()]).config


def run_foreign_code(mode: str) -> Tensor:
    """Compiles and runs some GEMMs, gives memory back to the device, and fills memory that was free with NaNs."""
    first, second = (torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

    @torch.compile(mode=mode)
    def layers(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x @ first) @ second + x

    with torch.no_grad():
        for _ in range(4):
            result = layers(first).clone()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.full((2**28,), float("nan"), device=DEVICE)
    return result


@pytest.mark.parametrize("mode", MODES)
def test_compiled_code_beside_the_engine_changes_no_token(mode: str):
    state = TrainState.build(run_of("--seq-length 640 --cuda-graphs off"), ParallelMesh.single(DEVICE))
    options = EngineOptions(max_sequences=16, max_length=600, max_step_tokens=8192, prefix_caching=False)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(VOCABULARY, (512,), generator=generator).tolist() for _ in range(16)]
    engine, params = Engine(state.model, options=options), SamplingParams(max_new_tokens=8, temperature=0.0)
    with contextlib.closing(engine):
        before = [answer.ids for [answer] in engine.complete(prompts, params)]
        foreign = run_foreign_code(mode)
        for _ in range(2):
            assert [answer.ids for [answer] in engine.complete(prompts, params)] == before
    assert bool(foreign.isfinite().all())


def capture_for_generation(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    graph, result = GraphCapture(DEVICE).capture(step)
    return result, graph.replay


def capture_for_training(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    capture = CudaGraphCapture(DEVICE)
    capture.run(step)  # type: ignore[arg-type]
    return capture.capture(step)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("capture", [capture_for_generation, capture_for_training])
def test_a_captured_gemm_owns_its_workspace(capture: Callable[..., tuple[Tensor, Callable[[], None]]]):
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows, weight = (
        torch.randn(size, 2048, device=DEVICE, dtype=torch.bfloat16, generator=generator) for size in (16, VOCABULARY)
    )
    with torch.no_grad():
        expected = rows @ weight.t()
        result, replay = capture(lambda: rows @ weight.t())
        run_foreign_code("reduce-overhead")
        replay()
    assert torch.equal(result, expected)


def losses(graphs: str, mode: str | None) -> list[float]:
    """Compiled code of others runs before every fourth step, if any."""
    run = run_of(f"--seq-length {FEW_TOKENS} --cuda-graphs {graphs}")
    state, found = TrainState.build(run, ParallelMesh.single(DEVICE)), []
    for step in range(12):
        if mode is not None and step % 4 == 3:
            run_foreign_code(mode)
        text = torch.randint(VOCABULARY, (1, FEW_TOKENS + 1), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        mask = torch.ones(1, FEW_TOKENS, device=DEVICE)
        batch = Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), mask)
        found.append(float(torch.as_tensor(train_step(state, [batch]).loss)))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_compiled_code_beside_captured_training_steps_changes_no_loss(mode: str):
    """Attention's backward pass adds in any order, so bits may differ."""
    assert losses("on", mode) == pytest.approx(losses("off", None), rel=1e-3)
