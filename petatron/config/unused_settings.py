"""Settings that have no effect in a config, with the reasons, and the notices about those that somebody has set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from petatron.config.optimizer_registry import unused_optimizer_settings
from petatron.config.schema.fields import all_fields, fields_by_name
from petatron.config.schema.run import RawRunConfig
from petatron.config.value_origins import ValueOrigin


def training_flags(origins: Mapping[str, ValueOrigin]) -> list[str]:
    """Returns the flags that were typed and that only training reads, by name."""
    return sorted(info.flag for info in all_fields() if info.role == "training" and origins[info.path].kind == "flag")


def unused_settings(config: RawRunConfig) -> frozenset[str]:
    """Returns the paths of the settings that have no effect in this config, whatever their values."""
    return frozenset(_unused_reasons(config))


def _unused_reasons(config: RawRunConfig) -> dict[str, str]:
    """Returns why settings have no effect, by path."""
    reasons = {info.path: reason for info in all_fields() if (reason := info.unused_reason(config))}
    others = (fields_by_name()[name].path for name in unused_optimizer_settings(config.optim))
    return dict.fromkeys(others, f"the optimizer is {config.optim.optimizer}") | reasons


def unused_flag_notices(config: RawRunConfig, origins: Mapping[str, ValueOrigin]) -> Iterator[str]:
    """Yields one line for each value set in a flag or file that has no effect in this config."""
    reasons = _unused_reasons(config)
    for info in all_fields():
        value, origin = getattr(getattr(config, info.section), info.name), origins[info.path]
        if origin.kind in ("flag", "file") and value != info.default and info.path in reasons:
            # Nobody typed a flag for what a file says.
            given = f"{info.name} ({origin.detail})" if origin.kind == "file" else origin.detail
            yield f"{given} has no effect: {reasons[info.path]}"
