"""`petatron plan model`: the parts of a model with their parameters and FLOPs, as a table and as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from petatron.base.check_output_file import writable_problems
from petatron.base.errors import raise_problems
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.cli.train import load_planned


def parser() -> argparse.ArgumentParser:
    root = CommandParser(
        prog="petatron plan model",
        usage="petatron plan model [PRESET] [--out FILE.svg] [--config FILE] [flags of petatron train]",
        description="Lists the parts of a model in the order in which a token passes them, equal layers once: parameters and shares of the "
        "FLOPs of a step. With --out, draws it too, with the widths of all GEMMs.",
        epilog="For example: petatron plan model modernbert-base --out modernbert.svg",
    )
    root.add_argument("--out", metavar="FILE.svg", type=Path, help="write the picture here")
    return root


def main(argv: Sequence[str]) -> int:
    options, flags = parser().parse_known_args(list(argv))
    if options.out is not None:
        raise_problems(writable_problems("--out", options.out))
    run = load_planned(flags).config
    from petatron.models.registry import model_spec
    from petatron.plan.model_drawing import model_svg, model_text
    from petatron.plan.model_parts import model_parts

    parts = model_parts(model_spec(run))
    print("\n".join(model_text(parts)))
    if options.out is not None:
        name = next((word for word in flags if not word.startswith("-")), run.model.model_type)
        options.out.write_text(model_svg(parts, title=name), encoding="utf-8")
    return 0
