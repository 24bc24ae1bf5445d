"""Spans and bytes of tokens against the libraries' own, on random texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import normalizers

from petatron.base.errors import DataError
from petatron.config.schema.data import TokenizerConfig
from petatron.data.bpe.pre_tokenizer_patterns import TIKTOKENIZER_PATTERNS
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.encoded_text import EncodedText, byte_spans
from petatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, NullTokenizer, Tokenizer, build_tokenizer
from tests.longform import later
from tests.unit.data.vocabularies import (
    LINES,
    PIECE_MODELS,
    bert_texts,
    piece_model,
    random_texts,
    trained_tokens,
    write_bert_vocabulary,
    write_vocabulary,
)

TEXTS, LONG = 200, 10_000
COUNTS = [TEXTS, later(LONG)]


def opened(kind: Any, **settings: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **settings))


def pieces(name: str, folder: Path, **settings: Any) -> Tokenizer:
    path = folder / "x.model"
    path.write_bytes(piece_model(name))
    return opened("SentencePieceTokenizer", tokenizer_model=str(path), **settings)


def byte_level(folder: Path) -> HuggingFaceTokenizer:
    return train_bpe(LINES * 3, 420, folder / "tokenizer.json")


def check(tokenizer: Tokenizer, text: str) -> EncodedText:
    """Returns ids and spans, which are in the order of the text."""
    encoded = tokenizer.encode_with_offsets(text)
    assert encoded.ids == tokenizer.encode(text) == tokenizer.encode_batch([text])[0], text
    assert len(encoded.spans) == len(encoded.ids)
    assert all(0 <= start <= stop <= len(text) for start, stop in encoded.spans)
    assert encoded.spans == sorted(encoded.spans)
    return encoded


@pytest.mark.parametrize("count", COUNTS)
def test_byte_level_spans_and_bytes(tmp_path: Path, count: int):
    ours = byte_level(tmp_path)
    theirs = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in random_texts(count):
        encoded, encoding = check(ours, text), theirs.encode(text, add_special_tokens=False)
        assert encoded.spans == encoding.offsets
        assert (
            ours.decode_bytes(encoded.ids) == b"".join(ours.decode_bytes([id]) for id in encoded.ids) == text.encode()
        )
        for id, (start, stop) in zip(encoded.ids, byte_spans(text, encoded.spans), strict=True):
            assert ours.decode_bytes([id]) in text.encode()[start:stop]


@pytest.mark.parametrize("count", COUNTS)
def test_gpt2_spans_are_those_of_the_same_tokenizer_json(tmp_path: Path, count: int):
    import json

    byte_level(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    ours, theirs = opened("GPT2BPETokenizer", **files), HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    for text in random_texts(count, seed=1):
        assert check(ours, text) == theirs.encode_with_offsets(text)
        assert ours.decode_bytes(ours.encode(text)) == text.encode()


@pytest.mark.parametrize("count", COUNTS)
def test_tiktoken_spans_and_bytes(tmp_path: Path, count: int):
    """tiktoken gives the start of each token: of a part of a character, that of the character."""
    from tiktoken import Encoding

    tokens = trained_tokens(420)
    path = write_vocabulary(tmp_path / "vocab.json", tokens)
    ours = opened("TikTokenizer", tokenizer_model=str(path), tiktoken_num_special_tokens=10)
    theirs = Encoding(
        "x",
        pat_str=TIKTOKENIZER_PATTERNS["v2"],
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={},
    )
    for text in random_texts(count, seed=2):
        if "<" in text:  # special tokens are ours
            continue
        encoded = check(ours, text)
        _, starts = theirs.decode_with_offsets([id - 10 for id in encoded.ids])
        assert [start for start, _ in encoded.spans] == starts
        assert ours.decode_bytes(encoded.ids) == text.encode()
        for id, (start, stop) in zip(encoded.ids, encoded.spans, strict=True):
            assert theirs.decode_single_token_bytes(id - 10) in text[start:stop].encode()


@pytest.mark.parametrize(("lowercase", "count"), [(True, TEXTS), (False, TEXTS), later(True, LONG), later(False, LONG)])
def test_word_piece_spans_are_those_of_transformers(tmp_path: Path, lowercase: bool, count: int):
    from transformers import BertTokenizerFast  # pyright: ignore[reportAttributeAccessIssue]

    path = write_bert_vocabulary(tmp_path / "vocab.txt")
    kind = "BertWordPieceLowerCase" if lowercase else "BertWordPieceCase"
    ours = opened(kind, vocab_file=str(path))
    vocab = {line: number for number, line in enumerate(path.read_text("utf-8").split("\n")[:-1])}
    theirs = BertTokenizerFast(vocab=vocab, do_lower_case=lowercase)
    for text in bert_texts(count):
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        encoded = check(ours, text)
        assert (encoded.ids, encoded.spans) == (expected["input_ids"], expected["offset_mapping"]), text
    assert ours.decode_bytes(ours.encode("The item")) == ours.decode(ours.encode("The item")).encode()


def library_spans(library: Any, text: str) -> list[tuple[int, int]]:
    proto = library.encode(text, out_type="proto")
    content = text.encode()
    return [(len(content[: piece.begin].decode()), len(content[: piece.end].decode())) for piece in proto.pieces]


@pytest.mark.parametrize(
    ("name", "count"), [*((name, TEXTS) for name in PIECE_MODELS), *(later(name, LONG) for name in PIECE_MODELS)]
)
def test_pieces_have_the_library_s_spans(tmp_path: Path, name: str, count: int):
    from sentencepiece import SentencePieceProcessor

    ours, library = pieces(name, tmp_path), SentencePieceProcessor(model_proto=piece_model(name))
    for text in random_texts(count, seed=3):
        encoded = check(ours, text)
        assert encoded.spans == library_spans(library, text), text
        if PIECE_MODELS[name].get("byte_fallback") and "▁" not in text:
            assert ours.decode_bytes(encoded.ids) == text.encode()
        assert ours.decode_bytes(encoded.ids).decode(errors="replace") == ours.decode(encoded.ids)


def test_pieces_of_a_part_of_a_character_keep_their_bytes(tmp_path: Path):
    ours = pieces("llama", tmp_path)
    ids = ours.encode("The 東京")
    assert ours.decode_bytes(ids[:-1]) == "The 東京".encode()[:-1] != ours.decode(ids[:-1]).encode()
    folder = tmp_path / "saved"
    folder.mkdir()
    for name, content in ours.files().items():
        (folder / name).write_bytes(content)
    again = HuggingFaceTokenizer(folder)
    assert again.decode_bytes(ids[:-1]) == "The 東京".encode()[:-1]
    for text in random_texts(TEXTS, seed=4):
        if "<" not in text and "▁" not in text:
            assert again.decode_bytes(again.encode(text)) == text.encode()


@pytest.mark.parametrize(
    "settings",
    [
        {"vocab_extra_ids": 3},
        {"tokenizer_special_tokens": ("<x>", "item"), "tokenizer_sentencepiece_legacy": True},
        {"tokenizer_sentencepiece_ignore_extra_whitespaces": False},
    ],
)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_spans_around_special_tokens_and_spaces(tmp_path: Path, name: str, settings: dict[str, Any]):
    ours = pieces(name, tmp_path, **settings)
    for text in [*random_texts(TEXTS, seed=5), "a  b", "<x> item  <extra_id_1>東", "  "]:
        encoded = check(ours, text)
        for id, (start, stop) in zip(encoded.ids, encoded.spans, strict=True):
            piece = ours.decode([id]).strip()
            if piece.isascii() and piece.isalnum() and start < stop and text[start:stop].isascii():
                assert piece in text[start:stop]


def test_bytes_and_numbers():
    ours = ByteTokenizer()
    for text in random_texts(50):
        encoded = check(ours, text)
        assert ours.decode_bytes(encoded.ids) == text.encode()
        assert len(set(byte_spans(text, encoded.spans))) == len(text)
    null = NullTokenizer(99)
    assert null.encode_with_offsets(" 12  7\n") == EncodedText([12, 7], [(1, 3), (5, 6)])
    with pytest.raises(DataError, match=r"stand for no bytes of a text: it knows numbers alone\. Give the tokenizer"):
        null.decode_bytes([3])


def test_words_that_python_divides_have_no_spans(tmp_path: Path):
    path = write_bert_vocabulary(tmp_path / "vocab.txt")
    ours = opened("BertWordPieceCase", vocab_file=str(path), tokenizer_hf_no_use_fast=True)
    with pytest.raises(DataError, match=r"--tokenizer-hf-no-use-fast.*Leave the flag out"):
        ours.encode_with_offsets("The item")


def test_an_added_token_is_text_whatever_its_letters_are(tmp_path: Path):
    """`é` alone stands for a byte of a byte-level vocabulary, but an added token with it does not."""
    byte_level(tmp_path)
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.add_tokens(["café"])
    fast.save(str(tmp_path / "tokenizer.json"))
    ours = HuggingFaceTokenizer(tmp_path)
    ids = ours.encode("a café")
    assert ids[-1] == ours.vocab_size - 1
    assert ours.decode_bytes(ids) == "a café".encode() != ours.decode(ids).encode()


@pytest.mark.parametrize(("change", "text"), [(normalizers.NFC, "e\u0301"), (normalizers.Lowercase, "A")])
def test_a_normalizer_decides_what_bytes_come_back(tmp_path: Path, change: Callable[[], Any], text: str):
    byte_level(tmp_path)
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.normalizer = change()
    fast.save(str(tmp_path / "tokenizer.json"))
    ours = HuggingFaceTokenizer(tmp_path)
    encoded = ours.encode_with_offsets(text)
    assert ours.decode_bytes(encoded.ids) == fast.normalizer.normalize_str(text).encode() != text.encode()
    assert encoded.spans == fast.encode(text).offsets
