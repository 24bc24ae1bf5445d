"""`petatron data teacher`: stores a teacher's likeliest tokens for the rows of a run's data, which `--objective distill` reads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.format_text import count_with_noun
from petatron.cli.subcommands.run_on_ranks import start_ranks
from petatron.cli.train import read_checkpoint, with_preset, with_settings_from_data
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.rank_exit import run_rank_main
from petatron.validate import resolve_config, without_problems

if TYPE_CHECKING:
    from petatron.config import LoadedConfig

_PRECISIONS = {"fp16": "float16", "fp32": "float32", "fp64": "float64"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "the teacher: a model folder, a run, or a name on the hub; flags of `petatron train` follow (--data-path, --seq-length, ...)"
    parser.add_argument("teacher", metavar="TEACHER", help=text)
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="where it is stored; what is there is kept"
    )
    parser.add_argument(
        "--top-k", type=int, default=64, metavar="K", help="tokens that are stored of a position (default: 64)"
    )
    text = "precision of stored log-probabilities (default: fp16; the first four significant digits)"
    parser.add_argument("--log-prob-precision", choices=tuple(_PRECISIONS), default="fp16", help=text)


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    if args.top_k < 1:
        raise ConfigError([Problem("--top-k", str(args.top_k), "is below 1", "Use 64.")])
    argv = with_preset([args.teacher, *flags])
    environment = read_environment()
    if environment.launcher != "single":
        return run_rank_main(lambda: _run_rank(args, argv, environment.world_size))
    launch = _load(with_settings_from_data(argv)).config.launch
    if (launch.nproc_per_node or 1) * launch.nnodes == 1:
        return _run_rank(args, argv, 1)
    options = ["--out", str(args.out), "--top-k", str(args.top_k), "--log-prob-precision", args.log_prob_precision]
    return start_ranks("data", ["teacher", args.teacher, *options, *flags], launch)


def _load(argv: Sequence[str], world_size: int | None = None) -> LoadedConfig:
    loaded, problems = resolve_config(
        argv, require_training=False, world_size=world_size, read_checkpoint=read_checkpoint
    )
    config = loaded.config
    if config.train.train_iters is None and config.train.train_samples is None:
        fix = "Rows depend on how many the run needs: give the flag of the run."
        problems += [Problem("--train-iters", "", "is not set", fix)]
    if config.parallel.context_parallel_size > 1:
        size = str(config.parallel.context_parallel_size)
        problems += [Problem("--context-parallel-size", size, "shares rows, and they are stored whole", "Use --tp.")]
    return without_problems(loaded, problems)


def _run_rank(args: argparse.Namespace, argv: Sequence[str], world_size: int) -> int:
    import torch

    from petatron.base.log import configure_logging
    from petatron.data.stored_outputs import StoredOutputs
    from petatron.mesh.launch.process_group import stop_process_group
    from petatron.models.distillation import TOP_IDS, TOP_LOG_PROBS, TopLogProbs
    from petatron.models.objective import ModelRole, StoredRole
    from petatron.pretrained.launch_and_build_model import launch
    from petatron.pretrained.open_tokenizer import open_tokenizer
    from petatron.train.build_run import RunLength, build_loaders, build_model
    from petatron.train.stored_role_outputs import check_description, dataset_sizes, describe_rows, fill_store

    configure_logging(rank=read_environment().rank)
    loaded, tokenizer = open_tokenizer(_load(with_settings_from_data(list(argv), world_size=world_size), world_size))
    config = loaded.config
    mesh = launch(config)
    model = build_model(config, mesh, gradients=False)
    if model.start_folder is None:
        raise DataError(f"{args.teacher} has no weights. Give the folder of a model that is trained.")
    samples = RunLength.from_config(config).samples
    loaders = build_loaders(config, mesh, tokenizer, train_samples=samples)
    made_from = {"format": 1, "teacher": args.teacher, "top_k": args.top_k, "precision": args.log_prob_precision}
    store = StoredOutputs(args.out, {**made_from, **describe_rows(config, model)})
    if len(store):
        there = StoredOutputs.open(args.out)
        check_description(there, config, model)
        if different := [name for name, value in made_from.items() if there.description.get(name) != value]:
            raise DataError(
                f"{args.out} was stored with another {', '.join(different)}. Give another folder, or the same values."
            )
    compute = TopLogProbs(args.top_k, getattr(torch, _PRECISIONS[args.log_prob_precision]))
    stored = StoredRole("row", (TOP_IDS, TOP_LOG_PROBS), str(args.out), ModelRole(""), compute)
    fill_store(store, stored, model, dataset_sizes(config, loaders, samples), lambda: model, role="teacher")
    if mesh.rank == 0:
        size_bytes = sum(file.stat().st_size for file in args.out.iterdir())
        rows = count_with_noun(len(store), "row")
        print(
            f"{args.out}: {rows} of {config.model.seq_length:,} tokens, {args.top_k} of each, {size_bytes / 1e6:,.1f} MB"
        )
        print(f"--objective distill --objective-settings stored={args.out}")
    stop_process_group()
    return 0
