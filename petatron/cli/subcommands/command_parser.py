"""The parser of a subcommand's arguments: argparse's, which stops at the first wrong one, made to tell all of them at once."""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from petatron.config.schema.fields import closest_matches

_WRONG = object()
"""Stands for a value that could not be read, so that parsing goes on to the other problems."""
_CUTOFF = 0.75
"""How alike two flags have to be for one to be suggested for the other."""
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}


class CommandParser(argparse.ArgumentParser):
    """Tells wrong values, unknown flags and missing ones together, below the usage of the command, and exits with 2.

    Flags have to be written in full. root: the parser that this one is a subparser of.
    """

    def __init__(self, *args: Any, root: CommandParser | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._root = root or self
        self._command: CommandParser = self
        self._problems: list[str] = []

    def add_subparsers(self, **kwargs: Any) -> Any:
        subparser: Any = partial(type(self), root=self._root)
        return super().add_subparsers(parser_class=subparser, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Returns the values; words that the command does not know are a problem too."""
        options, unknown = super().parse_known_args(args, namespace)
        self.refuse(unknown)
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Returns the values, and the words that the command does not know."""
        self._root._command = self  # the last one that begins is the command that was chosen
        options, unknown = super().parse_known_args(args, namespace)
        if self._root is self:
            self.refuse([])
        return options, unknown

    def refuse(self, unknown: Sequence[str]) -> None:
        """Ends the program if there were problems, or words that are not known."""
        if unknown:
            meant = [flag for word in unknown if (flag := self._command.closest_flag(word)) is not None]
            suggestion = f". Did you mean {' and '.join(meant)}?" if meant else ""
            self._problems.append(f"unrecognized arguments: {' '.join(unknown)}{suggestion}")
        if self._problems:
            self._command.error(self._problems.pop())

    def error(self, message: str) -> NoReturn:
        """Ends the program with this problem and those before it."""
        problems = [*self._root._problems, message]
        super().error(
            message if len(problems) == 1 else "\n  ".join((f"{len(problems)} problems in these arguments:", *problems))
        )

    def closest_flag(self, word: str, *, others: Sequence[str] = ()) -> str | None:
        """Returns the flag that an unknown word may have been meant for; None if one of another command's is closer."""
        flags = [flag for action in self._actions if action.dest != "help" for flag in action.option_strings]
        if not word.startswith("--"):
            return None
        close = closest_matches(word.partition("=")[0], [*flags, *others], count=1, cutoff=_CUTOFF)
        return close[0] if close and close[0] in flags else None

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)  # pyright: ignore[reportAttributeAccessIssue]
        except argparse.ArgumentError as error:
            kind = _KINDS.get(action.type)
            name = "/".join(action.option_strings) or action.metavar or action.dest
            self._root._problems.append(f"{name} {arg_string!r} is not {kind}" if kind else str(error))
            return _WRONG

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value is _WRONG:
            return
        try:
            super()._check_value(action, value)  # pyright: ignore[reportAttributeAccessIssue]
        except argparse.ArgumentError as error:
            if action.nargs == argparse.PARSER:  # without a command there is nothing to go on with
                raise
            self._root._problems.append(str(error))


CHECKPOINT = "the folder of a run, of one of its steps, of a Hugging Face model, or of what Megatron-LM saved"
WEIGHTS_HELP = "kind of state to take as the weights, as checkpoint inspect lists it: ema (the model's)"


def checkpoint_parser(
    subcommand: str, usage: str, description: str, *, epilog: str, keep_lines: bool = False
) -> CommandParser:
    """Returns the parser of `petatron SUBCOMMAND CHECKPOINT ...`; words that it does not know are left to `petatron train`.

    usage: what follows CHECKPOINT. description: its `{checkpoint}` becomes what a CHECKPOINT is. keep_lines: of the epilog.
    """
    root = CommandParser(
        prog=f"petatron {subcommand}",
        usage=f"petatron {subcommand} CHECKPOINT {usage}",
        description=description.format(checkpoint=CHECKPOINT),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter if keep_lines else argparse.HelpFormatter,
    )
    root.add_argument("--weights", metavar="KIND", help=WEIGHTS_HELP)
    return root
