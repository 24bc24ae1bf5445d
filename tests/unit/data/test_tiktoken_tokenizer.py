"""The TikTokenizer against tiktoken itself, with Megatron's special tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiktoken

from petatron.base.errors import DataError
from petatron.config.schema.data import TokenizerConfig
from petatron.data.bpe.pre_tokenizer_patterns import TIKTOKENIZER_PATTERNS
from petatron.data.tiktoken_tokenizer import TikTokenizer
from petatron.data.tokenizer import HuggingFaceTokenizer, build_tokenizer
from petatron.data.vocabulary_difference import vocabulary_difference
from tests.longform import later
from tests.unit.data.vocabularies import random_texts, random_tokens, trained_tokens, write_vocabulary

SPECIAL = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]


def library(tokens: Sequence[bytes], specials: Sequence[str], pattern: str) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "real",
        pat_str=TIKTOKENIZER_PATTERNS[pattern],
        mergeable_ranks={token: rank + len(specials) for rank, token in enumerate(tokens)},
        special_tokens={name: number for number, name in enumerate(specials)},
    )


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("tiktoken") / "vocab.json", trained_tokens(420))


@pytest.mark.parametrize(("pattern", "count"), [("v1", 300), ("v2", 600), later("v1", 10_000), later("v2", 10_000)])
def test_ids_and_texts_are_tiktoken_s(vocabulary: Path, pattern: str, count: int) -> None:
    ours = TikTokenizer(vocabulary, pattern=pattern, num_special_tokens=10)
    real = library(trained_tokens(420), [*SPECIAL, "<SPECIAL_7>", "<SPECIAL_8>", "<SPECIAL_9>"], pattern)
    texts = random_texts(count)
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids == real.encode(text, allowed_special="all"), text
        assert ours.decode(ids) == text
    chance = random.Random(1)
    for _ in range(count):
        ids = chance.choices(range(ours.vocab_size), k=chance.randint(0, 8))
        assert ours.decode(ids) == real.decode(ids)
    assert (ours.vocab_size, ours.eod, ours.encode("</s>")) == (430, 2, [2])


@pytest.mark.parametrize("seed", [*range(4), *(later(seed) for seed in range(4, 60))])
def test_any_vocabulary_merges_as_tiktoken_does(tmp_path: Path, seed: int) -> None:
    """Also one in which a token has a lower rank than what it is made of, or overlaps itself."""
    tokens, chance = random_tokens(400, seed), random.Random(seed)
    ours = TikTokenizer(write_vocabulary(tmp_path / "x.tiktoken", tokens), num_special_tokens=7)
    real = library(tokens, SPECIAL, "v2")
    texts = ["".join(chance.choices("ab= ", weights=[6, 6, 2, 1], k=chance.randint(0, 50))) for _ in range(300)]
    assert ours.encode_batch(texts) == [real.encode(text) for text in texts]


def test_a_folder_with_its_files_has_the_same_tokenizer(vocabulary: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = TikTokenizer(vocabulary, num_special_tokens=20)
    for name, content in ours.files().items():
        (tmp_path / name).write_bytes(content)
    opened = HuggingFaceTokenizer(tmp_path)
    assert (opened.vocab_size, opened.eod) == (ours.vocab_size, ours.eod)
    assert vocabulary_difference(opened, ours) is None
    auto = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert (auto.eos_token_id, auto.bos_token_id, auto.pad_token_id) == (2, 1, 4)
    texts = random_texts(200)
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert opened.encode(text) == ids and opened.decode(ids) == text
        assert auto(text, add_special_tokens=False)["input_ids"] == ids


def test_vocabulary_size_and_special_tokens_are_megatron_s(vocabulary: Path) -> None:
    """Special tokens have the first ids, and the tokens of the highest ranks are cut."""
    config = TokenizerConfig(
        tokenizer_type="TikTokenizer",
        tokenizer_model=str(vocabulary),
        tiktoken_pattern="v1",
        tiktoken_num_special_tokens=9,
        tokenizer_special_tokens=("<fim>", *SPECIAL),
    )
    cut = build_tokenizer(config, vocab_size=300)
    assert cut.vocab_size == 300 and cut.eod == 3 and cut.encode("<fim><SPECIAL_8>A") == [0, 8, 9 + ord("A")]
    assert cut.encode("東京") == library(trained_tokens(420)[:291], ["<fim>", *SPECIAL, "<SPECIAL_8>"], "v1").encode(
        "東京"
    )
    assert build_tokenizer(config).vocab_size == 429
    assert cut.decode([299, 300, 1000]) == cut.decode([299])


def test_a_token_with_a_special_token_s_name_keeps_its_id(tmp_path: Path) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"<s", b"<s>", b"<s>x", b"<st"]
    ours = TikTokenizer(write_vocabulary(tmp_path / "v.json", tokens), num_special_tokens=7)
    real = library(tokens, SPECIAL, "v2")
    for text in ("<s>x", "<st", "<<s>>", "< s>"):
        assert ours.encode(text) == real.encode(text, allowed_special="all")
    assert ours.decode([7 + 257, 7 + 258]) == "<s><s>x" and ours.vocab_size == 267


def test_files_that_are_no_vocabulary(vocabulary: Path, tmp_path: Path) -> None:
    entries = json.loads(vocabulary.read_text())
    wrong = {
        "not.json": ("{", "cannot be understood"),
        "object.json": ("{}", "not the list of a vocabulary"),
        "bytes.json": (json.dumps(entries[1:]), "entry 0 is not rank 0"),
        "keys.json": (json.dumps([{"rank": 0}]), "entry 0 is not rank 0"),
        "order.json": (json.dumps([{**entries[1], "rank": 0}, *entries[1:]]), "first 256 tokens are not the bytes"),
        "twice.json": (json.dumps([*entries, {**entries[-1], "rank": len(entries)}]), "two ranks have the same token"),
        "gap.tiktoken": ("AA== 0\nAQ== 2\n", "rank 2 follows rank 0"),
        "few.tiktoken": ("AA== 0\nAQ== 1\n", "no token for the byte 0x02"),
        "text.tiktoken": ("some words here\n", "cannot be understood"),
        "long.json": (
            json.dumps([*entries, {"rank": len(entries), "token_bytes": "A" * 2000, "token_str": ""}]),
            "more than 1024",
        ),
    }
    for name, (content, why) in wrong.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match="is not a vocabulary of tiktoken") as caught:
            TikTokenizer(tmp_path / name)
        assert why in str(caught.value), name
    with pytest.raises(DataError, match="cannot be read: No such file"):
        TikTokenizer(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_special_tokens": 3}, "are 7, and --tiktoken-num-special-tokens 3 are reserved"),
        ({"special_tokens": ["<s>"]}, "have no <unk> </s> <mask> <pad> <cls> <sep>"),
        ({"special_tokens": [*SPECIAL, "<s>"]}, "name a token twice"),
        ({"special_tokens": [*SPECIAL, "<SPECIAL_9>"]}, "name a token twice"),
        ({"special_tokens": [*SPECIAL, "<é>"]}, "'<é>', which is empty or not ASCII"),
        ({"vocab_size": 1100}, "--vocab-size 1100 has no room for 1000 special tokens and the 256 bytes"),
        ({"vocab_size": 5000}, "--vocab-size 5000 is more than the 1000 special tokens and 420 tokens"),
    ],
)
def test_sizes_and_names_that_cannot_be(vocabulary: Path, settings: dict, why: str) -> None:
    with pytest.raises(DataError) as caught:
        TikTokenizer(vocabulary, **settings)
    assert why in str(caught.value)
