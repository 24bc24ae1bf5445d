"""Checks that communication between these ranks works: bandwidth and results of every collective, and two training steps.

Run by `petatron doctor --nccl` on every rank. The layout gives each axis two ranks where it can, so that every kind of communicator is
tested; the model is trained in that layout and, on rank 0, in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from petatron.mesh import collectives
from petatron.mesh.diagnose.bandwidth import BandwidthResult, measure_axis, measure_send_recv
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.validate import load_config
from petatron.verify.record_trace import record_steps

_STEPS = 2
_LOSS_TOLERANCE = 1e-9
_MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 96 --seq-length 64 --vocab-size 131 --mock-data "
    "--make-vocab-size-divisible-by 8 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    f"--hidden-dropout 0 --attention-dropout 0 --num-workers 0 --lr 1e-3 --eval-iters 0 --train-iters {_STEPS} --fp64"
)
_MESSAGE_BYTES = (1 << 18, 1 << 24, 1 << 28)
_SHARED_DEVICE_MESSAGE_BYTES = (1 << 16, 1 << 20, 1 << 24)


@dataclass(slots=True)
class CommunicationReport:
    """What a rank measured; `losses` are of the layout and of one process, which only rank 0 trains."""

    layout: str
    connect_s: float
    measured: list[BandwidthResult] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """Describes everything that failed."""
        texts = [
            f"{result.op} over {result.axis} ({result.ranks} ranks, {result.bytes:,} bytes) gave wrong values"
            for result in self.measured
            if not result.correct
        ]
        for step, (here, alone) in enumerate(self.losses, start=1):
            if abs(here - alone) > _LOSS_TOLERANCE * abs(alone):
                texts.append(f"step {step} of {self.layout} has loss {here:.12f}, one process {alone:.12f}")
        return texts


def layout_flags(ranks: int) -> str:
    """Returns two ranks for pp and two for tp where they divide, the others for dp with a sharded optimizer.

    >>> layout_flags(8)
    '--pp 2 --tp 2 --sequence-parallel --dp 2 --use-distributed-optimizer --overlap-param-gather'
    """
    pp = 2 if ranks % 2 == 0 else 1
    tp = 2 if ranks // pp % 2 == 0 else 1
    flags = [f"--pp {pp}"] * (pp > 1) + [f"--tp {tp} --sequence-parallel"] * (tp > 1)
    dp = ranks // pp // tp
    flags += [f"--dp {dp}"] + ["--use-distributed-optimizer --overlap-param-gather"] * (dp > 1)
    return " ".join(flags)


def check_communication(
    make_mesh: Callable[[Layout], ParallelMesh], *, ranks: int, shared_device: bool, log: Callable[[str], None]
) -> CommunicationReport:
    """Runs the checks on every rank of the world; `log` reports progress on rank 0."""
    started = time.monotonic()
    flags = layout_flags(ranks)
    config = load_config(f"{_MODEL} {flags} --global-batch-size {4 * ranks}".split(), world_size=ranks).config
    mesh = make_mesh(Layout.from_config(config.parallel))
    run = replace(config, train=replace(config.train, device=mesh.device.type))
    names = [name for name in ("tp", "pp", "dp_cp", "world") if mesh[name].size > 1]
    mesh.create_groups(names)
    findings = CommunicationReport(flags, time.monotonic() - started)
    log(f"{mesh.describe()}: connected in {findings.connect_s:.1f} s")
    sizes = _SHARED_DEVICE_MESSAGE_BYTES if shared_device or mesh.device.type == "cpu" else _MESSAGE_BYTES
    for name in names:
        log(f"measuring {name} ({mesh[name].size} ranks)")
        findings.measured += measure_axis(mesh[name], sizes, mesh.device)
        if name == "pp":
            findings.measured += measure_send_recv(mesh.pp, sizes, mesh.device)
    log(f"training {_STEPS} steps in {flags} and in one process")
    losses = [step.loss for step in record_steps(run, mesh, keep_tensors=lambda step: False)]
    alone = losses
    if mesh.rank == 0:
        argv = f"{_MODEL} --global-batch-size {4 * ranks} --device {mesh.device.type}".split()
        single = load_config(argv, world_size=1).config
        alone = [
            step.loss
            for step in record_steps(single, ParallelMesh.single(mesh.device), keep_tensors=lambda step: False)
        ]
    findings.losses = list(zip(losses, alone, strict=True))
    collectives.barrier(mesh.control)
    findings.seconds = time.monotonic() - started
    return findings


def current_device(kind: str) -> torch.device:
    """Returns the device this rank is bound to."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
