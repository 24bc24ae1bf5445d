"""A tokenizer: tokenizer.json with its config, and the files of GPT-2, tiktoken, SentencePiece and BERT. No digest covers them."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.tiktoken_tokenizer import TikTokenizer
from petatron.data.tokenizer import (
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    build_tokenizer,
    folder_tokenizer,
)
from tests.fuzz.kind import Kind, Refused
from tests.unit.data.vocabularies import piece_model

_BERT_TOKENS = "[PAD] [UNK] [CLS] [SEP] [MASK] some text times , ##s s ##mes so ##me ö m ##t".split()
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
        "ranks/vocab.json": _ranks(),
        "pieces/tokenizer.model": piece_model("llama"),
        "pieces/tokenizer_config.json": b'{"petatron": {"special_tokens": ["<x>"], "vocab_extra_ids": null}}',
        "bert/vocab.txt": "".join(f"{token}\n" for token in _BERT_TOKENS).encode(),
        "bert/tokenizer_config.json": b'{"do_lower_case": false, "petatron": {"vocab_extra_ids": 2, "splits_in_python": true}}',
    }
    return Kind(
        name,
        files,
        doors={"folder": _folder, "file": _file, "gpt2": _gpt2, "ranks": _ranks_door, "pieces": _pieces, "bert": _bert},
        formats={".json": "json", ".txt": "text"},
        reads={
            "folder": ("tokenizer", "special"),
            "file": ("tokenizer",),
            "gpt2": ("gpt2/",),
            "ranks": ("ranks/",),
            "pieces": ("pieces/",),
            "bert": ("bert/",),
        },
    )


def _folder(folder: Path, scratch: Path) -> Any:
    return _used(HuggingFaceTokenizer(folder))


def _file(folder: Path, scratch: Path) -> Any:
    return _used(HuggingFaceTokenizer(folder / "tokenizer.json"))


def _gpt2(folder: Path, scratch: Path) -> Any:
    return _used(GPT2BPETokenizer(folder / "gpt2" / "vocab.json", folder / "gpt2" / "merges.txt"))


def _ranks() -> bytes:
    tokens = [*(bytes([byte]) for byte in range(256)), b"so", b"me", b"some", b" t"]
    encoded = [base64.b64encode(token).decode() for token in tokens]
    return json.dumps([{"rank": n, "token_bytes": text, "token_str": ""} for n, text in enumerate(encoded)]).encode()


def _ranks_door(folder: Path, scratch: Path) -> Any:
    return _used(TikTokenizer(folder / "ranks" / "vocab.json", num_special_tokens=9))


def _pieces(folder: Path, scratch: Path) -> Any:
    return _used(_of_folder(folder / "pieces"))


def _bert(folder: Path, scratch: Path) -> Any:
    return _used(_of_folder(folder / "bert"))


def _of_folder(folder: Path) -> Tokenizer:
    config = folder_tokenizer(folder)
    if config is None:
        raise Refused("there is no tokenizer")
    return build_tokenizer(config)


def _used(tokenizer: Tokenizer) -> Any:
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
