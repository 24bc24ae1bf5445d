"""`petatron bench suite`: the training step of many models, each beside a peer, as one table.

Every model is measured by `petatron bench train` in a process of its own: it begins with an empty device, and one that fails costs a
row. The peer is torchtitan where its source is given and it can build the model, else transformers where that is installed, and for
FP8, which transformers does not have, our own bf16. A model is begun only if its estimated time is left of `--seconds`.
On a CPU, tiny forms of the models show that the suite works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from petatron.base.check_output_file import writable_problems
from petatron.base.device import detect_device
from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.log import get_logger
from petatron.bench import BenchResult
from petatron.bench.arguments import SUITE_SECONDS
from petatron.bench.measure.check_arguments import file_problems, positive_problems
from petatron.bench.measure.suite_models import SuiteEntry, select_entries
from petatron.bench.measure.suite_table import (
    BEGIN,
    END,
    HEADER,
    SuiteRow,
    format_table,
    measured_device,
    merge_rows,
    row_from_bench,
    rows_from_json,
    update_table,
)
from petatron.bench.peers.torchtitan import has_usable_source

_TIMEOUT_FACTOR = 3.0  # of its estimate, after which a model is stopped
_CPU_ESTIMATE_S = 20.0
_log = get_logger(__name__)


def argument_problems(args: argparse.Namespace) -> Iterator[Problem]:
    """Yields what is wrong with the arguments, before minutes of measuring; makes the folder for results."""
    yield from _table_problems(args) if args.table else _measurement_problems(args)
    if args.into is not None:
        missing = file_problems("--into", args.into, f"Give a file that has the lines {BEGIN} and {END}.")
        yield from missing or writable_problems("--into", Path(args.into))
    elif args.replace:
        fix = "Give --into the file whose table is replaced."
        yield Problem("--replace", "", "has no effect without --into", fix)
    if args.out is not None:
        folder = Path(args.out)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "suite.md").touch()
        except OSError as error:
            rule = f"cannot be written: {error.strerror or error}"
            yield Problem("--out", str(folder), rule, "Choose a writable folder.")


def _table_problems(args: argparse.Namespace) -> Iterator[Problem]:
    given = {
        "--only": ",".join(args.only),
        "--seconds": "" if args.seconds is None else f"{args.seconds:g}",
        "--device": args.device,
        "--peer-path": ",".join(args.peer_path),
    }
    rule, fix = "chooses what is measured, and --table measures nothing", "Leave one of them out."
    yield from (Problem(flag, value, rule, fix) for flag, value in given.items() if value)
    for path in args.table:
        yield from file_problems("--table", path, "Give the suite.json that `petatron bench suite --out DIR` wrote.")


def _measurement_problems(args: argparse.Namespace) -> Iterator[Problem]:
    yield from positive_problems({} if args.seconds is None else {"--seconds": args.seconds})
    for path in args.peer_path:
        if not Path(path).is_dir():
            rule, fix = "is no folder, so there would be another peer", "Give the folder that holds the package."
            yield Problem("--peer-path", path, rule, fix)
    for check in (lambda: select_entries(args.only), lambda: detect_device(args.device or "auto")):
        try:
            check()
        except ConfigError as error:
            yield from error.problems


def run(args: argparse.Namespace) -> BenchResult:
    """Measures all models that fit the time budget, or reads their rows, and writes the table where asked."""
    rows, details = _read_all(args.table) if args.table else ([], {})
    place = None if args.table else detect_device(args.device or "auto")
    device = measured_device(details) if place is None else place.name
    if args.into is not None:  # also before the minutes of a measurement
        _updated_page(args, rows, device)
    out = None if args.out is None else Path(args.out)
    if place is not None:
        seconds = SUITE_SECONDS if args.seconds is None else args.seconds
        plan = SuiteRunner(on_cuda=place.kind == "cuda", peer_paths=tuple(args.peer_path), seconds=seconds, out=out)
        rows, details = plan.measure(select_entries(args.only), run_child)
    values = {"rows": [asdict(row) for row in rows], "models": details}
    if out is not None:
        (out / "suite.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        (out / "suite.md").write_text(format_table(rows) + "\n", encoding="utf-8")
    if args.into is not None:
        Path(args.into).write_text(_updated_page(args, rows, device), encoding="utf-8")
    return BenchResult(tuple((row.label, _row_text(row)) for row in rows), values)


def _updated_page(args: argparse.Namespace, rows: Sequence[SuiteRow], device: str | None) -> str:
    return update_table(_read_text(Path(args.into)), rows, device=device, replace=args.replace, source=str(args.into))


def _row_text(row: SuiteRow) -> str:
    named = zip(HEADER[1:], row.cells()[1:], strict=True)
    return ", ".join(text if name in ("Petatron", "peer") else f"{name} {text}" for name, text in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRunner:
    """What all models of a suite have in common."""

    on_cuda: bool
    peer_paths: Sequence[str]
    seconds: float
    out: Path | None = None

    def measure(
        self,
        entries: Sequence[SuiteEntry],
        run_train: Callable[[Sequence[str], float], tuple[dict[str, Any] | None, str]],
    ) -> tuple[list[SuiteRow], dict[str, Any]]:
        """Measures entry by entry; `run_train` runs `petatron bench train` with some flags, within some seconds."""
        rows: list[SuiteRow] = []
        details: dict[str, Any] = {}
        started = time.monotonic()
        for number, entry in enumerate(entries, start=1):
            label = entry.label if self.on_cuda else f"{entry.name}, a tiny form on a CPU"
            estimate = entry.estimated_s if self.on_cuda else _CPU_ESTIMATE_S
            left = self.seconds - (time.monotonic() - started)
            if estimate > left:
                times = f"{estimate:.0f} s, and {max(left, 0.0):.0f} of {self.seconds:.0f} are left"
                _log.info("%s: left out, takes about %s", entry.name, times)
                failure = f"left out: takes about {estimate:.0f} s, which were not left"
                rows.append(SuiteRow(label=label, failure=failure))
                continue
            _log.info("%s, %d of %d: %.0f s so far", entry.name, number, len(entries), self.seconds - left)
            began = time.monotonic()
            flags = self.flags(entry)
            values, log = run_train(flags, min(left, _TIMEOUT_FACTOR * estimate))
            # Files of earlier suites have the flags under "words" too.
            details[entry.name] = {"words": flags, "seconds": time.monotonic() - began, "bench": values}
            if values is None:
                reason = log.strip().splitlines()[-1] if log.strip() else "no output"
                rows.append(SuiteRow(label=label, failure=f"failed: {reason[:120].replace('|', '/')}"))
            else:
                rows.append(row_from_bench(label, values))
            _log.info("%s: %s", entry.name, _row_text(rows[-1]))
            if self.out is not None:
                (self.out / f"{entry.name}.log").write_text(log, encoding="utf-8")
        return rows, details

    def flags(self, entry: SuiteEntry) -> list[str]:
        """Returns the flags of `petatron bench train` for a model, beside the peer it is compared with."""
        flags, peer = entry.bench_flags(on_cuda=self.on_cuda), self.peer(entry)
        flags += [] if peer is None else ["--against", peer]
        if peer == "torchtitan":
            flags += [text for path in self.peer_paths for text in ("--peer-path", path)]
        return flags

    def peer(self, entry: SuiteEntry) -> str | None:
        """Returns whom a model is compared with: torchtitan if it can, else transformers; FP8 without it with our own bf16."""
        if entry.has_torchtitan and has_usable_source([Path(path) for path in self.peer_paths], entry.fp8_recipe):
            return "torchtitan"
        if entry.fp8_recipe is not None:
            return "bf16"
        return "hf" if importlib.util.find_spec("transformers") is not None else None


def run_child(flags: Sequence[str], limit_s: float) -> tuple[dict[str, Any] | None, str]:
    """Runs `petatron bench train` in a process group of its own; returns its JSON, or None, and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "petatron", "bench", "train", "--json", str(answer), *flags]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            log = process.communicate(timeout=limit_s)[0]
        except BaseException as error:
            # Its own children too, which hold memory of the device.
            os.killpg(process.pid, signal.SIGKILL)
            log = process.communicate()[0]
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return None, f"{log}\nstopped after {limit_s:.0f} s"
        if process.returncode != 0 or not answer.is_file():
            return None, log
        return json.loads(answer.read_text()), log


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {path}: {error}. Give a text file.") from error


