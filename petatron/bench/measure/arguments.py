"""Arguments shared by several benches, their checks, and the device they name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from petatron.base.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where (default: auto)")


def minimum_problems(given: Mapping[str, tuple[int, int]]) -> list[Problem]:
    """Returns problems of flags whose value is below their minimum; both by flag.

    >>> print(*minimum_problems({"--repeat": (0, 1), "--steps": (4, 1)}))
    --repeat 0 is below 1. Use 1 or more.
    """
    return [
        Problem(flag, str(value), f"is below {least}", f"Use {least} or more.")
        for flag, (value, least) in given.items()
        if value < least
    ]


def positive_problems(given: Mapping[str, float]) -> list[Problem]:
    """Returns problems of sizes that are not positive; what is no number is not, either."""
    wrong = ((flag, value) for flag, value in given.items() if not value > 0)
    return [Problem(flag, str(value), "must be positive", "Use more than 0, or leave it out.") for flag, value in wrong]


def resolve_device(kind: Literal["auto", "cpu", "cuda"], *, problems: Sequence[Problem] = ()) -> torch.device:
    """Returns the device that --device names. Problems of other arguments are raised here, together with one of this."""
    import torch

    from petatron.base.device import detect_device

    found = list(problems)
    try:
        on_cuda = detect_device(kind).kind == "cuda"
    except ConfigError as error:
        raise ConfigError([*found, *error.problems]) from error
    if found:
        raise ConfigError(found)
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
