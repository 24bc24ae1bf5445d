"""The Hugging Face folder inside a checkpoint: its tensors' names, and the files beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from petatron.checkpoint.state import ModelFolder
from petatron.data.tokenizer import Tokenizer
from petatron.models.batch import Architecture
from petatron.models.hf import Entry, folder_entries, model_config_json

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class Companions:
    """What a model that came from elsewhere brought along: files beside the weights, and the token ids of its config.json.

    An id that its config.json does not name is none: readers have a default for it, which None would replace.
    """

    token_ids: Mapping[str, Any]
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, config: Mapping[str, Any], files: Mapping[str, bytes]) -> Companions:
        return cls({key: config[key] for key in _TOKEN_IDS if key in config}, files)


def model_folder(
    architecture: Architecture, dtype: torch.dtype, tokenizer: Tokenizer | Companions | None
) -> ModelFolder:
    """How a model is kept so that other programs open it; without a tokenizer the folder has none."""
    model, moe, experts_in = architecture.model, architecture.moe, architecture.experts_in
    config = model_config_json(model, moe, experts_in, dtype)
    beside = tokenizer if isinstance(tokenizer, Companions) else _made_for(tokenizer)
    config = {key: value for key, value in config.items() if key not in _TOKEN_IDS} | dict(beside.token_ids)
    generation = {"_from_model_config": True, **beside.token_ids}
    documents = {"config.json": _json(config), "generation_config.json": _json(generation), **beside.files}
    return ModelFolder(_entries(architecture), documents)


@lru_cache(maxsize=4)
def _entries(architecture: Architecture) -> tuple[Entry, ...]:
    """Kept between saves: finding them builds the decoder, which takes a fifth of a second for 126 layers."""
    return folder_entries(architecture.model, architecture.moe, architecture.experts_in)


def _made_for(tokenizer: Tokenizer | None) -> Companions:
    """A run's tokenizer ends documents and begins none."""
    ids = {"bos_token_id": None, "eos_token_id": None if tokenizer is None else tokenizer.eod}
    return Companions(ids, {} if tokenizer is None else tokenizer.files())


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
