"""`petatron report`: a run as one HTML file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from petatron.cli.plot import write_result
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.history.report.html_page import report_html
from petatron.history.run_folder import open_runs

_REPORT_FILE = "report.html"


def parser() -> argparse.ArgumentParser:
    root = CommandParser(
        prog="petatron report",
        description="Writes a run as one HTML file to send to a colleague: curves, settings with their origins, environment, data, "
        "layout, checkpoints, evaluation and text samples. It needs nothing else and requests nothing.",
    )
    root.add_argument("run", type=Path, metavar="RUN", help="folder that --save or --log-dir named")
    root.add_argument("--out", type=Path, metavar="FILE", help=f"where to write it (RUN/{_REPORT_FILE})")
    return root


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    run = open_runs([options.run])[0]
    out = options.run / _REPORT_FILE if options.out is None else options.out
    write_result(out, report_html(run))
    print(f"wrote {out}")
    return 0
