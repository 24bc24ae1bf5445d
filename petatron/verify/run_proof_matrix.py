"""Runs many layouts on one set of local ranks, and compares each with one process.

Starting eight Python processes takes longer than training a tiny model in most layouts, so the ranks are started once and
loop over the cases; for a case of n ranks the first n form their own process group. Rank 0 trains the references, each
once, and compares. The ranks report to the command that started them in a folder:

    cases.json                 what to run
    begun                      the ranks have completed their rendezvous
    outcome-00007.json         the result of case 7
    error-00007-00002.json     why rank 2 failed in case 7
    case-00007/rank-00002/     the steps of rank 2, until they have been compared
    reference-.../rank-00000/  the steps of one process

A rank that fails exits, and the launcher ends its peers: after a failed collective the state of a peer is unknown. The command
then starts fresh ranks, which continue with the first case that has neither a result nor an error. So neither a crash nor a hang
affects other cases.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from petatron.base.errors import PetatronError
from petatron.base.safe_files import remove_tree, write_atomic
from petatron.mesh.launch.environment import RankEnvironment
from petatron.mesh.launch.rank_exit import is_echo
from petatron.mesh.launch.rendezvous import Rendezvous
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.pretrained.open_tokenizer import open_tokenizer
from petatron.validate import load_config
from petatron.verify.compare_traces import TraceComparison
from petatron.verify.proof_matrix import MATRIX_TOLERANCES, MatrixEntry
from petatron.verify.record_trace import Injection, record_steps, write_trace
from petatron.verify.verify_layouts import compare_recorded_runs, parse_injection, plan_verification

TIMEOUT_MINUTES = 1.5
"""How long ranks wait for each other; a step of these models takes a fraction of a second."""
STARTED_FILE = "begun"
"""The file that marks the rendezvous as complete: a failure before it is not a case's."""


@dataclass(frozen=True, slots=True)
class MatrixCase:
    """One layout to run, as arguments of the two command lines."""

    name: str
    model_flags: str
    layout_flags: str
    argv: tuple[str, ...]
    reference_argv: tuple[str, ...]
    world_size: int
    dtype: str
    steps: int
    inject: str | None = None
    """A fault to inject (see `verify.parse_injection`), for testing the check itself."""

    @property
    def command(self) -> str:
        """Returns the `petatron verify` command of this case alone."""
        inject, flags = f" --inject {self.inject}" if self.inject else "", f"{self.model_flags} {self.layout_flags}"
        return f"petatron verify {flags} --steps {self.steps} --dtype {self.dtype}{inject}"

    @property
    def reference_name(self) -> str:
        """Cases of one model share a reference."""
        return f"reference-{sha256(' '.join(self.reference_argv).encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of a case: the largest relative differences over all steps, and what diverged first or failed."""

    name: str
    loss: float | None = None
    gradient: float | None = None
    parameter: float | None = None
    departure: str | None = None
    error: str | None = None
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.departure is None and self.error is None


def make_case(entry: MatrixEntry, *, model_flags: str, steps: int, dtype: str, inject: str | None = None) -> MatrixCase:
    """Builds the case of an entry; ConfigError if the layout does not fit the model, or the fault names no tensor of it."""
    model, layout = model_flags.split(), entry.flags.split()
    both = plan_verification([*model, *layout], steps=steps, dtype=dtype)
    assert both.candidate.config.parallel.world_size == entry.world_size, entry.name
    if inject is not None:
        parse_injection(inject, both.candidate.config)
    fixed = both.candidate_argv[len(model) + len(layout) :]
    argvs = tuple(both.candidate_argv), (*model, *fixed)
    return MatrixCase(entry.name, model_flags, entry.flags, *argvs, entry.world_size, dtype, steps, inject)


def write_cases(cases: Sequence[MatrixCase], folder: Path) -> None:
    write_atomic(folder / "cases.json", json.dumps([asdict(case) for case in cases]))


def read_cases(folder: Path) -> list[MatrixCase]:
    cases: list[dict[str, Any]] = json.loads((folder / "cases.json").read_text())
    lists = ("argv", "reference_argv")
    return [MatrixCase(**{**case, **{name: tuple(case[name]) for name in lists}}) for case in cases]


