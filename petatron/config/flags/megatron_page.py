"""The page of Megatron's flags, docs/megatron.md, generated from the table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from petatron.config.flags.megatron_flags import OTHER_VALUES, UNSUPPORTED_VALUES
from petatron.config.flags.megatron_table import FlagAnswerKind, MegatronFlag, megatron_flags
from petatron.config.flags.reference_page import markdown_table
from petatron.config.schema.fields import flag_name

_INTRODUCTION = """# Megatron-LM's flags

This page is generated: `petatron config reference --megatron --out docs/megatron.md`.

`pretrain_gpt.py`, `pretrain_mamba.py`, `pretrain_bert.py`, `pretrain_t5.py`, `pretrain_vlm.py` and `petatron train` take Megatron's
flags; `petatron port` reads its scripts ([port.md](port.md)).
Every flag has one of four answers, and the answer may depend on the value: a value that turns a feature off (a no-op) is always
accepted. All problems are reported at once.

"""
_MEANING: Mapping[FlagAnswerKind, str] = {
    "works": "a field of ours has this name, or another one ([flags.md](flags.md))",
    "always so": "accepted without effect: Petatron always does this, or has no such detail; one notice names all that were typed",
    "not here": "refused by name, with what to use instead",
    "gone": "an old name: refused with what it became",
}


def megatron_page() -> str:
    """Returns the whole page."""
    by_kind: dict[FlagAnswerKind, dict[str, MegatronFlag]] = {kind: {} for kind in _MEANING}
    for flag, answer in sorted(megatron_flags().items()):
        by_kind[answer.kind][flag] = answer
    counts = [(kind, str(len(flags)), _MEANING[kind]) for kind, flags in by_kind.items()]
    works = ", ".join(f"`{flag}`" for flag in by_kind["works"])
    parts = [
        _INTRODUCTION + markdown_table(("Answer", "Flags", "Meaning"), counts),
        f"## Works\n\n{works}\n",
        _grouped("Always so", "Because", by_kind["always so"]),
        _grouped("Not here", "What it needs", by_kind["not here"]),
        _values(by_kind["not here"]),
        _grouped("Gone", "Now", by_kind["gone"]),
    ]
    return "\n".join(parts)


def _grouped(title: str, heading: str, flags: Mapping[str, MegatronFlag]) -> str:
    """Returns the flags of one answer, by the answer's text."""
    groups: dict[str, list[str]] = {}
    for flag, answer in flags.items():
        text = f"it is for `{answer.command}`" if answer.command else answer.text
        groups.setdefault(text + (f". {answer.remedy}" if answer.remedy else ""), []).append(f"`{flag}`")
    rows = [(text, ", ".join(names)) for text, names in groups.items()]
    return f"## {title}\n\n" + markdown_table((heading, "Flags"), rows)


def _values(flags: Mapping[str, MegatronFlag]) -> str:
    """Returns what depends on the value."""
    neutral = [(f"`{flag}`", _spans(item.neutral_values)) for flag, item in flags.items() if item.neutral_values]
    others = [
        (f"`{flag_name(name)} {value}`", f"`{other.value}`: {other.reason}")
        for name, values in OTHER_VALUES.items()
        for value, other in values.items()
    ]
    refused = [
        (f"`{flag_name(name)}`", _spans(value for value in values if value not in OTHER_VALUES.get(name, {})))
        for name, values in UNSUPPORTED_VALUES.items()
    ]
    return "\n".join(
        [
            "## Values\n\nValues of refused flags that turn the feature off, and are accepted:\n",
            markdown_table(("Flag", "Accepted values"), neutral),
            "Values that are replaced by another value of Petatron:\n",
            markdown_table(("Typed", "Here"), others),
            "Values of accepted flags that are not here:\n",
            markdown_table(("Flag", "Refused values"), [row for row in refused if row[1]]),
        ]
    )


def _spans(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)
