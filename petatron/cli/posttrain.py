"""`petatron posttrain`: reinforcement learning on answers that the model draws itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from petatron.base.errors import ConfigError, Problem
from petatron.cli.subcommands.run_on_ranks import start_ranks
from petatron.cli.train import load_checked, with_preset
from petatron.config.flags.help_text import flag_help
from petatron.config.import_user_modules import IMPORT_FLAG
from petatron.config.schema.fields import closest_matches
from petatron.config.schema.objective_and_dataset_names import DISTILL, POLICY_GRADIENT
from petatron.mesh.launch.environment import imports_from_env, read_environment
from petatron.mesh.launch.rank_exit import run_rank_main

_SETTINGS_FLAG = "--objective-settings"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What a paper's name stands for: settings of the objective, further flags, and a line for the help."""

    settings: Mapping[str, str]
    flags: tuple[str, ...]
    title: str
    objective: str = POLICY_GRADIENT


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(
        {"ratio": "token", "average": "sequence"},
        ("--advantage", "group"),
        "rewards against the mean of a prompt's answers, divided by their deviation (Shao et al., 2024)",
    ),
    "dr-grpo": Algorithm(
        {"ratio": "token", "average": "constant", "constant_tokens": "--max-answer-tokens"},
        ("--advantage", "centered"),
        "GRPO without its two biases, by length and by deviation (Liu et al., 2025)",
    ),
    "dapo": Algorithm(
        {"ratio": "token", "average": "token", "clip_high": "0.28"},
        ("--advantage", "group", "--redraw-equal-rewards", "3"),
        "all tokens count alike, ratios are clipped higher, prompts of equal rewards are drawn again (Yu et al., 2025)",
    ),
    "gspo": Algorithm(
        {"ratio": "sequence", "average": "sequence", "clip_low": "3e-4", "clip_high": "4e-4"},
        ("--advantage", "group"),
        "one ratio for a whole answer (Zheng et al., 2025)",
    ),
    "rloo": Algorithm(
        {"ratio": "product", "average": "sequence"},
        ("--advantage", "leave-one-out"),
        "rewards against the mean of a prompt's other answers (Ahmadian et al., 2024)",
    ),
    "reinforce++": Algorithm(
        {"ratio": "token", "average": "token"},
        ("--advantage", "batch"),
        "rewards against the mean of a prompt's answers, divided by the deviation of a step (Hu et al., 2025)",
    ),
    "ppo": Algorithm(
        {"ratio": "token", "average": "token"},
        ("--advantage", "gae", "--rollouts-per-prompt", "1"),
        "each token against what a critic expected, which is trained beside the model (Schulman et al., 2017)",
    ),
    "distill": Algorithm(
        {"mix": "1"},
        ("--rollouts-per-prompt", "2"),
        "the distribution of a teacher (--objective-settings teacher=FOLDER) on answers of one's own (Agarwal et al., 2024)",
        objective=DISTILL,
    ),
}

USAGE = """usage: petatron posttrain ALGORITHM [MODEL_FOLDER | PRESET] --rollout-prompts FILE --rewards NAME ... [flags]

Draws answers to prompts, rewards them, and trains on them, step after step. Flags are those of `petatron train`, and take the same files
and layouts. --global-batch-size counts answers, --micro-batch-size rows of --seq-length into which they are packed.

"""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help") or any(word in ("-h", "--help") for word in argv):
        width = max(map(len, ALGORITHMS))
        print(USAGE + "\n".join(f"  {name:<{width}}  {kind.title}" for name, kind in ALGORITHMS.items()) + "\n")
        print(flag_help())
        return 0
    argv = [*training_flags(argv), *(f"{IMPORT_FLAG}={name}" for name in imports_from_env())]
    if read_environment().launcher != "single":
        return run_rank_main(lambda: posttrain_rank(argv))
    launch = load_checked(argv).config.launch
    if (launch.nproc_per_node or 1) * launch.nnodes == 1:
        return posttrain_rank(argv)
    return start_ranks("posttrain", argv, launch)


def training_flags(argv: Sequence[str]) -> list[str]:
    """Returns the flags that an algorithm stands for, before those that were typed; flags alone are returned as they are.

    >>> training_flags(["rloo", "--lr", "1e-5", "--objective-settings", "clip_high=0.3"])[2:6]
    ['--objective-settings', 'ratio=product', 'average=sequence', 'clip_high=0.3']
    """
    if argv[0].startswith("-"):  # a rank that was started with the flags of all
        return list(argv)
    algorithm = ALGORITHMS.get(argv[0])
    if algorithm is None:
        close = closest_matches(argv[0], ALGORITHMS, count=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ConfigError([Problem("posttrain", argv[0], "is no algorithm", f"{hint}Known: {', '.join(ALGORITHMS)}.")])
    flags = with_preset(list(argv[1:]))
    settings, flags = _take_settings(flags)
    named = {name: _value(value, flags) for name, value in algorithm.settings.items()}
    merged = [f"{name}={value}" for name, value in (named | settings).items()]
    return ["--objective", algorithm.objective, _SETTINGS_FLAG, *merged, *algorithm.flags, *flags]


def posttrain_rank(argv: list[str]) -> int:
    """Runs one rank from start to end."""
    from petatron.base.log import configure_logging
    from petatron.cli.main import SUBCOMMANDS
    from petatron.mesh.launch.process_group import stop_process_group
    from petatron.posttrain.run_posttraining import run_posttraining

    environment = read_environment()
    configure_logging(rank=environment.rank)
    run_posttraining(load_checked(argv, world_size=environment.world_size), subcommands=SUBCOMMANDS)
    stop_process_group()
    return 0


def _take_settings(flags: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the settings of the objective that were typed, by name, and the other flags."""
    settings: dict[str, str] = {}
    others: list[str] = []
    inside = False
    for word in flags:
        inside = word == _SETTINGS_FLAG or (inside and not word.startswith("--"))
        if not inside:
            others.append(word)
        elif word != _SETTINGS_FLAG:
            name, _, value = word.partition("=")
            settings[name] = value
    return settings, others


def _value(value: str, flags: Sequence[str]) -> str:
    """Returns a setting's value; one that is a flag has that flag's, as typed or by default."""
    if not value.startswith("--"):
        return value
    from petatron.config.schema.rollout import RolloutConfig

    default = str(getattr(RolloutConfig(), value.lstrip("-").replace("-", "_")))
    return next((after for word, after in pairwise(flags) if word == value), default)
