"""WordPiece tokenizers: the ids of transformers' BertTokenizer, in both of its implementations, and those of Megatron's settings."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import DataError
from petatron.config.schema.data import TokenizerConfig
from petatron.config.schema.sections.vocabulary import padded_rows
from petatron.data.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    build_tokenizer,
    folder_tokenizer,
)
from petatron.data.transformers_tokenizer import missing_for_transformers
from petatron.data.vocabulary_difference import vocabulary_difference
from tests.unit.data.vocabularies import BERT_SPECIAL_TOKENS, bert_texts, write_bert_vocabulary

KINDS = ("BertWordPieceLowerCase", "BertWordPieceCase")


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert_vocabulary(tmp_path_factory.mktemp("bert") / "vocab.txt")


def opened(vocab: Path, kind: Any, **settings: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, vocab_file=str(vocab), **settings))


@functools.cache
def texts() -> tuple[str, ...]:
    return tuple(bert_texts(10_000))


@pytest.mark.parametrize("in_python", [False, True], ids=["library", "python"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(vocab: Path, kind: str, in_python: bool):
    from transformers.models.bert.tokenization_bert import BertTokenizer
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    lowercase = kind == "BertWordPieceLowerCase"
    if in_python:
        theirs = BertTokenizerLegacy(str(vocab), do_lower_case=lowercase)
    else:
        theirs = BertTokenizer.from_pretrained(str(vocab.parent), do_lower_case=lowercase)
    ours = opened(vocab, kind, tokenizer_hf_no_use_fast=in_python)
    expected = theirs(list(texts()), add_special_tokens=False)["input_ids"]
    for text, ids, real in zip(texts(), ours.encode_batch(texts()), expected, strict=True):
        assert ids == real, ascii(text)
    assert ours.vocab_size == len(theirs) == len(theirs.get_vocab())
    assert [ours.encode(name) for name in BERT_SPECIAL_TOKENS] == [
        [theirs.convert_tokens_to_ids(name)] for name in BERT_SPECIAL_TOKENS
    ]


def test_the_two_implementations_differ_where_unicode_is_newer_or_composed(vocab: Path):
    """The difference that --tokenizer-hf-no-use-fast makes; without such texts the test above would show nothing."""
    for kind, text in (("BertWordPieceLowerCase", "\u0378"), ("BertWordPieceCase", "e\u0301"), (KINDS[0], "ΣΣ")):
        library, python = opened(vocab, kind), opened(vocab, kind, tokenizer_hf_no_use_fast=True)
        assert library.encode(text) != python.encode(text)
        assert library.encode("The café, 東京!") == python.encode("The café, 東京!")


def test_words_and_special_tokens(vocab: Path):
    lower, cased = (opened(vocab, kind) for kind in KINDS)
    assert lower.decode(lower.encode("thé ITEM items?")) == "the item items?"
    assert cased.decode(cased.encode("é ITEM items?")) == "é [UNK] items?"
    mask, unknown = lower.encode("[MASK][UNK]")
    assert lower.encode("the [MASK].")[1] == mask and lower.encode("𓀀" * 3) == [unknown]
    assert lower.encode("a" * 101) == [unknown] != lower.encode("a" * 100)
    assert lower.encode("") == lower.encode(" \t\u3000") == []
    assert lower.eod == lower.encode("[SEP]")[0]


@pytest.mark.parametrize("in_python", [False, True])
def test_special_tokens_and_sentinels_have_ids_after_the_vocabulary(vocab: Path, in_python: bool):
    size = opened(vocab, KINDS[0]).vocab_size
    settings = {"tokenizer_special_tokens": ("[BOS]", "[EOS]", "the"), "vocab_extra_ids": 3}
    ours = opened(vocab, KINDS[0], tokenizer_hf_no_use_fast=in_python, **settings)
    assert ours.vocab_size == size + 5 and ours.eod == size + 1
    ids = ours.encode("item<extra_id_0>item <extra_id_2>[BOS]<extra_id_3>")
    assert [number for number in ids if number >= size] == [size + 2, size + 4, size]
    assert ours.encode("the") == opened(vocab, KINDS[0]).encode("the")  # a token of the vocabulary keeps its id
    assert ours.decode([size + 2, size]) == "<extra_id_0> [BOS]"
    with pytest.raises(DataError, match="names an empty token"):
        opened(vocab, KINDS[0], tokenizer_special_tokens=("",))


def test_the_padded_vocabulary_is_megatron_s():
    """BERT's 30,522 and 28,996 tokens with T5's 100 sentinels, at 1 and 8 tensor-parallel ranks."""
    sizes = [padded_rows(rows, 128, ranks) for rows in (30_522, 29_096) for ranks in (1, 8)]
    assert sizes == [30_592, 30_720, 29_184, 29_696]


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_of_a_model_folder_give_the_same_ids(vocab: Path, kind: str, tmp_path: Path):
    from transformers import AutoTokenizer

    ours = opened(vocab, kind, tokenizer_special_tokens=("[EOS]",), vocab_extra_ids=2)
    for name, content in ours.files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    config = folder_tokenizer(tmp_path)
    assert config is not None and missing_for_transformers(ours) is None
    again = build_tokenizer(config)
    assert isinstance(again, HuggingFaceTokenizer) and (again.eod, again.vocab_size) == (ours.eod, ours.vocab_size)
    some = texts()[:2000]
    assert again.encode_batch(some) == ours.encode_batch(some)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(list(some), add_special_tokens=False)["input_ids"] == ours.encode_batch(some)
    wrapped = theirs("the item").input_ids
    assert (wrapped[0], wrapped[-1]) == (ours.encode("[CLS]")[0], ours.encode("[SEP]")[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_with_a_vocab_txt_alone(vocab: Path, kind: Any, tmp_path: Path):
    ours = opened(vocab, kind, tokenizer_special_tokens=("[EOS]",), vocab_extra_ids=2, tokenizer_hf_no_use_fast=True)
    for name, content in ours.files().items():
        (tmp_path / name).write_bytes(content)
    assert not (tmp_path / "tokenizer.json").exists() and "in its own way" in (missing_for_transformers(ours) or "")
    config = folder_tokenizer(tmp_path)
    assert config is not None and config.tokenizer_type == kind
    again = build_tokenizer(config)
    assert again.encode_batch(texts()[:2000]) == ours.encode_batch(texts()[:2000])
    assert vocabulary_difference(again, ours) is None
    assert "id" in (vocabulary_difference(opened(vocab, kind), ours) or "")
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"do_lower_case": kind == KINDS[0]}))
    assert folder_tokenizer(tmp_path) == TokenizerConfig(tokenizer_type=kind, vocab_file=str(tmp_path / "vocab.txt"))
    settings.unlink()
    config = folder_tokenizer(tmp_path)
    assert config is not None and config.tokenizer_type == "BertWordPieceLowerCase"  # as in transformers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[PAD]\n[UNK]\n[CLS]\n", "has no \\[SEP\\] \\[MASK\\]"),
        (b"", "has no \\[UNK\\]"),
        (b"[PAD]\n\xff\n", "cannot be understood"),
        (None, "does not exist. Check --vocab-file"),
    ],
)
def test_files_that_are_no_vocabulary(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        opened(path, KINDS[0])
    with pytest.raises(DataError, match="is not a file"):
        opened(tmp_path, KINDS[0])
    with pytest.raises(DataError, match="BertWordPieceCase needs --vocab-file"):
        build_tokenizer(TokenizerConfig(tokenizer_type="BertWordPieceCase"))


@pytest.mark.parametrize("in_python", [False, True])
def test_lines_of_other_systems_and_repeated_tokens(vocab: Path, tmp_path: Path, in_python: bool):
    """As transformers reads them: line ends of Windows count as one, and the last line of a token gives its id."""
    from transformers.models.bert.tokenization_bert import load_vocab

    lines = vocab.read_text().splitlines()
    path = tmp_path / "vocab.txt"
    path.write_bytes("\r\n".join([*lines, "", "item", "[MASK]"]).encode())
    ours, expected = opened(path, KINDS[0], tokenizer_hf_no_use_fast=in_python), load_vocab(str(path))
    assert ours.encode("item [MASK]") == [expected["item"], expected["[MASK]"]] == [len(lines) + 1, len(lines) + 2]
    assert ours.vocab_size == len(lines) + 3
    assert ours.decode([lines.index("item"), ours.encode("the")[0]]) == "the"


def test_random_ids_decode(vocab: Path):
    ours, chance = opened(vocab, KINDS[1]), random.Random(0)
    from transformers.models.bert.tokenization_bert import BertTokenizer

    theirs = BertTokenizer.from_pretrained(str(vocab.parent), do_lower_case=False)
    for _ in range(300):
        ids = chance.choices(range(ours.vocab_size), k=chance.randint(0, 12))
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False), ids
    with pytest.raises(DataError, match="Token ids for the tokenizer"):
        ours.decode([-1])
