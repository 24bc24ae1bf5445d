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
from petatron.base.output_file import writable_problems
from petatron.bench.measure.arguments import (
    add_device_argument,
    add_only_argument,
    file_problems,
    positive_problems,
)
from petatron.bench.measure.suite_entries import ENTRIES, SuiteEntry, select_entries
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

if TYPE_CHECKING:
    from petatron.bench.result import BenchResult

_DEFAULT_SECONDS = 600.0
_TIMEOUT_FACTOR = 3.0  # of its estimate, after which a model is stopped
_CPU_ESTIMATE_S = 20.0
_log = get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    budget = f"time budget; models beyond it are left out (default: {_DEFAULT_SECONDS:.0f})"
    parser.add_argument("--seconds", type=float, metavar="N", help=budget)
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
    into = "put the rows into the table between its two comments in this file, among those of the same device"
    parser.add_argument("--into", metavar="FILE", help=into)
    replaced = "with --into: drop the rows that the file has, also those of another device"
    parser.add_argument("--replace", action="store_true", help=replaced)
    add_device_argument(parser)
    parser.set_defaults(device=None)  # to know whether it was given


def argument_problems(args: argparse.Namespace) -> list[Problem]:
    """Returns what is wrong with the arguments, before minutes of measuring."""
    found = _table_problems(args) if args.table else _measurement_problems(args)
    if args.into is not None:
        missing = file_problems("--into", args.into, f"Give a file that has the lines {BEGIN} and {END}.")
        found += missing or writable_problems("--into", Path(args.into))
    elif args.replace:
        fix = "Give --into the file whose table is replaced."
        found.append(Problem("--replace", "", "has no effect without --into", fix))
    if args.out is not None:
        found += _make_out_folder(Path(args.out))
    return found


def _table_problems(args: argparse.Namespace) -> list[Problem]:
    given = {
        "--only": ",".join(args.only),
        "--seconds": "" if args.seconds is None else f"{args.seconds:g}",
        "--device": args.device,
        "--peer-path": ",".join(args.peer_path),
    }
    rule, fix = "chooses what is measured, and --table measures nothing", "Leave one of them out."
    found = [Problem(flag, value, rule, fix) for flag, value in given.items() if value]
    for path in args.table:
        found += file_problems("--table", path, "Give the suite.json that `petatron bench suite --out DIR` wrote.")
    return found


def _measurement_problems(args: argparse.Namespace) -> list[Problem]:
    from petatron.base.device import detect_device

    found = [*positive_problems({} if args.seconds is None else {"--seconds": args.seconds})]
    for path in args.peer_path:
        if not Path(path).is_dir():
            rule, fix = "is no folder, so there would be another peer", "Give the folder that holds the package."
            found.append(Problem("--peer-path", path, rule, fix))
    for check in (lambda: select_entries(args.only), lambda: detect_device(args.device or "auto")):
        try:
            check()
        except ConfigError as error:
            found += error.problems
    return found


def run(args: argparse.Namespace) -> BenchResult:
    """Measures all models that fit the time budget, or reads their rows, and writes the table where asked."""
    from petatron.base.device import detect_device
    from petatron.bench.result import BenchResult

    rows, details = _read_all(args.table) if args.table else ([], {})
    place = None if args.table else detect_device(args.device or "auto")
    device = measured_device(details) if place is None else place.name
    if args.into is not None:  # also before the minutes of a measurement
        _updated_page(args, rows, device)
    out = None if args.out is None else Path(args.out)
    if place is not None:
        plan = SuiteRunner(
            on_cuda=place.kind == "cuda",
            peer_paths=tuple(args.peer_path),
            seconds=_DEFAULT_SECONDS if args.seconds is None else args.seconds,
            out=out,
        )
        rows, details = plan.measure(select_entries(args.only), run_child)
    values = {"rows": [asdict(row) for row in rows], "models": details}
    if out is not None:
        _write_files(out, rows, values)
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
        run_words: Callable[[Sequence[str], float], tuple[dict[str, Any] | None, str]],
    ) -> tuple[list[SuiteRow], dict[str, Any]]:
        """Measures entry by entry; `run_words` runs `petatron bench train` within some seconds."""
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
            values, log = run_words(words, min(left, _TIMEOUT_FACTOR * estimate))
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
        if entry.has_torchtitan and self._has_torchtitan(entry.fp8_recipe):
            return "torchtitan"
        if entry.fp8_recipe is not None:
            return "bf16"
        return "hf" if importlib.util.find_spec("transformers") is not None else None

    def _has_torchtitan(self, fp8_recipe: str | None) -> bool:
        """Whether a version of it can do the work with the installed torch."""
        from petatron.bench.peers.torchtitan import has_usable_source

        return has_usable_source([Path(path) for path in self.peer_paths], fp8_recipe)


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


def _make_out_folder(folder: Path) -> list[Problem]:
    """Makes the folder for results."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "suite.md").touch()
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        return [Problem("--out", str(folder), rule, "Choose a writable folder.")]
    return []


def _write_files(out: Path, rows: Sequence[SuiteRow], values: Mapping[str, Any]) -> None:
    (out / "suite.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (out / "suite.md").write_text(format_table(rows) + "\n", encoding="utf-8")


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
        found, models = _read_rows(Path(path))
        rows = merge_rows(rows, found)
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
    known = isinstance(models, dict) and all(isinstance(one, dict) and "bench" in one for one in models.values())
    if reason is None and (rows is None or not known):
        reason = "it lacks the rows of a table, or has others"
    if rows is None or reason is not None:
        raise DataError(
            f"{path} was not written by petatron bench suite: {reason}. Give the suite.json that its --out wrote."
        )
    return rows, content["models"]
