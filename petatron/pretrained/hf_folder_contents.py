"""Describes a model as the Hugging Face folder that a checkpoint contains: tensor names, and the files next to the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from petatron.checkpoint.checkpoint_contents import ModelFolder
from petatron.data.tokenizer import Tokenizer
from petatron.models.hf import build_config_json, folder_entries
from petatron.models.model_spec import ModelSpec

_TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class CompanionFiles:
    """Files that came with a pretrained model next to the weights, and the token ids of its config.json.

    Ids that config.json does not name are omitted, since None would override the reader's default.
    """

    token_ids: Mapping[str, Any]
    files: Mapping[str, bytes]

    @classmethod
    def from_config_json(cls, config: Mapping[str, Any], files: Mapping[str, bytes]) -> CompanionFiles:
        return cls({key: config[key] for key in _TOKEN_ID_KEYS if key in config}, files)


def build_hf_folder(spec: ModelSpec, dtype: torch.dtype, tokenizer: Tokenizer | CompanionFiles | None) -> ModelFolder:
    """Describes a model as a Hugging Face folder; without a tokenizer it has no tokenizer files."""
    config = build_config_json(spec, dtype)
    companions = tokenizer if isinstance(tokenizer, CompanionFiles) else _companions_for_tokenizer(tokenizer)
    config = {key: value for key, value in config.items() if key not in _TOKEN_ID_KEYS} | dict(companions.token_ids)
    documents = {
        "config.json": json_bytes(config),
        "generation_config.json": json_bytes({"_from_model_config": True, **companions.token_ids}),
        **companions.files,
    }
    return ModelFolder(_cached_folder_entries(spec), documents)


_cached_folder_entries = lru_cache(maxsize=4)(folder_entries)
"""Caches the entries from save to save."""


def _companions_for_tokenizer(tokenizer: Tokenizer | None) -> CompanionFiles:
    """Returns the files and token ids of a run's tokenizer. Only end-of-document is known; for other ids transformers has defaults."""
    ids = dict.fromkeys(_TOKEN_ID_KEYS) | {"eos_token_id": None if tokenizer is None else tokenizer.eod}
    return CompanionFiles(ids, {} if tokenizer is None else tokenizer.files())


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Serializes a JSON file of a model folder."""
    return (json.dumps(content, indent=2) + "\n").encode()
