"""`petatron eval`: measures checkpoints on tasks, in any layout, and compares them side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import ConfigError, Problem
from petatron.cli.subcommands.checkpoint_parser import checkpoint_parser
from petatron.cli.subcommands.megatron_tasks import MEGATRON_WORD, from_megatron_flags
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.rank_exit import run_rank_main

if TYPE_CHECKING:
    from petatron.evaluate.task_list import TaskSettings
    from petatron.serve.open_engine import ModelSettings


def parser() -> argparse.ArgumentParser:
    root = checkpoint_parser(
        "eval",
        "[CHECKPOINT ...] (--task NAME --data FILE | --tasks FILE.yaml) [flags]",
        "Measures models on tasks: {checkpoint}. Metrics have 95 % bootstrap intervals, and several checkpoints are compared side "
        "by side.",
        epilog="Tasks: wikitext103, lambada, hellaswag, arc_easy, arc_challenge, piqa, winogrande, mmlu, multiple_choice (any JSON "
        "lines of context, choices, answer) and text (any text, or JSON lines of text). All other words are flags of `petatron "
        "train`, for example a layout: --tp 2 --bf16.",
    )
    add = root.add_argument
    add("--task", metavar="NAME", help="one task, on the file --data")
    add("--data", metavar="FILE", type=Path, help="the task's file: JSON lines, or text")
    add(
        "--tasks",
        metavar="FILE",
        type=Path,
        help="YAML list of tasks: `- task: NAME` with data, name, limit, stride, strict, bos, num_fewshot, fewshot_data, fewshot_seed",
    )
    add("--limit", metavar="N", type=int, help="examples, or documents, at most")
    add(
        "--stride",
        "--overlapping-eval",
        metavar="N",
        type=int,
        help="tokens that each window counts, the others being context (all of them)",
    )
    add("--strict-lambada", action="store_true", help="predict all of the last word, as it stands between spaces")
    add(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="begin each text with the BOS token (what the tokenizer does); not for wikitext103",
    )
    add("--num-fewshot", metavar="N", type=int, default=0, help="multiple choice: show N solved examples first (0)")
    add(
        "--fewshot-data",
        metavar="FILE",
        type=Path,
        help="the file of these examples (--data, never the example itself)",
    )
    add("--fewshot-seed", metavar="N", type=int, help="draw these examples with this seed (the first N of the file)")
    add("--batch-tokens", metavar="N", type=int, help="tokens of a micro-batch on one rank (8192)")
    add("--out", metavar="FILE", type=Path, help="write results with counts and intervals as JSON")
    add("--megatron-lines", action="store_true", help=argparse.SUPPRESS)
    return root


def main(argv: list[str]) -> int:
    if argv[:1] == [MEGATRON_WORD]:
        argv = from_megatron_flags(argv[1:])
    first = next((index for index, word in enumerate(argv) if word.startswith("-")), len(argv))
    checkpoints, words = argv[:first], argv[first:]
    options, flags = parser().parse_known_args(words)
    tasks = _check_options(checkpoints, options)
    from petatron.serve.open_engine import model_settings, warn_of_training_flags

    models = [model_settings(checkpoint, flags, weights=options.weights) for checkpoint in checkpoints]
    if read_environment().launcher != "single":
        return run_rank_main(lambda: _evaluate_rank(models, flags, tasks, options))
    warn_of_training_flags(models[0])
    if models[0].num_ranks == 1:
        return _evaluate_rank(models, flags, tasks, options)
    from petatron.mesh.launch.local_launcher import run_ranks

    launch = models[0].loaded.config.launch
    return run_ranks(
        [sys.executable, "-m", "petatron", "eval", *argv],
        nproc=models[0].num_local_ranks,
        nnodes=launch.nnodes,
        node_rank=launch.node_rank,
        master_addr=launch.master_addr,
        master_port=launch.master_port,
    )


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
        single = ("limit", "stride", "strict_lambada", "bos", "num_fewshot", "fewshot_data", "fewshot_seed")
        alone = [name for name in single if getattr(options, name) != parser().get_default(name)]
        flags = " ".join(f"--{name.replace('_', '-')}" for name in alone)
        problems += [Problem(flags, "", "is for --task", f"Write it in {options.tasks}.")] if alone else []
    elif options.tasks is None and options.task is not None and options.data is not None:
        settings = TaskSettings(
            task=options.task.lower(),
            data=options.data,
            limit=options.limit,
            stride=options.stride,
            strict=options.strict_lambada,
            bos=options.bos,
            num_fewshot=options.num_fewshot,
            fewshot_data=options.fewshot_data,
            fewshot_seed=options.fewshot_seed,
        )
        problems += setting_problems(settings, where="--task")
        tasks.append(settings)
    else:
        rule = "and --data are one way to say what to measure, --tasks is the other"
        problems.append(Problem("--task", options.task or "", rule, "Give --task and --data, or --tasks alone."))
    if problems:
        raise ConfigError(problems)
    return tasks if options.tasks is None else read_task_list(options.tasks)


def _evaluate_rank(
    models: list[ModelSettings], flags: list[str], tasks: list[TaskSettings], options: argparse.Namespace
) -> int:
    from petatron.base.log import configure_logging
    from petatron.cli.subcommands.eval_checkpoints import evaluate_checkpoints, report_results
    from petatron.mesh.launch.process_group import stop_process_group

    rank = read_environment().rank
    configure_logging(rank=rank)
    found = evaluate_checkpoints(models, flags, tasks, batch_tokens=options.batch_tokens, shown=rank == 0)
    if rank == 0:
        report_results(found, tasks, out=options.out, megatron_lines=options.megatron_lines)
    stop_process_group()
    return 0
