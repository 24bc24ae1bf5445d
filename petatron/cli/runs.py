"""`petatron runs`: lists the runs below a folder, and compares two."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

from petatron.base.errors import RunFolderError
from petatron.base.terminal_escape import printable
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.history.draw.axis_ticks import compact
from petatron.history.run_folder import RecordedRun, find_run_folders, open_run, open_runs
from petatron.history.run_summary import (
    Difference,
    result_differences,
    setting_differences,
    summarize_run,
    summary_texts,
    summary_values,
)

_HEADER = ("run", "state", "step", "loss", "best valid", "layout", "changed")
_MIN_NAME, _MIN_VALUE = 12, 10
_LONG_COUNT = 100_000


def parser() -> argparse.ArgumentParser:
    root = CommandParser(
        prog="petatron runs",
        usage="petatron runs [-h] [--json] [DIR]\n       petatron runs diff [-h] [--json] A B",
        description="Lists the runs below a folder: whether each is running, finished, stopped or failed, how far it came, its last "
        "and its best validation loss, its layout, and when it last changed. `petatron runs diff A B` compares two.",
    )
    root.add_argument("root", nargs="?", type=Path, default=Path("runs"), metavar="DIR", help="where to look (runs)")
    root.add_argument("--json", action="store_true", help="print everything as JSON")
    return root


def diff_parser() -> argparse.ArgumentParser:
    root = CommandParser(
        prog="petatron runs diff",
        description="Shows the settings in which two runs differ, with the origin of each value, and their results side by side.",
    )
    root.add_argument("first", type=Path, metavar="A", help="folder that --save or --log-dir named")
    root.add_argument("second", type=Path, metavar="B")
    root.add_argument("--json", action="store_true", help="print everything as JSON")
    return root


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["diff"]:
        return _diff(diff_parser().parse_args(argv[1:]))
    return _list(parser().parse_args(argv))


def _list(options: argparse.Namespace) -> int:
    runs: list[RecordedRun] = []
    notes: list[str] = []
    for folder in find_run_folders(options.root):
        try:
            inside = folder.relative_to(options.root)
            label = printable(str(inside) if inside.parts else folder.resolve().name)
            runs.append(open_run(folder, label=label, every_point=options.json))
        except RunFolderError as error:
            notes.append(f"skipped: {error}")
    if options.json:
        print(json.dumps({"runs": [summary_values(run) for run in runs], "notes": notes}, indent=1))
        return 0
    if runs:
        print(_table([_HEADER, *map(_row, runs)], width=shutil.get_terminal_size().columns))
    else:
        print(f"no runs below {options.root}: a run is a folder with a metrics.jsonl")
    for note in notes:
        print(note)
    return 0


def _row(run: RecordedRun) -> tuple[str, ...]:
    summary = summarize_run(run)
    texts = summary_texts(summary)
    changed = time.strftime("%m-%d %H:%M", time.localtime(run.changed_s))
    done = (summary.iteration, summary.train_iters)
    steps = "/".join(f"{n:,}" if n < _LONG_COUNT else compact(n) for n in done if n is not None)
    return run.label, run.state, steps, texts["last loss"], texts["best validation"].split(" (")[0], run.layout, changed


def _table(rows: Sequence[Sequence[str]], *, width: int) -> str:
    """Aligns columns; where the terminal is narrow, the layout and then the names are shortened."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    over = sum(widths) + 2 * (len(widths) - 1) - width
    for index, least in ((5, 8), (0, _MIN_NAME)):
        cut = min(max(0, over), max(0, widths[index] - least))
        widths[index] -= cut
        over -= cut
    right = (2, 3, 4)
    lines = []
    for row in rows:
        cells = [cell if len(cell) <= wide else f"{cell[: wide - 1]}…" for cell, wide in zip(row, widths)]
        aligned = (f"{c:>{w}}" if i in right else f"{c:{w}}" for i, (c, w) in enumerate(zip(cells, widths)))
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _diff(options: argparse.Namespace) -> int:
    first, second = open_runs([options.first, options.second])
    settings, results = setting_differences(first, second), result_differences(first, second)
    if options.json:
        runs = [summary_values(run) for run in (first, second)]
        print(json.dumps({"runs": runs, "settings": [asdict(difference) for difference in settings]}, indent=1))
        return 0
    width = shutil.get_terminal_size().columns
    print(_side_by_side("settings", settings, first, second, width) if settings else "settings: no difference")
    print()
    print(_side_by_side("results", results, first, second, width))
    for run in (first, second):
        for note in run.notes:
            print(f"note: {run.label}: {note}")
    return 0


def _side_by_side(title: str, rows: Sequence[Difference], first: RecordedRun, second: RecordedRun, width: int) -> str:
    """Prints a value with its origin in one column per run; long values go on in the next line."""

    def with_origin(text: str, origin: str) -> str:
        return f"{text}  [{origin}]" if origin else text

    cells = [(title, first.label, second.label)]
    cells += [
        (row.name, with_origin(row.first, row.first_origin), with_origin(row.second, row.second_origin)) for row in rows
    ]
    cells = [tuple(map(printable, row)) for row in cells]
    name = min(max(len(row[0]) for row in cells), max(_MIN_NAME, width // 2))
    value = min(max(len(text) for row in cells for text in row[1:]), max(_MIN_VALUE, (width - name - 4) // 2))
    lines = []
    for row in cells:
        parts = [
            [text[start : start + wide] for start in range(0, len(text), wide)]
            for text, wide in zip(row, (name, value, value))
        ]
        for texts in zip_longest(*parts, fillvalue=""):
            lines.append(f"{texts[0]:{name}}  {texts[1]:{value}}  {texts[2]}".rstrip())
    return "\n".join(lines)
