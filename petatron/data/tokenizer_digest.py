"""A short name for what a tokenizer does: equal wherever its files are, another when their content or a setting is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from petatron.config.schema.training import TokenizerConfig
from petatron.data.tokenizer import Tokenizer

_PATHS = ("tokenizer_model", "vocab_file", "merge_file")


def tokenizer_digest(config: TokenizerConfig, tokenizer: Tokenizer) -> str:
    """Hashes the settings and the content of the files."""
    settings = {name: value for name, value in asdict(config).items() if name not in _PATHS}
    settings |= {"class": type(tokenizer).__name__, "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod}
    content = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=8)
    for name, data in sorted(tokenizer.files().items()):
        content.update(f"{name}:{len(data)}:".encode() + data)
    return content.hexdigest()
