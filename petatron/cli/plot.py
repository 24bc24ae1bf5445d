"""`petatron plot`: the curves of runs, in the terminal or as a picture."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from petatron.base.errors import Problem, RunFolderError, raise_problems
from petatron.base.safe_files import write_atomic
from petatron.base.terminal_escape import printable, raw_stream
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.history.draw.png import figure_png
from petatron.history.draw.svg import figure_svg
from petatron.history.draw.terminal import MIN_WIDTH, can_color, print_panels
from petatron.history.draw.theme import THEMES
from petatron.history.metric_curves import DEFAULT_METRICS, MAX_RUNS, METRICS, X_AXES, build_panels, check_metrics
from petatron.history.run_folder import RecordedRun, open_runs

_SUFFIXES = (".svg", ".png")
_MIN_HEIGHT, _MAX_SIZE = 3, 1000


def parser() -> argparse.ArgumentParser:
    root = CommandParser(
        prog="petatron plot",
        description="Draws loss, validation, learning rate, gradient norm, throughput and memory of one or several runs: in the "
        "terminal, or as a picture with --out.",
        epilog="For example: petatron plot runs/a runs/b --smooth 0.9 --x tokens --out compare.svg",
    )
    add = root.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder that --save or --log-dir named")
    add("--metrics", metavar="A,B", default=",".join(DEFAULT_METRICS), help=f"of {', '.join(METRICS)} (the first six)")
    add("--x", choices=list(X_AXES), default="step", help="what the x axis counts (step)")
    text = "weight of the moving average, 0 to below 1 (0: as recorded)"
    add("--smooth", type=float, default=0.0, metavar="W", help=text)
    add("--out", type=Path, metavar="FILE", help=".svg, or .png (needs matplotlib, in the extra `log`)")
    add("--theme", choices=list(THEMES), default="light", help="colors of the picture (light)")
    add("--width", type=int, metavar="N", help="columns in the terminal (as wide as it is)")
    add("--height", type=int, default=8, metavar="N", help="rows of a panel in the terminal (8)")
    return root


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    metrics = list(dict.fromkeys(name.strip() for name in options.metrics.split(",") if name.strip()))
    raise_problems(_problems(options))
    check_metrics(metrics)
    runs = open_runs(options.runs)
    for note in (f"note: {run.label}: {note}" for run in runs for note in run.notes):
        print(printable(note), file=sys.stderr)
    width = options.width or min(_MAX_SIZE, max(MIN_WIDTH, shutil.get_terminal_size().columns))
    num_columns = 400 if options.out is not None else width
    panels = build_panels(runs, metrics=metrics, x_axis=options.x, smooth=options.smooth, num_columns=num_columns)
    if not panels:
        raise RunFolderError(_nothing_to_draw(runs, metrics, options.x))
    labels = [run.label for run in runs]
    if options.out is not None:
        draw = figure_png if options.out.suffix.lower() == ".png" else figure_svg
        title = labels[0] if len(labels) == 1 else f"{len(labels)} runs"
        title += f", smoothed by {options.smooth:g}" if options.smooth else ""
        write_result(options.out, draw(panels, labels, theme=THEMES[options.theme], title=title))
        print(f"wrote {options.out}")
        return 0
    stream = raw_stream(sys.stdout)
    print_panels(panels, labels, stream=stream, width=width, height=options.height, colored=can_color(stream))
    return 0


def _problems(options: argparse.Namespace) -> Iterator[Problem]:
    if not 0 <= options.smooth < 1:
        yield Problem("--smooth", f"{options.smooth:g}", "is not from 0 to below 1", "Use 0.9, for example.")
    if options.out is not None and options.out.suffix.lower() not in _SUFFIXES:
        yield Problem("--out", str(options.out), "is neither .svg nor .png", "Give one of these endings.")
    if options.width is not None and not MIN_WIDTH <= options.width <= _MAX_SIZE:
        yield Problem("--width", str(options.width), f"is not from {MIN_WIDTH} to {_MAX_SIZE}", "Use 80.")
    if not _MIN_HEIGHT <= options.height <= _MAX_SIZE:
        yield Problem("--height", str(options.height), f"is not from {_MIN_HEIGHT} to {_MAX_SIZE}", "Use 8.")
    if len(options.runs) > MAX_RUNS:
        rule = f"are more than the {MAX_RUNS} that can be told apart"
        yield Problem("RUN", f"{len(options.runs)} runs", rule, "Draw fewer of them.")


def _nothing_to_draw(runs: Sequence[RecordedRun], metrics: Sequence[str], x_axis: str) -> str:
    names = ", ".join(run.label for run in runs)
    recorded = any(run.metrics.columns["iteration"].size or run.metrics.evaluations for run in runs)
    if not recorded:
        return f"{names}: there is no log point yet. A run writes one after its first step, then every --log-interval steps."
    return f"{names}: none of the metrics {', '.join(metrics)} was recorded by {x_axis}. Choose others with --metrics or --x."


def write_result(path: Path, content: str | bytes) -> None:
    """Writes what was drawn; readers see the whole file or none."""
    try:
        write_atomic(path, content)
    except OSError as error:
        raise RunFolderError(
            f"--out {printable(str(path))} cannot be written: {error.strerror or error}. Choose a folder that exists and is writable."
        ) from error
