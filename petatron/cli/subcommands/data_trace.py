"""`petatron data trace`: names the documents that an iteration of a run trains on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import count_with_noun
from petatron.base.terminal_escape import printable
from petatron.cli.subcommands.open_run_data import add_run_arguments, open_run_data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, accepted="a checkpoint, a run folder, or its config.yaml")
    add = parser.add_argument
    add("--iteration", type=int, required=True, metavar="N", help="the iteration, counted from 1")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    if args.iteration < 1:
        raise_problems([Problem("--iteration", str(args.iteration), "is no iteration", "They are counted from 1.")])
    config, tokenizer, checkpoints = open_run_data(args.run, flags, world_size=args.world_size)
    from petatron.train.samples_of_iteration import trace_step

    step = trace_step(config, tokenizer, iteration=args.iteration, checkpoints=checkpoints)
    if args.json:
        print(json.dumps(step.as_json()))
        return 0
    last = step.consumed_samples + len(step.samples) - 1
    print(
        f"iteration {step.iteration:,}: {count_with_noun(len(step.samples), 'sample')}, {step.consumed_samples:,} to {last:,}"
    )
    if step.data_changed:
        print(
            "WARNING: the data or its order is not what the checkpoint was trained on (data.md: Which samples a run sees)"
        )
    for place, sample in enumerate(step.samples):
        change = f" ({sample.change})" if sample.change else ""
        print(
            printable(
                f"sample {step.consumed_samples + place:,}: {sample.dataset}, its sample {sample.index:,}{change}"
            )
        )
        for document in sample.documents:
            print(printable(f"  {document}"))
    return 0
