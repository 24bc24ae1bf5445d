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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.log import get_logger
from petatron.bench.measure.arguments import add_device_argument, add_only_argument, positive_problems
from petatron.bench.measure.suite_entries import ENTRIES, SuiteEntry, select_entries

if TYPE_CHECKING:
    from petatron.bench.measure.suite_table import SuiteRow
    from petatron.bench.result import BenchResult

_LONGEST_SHARE = 3.0  # of its estimate, after which a model is stopped
_CPU_ESTIMATE_S = 20.0
_log = get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        metavar="N",
        help="time budget; models beyond it are left out (default: 600)",
    )
    add_only_argument(parser, [entry.name for entry in ENTRIES])
    parser.add_argument("--out", metavar="DIR", help="folder for suite.json, suite.md and every model's log")
    parser.add_argument("--peer-path", action="append", default=[], metavar="DIR", help="as in bench train")
    parser.add_argument(
        "--table",
        action="append",
        default=[],
        metavar="FILE",
        help="measure nothing: take the rows of this suite.json; given again, of both, the later one's where both measured",
    )
    parser.add_argument("--into", metavar="FILE", help="write the table between its two comments in this file")
    add_device_argument(parser)


def run(args: argparse.Namespace) -> BenchResult:
    """Measures all models that fit the time budget, or reads their rows, and writes the table where asked."""
    from petatron.bench.measure.suite_table import find_table, replace_table
    from petatron.bench.result import BenchResult

    if args.table and args.only:
        rule, fix = "chooses what is measured, and --table measures nothing", "Leave one of them out."
        raise ConfigError([Problem("--only", ",".join(args.only), rule, fix)])
    out = None if args.out is None else _made_folder(Path(args.out))
    target = None if args.into is None else Path(args.into)
    if target is not None:  # before the minutes of a measurement
        find_table(_read_text(target), source=str(target))
    rows, details = _read_all(args.table) if args.table else _measure_all(args, out)
    values = {"rows": [asdict(row) for row in rows], "models": details}
    if out is not None:
        _write_files(out, rows, values)
    if target is not None:
        target.write_text(replace_table(_read_text(target), rows, source=str(target)), encoding="utf-8")
    return BenchResult(tuple((row.label, _row_text(row)) for row in rows), values)


def _row_text(row: SuiteRow) -> str:
    from petatron.bench.measure.suite_table import HEADER

    named = zip(HEADER[1:], row.cells()[1:], strict=True)
    return ", ".join(text if name in ("Petatron", "peer") else f"{name} {text}" for name, text in named)


