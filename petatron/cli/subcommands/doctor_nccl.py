"""`petatron doctor --nccl`: tests communication between ranks before a run depends on it.

On its own it starts a process per visible GPU, or several that share a single one. Under torchrun or srun it runs on their ranks, so
that a whole cluster can be tested with the launcher of the training run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import ConfigError, Problem
from petatron.mesh.launch.environment import RankEnvironment, read_environment
from petatron.mesh.launch.rank_exit import run_rank_main

if TYPE_CHECKING:
    from petatron.verify.communication_self_test import CommunicationReport

_RANKS_ON_ONE_GPU = 4
"""Ranks on a single GPU: two for tp and two for pp."""
_UNITS = (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10))


def check_ranks(*, device: str, ranks: int | None, report: Path | None) -> int:
    """Returns 0 if all communication worked, else 1."""
    if report is not None and not report.absolute().parent.is_dir():
        raise ConfigError([Problem("--json", str(report), "is in a folder that does not exist", "Make the folder.")])
    environment = read_environment()
    devices = _device_count(device)
    if environment.launcher != "single":
        per_device = -(-environment.local_world_size // devices) if device == "cuda" else 1
        return run_rank_main(lambda: _check_on_rank(environment, device, per_device, report))
    ranks = ranks or (max(devices, _RANKS_ON_ONE_GPU) if device == "cpu" or devices == 1 else devices)
    if ranks < 2:
        raise ConfigError([Problem("--ranks", str(ranks), "leaves nobody to communicate with", "Use 2 or more.")])
    if device == "cuda" and ranks > devices:
        shared = -(-ranks // devices)
        print(f"{ranks} ranks on {devices} GPU(s): up to {shared} share one, so speed means nothing here.")
    from petatron.mesh.launch.local_launcher import run_ranks

    flags = ["--nccl" if device == "cuda" else "--gloo", *(["--json", str(report)] if report else [])]
    code = run_ranks([sys.executable, "-m", "petatron", "doctor", *flags], nproc=ranks)
    if code not in (0, 1):
        print(f"VERDICT: communication does not work; the ranks ended with code {code} (see above).")
    return code


def _device_count(device: str) -> int:
    import torch

    if device == "cpu":
        return 1
    if not torch.cuda.is_available():
        fix = "Run it where training will run, or use --gloo to try CPU ranks."
        raise ConfigError([Problem("--nccl", "", "needs a CUDA device and none is visible", fix)])
    return torch.cuda.device_count()


def _check_on_rank(environment: RankEnvironment, device: str, ranks_per_device: int, report: Path | None) -> int:
    from petatron.mesh.launch.nccl_options import env_variables
    from petatron.mesh.launch.process_group import start_process_group, stop_process_group
    from petatron.mesh.mesh import ParallelMesh
    from petatron.mesh.rank_layout import Layout
    from petatron.verify.communication_self_test import check_communication, current_device

    leads = environment.rank == 0
    kind = "cuda" if device == "cuda" else "cpu"
    backend = start_process_group(environment, device_type=kind, timeout_minutes=1.0, ranks_per_device=ranks_per_device)
    if leads:
        for variable in env_variables(nccl=backend == "nccl", ranks_per_device=ranks_per_device):
            print(f"{variable.name}={variable.value}: {variable.reason}")

    def make(layout: Layout) -> ParallelMesh:
        return ParallelMesh(layout, environment.rank, device=current_device(kind), backend=backend, timeout_minutes=1.0)

    findings = check_communication(
        make,
        ranks=environment.world_size,
        shared_device=ranks_per_device > 1,
        log=lambda text: print(text, flush=True) if leads else None,
    )
    if leads:
        print(render(findings, shared=ranks_per_device > 1, backend=backend))
        if report is not None:
            report.write_text(json.dumps(asdict(findings), indent=1))
    stop_process_group()
    return 1 if findings.problems else 0


def render(findings: CommunicationReport, *, shared: bool, backend: str) -> str:
    """The table and the verdict."""
    lines = ["", f"{'axis':<8} {'ranks':>5} {'operation':<15} {'bytes':>8} {'time':>10} {'bus GB/s':>9}"]
    for result in findings.measured:
        unit, divisor = next(((unit, size) for unit, size in _UNITS if result.bytes >= size), ("B", 1))
        size = f"{result.bytes / divisor:g} {unit}"
        wrong = "" if result.correct else "  WRONG"
        lines.append(
            f"{result.axis:<8} {result.ranks:>5} {result.op:<15} {size:>8} {result.seconds * 1e3:>7.2f} ms "
            f"{result.bus_gb_s:>9.2f}{wrong}"
        )
    loss, alone = findings.losses[-1]
    steps = f"loss after {len(findings.losses)} steps"
    lines += ["", f"{steps}: {loss:.12f} in {findings.layout}, {alone:.12f} in one process"]
    if findings.problems:
        lines += ["", *findings.problems, f"VERDICT: communication over {backend} does not work; see the lines above."]
    else:
        speed = " Ranks share a GPU: order and results are real, times are not." if shared else ""
        lines += ["", f"VERDICT: communication over {backend} works ({findings.seconds:.0f} s).{speed}"]
    return "\n".join(lines)
