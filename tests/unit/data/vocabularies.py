"""Vocabularies that the real trainers make of a small text, and texts that try them."""

from __future__ import annotations

import base64
import functools
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from petatron.data.tiktoken_tokenizer import PRETOKENIZE_PATTERNS

LINES = [
    "def read(path):\n    return open(path).read()",
    "for item in items: print(item)  # prints  every item",
    "The MixedCase of CamelWords, don't we'll 123,456.789 and https://example.org/a/b",
    "naïve café — 東京タワー 🙂🙂 e\u0301te\u0301 ǅ ٣٤",
    "<s>struck</s> <strong>aaaa aaaaa</strong> ==== ===== /// ",
    "\t\ttabs and    spaces   \n\n\n  \r\n end",
]
_PARTS = (
    *"<s> </s> <unk> <mask> <SPECIAL_8> <SPECIAL_ <x> <y> <0x41> <extra_id_1> <EOD> ▁ ☯ aaaa ==== 's / The item é 東京 🙂 ǅ ٣".split(),
    *("\u0301", "\x85", "\u3000", "\ufeff", "\0"),
)
SPACES = " \t\n\r\x0b\x85\u2003"


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of ASCII, of any character, of spaces, of words, and of what a tokenizer may take for a special token."""
    chance = random.Random(seed)
    words, texts = " ".join(LINES), ["", " ", "  a", "a  "]
    while len(texts) < count:
        length = chance.randint(0, 30)
        kind = chance.randrange(5)
        if kind == 0:
            text = "".join(chr(chance.randrange(128)) for _ in range(length))
        elif kind == 1:
            text = "".join(
                chr(code) for code in chance.choices(range(0x110000), k=length) if not 0xD800 <= code < 0xE000
            )
        elif kind == 2:
            text = "".join(chance.choices(SPACES + "ab=▁", k=length))
        elif kind == 3:
            start = chance.randrange(len(words))
            text = words[start : start + 3 * length]
        else:
            text = "".join(chance.choices([*_PARTS, " ", "  "], k=length))
        texts.append(text)
    return texts


@functools.cache
def trained_tokens(size: int) -> tuple[bytes, ...]:
    """Tokens by rank, from the trainer that tiktoken has for education."""
    from tiktoken._educational import bpe_train

    ranks = bpe_train("\n".join(LINES * 3), size, PRETOKENIZE_PATTERNS["v2"], visualise=None)
    return tuple(sorted(ranks, key=lambda token: ranks[token]))


def random_tokens(size: int, seed: int) -> tuple[bytes, ...]:
    """A vocabulary that no trainer would make: tokens that no merges lead to, and ranks below those of their parts."""
    chance = random.Random(seed)
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(tokens) < size:
        known = chance.choice(list(tokens)[97:]) if chance.random() < 0.3 else b""
        token = known + bytes(chance.choices(b"ab= ", k=chance.randint(1, 5)))
        if len(token) < 12:
            tokens[token] = None
    return tuple(tokens)


def write_vocabulary(path: Path, tokens: Sequence[bytes]) -> Path:
    """Writes Megatron's kind of file, or tiktoken's own, by the ending of its name."""
    encoded = [base64.b64encode(token).decode() for token in tokens]
    if path.suffix == ".tiktoken":
        path.write_text("".join(f"{text} {rank}\n" for rank, text in enumerate(encoded)))
    else:
        entries = [{"rank": rank, "token_bytes": text, "token_str": ""} for rank, text in enumerate(encoded)]
        path.write_text(json.dumps(entries))
    return path


_EXACT = {
    "model_type": "bpe",
    "vocab_size": 420,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "character_coverage": 0.98,
}
PIECE_MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_EXACT, "byte_fallback": True},
    "unknown": {**_EXACT, "vocab_size": 120},
    "no prefix": {**_EXACT, "byte_fallback": True, "add_dummy_prefix": False, "pad_id": 3},
    "spaces inside": {**_EXACT, "byte_fallback": True, "split_by_whitespace": False, "split_digits": True},
    "unigram": {**_EXACT, "model_type": "unigram", "byte_fallback": True, "vocab_size": 330},
    "t5": {"model_type": "unigram", "vocab_size": 75, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "user symbols": {**_EXACT, "vocab_size": 120, "user_defined_symbols": ["<x>", "<y>"]},
}
EXACT_MODELS = ("llama", "unknown", "no prefix", "spaces inside")


@functools.cache
def piece_model(name: str) -> bytes:
    """The content of a `.model` of SentencePiece's trainer."""
    from sentencepiece import SentencePieceTrainer

    out = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in LINES for line in text.splitlines()] * 5),
        model_writer=out,
        minloglevel=2,
        **PIECE_MODELS[name],
    )
    return out.getvalue()
