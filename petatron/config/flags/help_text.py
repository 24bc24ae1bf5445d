"""The help text of subcommands that take a run's flags."""

from __future__ import annotations

import textwrap

from petatron.config.flags import megatron_flags
from petatron.config.flags.parse_command_line import FROM_FLAG, TOY_FLAG
from petatron.config.format_config import format_value
from petatron.config.schema.fields import FieldInfo, all_fields, sections
from petatron.config.schema.model import REQUIRED_FIELDS

_COLUMN, _WIDTH = 34, 110
FROM_DOC = (
    "Start a new run from a model that exists: the folder of a Hugging Face model, of a run, or of one of its steps, or the name of a "
    "model on the Hugging Face hub (OWNER/NAME), which is downloaded. Takes the model's settings, its tokenizer and its weights; the "
    "optimizer is fresh, at iteration 0."
)
TOY_DOC = (
    "Shrink the model of the preset, file or folder to a size that a laptop trains in seconds: every kind of layer, experts, latent "
    "attention, windows and the like stay, with small widths and few layers. Flags win. With `--from` the folder gives the structure "
    "alone: weights are random."
)
DEFAULTS_DOC = (
    "Use Megatron's defaults where they change numbers and ours are others: "
    + ", ".join(f"{name} {value}" for name, value in megatron_flags.MEGATRON_DEFAULTS.items())
    + ". The scripts of Megatron's names (pretrain_gpt.py) give it."
)


def flag_help() -> str:
    """Returns every flag with its documentation, by section."""
    lines = ["Sources, later wins:", *_entry("--preset NAME", "A published model shape; `petatron config presets`.")]
    lines += [*_entry("--config FILE", "YAML with the same fields; may be given several times.")]
    lines += [*_entry(f"{FROM_FLAG} FOLDER", FROM_DOC), *_entry(TOY_FLAG, TOY_DOC)]
    lines += [*_entry(megatron_flags.MEGATRON_DEFAULTS_FLAG, DEFAULTS_DOC), ""]
    other_names = flag_aliases()
    for section, section_class in sections().items():
        title = (section_class.__doc__ or "").strip()
        lines.append(f"{section}: {title}")
        for info in (info for info in all_fields() if info.section == section):
            lines += _entry(_usage(info, other_names.get(info.name, [])), _meaning(info))
        lines.append("")
    lines.append(
        "Booleans: --x, --no-x or --x=false. `none` unsets a field. Megatron's other spellings: docs/flags.md."
    )
    return "\n".join(lines)


def flag_aliases() -> dict[str, list[str]]:
    """Maps field names to their other spellings, as typed."""
    aliases: dict[str, list[str]] = {}
    for flag, name in megatron_flags.ALIASES.items():
        aliases.setdefault(name, []).append(flag)
    for flag, shorthand in megatron_flags.SHORTHANDS.items():
        aliases.setdefault(shorthand.field, []).append(flag)
    for flag, choices in megatron_flags.CHOICE_FLAGS.items():
        for name in {choice.field for choice in choices.values()}:
            aliases.setdefault(name, []).append(f"{flag} {'|'.join(choices)}")
    return aliases


def _usage(info: FieldInfo, others: list[str]) -> str:
    value = {"bool": "", "choice": " CHOICE", "str": " TEXT"}.get(info.kind, " N")
    return ", ".join([info.flag + value + (" ..." if info.is_list else ""), *others])


def _meaning(info: FieldInfo) -> str:
    meaning = info.doc
    if info.choices:
        meaning += f" One of {', '.join(info.choices)}."
    if info.name in REQUIRED_FIELDS:
        meaning += " Required."
    elif info.default not in (None, ()) and info.kind != "bool":
        meaning += f" [{format_value(info.default)}]"
    elif info.default is True:
        meaning += " [on]"
    return meaning


def _entry(usage: str, meaning: str) -> list[str]:
    body = textwrap.wrap(meaning, _WIDTH - _COLUMN)
    head = textwrap.wrap(usage, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    if len(head[0]) < _COLUMN - 1:
        return [head[0].ljust(_COLUMN) + body[0], *(" " * _COLUMN + line for line in body[1:])]
    return [*head, *(" " * _COLUMN + line for line in body)]
