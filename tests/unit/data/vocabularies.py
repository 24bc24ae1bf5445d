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

from petatron.data.bpe.pre_tokenizer_patterns import TIKTOKENIZER_PATTERNS

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

    ranks = bpe_train("\n".join(LINES * 3), size, TIKTOKENIZER_PATTERNS["v2"], visualise=None)
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


BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LETTERS = (
    *"abcdeéèEÉÀzZßİıĲǅάΣσςΩΐЙй",
    *("\u0301", "\u0308", "\u0345", "\u0940", "\u05bc", "\uff9e"),  # marks
    *("한", "\u1112", "\u1161", "東", "京", "〆", "豈", "\U0002f800", "ね", "カ"),
    *("ﬁ", "K", "Å", "\u1fbe", "٣", "１", "²", "Ⅷ"),
    *"'’«»–…?!()$^`",
    *("\u2e4f", "\U00016fe2", "᙭", "\U00011660", "\u2329"),  # punctuation, some of it newer than the library's tables
    *("\0", "\u200b", "\u00ad", "\ufeff", "\ufffd", "\x85", "\u2028", "\u3000", "\u00a0", "\u0378", "\ue000", "\x1c"),
    *" \t\r\n",
)
_NAMES = (
    *BERT_SPECIAL_TOKENS,
    "[mask]",
    "[MA\0SK]",
    " [ SEP ]",
    "[CLS]]",
    "the",
    "item",
    "##s",
    "open",
    "<extra_id_0>",
)


def write_bert_vocabulary(path: Path) -> Path:
    """Writes a vocab.txt: special tokens, the letters of `bert_texts`, and words of LINES in pieces."""
    words = sorted({word for line in LINES for word in line.split() if word.isalnum()})
    words += [word.lower() for word in words]
    pieces = [f"##{word[cut:]}" for word in words for cut in range(1, len(word))]
    letters = [letter for letter in _LETTERS if not letter.isspace()]
    letters += [form for letter in letters for form in (letter.lower(), letter.upper())]
    tokens = [*BERT_SPECIAL_TOKENS, *words, "items", *letters, *(f"##{letter}" for letter in letters), *pieces]
    path.write_text("".join(f"{token}\n" for token in dict.fromkeys(tokens)), encoding="utf-8", newline="\n")
    return path


def bert_texts(count: int, seed: int = 0) -> list[str]:
    """Random texts: of any characters, of those with rules of their own, and of words among special tokens."""
    chance = random.Random(seed)
    texts = random_texts(count // 2, seed)
    while len(texts) < count:
        letters = chance.choices(_LETTERS, k=chance.randint(1, 20))
        names = chance.choices(_NAMES, k=3) if chance.random() < 0.5 else [""]
        texts.append(chance.choice(("", " ", "a")).join([*letters, *names, *letters[:3]]))
    return texts
