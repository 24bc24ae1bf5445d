"""`petatron config`: what a configuration is made of, and why."""

from __future__ import annotations

import sys
from pathlib import Path

from petatron.base.errors import ConfigError, Problem
from petatron.config.document import dump_yaml, read_file
from petatron.config.load import Loaded, resolve_config
from petatron.config.presets import preset_names, preset_summary
from petatron.config.reference import reference
from petatron.config.show import diff, show

_USAGE = """usage:
  petatron config show [PRESET] [flags ...] [--changed] [--yaml]
      every value with its origin: default, preset, file and line, flag, or derived and why
      --changed   leave out plain defaults
      --yaml      print a file for --config instead
  petatron config diff A B
      fields that differ; each of A and B is a preset, a YAML file, or a run folder with its config.yaml
  petatron config presets
      the model shapes that --preset knows
  petatron config reference [--out FILE]
      the page of all flags, as Markdown"""


def main(argv: list[str]) -> int:
    """Run one subcommand of `petatron config`."""
    if not argv or argv[0] in ("-h", "--help") or "--help" in argv[1:]:
        print(_USAGE)
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name == "show":
        return _show(rest)
    if name == "diff":
        return _diff(rest)
    if name == "presets":
        return _presets()
    if name == "reference":
        return _reference(rest)
    print(f"petatron config: {name!r} is not a subcommand.\n{_USAGE}", file=sys.stderr)
    return 2


def _show(argv: list[str]) -> int:
    preset = argv[0] if argv and not argv[0].startswith("-") else None
    flags = [text for text in argv[1 if preset else 0 :] if text not in ("--changed", "--yaml")]
    loaded, problems = resolve_config(flags, preset=preset, require_training=False)
    if "--yaml" in argv:
        print(dump_yaml(loaded.config, origins=loaded.origins), end="")
    else:
        print(show(loaded, changed_only="--changed" in argv))
    sys.stdout.flush()
    for notice in loaded.notices:
        print(f"note: {notice}", file=sys.stderr)
    if problems:
        print(f"\n{ConfigError(problems)}", file=sys.stderr)
    return 2 if problems else 0


def _diff(argv: list[str]) -> int:
    if len(argv) != 2:
        print(_USAGE, file=sys.stderr)
        return 2
    before, after = (_open(name).config for name in argv)
    print(diff(before, after) or "no difference")
    return 0


def _open(name: str) -> Loaded:
    """A preset, a YAML file or a run folder. What cannot be read is an error; rules do not matter for looking."""
    if name in preset_names():
        return resolve_config(preset=name)[0]
    path = Path(name) / "config.yaml" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        rule = "is neither a preset, nor a YAML file, nor a run folder with a config.yaml"
        raise ConfigError([Problem(name, "", rule, "`petatron config presets` lists the presets.")])
    if unreadable := read_file(path).problems:
        raise ConfigError(unreadable)
    return resolve_config(files=[path])[0]


def _presets() -> int:
    width = max(len(name) for name in preset_names())
    for name in preset_names():
        print(f"{name:{width}}  {preset_summary(name)}")
    return 0


def _reference(argv: list[str]) -> int:
    if not argv:
        print(reference(), end="")
        return 0
    if len(argv) != 2 or argv[0] != "--out":
        print(_USAGE, file=sys.stderr)
        return 2
    Path(argv[1]).write_text(reference(), encoding="utf-8")
    return 0
