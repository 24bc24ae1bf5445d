"""Translates the flags of Megatron-LM's `tasks/main.py` to those of `petatron eval`.

    python tasks/main.py --task WIKITEXT103 --valid-data FILE --load DIR [--overlapping-eval 32] [flags of the model]

Flags that describe the model are checked against the checkpoint. Those that say how Megatron would load or train have no
effect on a measurement and are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from petatron.base.errors import Problem, raise_problems
from petatron.cli.subcommands.command_parser import CommandParser

MEGATRON_WORD = "--megatron-tasks"
"""The first word of a command line in Megatron's flags."""
_TASKS = ("WIKITEXT103", "LAMBADA")
# Flags of loading, training and finetuning with their number of values; none changes what is measured.
_IGNORED_SWITCHES = (
    *("--use-checkpoint-args", "--no-use-checkpoint-args", "--no-load-optim", "--no-load-rng", "--finetune"),
    *("--exit-on-missing-checkpoint", "--keep-last"),
)
_IGNORED_VALUES = ("--epochs", "--train-data", "--log-interval", "--pretrained-checkpoint", "--eval-micro-batch-size")


def parser() -> argparse.ArgumentParser:
    root = CommandParser(
        prog="tasks/main.py",
        description="Measures a checkpoint on WIKITEXT103 or LAMBADA, with Megatron-LM's flags.",
        epilog="All other words are flags of `petatron train`. `petatron eval` has more tasks, and compares checkpoints.",
    )
    add = root.add_argument
    add("--task", help=f"{' or '.join(_TASKS)}, or any other task of `petatron eval`")
    add("--valid-data", nargs="+", metavar="FILE", help="the task's file")
    add("--load", metavar="DIR", help="folder of a run or of a Hugging Face model")
    add("--ckpt-step", type=int, metavar="N", help="this step of --load instead of the newest")
    add("--overlapping-eval", metavar="N", help="tokens that each window counts, the others being context")
    add("--strict-lambada", action="store_true", help="predict all of the last word")
    add("--vocab-file", metavar="FILE", help=argparse.SUPPRESS)
    add("--merge-file", metavar="FILE", help=argparse.SUPPRESS)
    for name in _IGNORED_SWITCHES:
        add(name, action="store_true", help=argparse.SUPPRESS)
    for name in _IGNORED_VALUES:
        add(name, nargs="+", help=argparse.SUPPRESS)
    return root


def from_megatron_flags(argv: Sequence[str]) -> list[str]:
    """Returns the words of `petatron eval`; raises `ConfigError` with what is missing."""
    options, flags = parser().parse_known_args(argv)
    problems = [
        Problem(flag, "", "is not given", f"Add {flag} {what}.")
        for flag, value, what in (
            ("--task", options.task, " or ".join(_TASKS)),
            ("--valid-data", options.valid_data, "FILE"),
            ("--load", options.load, "DIR"),
        )
        if value is None
    ]
    if options.valid_data is not None and len(options.valid_data) > 1:
        rule = "are several files, and a task has one"
        problems.append(Problem("--valid-data", " ".join(options.valid_data), rule, "Give one of them at a time."))
    raise_problems(problems)
    folder, data = options.load, (options.valid_data or [""])[0]
    if options.ckpt_step is not None:
        folder = os.path.join(folder, f"step-{options.ckpt_step:08d}")
    arguments = [folder, "--task", options.task, "--data", data, "--megatron-lines"]
    arguments += ["--overlapping-eval", options.overlapping_eval] if options.overlapping_eval is not None else []
    arguments += ["--strict-lambada"] if options.strict_lambada else []
    return [*arguments, *_tokenizer_flags(options), *flags]


def _tokenizer_flags(options: argparse.Namespace) -> list[str]:
    if options.vocab_file is not None and options.merge_file is None:
        print(
            f"note: --vocab-file {options.vocab_file} has no effect without --merge-file: the checkpoint's own tokenizer is used",
            file=sys.stderr,
        )
        return []
    given = (("--vocab-file", options.vocab_file), ("--merge-file", options.merge_file))
    return [word for flag, value in given if value is not None for word in (flag, value)]
