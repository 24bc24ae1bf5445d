"""`petatron config`: shows configurations and the origin of each value."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from petatron.base.check_output_file import writable_problems
from petatron.base.errors import CheckpointError, ConfigError, DataError, Problem, raise_problems
from petatron.base.format_text import count_with_noun
from petatron.cli.train import read_settings_alone
from petatron.config.flags.megatron_page import megatron_page
from petatron.config.flags.reference_page import reference_page
from petatron.config.format_config import format_config, format_config_diff
from petatron.config.presets import preset_names, preset_summary
from petatron.config.read_config_sources import ConfigSources, RawLoadedConfig
from petatron.config.schema.fields import closest_matches, join_with_or
from petatron.config.yaml_file import dump_yaml, read_yaml_file
from petatron.validate import resolve_config
from petatron.validate.load_checked_config import without_problems

_USAGE = """usage:
  petatron config show [X] [flags ...] [--changed] [--yaml]
      every value with its origin: default, preset (or its toy), file and line, flag, checkpoint, or derived and why
      X           a preset, a YAML file, or a run folder with its config.yaml
      --changed   leave out plain defaults
      --yaml      print a file for --config instead
  petatron config params [X] [flags ...]
      the parameters of the model by name, with shapes, as --freeze and --train-only match them, and which are frozen
  petatron config diff A B
      fields that differ; each of A and B is a preset, a file or a folder, like X
  petatron config presets
      the model shapes that --preset knows
  petatron config reference [--megatron] [--out FILE]
      the page of all flags, as Markdown
      --megatron  the page of Megatron-LM's flags instead, and what becomes of each"""


def main(argv: list[str]) -> int:
    """Run one subcommand of `petatron config`."""
    if not argv or argv[0] in ("-h", "--help") or "--help" in argv[1:]:
        print(_USAGE)
        return 0 if argv else 2
    actions = {"show": _show, "params": _params, "diff": _diff, "presets": _presets, "reference": _reference}
    if argv[0] in actions:
        return actions[argv[0]](argv[1:])
    print(f"petatron config: {argv[0]!r} is not a subcommand.\n{_USAGE}", file=sys.stderr)
    return 2


def _show(argv: list[str]) -> int:
    named = bool(argv) and not argv[0].startswith("-")
    sources = locate_config(argv[0]) if named else ConfigSources()
    sources["read_checkpoint"] = read_settings_alone
    flags = [text for text in argv[named:] if text not in ("--changed", "--yaml")]
    loaded, problems = resolve_config(flags, require_training=False, **sources)
    notices, problems = loaded.notices, list(problems)
    if not problems:
        try:
            notices = [*notices, *_frozen_notices(loaded)]
        except ConfigError as error:
            problems += error.problems
    if problems:
        # In a terminal the table scrolls the beginning away: a count first, and what is wrong last.
        print(f"{count_with_noun(len(problems), 'problem')}, after the table\n", file=sys.stderr, flush=True)
    if "--yaml" in argv:
        print(dump_yaml(loaded.config, origins=loaded.origins, changed_only="--changed" in argv), end="")
    else:
        print(format_config(loaded, changed_only="--changed" in argv))
    sys.stdout.flush()
    for notice in notices:
        print(f"note: {notice}", file=sys.stderr)
    if problems:
        print(f"\n{ConfigError(problems)}", file=sys.stderr)
    return 2 if problems else 0


def _frozen_notices(loaded: RawLoadedConfig) -> Iterator[str]:
    """Yields what `--freeze` and `--train-only` leave to train; `ConfigError` if that is wrong. Models are looked at only for these."""
    train = loaded.config.train
    parts = train.freeze_language_model or train.freeze_vision_encoder
    if not (train.freeze or train.train_only or parts) or loaded.config.model.vocab_size is None:
        return
    from petatron.models.frozen_params import describe_frozen, frozen_params
    from petatron.models.registry import model_spec

    run = without_problems(loaded, []).config
    yield describe_frozen(model_spec(run), frozen_params(run))


def _params(argv: list[str]) -> int:
    named = bool(argv) and not argv[0].startswith("-")
    sources = locate_config(argv[0]) if named else ConfigSources()
    sources["read_checkpoint"] = read_settings_alone
    flags, note = argv[named:], ""
    from petatron.models.frozen_params import describe_frozen, frozen_params, name_params
    from petatron.models.registry import model_spec
    from petatron.pretrained.open_tokenizer import open_tokenizer

    loaded = without_problems(*resolve_config(flags, require_training=False, **sources))
    with contextlib.suppress(ConfigError, DataError, CheckpointError):  # its files may be on another machine
        loaded, _ = open_tokenizer(loaded)
    if loaded.config.model.vocab_size is None:
        flags, note = [*flags, "--vocab-size", "128"], "; the size of the vocabulary is not known, 128 stands for it"
        loaded = without_problems(*resolve_config(flags, require_training=False, **sources))
    run = loaded.config
    spec, frozen = model_spec(run), frozen_params(run)
    rows = name_params(spec)
    width = max(len(name) for name in rows)
    for name, (param, shape) in rows.items():
        sizes = " x ".join(map(str, shape))
        print(f"{name:{width}}  {sizes}{'  frozen' if param in frozen.names else ''}")
    sys.stdout.flush()
    print(f"note: {describe_frozen(spec, frozen)}{note}", file=sys.stderr)
    return 0


def _diff(argv: list[str]) -> int:
    if len(argv) != 2:
        rule = f"compares two configurations, and gets {count_with_noun(len(argv), 'word')}"
        raise ConfigError([Problem("config diff", "", rule, "Name two presets, files or folders.")])
    sources = [locate_config(name) for name in argv]
    files = [path for source in sources for path in source.get("files", ())]
    raise_problems(problem for path in files for problem in read_yaml_file(path).problems)
    # Problems of rules do not matter for display.
    before, after = (resolve_config(**source)[0].config for source in sources)
    print(format_config_diff(before, after) or "no difference")
    return 0


def locate_config(name: str) -> ConfigSources:
    """Resolves a name on the command line: a preset, a YAML file or a run folder."""
    if name in preset_names():
        return ConfigSources(preset=name)
    folder = Path(name).is_dir()
    path = Path(name) / "config.yaml" if folder else Path(name)
    if path.is_file():
        return ConfigSources(files=(path,))
    rule = "is neither a preset, nor a YAML file, nor a run folder with a config.yaml"
    if folder:
        fix = "The folder is there, but holds no config.yaml."
    elif close := closest_matches(name, preset_names(), count=3):
        fix = f"Did you mean the preset {join_with_or(close)}?"
    else:
        fix = "Check the path; `petatron config presets` lists the presets."
    raise ConfigError([Problem(name, "", rule, fix)])


def _presets(argv: list[str]) -> int:
    if argv:
        raise ConfigError([Problem(argv[0], "", "is a word too many", "`petatron config presets` takes none.")])
    width = max(len(name) for name in preset_names())
    for name in preset_names():
        print(f"{name:{width}}  {preset_summary(name)}")
    return 0


def _reference(argv: list[str]) -> int:
    text = megatron_page() if argv[:1] == ["--megatron"] else reference_page()
    options = argv[1:] if argv[:1] == ["--megatron"] else argv
    if not options:
        print(text, end="")
        return 0
    if len(options) != 2 or options[0] != "--out":
        raise ConfigError([Problem(options[0], "", "is not how to write the page", "Give --out FILE, or nothing.")])
    raise_problems(writable_problems("--out", Path(options[1])))
    Path(options[1]).write_text(text, encoding="utf-8")
    return 0
