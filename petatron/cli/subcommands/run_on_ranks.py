"""Runs a subcommand on every rank of its layout: those of torchrun or srun, or some that it starts itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.rank_exit import run_rank_main

if TYPE_CHECKING:
    from petatron.config.schema.training import LaunchConfig
    from petatron.serve.open_engine import ModelSettings

    Models = Sequence[ModelSettings]


def run_on_ranks(
    subcommand: str,
    argv: Sequence[str],
    read_models: Callable[[], Models],
    run_rank: Callable[[Models], int],
    *,
    interactive: bool = False,
) -> int:
    """Runs a subcommand that opens models, in the layout of the first one."""
    from petatron.serve.open_engine import warn_of_training_flags

    if read_environment().launcher != "single":
        return run_rank_main(lambda: _run_rank(read_models(), run_rank))
    models = read_models()
    warn_of_training_flags(models[0])
    if models[0].num_ranks == 1:
        return _run_rank(models, run_rank)
    return start_ranks(subcommand, argv, models[0].loaded.config.launch, interactive=interactive)


def _run_rank(models: Models, run_rank: Callable[[Models], int]) -> int:
    from petatron.base.log import configure_logging
    from petatron.mesh.launch.process_group import stop_process_group

    configure_logging(rank=read_environment().rank)
    code = run_rank(models)
    stop_process_group()
    return code


def start_ranks(subcommand: str, argv: Sequence[str], launch: LaunchConfig, *, interactive: bool = False) -> int:
    """Starts this machine's ranks of a run, each with the same command line; returns their exit code."""
    from petatron.mesh.launch.local_launcher import run_ranks

    return run_ranks(
        [sys.executable, "-m", "petatron", subcommand, *argv],
        nproc=launch.nproc_per_node or 1,
        nnodes=launch.nnodes,
        node_rank=launch.node_rank,
        master_addr=launch.master_addr,
        master_port=launch.master_port,
        interactive=interactive,
    )
