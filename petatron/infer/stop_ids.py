"""Which ids end an answer, by a model's own files and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError
from petatron.base.model_companion_files import read_companion_file
from petatron.base.model_folder_file_names import CONFIG_FILE
from petatron.data.tokenizer import Tokenizer
from petatron.infer.sampling_params import GENERATION_CONFIG_FILE
from petatron.pretrained.detect_model_format import model_files


def find_stop_ids(folder: Path, tokenizer: Tokenizer | None, *, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end an answer: those of config.json and generation_config.json, and the tokenizer's end of document."""
    named: list[Any] = [] if tokenizer is None else [tokenizer.eod]
    for name in (CONFIG_FILE, GENERATION_CONFIG_FILE):
        path = model_files(folder) / name
        if path.is_file():
            content = json.loads(read_companion_file(path, CheckpointError))
            named.append(content.get("eos_token_id") if isinstance(content, Mapping) else None)
    ids = [token for value in named for token in (value if isinstance(value, list) else [value])]
    return tuple(sorted({token for token in ids if type(token) is int and 0 <= token < vocab_size}))
