"""The Hugging Face folder inside a checkpoint: its tensors' names, and the files beside the weights."""

from __future__ import annotations

import json
from typing import Any

import torch

from petatron.checkpoint.state import ModelFolder
from petatron.data.tokenizer import Tokenizer
from petatron.models.base import Architecture
from petatron.models.hf import folder_entries, model_config_json


def model_folder(architecture: Architecture, dtype: torch.dtype, tokenizer: Tokenizer | None) -> ModelFolder:
    """How a model is kept so that other programs open it; without a tokenizer the folder has none."""
    model, moe, experts_in = architecture.model, architecture.moe, architecture.experts_in
    end = None if tokenizer is None else tokenizer.eod
    config = model_config_json(model, moe, experts_in, dtype) | {"eos_token_id": end, "bos_token_id": None}
    generation = {"_from_model_config": True, "bos_token_id": None, "eos_token_id": end}
    documents = {"config.json": _json(config), "generation_config.json": _json(generation)}
    if tokenizer is not None:
        documents |= tokenizer.files()
    return ModelFolder(folder_entries(model, moe, experts_in), documents)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
