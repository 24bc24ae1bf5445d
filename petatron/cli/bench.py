"""`petatron bench`: measurements that compare two ways of doing the same work in one run, on this machine.

A bench is a module with `run(args) -> BenchResult`, imported when it runs; adding one is a line in BENCHES and its arguments in
`bench/arguments.py`. One with `argument_problems(args)` is run only where that finds none, and they are told together with those of
`--json`. One of TAKES_RUN_FLAGS also gets the flags its parser does not know, as `run(args, flags)`: those of a training run; a preset
may come first.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from petatron.base.check_output_file import writable_problems
from petatron.base.errors import DataError, raise_problems
from petatron.base.log import configure_logging
from petatron.base.version import __version__
from petatron.bench import BenchResult
from petatron.bench.arguments import TAKES_RUN_FLAGS, add_arguments
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.cli.train import with_preset

BENCHES: Mapping[str, str] = {
    "data": "preprocessing against a bare tokenizer loop, and index building",
    "checkpoint": "saving and loading against torch.save and torch.load",
    "optimizer": "one optimizer step against torch's fused AdamW, clipping and cast",
    "train": "the training step: speed, MFU and memory, alone or against a peer",
    "memory": "the peak that plan memory predicts against the measured one",
    "suite": "the training step of many models, each beside a peer, as one table",
    "kernels": "each operation: the chosen implementation against others, and the device",
    "generate": "continuing text, against transformers",
    "stream": "many requests of all lengths at once, against transformers",
    "serve": "tokens over HTTP against the engine alone, and the time to the first token",
    "posttrain": "SFT, LoRA or GRPO as a whole: speed, memory and the parts of a step, against TRL",
    "scale": "what a start and a save cost on one of thousands of simulated ranks",
}
"""What each module of `petatron/bench/` measures."""


def main(argv: Sequence[str]) -> int:
    """Run one bench, print its table and write its JSON."""
    parser = CommandParser(prog="petatron bench", description="Measure speed side by side.")
    names = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, summary in BENCHES.items():
        parser_of_bench = names.add_parser(name, help=summary, description=summary)
        parser_of_bench.add_argument("--json", metavar="FILE", help="write all numbers here")
        add_arguments(name, parser_of_bench)
    takes_flags = not TAKES_RUN_FLAGS.isdisjoint(argv[:1])
    args, flags = parser.parse_known_args(argv) if takes_flags else (parser.parse_args(argv), [])
    module, flags = importlib.import_module(f"petatron.bench.{args.bench}"), with_preset(flags)
    configure_logging()
    wrong = writable_problems("--json", Path(args.json)) if args.json else []
    wrong += module.argument_problems(args) if hasattr(module, "argument_problems") else []
    raise_problems(wrong)
    result: BenchResult = module.run(args, flags) if takes_flags else module.run(args)
    width = max(len(label) for label, _ in result.rows)
    for label, value in result.rows:
        print(f"{label:<{width}}  {value}")
    if args.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        content = {"bench": args.bench, "petatron": __version__, "machine": machine, **result.values}
        try:
            Path(args.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            why = error.strerror or error
            raise DataError(f"Cannot write {args.json}: {why}. Choose a writable file.") from error
    return 0
