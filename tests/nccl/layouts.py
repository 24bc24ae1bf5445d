"""What a rank does in the tests of layouts: a small model in float64 whose every tensor is compared, then a wide one in bf16.

The wide model's activations are 4 MB, far more than NCCL buffers here (`tests/dist.py`): a transfer is over when its partner has
taken it, so an order that only works with buffers hangs.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist

from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.validate import load_config
from petatron.verify.proof_matrix import MatrixEntry
from petatron.verify.record_trace import StepTrace, record_steps
from petatron.verify.verify_layouts import plan_verification
from tests.dist import RankPool
from tests.load_deadline import scaled

WIDE = (
    "--hidden-size 512 --num-attention-heads 8 --num-query-groups 4 --ffn-hidden-size 768 --seq-length 2048 --vocab-size 1031 "
    "--init-method-std 0.02 --no-compile --ddp-bucket-size 1000000 --bf16 --lr 5e-5"
)
"""The learning rate keeps two steps a sharp comparison: the first update of Adam moves every weight by all of it. 2e-3, a tenth of the
weights' standard deviation, takes a model with experts from a loss of 7.0 to 2.6, and noise as large as the rounding of bf16, in the
outputs of all layers, changes that by 1e-3; 5e-5 takes it to 6.3, which the same noise changes by 1e-4, no more than the first loss."""
_WIDE_BRANCHES = {
    "--num-experts": "--moe-ffn-hidden-size 384",
    "--moe-shared-expert-intermediate-size": "--moe-shared-expert-intermediate-size 256",
    # Each head has keys and values of its own.
    "--kv-lora-rank": "--kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --num-query-groups 8",
    "--objective-settings": "--objective-settings temperature=1",  # it multiplies rounding
    "--decoder-seq-length": "--decoder-seq-length 1024",
    "--linear-key-head-dim": "--linear-key-head-dim 64 --linear-value-head-dim 64 --linear-chunk-size 64",
    "--mamba-state-dim": "--mamba-state-dim 64 --mamba-head-dim 64 --mamba-chunk-size 64",
}
"""A flag of a small model -> what the wide one has in its place."""
_FIXED = (
    "--device cuda --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --lr-decay-style constant --lr-warmup-iters 0 --min-lr 0 "
    "--train-iters 2"
)


def wide_flags(model_flags: str) -> str:
    """Flags of a wide model of the kind of a small one."""
    given = model_flags.split()
    return " ".join([model_flags, WIDE, *(sizes for flag, sizes in _WIDE_BRANCHES.items() if flag in given)])


def wide_run(flags: str, layout: str = "", *, world_size: int = 1) -> RunConfig:
    """Two steps of a wide model in a layout."""
    return load_config(f"{flags} {_FIXED} {layout}".split(), world_size=world_size).config


def small_run(entry: MatrixEntry, *, alone: bool, device: str = "cuda") -> RunConfig:
    """The model of the proof matrix, in its layout or in one process."""
    both = plan_verification(
        [*entry.model_flags.split(), "--device", device, *entry.flags.split()], steps=2, dtype="float64"
    )
    return (both.reference if alone else both.candidate).config


def mesh_of(run: RunConfig) -> ParallelMesh:
    """This rank's mesh over NCCL; alone, it has no groups."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda", torch.cuda.current_device())
    return ParallelMesh(
        Layout.from_config(run.parallel), rank, device=device, backend="nccl", timeout_minutes=scaled(60) / 60
    )


def train(runs: list[RunConfig]) -> tuple[list[list[StepTrace]], int]:
    """On a rank: train each run on one mesh, with tensors of those in float64; and how many groups its steps opened that were not
    connected before."""
    mesh = mesh_of(runs[0])
    traces = [list(record_steps(run, mesh, keep_tensors=lambda step, kept=run.precision.fp64: kept)) for run in runs]
    return traces, len(mesh.communicators)


@cache
def small_reference(entry: MatrixEntry) -> list[StepTrace]:
    """One process on the CPU, in float64."""
    return list(record_steps(small_run(entry, alone=True, device="cpu"), ParallelMesh.single()))


_WIDE_REFERENCES: dict[str, list[StepTrace]] = {}


def wide_reference(pool: RankPool, flags: str) -> list[StepTrace]:
    """One process on the GPU; models are few and layouts many."""
    if flags not in _WIDE_REFERENCES:
        _WIDE_REFERENCES[flags] = pool.run(train, 1, [wide_run(flags)], timeout_s=120)[0][0][0]
    return _WIDE_REFERENCES[flags]


def assert_close(steps: list[StepTrace], wanted: list[StepTrace]) -> None:
    """Rounding of bf16 apart, the same losses and gradient norms: on an H200 losses of layouts are 5e-5 apart and norms 5e-4."""
    assert len(steps) == len(wanted)
    for number, (step, other) in enumerate(zip(steps, wanted), start=1):
        pair = f"of step {number} {step.loss:.6f}, {step.grad_norm:.5f} against {other.loss:.6f}, {other.grad_norm:.5f}"
        assert step.loss == pytest.approx(other.loss, rel=3e-4), f"loss and norm {pair}"
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=5e-3), f"loss and norm {pair}"
