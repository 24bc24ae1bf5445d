"""`petatron train`: starts local ranks if configured, and trains on each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from petatron.base.errors import Problem
from petatron.cli.subcommands.run_on_ranks import start_ranks
from petatron.config import CheckpointConfig, LoadedConfig
from petatron.config.flags.help_text import flag_help
from petatron.config.import_user_modules import IMPORT_FLAG
from petatron.config.settings_from_checkpoint import CheckpointSettings
from petatron.mesh.launch.environment import imports_from_env, read_environment
from petatron.mesh.launch.rank_exit import run_rank_main
from petatron.validate import resolve_config, without_problems
from petatron.validate.preflight import preflight

USAGE = """usage: petatron train [PRESET] [--config FILE] [flags]

Starts its own ranks with --nproc-per-node (or as many as --tp x --pp x --cp x --dp need), and runs unchanged under
torchrun and srun. Order: preset, then files, then flags; later wins. `petatron config presets` lists presets.
--from FOLDER starts from a model that exists: of Hugging Face (or its name on the hub), of a run, or of one step of a run.
--toy shrinks the model to a size that a laptop trains in seconds: petatron train deepseek-v3 --toy --mock-data ...
"""


def main(argv: list[str]) -> int:
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        print(flag_help())
        return 0
    argv = [*with_preset(argv), *(f"{IMPORT_FLAG}={name}" for name in imports_from_env())]  # stored in the run
    environment = read_environment()
    if environment.launcher != "single":
        return run_rank_main(lambda: train_rank(argv))
    launch = load_checked(argv).config.launch
    if (launch.nproc_per_node or 1) * launch.nnodes == 1:
        return train_rank(argv)
    return start_ranks("train", argv, launch)


def load_checked(argv: list[str], *, world_size: int | None = None) -> LoadedConfig:
    """Returns the config; what is wrong with it and what this machine lacks is told together, before anything is built.

    A rank (`world_size`) without other problems leaves the machine to `check_start`.
    """
    loaded, problems = resolve_config(argv, world_size=world_size, read_checkpoint=read_checkpoint)
    if problems or world_size is None:
        told = {problem.where for problem in problems}
        problems += [problem for problem in preflight(loaded.config) if problem.where not in told]
    return without_problems(loaded, problems)


def with_preset(argv: list[str]) -> list[str]:
    """A first word that is no flag names a preset, or a YAML file."""
    if not argv or argv[0].startswith("-"):
        return argv
    return ["--config" if argv[0].endswith((".yaml", ".yml")) else "--preset", *argv]


def read_checkpoint(config: CheckpointConfig, folder: str | None, *, settings_only: bool = False) -> CheckpointSettings:
    """Returns the settings of a checkpoint, for --use-checkpoint-args and --from; torch is imported only then."""
    from petatron.pretrained.read_checkpoint_args import read_checkpoint_args

    return read_checkpoint_args(config, folder, settings_only=settings_only)


read_settings_alone = partial(read_checkpoint, settings_only=True)
"""For commands that read no weights: a config.json is enough, and of a model on the hub it alone is downloaded."""


def load_planned(argv: Sequence[str], other_problems: Sequence[Problem] = ()) -> LoadedConfig:
    """Returns the config of a command that starts no run; `ConfigError` with everything that is wrong, also with its own flags."""
    flags = with_preset(list(argv))
    loaded, problems = resolve_config(flags, require_training=False, read_checkpoint=read_settings_alone)
    return without_problems(loaded, [*other_problems, *problems])


def train_rank(argv: list[str]) -> int:
    """Runs one rank from start to end."""
    from petatron.base.log import configure_logging
    from petatron.cli.main import SUBCOMMANDS
    from petatron.mesh.launch.process_group import stop_process_group
    from petatron.train.run_training import run_training

    environment = read_environment()
    configure_logging(rank=environment.rank)
    run_training(load_checked(argv, world_size=environment.world_size), subcommands=SUBCOMMANDS)
    stop_process_group()
    return 0
