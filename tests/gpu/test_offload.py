"""Activation offload on a CUDA device: the same bits, less memory, and copies that nobody overtakes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from petatron.config import RunConfig
from petatron.config.schema.memory import MemoryConfig
from petatron.estimate.offload_plan import plan_offload
from petatron.estimate.recompute_plan import plan_recompute
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import RandomStreams
from petatron.models.batch import Batch
from petatron.models.registry import model_spec
from petatron.models.stage_interface import StageModule
from petatron.parallel.activation_offload import HostLink, apply_activation_offload
from petatron.parallel.activation_recompute import apply_recompute
from petatron.validate import load_config
from tests.run_stage import run_stage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --num-query-groups 4 --seq-length 1024 --vocab-size 512 "
    "--mock-data --train-iters 1 --lr 1e-3 --micro-batch-size 4 --bf16 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --hidden-dropout 0.1 --attention-dropout 0"
)
DEVICE = torch.device("cuda", 0)


def offloading(run: RunConfig, memory: MemoryConfig) -> tuple[StageModule, HostLink]:
    spec = model_spec(run)
    torch.manual_seed(3)
    with DEVICE:
        model = spec.build_stage(spec.whole_model).to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.02)
    streams = RandomStreams.seeded(7, ParallelMesh.single(device=DEVICE))
    link = HostLink(DEVICE)
    shape = ActivationShape.from_config(run, device="cuda")
    plan = plan_recompute(memory, spec, shape, model.stage, in_flight=2)
    apply_recompute(model, plan, streams)
    apply_activation_offload(model, plan_offload(memory, shape, spec.stage_layers(model.stage), plan), link)
    return model, link


def train(model: StageModule, run: RunConfig, steps: int) -> tuple[dict[str, Tensor], int]:
    """Gradients over some steps with two micro-batches in flight, and the most memory that was allocated."""
    generator = torch.Generator().manual_seed(11)
    shape = (run.train.micro_batch_size, run.model.seq_length + 1)
    torch.cuda.manual_seed(5)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    for _ in range(steps):
        waiting: list[Tensor] = []
        for _ in range(3):
            text = torch.randint(0, 512, shape, generator=generator).to(DEVICE)
            waiting.append(run_stage(model, Batch(text[:, :-1], text[:, 1:], torch.ones_like(text[:, 1:]))).sum())
            if len(waiting) == 2:
                waiting.pop(0).backward()
        waiting.pop().backward()
    grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    torch.cuda.synchronize(DEVICE)
    return grads, torch.cuda.max_memory_allocated(DEVICE)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention's backward pass adds in any order otherwise, and also where torch is told to warn only."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


KEEP = MemoryConfig()
WHOLE = MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("recompute", [KEEP, WHOLE], ids=["keep", "whole"])
def test_the_same_bits_with_less_memory(recompute: MemoryConfig):
    run = load_config(MODEL.split()).config
    peaks: list[int] = []
    wanted: dict[str, Tensor] = {}
    for number in (0, 2, 8):
        model, link = offloading(run, replace(recompute, cpu_offloading_num_layers=number))
        grads, peak = train(model, run, steps=3)
        wanted = wanted or grads
        assert [name for name, grad in grads.items() if not torch.equal(grad, wanted[name])] == []
        assert (link.offloaded_bytes > 0) == (number > 0)
        assert all(slab.is_pinned() for slab in link.buffers.slabs)
        peaks.append(peak)
        del model
    if recompute is KEEP:
        assert peaks[0] > peaks[1] > peaks[2]


REAL = MODEL.replace(
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8",
    "--num-layers 12 --hidden-size 2048 --num-attention-heads 16",
)
BY_MODULE = MemoryConfig(fine_grained_activation_offloading=True)
CHOICES = {
    "core attention": replace(BY_MODULE, offload_modules=("core_attn", "attn_proj")),
    "all of attention, and norms": replace(
        BY_MODULE, offload_modules=("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
    ),
    "all": replace(BY_MODULE, offload_modules=("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp")),
    "half of all": replace(
        BY_MODULE, offload_modules=("attn_norm", "core_attn", "mlp_norm", "mlp"), activation_offload_fraction=0.5
    ),
}


@pytest.mark.usefixtures("deterministic")
def test_modules_leave_with_the_same_bits_and_the_memory_that_is_planned(capsys: pytest.CaptureFixture[str]):
    """Prints the memory that each choice frees, and its step time against that of keeping all."""
    run = load_config(REAL.replace("--seq-length 1024", "--seq-length 2048").split()).config
    shape, spec = ActivationShape.from_config(run, device="cuda"), model_spec(run)
    stage = spec.whole_model
    wanted: dict[str, Tensor] = {}
    peak, seconds = 0, 0.0
    freed: dict[str, tuple[int, float]] = {}
    for name, memory in {"nothing": KEEP, **CHOICES}.items():
        plan = plan_recompute(memory, spec, shape, stage, in_flight=2)
        planned = plan_offload(memory, shape, spec.stage_layers(stage), plan).freed_bytes(2)
        gc.collect()  # the model before this: a wrapped forward method refers to its module, which refers to the method
        before = torch.cuda.memory_allocated(DEVICE)
        model, link = offloading(run, memory)
        train(model, run, steps=1)  # buffers, and kernels
        model.zero_grad()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        grads, most = train(model, run, steps=4)
        most -= before
        end.record()
        end.synchronize()
        if name == "nothing":
            peak, seconds, wanted = most, begin.elapsed_time(end), grads
        assert [key for key, grad in grads.items() if not torch.equal(grad, wanted[key])] == []
        with capsys.disabled():
            saved = f"{(peak - most) / 1e9:.2f} GB freed of {peak / 1e9:.2f} GB (planned {planned / 1e9:.2f})"
            print(f"\n  {name}: {saved}, step time x {begin.elapsed_time(end) / seconds:.3f}", end="")
        freed[name] = peak - most, planned
        assert (link.offloaded_bytes > 0) == (name != "nothing")
        del model, grads
    assert [name for name, (measured, planned) in freed.items() if measured < 0.8 * planned] == [], freed
