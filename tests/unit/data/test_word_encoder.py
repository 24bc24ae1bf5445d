"""Byte-level BPE by looking words up gives the ids of the library, for every pattern and any text."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from petatron.data.bpe import word_encoder as module
from petatron.data.bpe.pre_tokenizer_patterns import GPT4O_PATTERNS, SPLIT_PATTERNS
from petatron.data.bpe.train_bpe import train_byte_level_bpe
from petatron.data.bpe.word_encoder import word_encoder
from petatron.data.tokenizer import HuggingFaceTokenizer
from tests.unit.data.vocabularies import LINES, random_texts

PIECES = [
    *"abzAZ019 '\"!.,-_/\n\r\t\x0b\x1c\x1f\x85\xa0\u2028\u3000\u180e\u200bßſСл中文\u0301\u0300ǅʰ٣½😀stl’",
    *("'s", "'S", "'ll", "'rE", "  ", "   ", "\n\n", "\r\n", " \n ", "<|endoftext|>", "The item ", "of the list"),
]


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def byte_level(**options: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def split_by_removal(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "removed", invert=True), byte_level])


PRE_TOKENIZERS = [
    byte_level(),
    pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()]),
    *map(split, sorted(SPLIT_PATTERNS)),
    split_by_removal(min(GPT4O_PATTERNS)),
]


@pytest.fixture(scope="module")
def content() -> str:
    return train_byte_level_bpe(LINES * 3, 700, special_tokens=["Items", "e\u0301t"]).to_str()


def library_ids(fast: FastTokenizer, text: str) -> list[int]:
    return fast.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["none", "nfc"])
@pytest.mark.parametrize("number", range(len(PRE_TOKENIZERS)))
def test_ids_are_those_of_the_library(content: str, number: int, normalizer: normalizers.Normalizer | None):
    fast = FastTokenizer.from_str(content)
    fast.pre_tokenizer = PRE_TOKENIZERS[number]
    if normalizer is not None:
        fast.normalizer = normalizer
    encoder = word_encoder(fast)
    assert encoder is not None
    rng = random.Random(number)
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(1, 30))) for _ in range(400)]
    texts += ["", *LINES, *random_texts(100, seed=number)]
    for text in texts:
        assert encoder.encode(text) == library_ids(fast, text), repr(text)
    again = pickle.loads(pickle.dumps(encoder))
    assert all(again.encode(text) == encoder.encode(text) for text in texts[:20])


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer"])
def test_the_patterns_are_those_of_published_tokenizers(content: str, name: str):
    """transformers builds a family's tokenizer, its pattern included, around any vocabulary."""
    model = json.loads(content)["model"]
    fast = getattr(transformers, name)(vocab=model["vocab"], merges=list(map(tuple, model["merges"]))).backend_tokenizer
    encoder = word_encoder(fast)
    assert encoder is not None
    for text in random_texts(200):
        assert encoder.encode(text) == library_ids(fast, text)


def test_names_of_added_tokens_have_their_ids(content: str):
    fast = FastTokenizer.from_str(content)
    fast.normalizer = normalizers.NFC()
    fast.add_tokens([AddedToken("\u00e9 \u00e9", normalized=True), AddedToken("strip", lstrip=True, rstrip=True)])
    encoder = word_encoder(fast)
    assert encoder is not None
    texts = ["a\u00e9 \u00e9b", "ae\u0301 \u00e9b", "no  strip  here", "Items and items", "x e\u0301t"]
    for text in texts:
        assert encoder.encode(text) == library_ids(fast, text)
    assert fast.token_to_id("\u00e9 \u00e9") in encoder.encode("ae\u0301 e\u0301b")


UNKNOWN: dict[str, Callable[[FastTokenizer], object]] = {
    "a space before the first word": lambda fast: setattr(fast, "pre_tokenizer", byte_level(add_prefix_space=True)),
    "another pattern": lambda fast: setattr(fast, "pre_tokenizer", split(r"\w+|\W+")),
    "what is between words": lambda fast: setattr(fast, "pre_tokenizer", split_by_removal(r"\w+")),
    "no pattern": lambda fast: setattr(fast, "pre_tokenizer", byte_level(use_regex=False)),
    "lower case": lambda fast: setattr(fast, "normalizer", normalizers.Lowercase()),
    "dropout": lambda fast: setattr(fast.model, "dropout", 0.1),
    "words": lambda fast: setattr(fast, "model", models.WordLevel({"a": 0}, unk_token="a")),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_tokenizers_are_left_to_the_library(content: str, name: str):
    fast = FastTokenizer.from_str(content)
    assert word_encoder(fast) is not None
    UNKNOWN[name](fast)
    assert word_encoder(fast) is None


def test_no_more_words_are_kept_than_said(content: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_WORDS", 5)
    monkeypatch.setattr(module, "MAX_WORD_CHARS", 4)
    fast = FastTokenizer.from_str(content)
    encoder = word_encoder(fast)
    assert encoder is not None
    text = "longer words than four, then a b c d e f g h a b"
    assert encoder.encode(text) == encoder.encode(text) == library_ids(fast, text)
    kept = encoder._ids  # pyright: ignore[reportPrivateUsage]
    assert len(kept) == 5 and all(len(word) <= 4 for word in kept)


def test_batches_of_a_tokenizer_go_by_words(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tokenizer.json").write_text(content)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.encode_batch(LINES) == [tokenizer.encode(line) for line in LINES]
    monkeypatch.setattr(module.WordEncoder, "encode", lambda _, text: [len(text)])
    assert tokenizer.encode_batch(["abc"]) == [[3]]
