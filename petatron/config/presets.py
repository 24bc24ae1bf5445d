"""Published model shapes by name; each is a YAML file next to this module, in the same form as `--config`."""

from __future__ import annotations

import functools
from importlib import resources

from petatron.base.errors import Problem
from petatron.config.schema.fields import closest_matches
from petatron.config.yaml_file import ParsedYaml, read_yaml_text, unreadable_source

_PACKAGE, _SUFFIX = "petatron.config", ".yaml"


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Returns all presets, sorted by family and then by the size in the name."""
    folder = resources.files(_PACKAGE) / "presets"
    names = [entry.name.removesuffix(_SUFFIX) for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)]
    return tuple(sorted(names, key=_order))


def preset_text(name: str) -> str:
    """Returns the preset's file as written; the name must be one of `preset_names`."""
    return (resources.files(_PACKAGE) / "presets" / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def preset_summary(name: str) -> str:
    """Returns the first comment line of the preset's file."""
    return preset_text(name).splitlines()[0].lstrip("# ")


@functools.cache
def read_preset(name: str) -> ParsedYaml:
    """Returns the preset's settings, or the problem that there is none of that name; nobody changes them."""
    if name in preset_names():
        return read_yaml_text(preset_text(name), source=name, kind="preset")
    close = closest_matches(name, preset_names(), count=3)
    fix = f"Did you mean {' or '.join(close)}?" if close else "`petatron config presets` lists them."
    return unreadable_source(Problem("--preset", name, "is not a known preset", fix))


def _order(name: str) -> tuple[str, float, str]:
    family, _, size = name.partition("-")
    scale = {"m": 1e6, "b": 1e9}.get(size[-1:], 1.0)
    digits = size[:-1]
    return family, float(digits) * scale if digits.replace(".", "", 1).isdigit() else 0.0, name
