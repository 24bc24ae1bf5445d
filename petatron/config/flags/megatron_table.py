"""The table of Megatron's flags: what becomes of each. `megatron_table.txt` has it, and is read for a flag that is not ours.

Four answers: a flag *works* (it is a field or another name of one), is *always so* (accepted with a notice: a detail that does not exist
here), is *not here* (refused by name, with what to use instead), or is *gone* (what it became). A line of the file that starts with `>`
has the answer and its texts, divided by bars, and the lines after it the flags. `--flag=` takes a value, and `--flag=...` several.
`--flag=a|b` names values that ask for nothing, which are accepted where the flag is refused otherwise; they may be patterns of the shell.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

FlagAnswerKind = Literal["works", "always so", "not here", "gone"]
_FILE = Path(__file__).with_name("megatron_table.txt")
_OTHER_COMMAND = "other command"


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """The answer to a flag.

    text: why it is always so, the feature that is not here, or what became of it. remedy: what to use instead. command: the command that
    has it. neutral_values: values that ask for nothing.
    """

    kind: FlagAnswerKind
    text: str = ""
    remedy: str = ""
    command: str = ""
    takes_value: bool = False
    takes_several: bool = False
    neutral_values: tuple[str, ...] = ()

    def asks_for_nothing(self, value: str) -> bool:
        """Whether this value of a refused flag is what happens anyway."""
        return any(fnmatchcase(value, pattern) for pattern in self.neutral_values)


@functools.cache
def megatron_flags() -> Mapping[str, MegatronFlag]:
    """Returns the table, by flag."""
    return parse_table(_FILE.read_text(encoding="utf-8"))


def parse_table(text: str) -> dict[str, MegatronFlag]:
    """Reads the table's file.

    >>> table = parse_table("> always so | it is\\n--a --b=\\n> not here | muP\\n--c=0|none\\n> gone | --d\\n--e\\n")
    >>> table["--b"].takes_value, table["--c"].asks_for_nothing("0"), table["--e"].text
    (True, True, '--d')
    """
    table: dict[str, MegatronFlag] = {}
    answer = MegatronFlag("works")
    for line in text.splitlines():
        if line.startswith(">"):
            answer = _parse_answer(line)
        elif not line.startswith("#"):
            for entry in line.split():
                flag, equals, values = entry.partition("=")
                assert flag not in table, f"{flag} is in the table twice"
                several = values == "..."
                neutral = () if several else tuple(value for value in values.split("|") if value)
                table[flag] = replace(answer, takes_value=bool(equals), takes_several=several, neutral_values=neutral)
    return table


def _parse_answer(line: str) -> MegatronFlag:
    name, text, remedy = [*(part.strip() for part in line.removeprefix(">").split(" | ")), "", ""][:3]
    kinds: dict[str, FlagAnswerKind] = {kind: kind for kind in get_args(FlagAnswerKind)}
    if text == _OTHER_COMMAND:
        return MegatronFlag(kinds[name], command=remedy)
    return MegatronFlag(kinds[name], text, remedy)
