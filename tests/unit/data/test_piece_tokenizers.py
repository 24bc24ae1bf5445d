"""Tokenizers of SentencePiece's models against the sentencepiece library."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from petatron.base.errors import DataError
from petatron.config.schema.data import TokenizerConfig
from petatron.data.prompt.prompt_encoder import bos_ids
from petatron.data.sentencepiece_tokenizer import SentencePieceOptions, SentencePieceTokenizer
from petatron.data.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    build_tokenizer,
    folder_tokenizer,
)
from petatron.data.transformers_tokenizer import missing_for_transformers
from petatron.data.vocabulary_difference import vocabulary_difference
from petatron.serve.token_texts import TokenTexts
from tests.longform import later
from tests.unit.data.vocabularies import EXACT_MODELS, PIECE_MODELS, piece_model, random_texts

OTHERS = tuple(name for name in PIECE_MODELS if name not in EXACT_MODELS)
WITHOUT_MARKS = [text for text in random_texts(400) if "<" not in text and "▁" not in text]


def write(folder: Path, name: str) -> Path:
    path = folder / f"{name.replace(' ', '-')}.model"
    path.write_bytes(piece_model(name))
    return path


def real(name: str) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_proto=piece_model(name))


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("name", "count"), [*((name, 400) for name in PIECE_MODELS), *(later(name, 10_000) for name in PIECE_MODELS)]
)
def test_ids_and_texts_are_sentencepiece_s(tmp_path: Path, name: str, count: int) -> None:
    ours, library = SentencePieceTokenizer(write(tmp_path, name)), real(name)
    assert ours.has_exact_json == (name in EXACT_MODELS)
    texts = random_texts(count)
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids == library.encode(text), text
        assert ours.decode(ids) == library.decode(ids)
        if PIECE_MODELS[name].get("byte_fallback") and "▁" not in text:
            assert ours.decode(ids) == text
    chance = random.Random(2)
    for _ in range(count):
        ids = chance.choices(range(ours.vocab_size), k=chance.randint(0, 8))
        assert ours.decode(ids) == library.decode(ids)
    assert ours.vocab_size == library.get_piece_size() and ours.eod == library.eos_id()
    assert ours.decode([ours.vocab_size, 10**6]) == "", "rows that an embedding is padded with"


def test_a_long_document_has_the_library_s_ids(tmp_path: Path) -> None:
    text = " ".join(random_texts(800, seed=3))
    for name in ("llama", "unigram"):
        assert SentencePieceTokenizer(write(tmp_path, name)).encode(text) == real(name).encode(text)


def test_models_of_bpe_need_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: write(tmp_path, name) for name in PIECE_MODELS}
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    for name in EXACT_MODELS:
        assert SentencePieceTokenizer(files[name]).encode("The item")
    reasons = {"unigram": "the unigram algorithm", "t5": "the unigram algorithm", "user symbols": "symbols of the user"}
    for name, reason in reasons.items():
        with pytest.raises(DataError) as caught:
            SentencePieceTokenizer(files[name])
        assert f"A SentencePiece model with {reason}" in str(caught.value)
        assert "needs the sentencepiece library, which is not installed: pip install 'petatron[tokenizers]'" in str(
            caught.value
        )


@pytest.mark.parametrize("name", EXACT_MODELS)
def test_transformers_opens_a_folder_with_the_same_tokenizer(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    ours = SentencePieceTokenizer(write(tmp_path, name))
    assert missing_for_transformers(ours) is None
    folder = saved(ours, tmp_path)
    config = folder_tokenizer(folder)
    assert config is not None and config.tokenizer_type == "HuggingFaceTokenizer"
    opened, auto = build_tokenizer(config), transformers.AutoTokenizer.from_pretrained(str(folder))
    assert isinstance(opened, HuggingFaceTokenizer)
    assert (opened.vocab_size, opened.eod, auto.eos_token_id) == (ours.vocab_size, ours.eod, ours.eod)
    assert vocabulary_difference(opened, ours) is None and bos_ids(opened, add=True) == bos_ids(ours, add=True) == (1,)
    for text, ids in zip(WITHOUT_MARKS, ours.encode_batch(WITHOUT_MARKS), strict=True):
        assert opened.encode(text) == auto(text, add_special_tokens=False)["input_ids"] == ids
        if 0 not in ids:  # SentencePiece has a text of its own for the unknown
            assert opened.decode(ids) == ours.decode(ids) == auto.decode(ids, clean_up_tokenization_spaces=False)
    assert opened.encode("</s>") == [2] and ours.encode("</s>") == real(name).encode("</s>") != [2]
    assert auto.decode([*ours.encode("item"), 2], skip_special_tokens=True) == "item"


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_stay_in_their_own_file(tmp_path: Path, name: str) -> None:
    ours = SentencePieceTokenizer(write(tmp_path, name))
    assert "tokenizer.json" not in ours.files()
    assert "transformers finds a model without a tokenizer" in (missing_for_transformers(ours) or "")
    config = folder_tokenizer(saved(ours, tmp_path))
    assert config is not None and config.tokenizer_type == "SentencePieceTokenizer"
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    opened = build_tokenizer(config)
    assert opened.encode_batch(WITHOUT_MARKS) == ours.encode_batch(WITHOUT_MARKS) and opened.eod == ours.eod
    assert opened.files() == {**ours.files(), "chat_template.jinja": b"{{ messages }}"}
    assert vocabulary_difference(opened, ours) is None
    assert "ids, where the model has learned" in str(
        vocabulary_difference(SentencePieceTokenizer(write(tmp_path, "llama")), ours)
    )


@pytest.mark.parametrize("name", ["llama", "unigram"])
def test_tokens_have_their_bytes(tmp_path: Path, name: str) -> None:
    """For log-probabilities and grammars, of a model in a file of its own too."""
    ours = SentencePieceTokenizer(write(tmp_path, name))
    texts = TokenTexts(ours)
    word = ours.encode("The 東京")
    assert b"".join(map(texts.bytes_of, word)) == " The 東京".encode()
    assert texts.special_ids == {0: "<unk>", 1: "<s>", 2: "</s>"}


def test_legacy_finds_named_tokens_first(tmp_path: Path) -> None:
    """As Megatron does: a lone space after a token is dropped, except at the end."""
    config = TokenizerConfig(
        tokenizer_type="GPTSentencePieceTokenizer",
        tokenizer_model=str(write(tmp_path, "llama")),
        tokenizer_sentencepiece_legacy=True,
        tokenizer_special_tokens=("<x>", "</s>", "<x>>"),
    )
    ours, library = build_tokenizer(config), real("llama")
    size, space = library.get_piece_size(), library.piece_to_id("▁")
    assert ours.vocab_size == size + 2
    encode = library.encode
    assert ours.encode("item<x>>(</s>(") == [*encode("item"), size, *encode(">(")[1:], 2, *encode("(")]
    assert encode(">(")[0] == encode("(")[0] == space, "the case that is meant"
    assert ours.encode("<x>(<x>(") == [size, *encode("(")[1:], size, *encode("(")]
    for text in random_texts(300):
        if "▁" not in text and "<x> " not in text and "</s> " not in text:
            assert ours.decode(ours.encode(text)) == text, text
    assert "tokenizer.json" not in ours.files() and missing_for_transformers(ours)
    again = folder_tokenizer(saved(ours, tmp_path))
    assert again is not None and build_tokenizer(again).encode_batch(random_texts(100)) == ours.encode_batch(
        random_texts(100)
    )


def test_sentinels_follow_the_pieces(tmp_path: Path) -> None:
    """Those of Megatron's SentencePieceTokenizer with --vocab-extra-ids: special tokens, then `<extra_id_i>`."""
    path = write(tmp_path, "unigram")
    settings = {"tokenizer_model": str(path), "vocab_extra_ids": 3}
    ours = build_tokenizer(TokenizerConfig(tokenizer_type="SentencePieceTokenizer", **settings))
    library = real("unigram")
    size = library.get_piece_size()
    assert ours.vocab_size == size + 5 + 3 and ours.eod == size + 2  # <CLS> <SEP> <EOD> <MASK> <PAD>
    assert ours.encode("a<extra_id_0>b<s><EOD>") == [*library.encode("a"), size + 5, *library.encode("b"), 1, size + 2]
    assert ours.decode([size + 7, 2]) == "<extra_id_2></s>"
    again = folder_tokenizer(saved(ours, tmp_path))
    assert again is not None and build_tokenizer(again).vocab_size == ours.vocab_size
    plain = build_tokenizer(TokenizerConfig(tokenizer_type="GPTSentencePieceTokenizer", **settings))
    assert plain.vocab_size == size and plain.eod == 2


