"""Errors for users: each tells what was found, which rule it breaks and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from petatron.base.terminal_escape import printable


class PetatronError(Exception):
    """Base of every error a user can cause and fix; the command line prints it without a traceback.

    >>> issubclass(ConfigError, PetatronError) and issubclass(DataError, PetatronError)
    True
    """


class DataError(PetatronError):
    """A data file, index or tokenizer is missing, damaged or does not fit the run.

    >>> raise DataError("corpus.idx does not exist. Give the prefix of both files.")
    Traceback (most recent call last):
    petatron.base.errors.DataError: corpus.idx does not exist. Give the prefix of both files.
    """


class CheckpointError(PetatronError):
    """A checkpoint cannot be written, or cannot be read into this run."""


class LaunchError(PetatronError):
    """Ranks could not be started, or do not form the requested mesh."""


class PeerFailure(LaunchError):
    """Another rank has failed; this one is not to blame."""

    echo = True


class OtherRunError(LaunchError):
    """Where this rank would join, another run is; that one is not told of this rank's failure."""

    echo = True


class RunFolderError(PetatronError):
    """The folder of a run cannot be read, or what was drawn from it cannot be written."""


class RequestError(PetatronError):
    """One request to an engine failed by a fault that is not its sender's; the engine serves on."""


class TrainError(PetatronError):
    """Training cannot continue with sound numbers."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration.

    `where` is the flag or key as the user spells it, `value` what it has, `rule` what it breaks, `fix` what to do.
    """

    where: str
    value: str
    rule: str
    fix: str

    def __str__(self) -> str:
        head = printable(f"{self.where} {self.value}".strip())
        return f"{head} {self.rule}. {self.fix}".strip()


class ConfigError(PetatronError):
    """All problems of a configuration, reported together.

    >>> print(ConfigError([Problem("--tp", "3", "does not divide --num-attention-heads 8", "Use 2.")]))
    1 problem in this configuration:
      --tp 3 does not divide --num-attention-heads 8. Use 2.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = [f"{len(self.problems)} {noun} in this configuration:"]
        lines += [f"  {problem}" for problem in self.problems]
        super().__init__("\n".join(lines))


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raises `ConfigError` with all problems, if there are any."""
    if problems := tuple(problems):
        raise ConfigError(problems)
