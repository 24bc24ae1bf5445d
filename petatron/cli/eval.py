"""`petatron eval`: measures checkpoints on tasks, in any layout, and compares them side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import Problem, raise_problems
from petatron.cli.subcommands.command_parser import checkpoint_parser
from petatron.cli.subcommands.megatron_tasks_flags import MEGATRON_WORD, from_megatron_flags
from petatron.cli.subcommands.run_on_ranks import run_on_ranks
from petatron.mesh.launch.environment import read_environment

if TYPE_CHECKING:
    from petatron.evaluate.task_list import TaskSettings
    from petatron.serve.open_engine import ModelSettings

_TASK_OPTIONS = ("limit", "stride", "bos", "num_fewshot", "fewshot_data", "fewshot_seed")
"""Options that are settings of a task, by the same name."""


def parser() -> argparse.ArgumentParser:
    root = checkpoint_parser(
        "eval",
        "[CHECKPOINT ...] (--task NAME --data FILE | --tasks FILE.yaml) [flags]",
        "Measures models on tasks: {checkpoint}. Metrics have 95 % bootstrap intervals, and several checkpoints are compared side "
        "by side.",
        epilog="Tasks: wikitext103, lambada, hellaswag, arc_easy, arc_challenge, piqa, winogrande, mmlu, multiple_choice (any JSON "
        "lines of context, choices, answer), text (any text, or JSON lines of text), masked (the same, for encoders) and labels (JSON "
        "lines of texts with labels, for models with a head on whole texts). All other words are flags of `petatron train`, for example "
        "a layout: --tp 2 --bf16.",
    )
    add = root.add_argument
    add("--task", metavar="NAME", help="one task, on the file --data")
    add("--data", metavar="FILE", type=Path, help="the task's file: JSON lines, or text")
    settings = "data, name, limit, stride, strict, bos, num_fewshot, fewshot_data, fewshot_seed"
    add("--tasks", metavar="FILE", type=Path, help=f"YAML list of tasks: `- task: NAME` with {settings}")
    add("--limit", metavar="N", type=int, help="examples, or documents, at most")
    text = "tokens that each window counts, the others being context (all of them)"
    add("--stride", "--overlapping-eval", metavar="N", type=int, help=text)
    add("--strict-lambada", action="store_true", help="predict all of the last word, as it stands between spaces")
    text = "begin each text with the BOS token (what the tokenizer does); not for wikitext103"
    add("--bos", action=argparse.BooleanOptionalAction, help=text)
    add("--num-fewshot", metavar="N", type=int, default=0, help="multiple choice: show N solved examples first (0)")
    text = "the file of these examples (--data, never the example itself)"
    add("--fewshot-data", metavar="FILE", type=Path, help=text)
    add("--fewshot-seed", metavar="N", type=int, help="draw these examples with this seed (the first N of the file)")
    add("--batch-tokens", metavar="N", type=int, help="tokens of a micro-batch on one rank (8192)")
    add("--out", metavar="FILE", type=Path, help="write results with counts and intervals as JSON")
    add("--megatron-lines", action="store_true", help=argparse.SUPPRESS)
    return root


def main(argv: list[str]) -> int:
    if argv[:1] == [MEGATRON_WORD]:
        argv = from_megatron_flags(argv[1:])
    first = next((index for index, word in enumerate(argv) if word.startswith("-")), len(argv))
    checkpoints = argv[:first]
    options, flags = parser().parse_known_args(argv[first:])
    tasks = _check_options(checkpoints, options)
    from petatron.serve.open_engine import model_settings

    def read_models() -> list[ModelSettings]:
        return [model_settings(checkpoint, flags, weights=options.weights) for checkpoint in checkpoints]

    def run_rank(models: Sequence[ModelSettings]) -> int:
        from petatron.cli.subcommands.eval_checkpoints import evaluate_checkpoints, report_results

        is_first = read_environment().rank == 0
        results = evaluate_checkpoints(models, flags, tasks, batch_tokens=options.batch_tokens, shown=is_first)
        if is_first:
            report_results(results, tasks, out=options.out, megatron_lines=options.megatron_lines)
        return 0

    return run_on_ranks("eval", argv, read_models, run_rank)


def _check_options(checkpoints: list[str], options: argparse.Namespace) -> list[TaskSettings]:
    """Returns the tasks; raises `ConfigError` with everything that is wrong with the command line, before a model is opened."""
    from petatron.evaluate.task_list import TaskSettings, read_task_list, setting_problems

    problems: list[Problem] = []
    if not checkpoints:
        fix = "Give the folder of a run or of a model, before the flags."
        problems.append(Problem("CHECKPOINT", "", "is not given", fix))
    if options.batch_tokens is not None and options.batch_tokens < 1:
        problems.append(Problem("--batch-tokens", str(options.batch_tokens), "is below 1", "Leave it out for 8192."))
    if options.out is not None and (options.out.is_dir() or not options.out.parent.is_dir()):
        rule = "is a folder" if options.out.is_dir() else "is in a folder that does not exist"
        problems.append(Problem("--out", str(options.out), rule, "Give the path of a file in a folder that exists."))
    tasks: list[TaskSettings] = []
    if options.tasks is not None and options.task is None and options.data is None:
        single, defaults = (*_TASK_OPTIONS, "strict_lambada"), parser()
        alone = [name for name in single if getattr(options, name) != defaults.get_default(name)]
        flags = " ".join(f"--{name.replace('_', '-')}" for name in alone)
        problems += [Problem(flags, "", "is for --task", f"Write it in {options.tasks}.")] if alone else []
    elif options.tasks is None and options.task is not None and options.data is not None:
        named = {name: getattr(options, name) for name in _TASK_OPTIONS}
        settings = TaskSettings(task=options.task.lower(), data=options.data, strict=options.strict_lambada, **named)
        problems += setting_problems(settings, where="--task")
        tasks.append(settings)
    else:
        rule = "and --data are one way to say what to measure, --tasks is the other"
        problems.append(Problem("--task", options.task or "", rule, "Give --task and --data, or --tasks alone."))
    raise_problems(problems)
    return tasks if options.tasks is None else read_task_list(options.tasks)
