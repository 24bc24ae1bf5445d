"""Parses the string of `--pipeline-model-parallel-layout` into stages.

    layout := item*        item := symbol ['*' N] | '(' layout ')' ['*' N]       symbol := 'E' | 't' | 'm' | 'L' | '|'

E is the embedding, t a transformer layer, m a depth of multi-token prediction, L the output head with the loss; `|` ends a stage.
Commas and blanks mean nothing, so long strings can be grouped visually. `Et|(ttt|)*2tL` is four stages with 1, 3, 3 and 1 layers.
Whether the stages fit the model is not checked here.
"""

from __future__ import annotations

EMBEDDING, LAYER, PREDICTION, LOSS, STAGE_END = "E", "t", "m", "L", "|"
_SYMBOLS = EMBEDDING + LAYER + PREDICTION + LOSS + STAGE_END
_IGNORED = ", \t\n"
# Far above any model; keeps `t*999999999` from filling memory before it is refused.
_MAX_SYMBOLS = 100_000


class PipelineLayoutError(ValueError):
    """What is wrong with a layout string, as the predicate of a sentence about it."""


def parse_pipeline_layout(text: str) -> tuple[str, ...]:
    """Returns one string of symbols per stage.

    >>> parse_pipeline_layout("Et|(tt|)*2,L")
    ('Et', 'tt', 'tt', 'L')
    """
    rest = "".join(character for character in text if character not in _IGNORED)
    open_groups = [""]  # parsed content of the layout, and of each open bracket
    while rest:
        if rest[0] == "(":
            open_groups.append("")
            rest = rest[1:]
            continue
        if rest[0] == ")":
            if len(open_groups) == 1:
                raise PipelineLayoutError("closes a bracket that is not open")
            unit = open_groups.pop()
        elif rest[0] in _SYMBOLS:
            unit = rest[0]
        else:
            raise PipelineLayoutError(f"has {rest[0]!r}, which is none of E, t, m, L, |, brackets and * N")
        count, rest = _parse_repeat_count(rest[1:])
        if len(open_groups[-1]) + len(unit) * count > _MAX_SYMBOLS:
            raise PipelineLayoutError(f"has more than {_MAX_SYMBOLS} symbols")
        open_groups[-1] += unit * count
    if len(open_groups) > 1:
        raise PipelineLayoutError("opens a bracket that is not closed")
    return tuple(open_groups[0].split(STAGE_END))


def _parse_repeat_count(text: str) -> tuple[int, str]:
    """Returns the N of a leading `* N` (1 without one), and the remaining text."""
    if not text.startswith("*"):
        return 1, text
    digits = text[1:]
    rest = digits.lstrip("0123456789")
    number = digits[: len(digits) - len(rest)]
    if not number or len(number) > len(str(_MAX_SYMBOLS)) or int(number) < 1:
        raise PipelineLayoutError(f"has a * without a number from 1 to {_MAX_SYMBOLS} after it")
    return int(number), rest
