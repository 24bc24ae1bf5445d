"""A vocabulary that is given as another kind is told what it is, without the name of an exception."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from petatron.base.errors import DataError
from petatron.config.schema.data import TokenizerConfig
from petatron.data.tokenizer import build_tokenizer
from tests.unit.data.vocabularies import piece_model

_BYTES = [bytes([number]) for number in range(256)]
_BPE = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
FILES = {
    "tokenizer.json": json.dumps(_BPE).encode(),
    "tiktoken.json": json.dumps(
        [{"rank": n, "token_bytes": base64.b64encode(b).decode(), "token_str": ""} for n, b in enumerate(_BYTES)]
    ).encode(),
    "x.tiktoken": b"".join(base64.b64encode(b) + f" {n}\n".encode() for n, b in enumerate(_BYTES)),
    "tokenizer.model": piece_model("llama"),
    "vocab.json": json.dumps({"a": 0, "b": 1, "ab": 2}).encode(),
    "merges.txt": b"#version: 0.2\na b\n",
    "vocab.txt": b"[PAD]\n[UNK]\nthe\n",
    "archive": b"PK\x03\x04....",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "empty": b"",
    "words.txt": b"some words that are no vocabulary\n",
    "open.json": b'{"a": ',
    "binary": bytes(range(256)),
}
KINDS = {
    "tokenizer.json": ("a tokenizer.json", "Use --tokenizer-type HuggingFaceTokenizer."),
    "tiktoken.json": ("a vocabulary of tiktoken", "Use --tokenizer-type TikTokenizer."),
    "x.tiktoken": ("a vocabulary of tiktoken", "Use --tokenizer-type TikTokenizer."),
    "tokenizer.model": ("a SentencePiece model", "Use --tokenizer-type SentencePieceTokenizer"),
    "vocab.json": ("a vocabulary of GPT-2's BPE (vocab.json)", "Give it as --vocab-file"),
    "merges.txt": ("a list of merges of GPT-2's BPE (merges.txt)", "Give it as --merge-file"),
    "vocab.txt": ("a vocabulary of WordPiece", "Convert it"),
    "archive": ("a compressed file, or an archive", "Unpack it first."),
    "pointer": ("a pointer of Git LFS", "git lfs pull"),
    "empty": ("an empty file", "Copy it again."),
}
READERS = {
    "HuggingFaceTokenizer": "tokenizer.json",
    "TikTokenizer": "tiktoken.json",
    "SentencePieceTokenizer": "tokenizer.model",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabularies")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def error(**settings: str) -> str:
    with pytest.raises(DataError) as caught:
        build_tokenizer(TokenizerConfig(**settings))  # type: ignore[arg-type]
    assert not re.search(r"\w*(Error|Exception)\b", str(caught.value)), "the name of an exception"
    return str(caught.value)


@pytest.mark.parametrize("kind", READERS)
def test_a_vocabulary_of_another_kind_is_told_what_it_is(kind: str, folder: Path):
    wanted, _ = KINDS[READERS[kind]]
    for name in FILES:
        if KINDS.get(name, ("",))[0] == wanted:
            continue
        told = error(tokenizer_type=kind, tokenizer_model=str(folder / name))
        assert told.startswith(f"{folder / name} is not {wanted}: it "), told
        if name in KINDS:
            is_kind, fix = KINDS[name]
            assert f"it is {is_kind}" in told and fix in told
        else:
            assert "it cannot be understood" in told


@pytest.mark.parametrize("kind", READERS)
def test_a_vocabulary_of_its_own_kind_opens(kind: str, folder: Path):
    assert build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(folder / READERS[kind]))).vocab_size  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("vocab", "merges", "told"),
    [
        ("tokenizer.json", "merges.txt", "the first is a tokenizer.json. Use --tokenizer-type HuggingFaceTokenizer."),
        ("merges.txt", "vocab.json", "the first is a list of merges"),
        ("vocab.json", "tokenizer.model", "the second is a SentencePiece model. Use --tokenizer-type Sentence"),
        ("vocab.json", "archive", "the second is a compressed file"),
        ("open.json", "merges.txt", "one of them cannot be understood"),
    ],
)
def test_files_of_a_gpt2_tokenizer_that_are_others(vocab: str, merges: str, told: str, folder: Path):
    text = error(tokenizer_type="GPT2BPETokenizer", vocab_file=str(folder / vocab), merge_file=str(folder / merges))
    assert "are not a GPT-2 vocabulary and its merges" in text and told in text
