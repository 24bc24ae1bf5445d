"""Checks the arguments that several benches share, and resolves `--device`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from petatron.base.errors import ConfigError, Problem, raise_problems
from petatron.config.schema.fields import closest_matches

if TYPE_CHECKING:
    import torch


def select_names(texts: Sequence[str], known: Sequence[str]) -> list[str]:
    """Returns the names in the texts of `--only`, in the order of those that are known; without any text, all.

    >>> select_names(["c,a", "a"], ["a", "b", "c"]), select_names([], ["a", "b"])
    (['a', 'c'], ['a', 'b'])
    """
    if not texts:
        return list(known)
    names = [name for text in texts for name in text.replace(",", " ").split()]
    problems: list[Problem] = []
    for name in names or [""]:
        if name not in known:
            close = closest_matches(name, known, count=1, cutoff=0.6)
            fix = f"Did you mean {close[0]}?" if close else f"Use some of {', '.join(known)}."
            problems.append(Problem("--only", f"'{name}'", "is nothing that this bench measures", fix))
    raise_problems(problems)
    return [name for name in known if name in names]


def file_problems(flag: str, path: str, fix: str) -> list[Problem]:
    """Returns the problem of a flag that names a file to read where there is none."""
    if Path(path).is_file():
        return []
    return [Problem(flag, path, "is a folder" if Path(path).is_dir() else "is not there", fix)]


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


def positive_problems(given: Mapping[str, float], *, zero_allowed: bool = False) -> list[Problem]:
    """Returns problems of sizes and times that are not positive, or not finite: nan and inf are floats too.

    >>> print(*positive_problems({"--seconds": float("nan"), "--workers": 2}))
    --seconds nan must be positive and finite. Use more than 0, or leave it out.
    """
    rule, fix = "must be positive and finite", "Use more than 0, or leave it out."
    if zero_allowed:
        rule, fix = "must be finite and not negative", "Use 0 or more."
    right = [flag for flag, value in given.items() if 0 < value < math.inf or (zero_allowed and value == 0)]
    return [Problem(flag, str(value), rule, fix) for flag, value in given.items() if flag not in right]


def resolve_device(kind: Literal["auto", "cpu", "cuda"], *, problems: Sequence[Problem] = ()) -> torch.device:
    """Returns the device that --device names. Problems of other arguments are raised here, together with one of this."""
    import torch

    from petatron.base.device import detect_device

    try:
        on_cuda = detect_device(kind).kind == "cuda"
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    raise_problems(problems)
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
