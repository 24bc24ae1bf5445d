"""A tokenizer: tokenizer.json with its config, and GPT-2's vocabulary and merges. No digest covers them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.tokenizer import GPT2BPETokenizer, HuggingFaceTokenizer
from tests.fuzz.kind import Kind

_TEXT = "some text, sömetimes more\n"


def make(name: str) -> Kind:
    with tempfile.TemporaryDirectory() as folder:
        train_bpe([_TEXT * 4], 270, Path(folder) / "tokenizer.json")
        whole = (Path(folder) / "tokenizer.json").read_bytes()
    model = json.loads(whole)["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    config = {
        "eos_token": {"content": "<|endoftext|>", "lstrip": False},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1024,
    }
    files = {
        "tokenizer.json": whole,
        "tokenizer_config.json": json.dumps(config).encode(),
        "special_tokens_map.json": b'{"eos_token": "<|endoftext|>"}',
        "gpt2/vocab.json": json.dumps(model["vocab"]).encode(),
        "gpt2/merges.txt": ("#version: 0.2\n" + "\n".join(merges) + "\n").encode(),
    }
    return Kind(
        name,
        files,
        doors={"folder": _folder, "file": _file, "gpt2": _gpt2},
        formats={".json": "json", ".txt": "text"},
        reads={"folder": ("tokenizer", "special"), "file": ("tokenizer",), "gpt2": ("gpt2/",)},
    )


def _folder(folder: Path, scratch: Path) -> Any:
    return _used(HuggingFaceTokenizer(folder))


def _file(folder: Path, scratch: Path) -> Any:
    return _used(HuggingFaceTokenizer(folder / "tokenizer.json"))


def _gpt2(folder: Path, scratch: Path) -> Any:
    return _used(GPT2BPETokenizer(folder / "gpt2" / "vocab.json", folder / "gpt2" / "merges.txt"))


def _used(tokenizer: HuggingFaceTokenizer | GPT2BPETokenizer) -> Any:
    ids = tokenizer.encode(_TEXT)
    assert all(0 <= number < tokenizer.vocab_size for number in ids)
    return (
        ids,
        tokenizer.encode_batch([_TEXT, "", "b"]),
        tokenizer.decode(ids),
        tokenizer.vocab_size,
        tokenizer.eod,
        sorted(tokenizer.files()),
    )
