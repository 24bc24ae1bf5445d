"""How requests sample that do not say it: by the generation_config.json that a model came with.

Its sampling parameters alone are taken, as other servers do: its makers recommend them. Ids that end an answer are read beside
(`serve/open_engine.py`); a length is for a request to say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from petatron.base.companion_files import read_companion_file
from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger

GENERATION_CONFIG_FILE = "generation_config.json"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """None: the file does not say."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, float]:
        return {default.name: value for default in fields(self) if (value := getattr(self, default.name)) is not None}

    def as_params(self) -> dict[str, float]:
        """Returns the fields of `SamplingParams` that it sets: top_k 0 or below keeps all, which is None there, and the default."""
        return {name: value for name, value in self.given().items() if name != "top_k" or value > 0}

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> SamplingDefaults:
        """Returns those of a generation_config.json; a value that no request could have is left out, with a warning.

        >>> SamplingDefaults.from_values({"temperature": 0.6, "top_k": 20, "top_p": 7, "do_sample": True}).given()
        {'temperature': 0.6, 'top_k': 20}
        """
        defaults: dict[str, float] = {}
        for name, holds in _RANGES.items():
            value = values.get(name)
            if value is None:
                continue
            is_integer = name == "top_k"
            number = isinstance(value, int if is_integer else int | float) and not isinstance(value, bool)
            if number and math.isfinite(value) and holds(value):  # type: ignore[arg-type]
                defaults[name] = value  # type: ignore[assignment]
            else:
                _log.warning("%s has %s %r, which no request may have: left out", GENERATION_CONFIG_FILE, name, value)
        return cls(**defaults)  # type: ignore[arg-type]


_RANGES = {
    "temperature": lambda value: 0 <= value <= 100,
    "top_k": lambda value: value >= -1,
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value <= 100,
}
NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Returns those of a model's folder; none without the file."""
    path = folder / GENERATION_CONFIG_FILE
    if not path.is_file():
        return NO_DEFAULTS
    values = json.loads(read_companion_file(path, CheckpointError))
    return SamplingDefaults.from_values(values) if isinstance(values, Mapping) else NO_DEFAULTS