def _read_all(paths: Sequence[str]) -> tuple[list[SuiteRow], dict[str, Any]]:
    """Reads what earlier suites wrote; a row that a later one measured takes the place of an earlier one's."""
    rows: list[SuiteRow] = []
    details: dict[str, Any] = {}
    for path in paths:
        later_rows, models = _read_rows(Path(path))
        rows = merge_rows(rows, later_rows)
        details |= {name: model for name, model in models.items() if name not in details or model["bench"] is not None}
    return rows, details


def _read_rows(path: Path) -> tuple[list[SuiteRow], dict[str, Any]]:
    """Reads what an earlier suite wrote."""
    try:
        content = json.loads(_read_text(path))
        reason = None if isinstance(content, dict) else "it is no JSON object"
    except (ValueError, RecursionError):
        content, reason = {}, "it is no JSON"
    rows = rows_from_json(content["rows"]) if reason is None and "rows" in content else None
    models = content.get("models") if reason is None else None
    known = isinstance(models, dict) and all(isinstance(model, dict) and "bench" in model for model in models.values())
    if reason is None and (rows is None or not known):
        reason = "it lacks the rows of a table, or has others"
    if rows is None or reason is not None:
        fix = "Give the suite.json that its --out wrote."
        raise DataError(f"{path} was not written by petatron bench suite: {reason}. {fix}")
    return rows, content["models"]