def _measure_all(args: argparse.Namespace, out: Path | None) -> tuple[list[SuiteRow], dict[str, Any]]:
    from petatron.base.device import detect_device

    found = [*positive_problems({"--seconds": args.seconds})]
    for path in args.peer_path:
        if not Path(path).is_dir():
            rule, fix = "is no folder, so there would be another peer", "Give the folder that holds the package."
            found.append(Problem("--peer-path", path, rule, fix))
    try:
        on_cuda = detect_device(args.device).kind == "cuda"
        entries = select_entries(args.only)
    except ConfigError as error:
        raise ConfigError([*found, *error.problems]) from error
    if found:
        raise ConfigError(found)
    plan = SuitePlan(on_cuda=on_cuda, peer_paths=tuple(args.peer_path), seconds=args.seconds, out=out)
    return plan.measure(entries, run_child)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """What all models of a suite have in common."""

    on_cuda: bool
    peer_paths: Sequence[str]
    seconds: float
    out: Path | None = None

    def measure(
        self,
        entries: Sequence[SuiteEntry],
        run_words: Callable[[Sequence[str], float], tuple[dict[str, Any] | None, str]],
    ) -> tuple[list[SuiteRow], dict[str, Any]]:
        """Measures entry by entry; `run_words` runs `petatron bench train` within some seconds."""
        from petatron.bench.measure.suite_table import SuiteRow, row_from_bench

        rows: list[SuiteRow] = []
        details: dict[str, Any] = {}
        started = time.monotonic()
        for number, entry in enumerate(entries, start=1):
            label = entry.label if self.on_cuda else f"{entry.name}, a tiny form on a CPU"
            estimate = entry.estimated_s if self.on_cuda else _CPU_ESTIMATE_S
            left = self.seconds - (time.monotonic() - started)
            if estimate > left:
                _log.info(
                    "%s: left out, takes about %.0f s, and %.0f of %.0f are left",
                    entry.name,
                    estimate,
                    max(left, 0.0),
                    self.seconds,
                )
                rows.append(
                    SuiteRow(label=label, failure=f"left out: takes about {estimate:.0f} s, which were not left")
                )
                continue
            _log.info("%s, %d of %d: %.0f s so far", entry.name, number, len(entries), self.seconds - left)
            began = time.monotonic()
            words = self.words(entry)
            values, log = run_words(words, min(left, _LONGEST_SHARE * estimate))
            details[entry.name] = {"words": words, "seconds": time.monotonic() - began, "bench": values}
            if values is None:
                reason = log.strip().splitlines()[-1] if log.strip() else "no output"
                rows.append(SuiteRow(label=label, failure=f"failed: {reason[:120].replace('|', '/')}"))
            else:
                rows.append(row_from_bench(label, values))
            _log.info("%s: %s", entry.name, _row_text(rows[-1]))
            if self.out is not None:
                (self.out / f"{entry.name}.log").write_text(log, encoding="utf-8")
        return rows, details

    def words(self, entry: SuiteEntry) -> list[str]:
        """Returns the words of `petatron bench train` for a model, beside the peer it is compared with."""
        words, peer = entry.bench_words(on_cuda=self.on_cuda), self.peer(entry)
        words += [] if peer is None else ["--against", peer]
        if peer == "torchtitan":
            words += [word for path in self.peer_paths for word in ("--peer-path", path)]
        return words

    def peer(self, entry: SuiteEntry) -> str | None:
        """Returns whom a model is compared with: torchtitan if it can, else transformers; FP8 without it with our own bf16."""
        needed = ("torchtitan",) if entry.fp8_recipe is None else ("torchtitan", "torchao")
        if entry.has_torchtitan and all(self._has_source(package) for package in needed):
            return "torchtitan"
        if entry.fp8_recipe is not None:
            return "bf16"
        return "hf" if importlib.util.find_spec("transformers") is not None else None

    def _has_source(self, package: str) -> bool:
        return any((Path(path) / package / "__init__.py").is_file() for path in self.peer_paths)


def run_child(words: Sequence[str], limit_s: float) -> tuple[dict[str, Any] | None, str]:
    """Runs `petatron bench train` in a process group of its own; returns its JSON, or None, and what it wrote."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "petatron", "bench", "train", "--json", str(answer), *words]
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


def _made_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "suite.md").touch()
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise ConfigError([Problem("--out", str(folder), rule, "Choose a writable folder.")]) from error
    return folder


def _write_files(out: Path, rows: Sequence[SuiteRow], values: Mapping[str, Any]) -> None:
    from petatron.bench.measure.suite_table import format_table

    (out / "suite.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (out / "suite.md").write_text(format_table(rows) + "\n", encoding="utf-8")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {path}: {error}. Give a text file.") from error


def _read_all(paths: Sequence[str]) -> tuple[list[SuiteRow], dict[str, Any]]:
    """Reads what earlier suites wrote; a row that a later one measured takes the place of an earlier one's."""
    rows: dict[str, SuiteRow] = {}
    details: dict[str, Any] = {}
    for path in paths:
        found, models = _read_rows(Path(path))
        rows |= {row.label: row for row in found if row.label not in rows or row.failure is None}
        details |= {name: model for name, model in models.items() if name not in details or model["bench"] is not None}
    return [*rows.values()], details


def _read_rows(path: Path) -> tuple[list[SuiteRow], dict[str, Any]]:
    """Reads what an earlier suite wrote."""
    from petatron.bench.measure.suite_table import rows_from_json

    try:
        content = json.loads(_read_text(path))
        reason = None if isinstance(content, dict) else "it is no JSON object"
    except (ValueError, RecursionError):
        content, reason = {}, "it is no JSON"
    rows = rows_from_json(content["rows"]) if reason is None and "rows" in content else None
    if reason is None and (rows is None or not isinstance(content.get("models"), dict)):
        reason = "it lacks the rows of a table, or has others"
    if rows is None or reason is not None:
        raise DataError(
            f"{path} was not written by petatron bench suite: {reason}. Give the suite.json that its --out wrote."
        )
    return rows, content["models"]
