"""`petatron train`: starts local ranks if configured, and trains on each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from petatron.base.errors import Problem
from petatron.base.safe_files import write_atomic
from petatron.cli.subcommands.run_on_ranks import start_ranks
from petatron.config import CheckpointConfig, LoadedConfig
from petatron.config.flags.help_text import flag_help
from petatron.config.flags.parse_command_line import FROM_FLAG
from petatron.config.flags.sft_flag import SFT_FLAG
from petatron.config.import_user_modules import IMPORT_FLAG
from petatron.config.presets import preset_names
from petatron.config.settings_from_checkpoint import CheckpointSettings
from petatron.mesh.launch.environment import imports_from_env, read_environment
from petatron.mesh.launch.rank_exit import run_rank_main
from petatron.validate import resolve_config, without_problems
from petatron.validate.preflight import preflight

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
USAGE = """usage: petatron train [PRESET | MODEL_FOLDER] [--config FILE] [flags]

Starts its own ranks with --nproc-per-node (or as many as --tp x --pp x --cp x --dp need), and runs unchanged under
torchrun and srun. Order: preset, then files, then flags; later wins. `petatron config presets` lists presets.
--from FOLDER starts from a model that exists: of Hugging Face (or its name on the hub), of a run, or of one step of a run.
--sft chats.jsonl fine-tunes on conversations: petatron train MODEL_FOLDER --sft chats.jsonl (docs/posttraining.md).
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
    argv = with_settings_from_data(argv, starts_run=True)
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
    """A first word that is no flag names a preset, a YAML file, or the folder of a model (or its name on the hub)."""
    if not argv or argv[0].startswith("-"):
        return argv
    if argv[0] not in preset_names() and (Path(argv[0]).is_dir() or _HUB_NAME.fullmatch(argv[0])):
        return [FROM_FLAG, *argv]
    return ["--config" if argv[0].endswith((".yaml", ".yml")) else "--preset", *argv]


def with_settings_from_data(argv: list[str], *, starts_run: bool = False, world_size: int | None = None) -> list[str]:
    """Returns the command line with the settings that follow from the data: the length of a run of epochs, and what `--sft` leaves open.

    starts_run: also with a folder of its own for a run that has none.
    """
    loaded, problems = resolve_config(
        argv, require_training=False, world_size=world_size, read_checkpoint=read_checkpoint
    )
    if problems or loaded.config.train.train_epochs is None:
        return argv  # what is wrong is told when the run is checked
    from petatron.train.settings_from_data import (
        PROMPTS_FILE,
        free_save_folder,
        needs_data_settings,
        settings_from_data,
    )

    if not needs_data_settings(loaded.config):
        return argv

    derived = settings_from_data(without_problems(loaded, problems))
    settings, save = derived.settings, loaded.config.checkpoint.save
    texts: list[str] = []
    if starts_run and save is None and any(word.partition("=")[0] == SFT_FLAG for word in argv):
        save = str(free_save_folder(loaded.config.checkpoint.pretrained_checkpoint or "model"))
        texts.append(f"--save {save}: a folder that is free")
    flags = [] if save is None else [f"--save={save}"]
    if starts_run and save is not None and derived.prompts:
        path = Path(save) / PROMPTS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(f"{line}\n" for line in derived.prompts))
        flags.append(f"--sample-prompts={path}")
        texts.append(f"--sample-prompts {path}: of conversations that are held out")
    else:
        settings = [setting for setting in settings if setting.path != "log.sample_interval"]
    texts = [*(str(setting) for setting in settings), *texts]
    flags += [setting.word for setting in settings]
    if texts:
        print("derived from the data:", *texts, sep="\n  ")
    return [*argv, *flags]


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
    if environment.launcher != "single":  # else the launcher has done it
        argv = with_settings_from_data(argv, world_size=environment.world_size)
    run_training(load_checked(argv, world_size=environment.world_size), subcommands=SUBCOMMANDS)
    stop_process_group()
    return 0
