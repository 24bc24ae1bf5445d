"""What a rank does in the tests of layouts: a small model in float64 whose every tensor is compared, then a wide one in bf16.

The wide model's activations are 4 MB, far more than NCCL buffers here (`tests/dist.py`): a transfer is over when its partner has
taken it, so an order that only works with buffers hangs.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist

from petatron.config import RunConfig, load_config
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.verify.matrix import MatrixEntry
from petatron.verify.trace import StepTrace, record_steps
from petatron.verify.verify import plan_verification
from tests.dist import RankPool

WIDE = (
    "--hidden-size 512 --num-attention-heads 8 --num-query-groups 4 --ffn-hidden-size 768 --seq-length 2048 --vocab-size 1031 "
    "--init-method-std 0.02 --no-compile --ddp-bucket-size 1000000"
)
_WIDE_EXPERTS = "--moe-ffn-hidden-size 384 --moe-shared-expert-intermediate-size 256"
_FIXED = "--device cuda --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --lr-decay-style constant --lr-warmup-iters 0 --min-lr 0"


def wide_run(entry: MatrixEntry, layout: str, extra: str = "--bf16") -> RunConfig:
    """The wide model of an entry's kind in a layout."""
    experts = _WIDE_EXPERTS if entry.has_experts else ""
    heads = "--num-query-groups 8" if entry.has_latents else ""  # each has keys and values of its own
    words = f"{entry.model_flags} {WIDE} {experts} {heads} {_FIXED} --train-iters 2 {layout} {extra}"
    return load_config(words.split(), world_size=1 if not layout else entry.world_size).config


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
    return ParallelMesh(Layout.from_config(run.parallel), rank, device=device, backend="nccl", timeout_minutes=1.0)


def train(runs: list[RunConfig]) -> tuple[list[list[StepTrace]], int]:
    """On a rank: train each run on one mesh; and how many groups its steps opened that were not connected before."""
    mesh = mesh_of(runs[0])
    traces = [
        list(record_steps(run, mesh, keep_tensors=lambda step, kept=index == 0: kept)) for index, run in enumerate(runs)
    ]
    return traces, len(mesh.communicators)


@cache
def small_reference(entry: MatrixEntry) -> list[StepTrace]:
    """One process on the CPU, in float64."""
    return list(record_steps(small_run(entry, alone=True, device="cpu"), ParallelMesh.single()))


_WIDE_REFERENCES: dict[str, list[StepTrace]] = {}


def wide_reference(pool: RankPool, entry: MatrixEntry) -> list[StepTrace]:
    """One process on the GPU, in bf16; models are few and layouts many."""
    if entry.model not in _WIDE_REFERENCES:
        run = wide_run(entry, "")
        _WIDE_REFERENCES[entry.model] = pool.run(train, 1, [run], timeout_s=120)[0][0][0]
    return _WIDE_REFERENCES[entry.model]
