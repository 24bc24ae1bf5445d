"""Options of a tokenizer that its own files do not say, in the tokenizer_config.json of a model folder, under a key of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from petatron.base.untrusted_files import is_count, read_limited_json, reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.tokenizers_library import MAX_TOKENIZER_BYTES

OPTIONS_KEY = "petatron"
"""The key of a tokenizer_config.json that stores the non-default options of a tokenizer."""
MAX_EXTRA_IDS = 1 << 16
"""The most sentinels after a vocabulary; T5 has 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTokenizerOptions:
    """A folder's tokenizer_config.json (`settings`), the options in it, and those that several tokenizers have."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: tuple[str, ...] = ()
    vocab_extra_ids: int | None = None


def read_stored_options(folder: Path) -> StoredTokenizerOptions:
    """Reads the options that a folder stores; none if it has no tokenizer_config.json."""
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return StoredTokenizerOptions()
    with reading_untrusted(config, data_file_error):
        settings = read_limited_json(config, MAX_TOKENIZER_BYTES)
        stored = settings.get(OPTIONS_KEY, {})
        tokens, extra_ids = stored.get("special_tokens", []), stored.get("vocab_extra_ids")
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise TypeError(f"{OPTIONS_KEY}.special_tokens is no list of texts")
        if extra_ids is not None and not (is_count(extra_ids) and extra_ids <= MAX_EXTRA_IDS):
            raise ValueError(f"{OPTIONS_KEY}.vocab_extra_ids is no number from 0 to {MAX_EXTRA_IDS:,}")
    return StoredTokenizerOptions(
        settings=settings, options=stored, special_tokens=tuple(tokens), vocab_extra_ids=extra_ids
    )
