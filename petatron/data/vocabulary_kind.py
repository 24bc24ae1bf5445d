"""Detects which kind of vocabulary a file is (tokenizer.json, tiktoken, SentencePiece, GPT-2), for errors about a wrong kind.

Every trainer names its file as it likes (`tokenizer.model` is SentencePiece's or tiktoken's), so the first bytes decide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import open_regular_file

_PREFIX_BYTES = 1 << 16
_EXCEPTION = re.compile(r"cannot be understood \((?:(\w+)(?:: (.*))?|(it .*))\)", re.S)
_LIBRARY_PREFIXES = re.compile(r"^(?:Cannot instantiate Tokenizer from buffer|Error while \w+ BPE(?: files)?): ")
_UNTOLD = ("KeyError", "IndexError", "AttributeError", "PanicException", "Error")
"""Exceptions whose text says nothing to somebody who does not know the code."""


@dataclass(frozen=True, slots=True)
class VocabularyKind:
    """A kind of file: what it is called, how to give it, and how it begins."""

    name: str
    fix: str
    begins: re.Pattern[bytes]


def _kind(name: str, fix: str, begins: bytes) -> VocabularyKind:
    return VocabularyKind(name, fix, re.compile(begins, re.S))


TOKENIZER_JSON = _kind(
    "a tokenizer.json", "Use --tokenizer-type HuggingFaceTokenizer", rb'\s*\{(?=.*"(model|added_tokens)"\s*:)'
)
TIKTOKEN = _kind(
    "a vocabulary of tiktoken",
    "Use --tokenizer-type TikTokenizer",
    rb'\s*\[\s*\{[^{}]*"(token_bytes|token_str)"|[A-Za-z0-9+/]+=* \d+\r?(\n|$)',
)
SENTENCEPIECE = _kind(
    "a SentencePiece model",
    "Use --tokenizer-type SentencePieceTokenizer, GPTSentencePieceTokenizer or Llama2Tokenizer",
    rb"\n[\x03-\x7f]\n|\n[\x80-\xff]+[\x00-\x7f]\n",
)
GPT2_VOCABULARY = _kind(
    "a vocabulary of GPT-2's BPE (vocab.json)",
    "Give it as --vocab-file, with its merges.txt as --merge-file",
    rb'\s*\{\s*"(\\.|[^"\\])*"\s*:\s*\d',
)
GPT2_MERGES = _kind(
    "a list of merges of GPT-2's BPE (merges.txt)",
    "Give it as --merge-file, with its vocab.json as --vocab-file",
    rb"#version|[^\s{\[]+ [^\s{\[]+\r?\n[^\s]+ [^\s]+\r?(\n|$)",
)
_WORDPIECE = _kind(
    "a vocabulary of WordPiece, as BERT has it",
    "Convert it to a tokenizer.json first",
    rb"\[PAD\]\r?\n|.*\n\[UNK\]\r?\n",
)
_ARCHIVE = _kind(
    "a compressed file, or an archive", "Unpack it first", rb"\x1f\x8b|PK\x03\x04|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd"
)
_EMPTY = _kind("an empty file", "Copy it again", rb"$")
_POINTER = _kind("a pointer of Git LFS", "Fetch the file itself (`git lfs pull`)", rb"version https://git-lfs")
_KINDS = (
    *(_POINTER, _EMPTY, _ARCHIVE, SENTENCEPIECE, GPT2_VOCABULARY, TIKTOKEN, TOKENIZER_JSON, GPT2_MERGES, _WORDPIECE),
)


def vocabulary_kind(content: bytes) -> VocabularyKind | None:
    """Returns the kind of a file from its first bytes.

    >>> [kind and kind.name for kind in map(vocabulary_kind, (b'{"a": 0}', b"AA== 0", b"{}"))]
    ["a vocabulary of GPT-2's BPE (vocab.json)", 'a vocabulary of tiktoken', None]
    """
    return next((kind for kind in _KINDS if kind.begins.match(content)), None)


def wrong_kind(paths: Sequence[Path], wanted: Sequence[VocabularyKind]) -> tuple[int, VocabularyKind] | None:
    """Returns the first of these files that is of another kind than its own, by its place, with what it is."""
    for place, (path, kind) in enumerate(zip(paths, wanted, strict=True)):
        try:
            with open_regular_file(path) as file:
                is_kind = vocabulary_kind(file.read(_PREFIX_BYTES))
        except OSError:  # told by whoever reads it
            continue
        if is_kind is not None and is_kind is not kind:
            return place, is_kind
    return None


def vocabulary_error(path: Path, why: str, wanted: VocabularyKind, fix: str) -> str:
    """Returns the text of the error about a file that is not the vocabulary that was wanted; `fix` is for a file of no known kind."""
    other = wrong_kind([path], [wanted])
    told, remedy = (plain_reason(why), fix) if other is None else (f"is {other[1].name}", other[1].fix)
    return f"{printable(str(path))} is not {wanted.name}: it {told}. {remedy}."


def plain_reason(why: str) -> str:
    """Returns a reason of `reading_untrusted` without the name of the exception.

    >>> plain_reason("cannot be understood (ValueError: rank 2 follows rank 0)"), plain_reason("cannot be understood (KeyError: 3)")
    ('cannot be understood: rank 2 follows rank 0', 'cannot be understood')
    """
    match = _EXCEPTION.fullmatch(why)
    if match is None:
        return why
    name, said, remark = match.groups()
    text = remark or ("" if name in _UNTOLD else _LIBRARY_PREFIXES.sub("", said or "").rstrip("."))
    return f"cannot be understood{': ' if text else ''}{text}"
