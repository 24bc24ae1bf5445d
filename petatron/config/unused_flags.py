"""Valid settings that have no effect in combination: reported, so that no flag is ignored silently.

When a setting has an effect, and why it has none otherwise, is declared with the setting (`config/schema/metadata.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from petatron.config.optimizers import unused_optimizer_settings
from petatron.config.schema.fields import FieldInfo, FieldValue, all_fields, fields_by_name
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
            yield f"{_as_given(info, value, origin)} has no effect: {reasons[info.path]}"


def _as_given(info: FieldInfo, value: FieldValue, origin: ValueOrigin) -> str:
    """Returns a setting as its source spells it: nobody typed a flag for what a file says."""
    if origin.kind == "file":
        return f"{info.name} ({origin.detail})"
    return f"--no-{info.flag[2:]}" if value is False or (info.is_switch and value == info.off_value) else info.flag
