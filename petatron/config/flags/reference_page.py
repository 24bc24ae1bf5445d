"""The flag reference page, docs/flags.md, generated from the schema and the spelling tables."""

from __future__ import annotations

from petatron.config.flags.help_text import DEFAULTS_DOC, FROM_DOC, TOY_DOC, flag_aliases
from petatron.config.flags.megatron_flags import MEGATRON_DEFAULTS_FLAG
from petatron.config.flags.parse_command_line import FILE_FLAG, FROM_FLAG, PRESET_FLAG, TOY_FLAG
from petatron.config.format_config import format_value
from petatron.config.presets import preset_names, preset_summary
from petatron.config.schema.fields import FieldInfo, all_fields, sections
from petatron.config.schema.model import REQUIRED_FIELDS

_INTRODUCTION = f"""# Flags and fields

This page is generated: `petatron config reference --out docs/flags.md`.

Every setting is one field of one schema. On the command line it is a flag (`--num-layers 4` or `--num-layers=4`), in
a YAML file a key (`num_layers: 4`, under its section or at the top), in Python an attribute (`config.model.num_layers`).
Values come from the schema's defaults, then `{PRESET_FLAG} NAME`, then each `{FILE_FLAG} FILE`, then flags; later wins.
What is still unset is derived. `petatron config show` prints every value with its origin.

`{FROM_FLAG} FOLDER`: {FROM_DOC[0].lower()}{FROM_DOC[1:]} A flag that makes another model of it is an error.

`{TOY_FLAG}`: {TOY_DOC[0].lower()}{TOY_DOC[1:]}

`{MEGATRON_DEFAULTS_FLAG}`: {DEFAULTS_DOC[0].lower()}{DEFAULTS_DOC[1:]}

Booleans are `--x`, `--no-x` or `--x=false`. The word `none` unsets a field that may be unset. Fields marked `...` take
several values. Underscores in a flag count as dashes.
"""


def reference_page() -> str:
    """Returns the whole page."""
    parts = [_INTRODUCTION]
    for section, section_class in sections().items():
        features: dict[str, list[FieldInfo]] = {}
        for info in (info for info in all_fields() if info.section == section):
            features.setdefault(info.feature.name, []).append(info)
        parts.append(f"## {section}\n\n{(section_class.__doc__ or '').strip()}\n")
        for name, infos in features.items():
            reasons = [item.reason for item in infos[0].feature.used_when if item.reason and "{" not in item.reason]
            notice = "".join(f"Notice where they have no effect: {reason}.\n\n" for reason in reasons)
            heading = f"### {name}\n\n{notice}" if len(features) > 1 else ""
            parts.append(
                heading + markdown_table(("Flag", "Type", "Default", "Meaning"), [_row(info) for info in infos])
            )
    presets = [(f"`{name}`", preset_summary(name)) for name in preset_names()]
    parts.append("## Presets\n\n" + markdown_table(("Name", "What it is"), presets))
    parts.append(
        "## Megatron's other flags\n\nWhat becomes of each flag of Megatron-LM's: [megatron.md](megatron.md).\n"
    )
    return "\n".join(parts)


def _row(info: FieldInfo) -> tuple[str, ...]:
    names = [f"`{flag}`" for flag in (info.flag, *flag_aliases().get(info.name, []))]
    default = "required" if info.name in REQUIRED_FIELDS else format_value(info.default)
    if info.default is None and "Derived:" in info.doc:
        default = "derived"
    return "<br>".join(names), f"`{info.type_name}`", f"`{default}`", info.doc


def markdown_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Returns a table as Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    # A bar inside a cell would start a new one.
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