def test_spaces_that_a_model_joins_can_be_kept(tmp_path: Path) -> None:
    path, library = write(tmp_path, "t5"), real("t5")
    joined = SentencePieceTokenizer(path)
    kept = SentencePieceTokenizer(path, SentencePieceOptions(keep_extra_spaces=True))
    assert joined.encode("item  item") == joined.encode("item item") == library.encode("item item")
    space = library.piece_to_id("▁")
    assert kept.encode("item   item") == [*library.encode("item"), space, space, *library.encode("item")]
    assert kept.encode("item item") == library.encode("item item")


def test_files_that_are_no_model(tmp_path: Path) -> None:
    content = piece_model("llama")
    wrong = {
        "text": b"some words that are no model",
        "empty": b"",
        "cut": content[:-3],
        "twice": content + content[: content.index(b"<s>")],
        "vast": b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        "endless": b"\xff" * 20,
    }
    for name, bad in wrong.items():
        (tmp_path / name).write_bytes(bad)
        fix = "Copy it again" if name == "empty" else r"Give --tokenizer-model the \.model"
        with pytest.raises(DataError, match=rf"is not a SentencePiece model: it .*{fix}"):
            SentencePieceTokenizer(tmp_path / name)
    with pytest.raises(DataError, match="No such file"):
        SentencePieceTokenizer(tmp_path / "none.model")
    with pytest.raises(DataError, match="names an empty token"):
        SentencePieceTokenizer(write(tmp_path, "llama"), SentencePieceOptions(special_tokens=("",)))
    with pytest.raises(DataError, match=r"it is a SentencePiece model\. Use --tokenizer-type SentencePieceTokenizer"):
        HuggingFaceTokenizer(write(tmp_path, "llama"))


@pytest.mark.parametrize(
    "stored",
    [
        '{"special_tokens": "a"}',
        '{"special_tokens": [1]}',
        '{"vocab_extra_ids": -1}',
        "[]",
        '{"vocab_extra_ids": true}',
    ],
)
def test_stored_options_are_checked(tmp_path: Path, stored: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(piece_model("unigram"))
    (tmp_path / "tokenizer_config.json").write_text(f'{{"petatron": {stored}}}')
    with pytest.raises(DataError, match=r"tokenizer_config\.json"):
        folder_tokenizer(tmp_path)
