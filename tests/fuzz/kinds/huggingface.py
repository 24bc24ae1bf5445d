"""The folder of a Hugging Face model: config.json, the index, two files of tensors, a tokenizer.

No digest covers any of it: changed values are the model's values, and settings that do not contradict the tensors are its settings.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.tokenizer import HuggingFaceTokenizer
from tests.fuzz.kind import Kind
from tests.fuzz.kinds import models
from tests.fuzz.kinds.files import files_of

INDEX = "model.safetensors.index.json"
_MAMBA = "--mamba-head-dim 4 --mamba-state-dim 4 --mamba-num-groups 2 --hybrid-layer-pattern"
# A Nemotron-H, a Granite 4 with experts, and a Kimi-Linear.
_FLAGS = {
    "huggingface-hybrid": f"{_MAMBA} M-*- --num-layers 4 --squared-relu --position-embedding-type none",
    "huggingface-hybrid-moe": f"{_MAMBA} ME*E --num-layers 4 --mamba-norm-groups 1 --softmax-scale 0.3 "
    "--moe-shared-expert-intermediate-size 12",
    "huggingface-kimi-moe": "--num-layers 2 --num-query-groups 2 --no-group-query-attention --multi-latent-attention --kv-lora-rank 6 "
    "--qk-head-dim 3 --qk-pos-emb-head-dim 2 --v-head-dim 5 --qk-layernorm --latent-norm-epsilon 1e-6 --position-embedding-type none "
    "--experimental-attention-variant kimi_delta_attention --linear-attention-freq 2 --linear-key-head-dim 4 --linear-value-head-dim 4 "
    "--linear-num-key-heads 2 --linear-num-value-heads 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-dtype fp32 --moe-shared-expert-intermediate-size 12 --moe-layer-freq [0,1] --untie-embeddings-and-output-weights",
}


def make(name: str) -> Kind:
    _, model = models.tiny(*_FLAGS.get(name, "").split(), moe=name.endswith("moe"))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder) / "model")
        train_bpe(["some text, more text"], 280, Path(folder) / "model" / "tokenizer.json")
        files = files_of(Path(folder) / "model")
        tensors = load_file(Path(folder) / "model" / "model.safetensors")
    del files["model.safetensors"]
    files |= _sharded(tensors)
    files["tokenizer_config.json"] = json.dumps(
        {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    ).encode()
    files["chat_template.jinja"] = b"{{ messages }}"
    return Kind(
        name,
        files,
        doors={"read": models.read, "huggingface": models.to_huggingface, "petatron": models.to_petatron, "pretrained": models.pretrained,
        "tokenizer": _tokenizer},
        shares={"read": 4, "huggingface": 0.5, "petatron": 0.5, "pretrained": 0.5, "tokenizer": 0.3},
        reads={"tokenizer": ("tokenizer", "chat_template")},
        formats={".json": "json", ".safetensors": "safetensors", ".jinja": "text"},
    )  # fmt: skip


def _sharded(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    names = sorted(tensors)
    halves = (names[::2], names[1::2])
    called = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    where = {name: file for file, half in zip(called, halves) for name in half}
    parts = {file: save({name: tensors[name] for name in half}, {"format": "pt"}) for file, half in zip(called, halves)}
    return {**parts, INDEX: json.dumps({"metadata": {"total_size": 1}, "weight_map": where}).encode()}


def _tokenizer(folder: Path, scratch: Path) -> Any:
    tokenizer = HuggingFaceTokenizer(folder)
    ids = tokenizer.encode("some text")
    return ids, tokenizer.decode(ids), tokenizer.vocab_size, tokenizer.eod