def read_result(folder: Path, number: int) -> CaseResult | None:
    """Reads the result of a case, or the error of a failed one; None while it has not been run."""
    path = folder / f"outcome-{number:05d}.json"
    if path.exists():
        return CaseResult(**json.loads(path.read_text()))
    errors = [json.loads(file.read_text()) for file in sorted(folder.glob(f"error-{number:05d}-*.json"))]
    if not errors:
        return None
    first = min(errors, key=lambda error: (error["echo"], error["time"]))  # a broken connection is not the cause
    return CaseResult(first["name"], error=f"rank {first['rank']}: {first['text']}", seconds=first["seconds"])


def record_failure(folder: Path, number: int, name: str, text: str) -> CaseResult:
    """Records that a case ended without a report from any rank."""
    return _write_result(folder, number, CaseResult(name, error=text))


def run_cases(folder: Path, environment: RankEnvironment, on_result: Callable[[MatrixCase, CaseResult], None]) -> None:
    """Runs, on every rank, all cases that have no result; rank 0 passes each result to `on_result`."""
    torch.set_num_threads(1)
    meeting = Rendezvous(environment)
    cases = read_cases(folder)
    (folder / STARTED_FILE).touch()
    todo = [number for number in range(len(cases)) if read_result(folder, number) is None]
    for number in todo:
        case, started = cases[number], time.monotonic()
        if environment.rank >= case.world_size:
            continue
        try:
            verdict = _run_case(case, number, folder, meeting)
        except Exception as error:
            _write_error(error, case, number, folder, environment.rank, seconds=time.monotonic() - started)
            raise
        if verdict is not None:
            on_result(case, _write_result(folder, number, _case_result(case, verdict, time.monotonic() - started)))
    meeting.close()


def _run_case(case: MatrixCase, number: int, folder: Path, rendezvous: Rendezvous) -> TraceComparison | None:
    """Returns the comparison on rank 0, None on the others."""
    case_folder = folder / f"case-{number:05d}"
    reference = folder / case.reference_name
    with rendezvous.process_group(f"case-{number}", case.world_size, timeout_minutes=TIMEOUT_MINUTES):
        injection = parse_injection(case.inject) if case.inject else None
        _record(case.argv, case_folder, rank=rendezvous.rank, world_size=case.world_size, injection=injection)
    if rendezvous.rank:
        return None
    if not reference.exists():
        partial = folder / "reference-partial"
        remove_tree(partial)
        _record(case.reference_argv, partial, rank=0, world_size=1)
        partial.rename(reference)
    verdict = compare_recorded_runs(reference, case_folder, MATRIX_TOLERANCES[case.dtype])
    remove_tree(case_folder)
    return verdict


def _record(
    argv: Sequence[str], folder: Path, *, rank: int, world_size: int, injection: Injection | None = None
) -> None:
    loaded, _ = open_tokenizer(load_config(argv, world_size=world_size))
    mesh = ParallelMesh(Layout.from_config(loaded.config.parallel), rank, timeout_minutes=TIMEOUT_MINUTES)
    write_trace(record_steps(loaded.config, mesh, injection=injection), folder / f"rank-{rank:05d}")


def _case_result(case: MatrixCase, verdict: TraceComparison, seconds: float) -> CaseResult:
    worst = {
        kind: max((w.difference for step in verdict.steps for w in step.worst if w.kind == kind), default=0.0)
        for kind in ("gradient", "parameter")
    }
    loss = verdict.largest_loss_difference
    return CaseResult(case.name, loss, worst["gradient"], worst["parameter"], verdict.first_departure, None, seconds)


def _write_result(folder: Path, number: int, result: CaseResult) -> CaseResult:
    write_atomic(folder / f"outcome-{number:05d}.json", json.dumps(asdict(result)))
    return result


def _write_error(error: Exception, case: MatrixCase, number: int, folder: Path, rank: int, *, seconds: float) -> None:
    plain = isinstance(error, PetatronError)
    text = str(error) if plain else "".join(traceback.format_exception(error)).rstrip()
    report = {"name": case.name, "rank": rank, "text": text, "echo": is_echo(error), "time": time.time()}
    write_atomic(folder / f"error-{number:05d}-{rank:05d}.json", json.dumps({**report, "seconds": seconds}))
