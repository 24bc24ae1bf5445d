from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.data.curate import word_hashes
from petatron.data.curate.normalize_text import same_text_key, word_bytes
from petatron.data.curate.word_hashes import word_ngrams

MODULES = [
    "normalize_text", "word_hashes", "dedup.min_hash", "dedup.duplicate_links", "files.document_blocks", "files.step_files",
    "files.step_summary", "files.worker_pool",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"petatron.data.curate.{name}"))
    assert result.attempted > 0 and result.failed == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(st.sampled_from("ab .é你"), max_size=24), max_size=6), st.integers(1, 4))
def test_hashes_are_equal_where_word_ngrams_are(texts: list[str], n: int) -> None:
    grams = word_ngrams(texts, n, keep_short=True)
    expected: list[tuple[bytes, ...]] = []
    counts = []
    for text in texts:
        words_of_text = word_bytes(text).split()
        of_text = [tuple(words_of_text[at : at + n]) for at in range(max(len(words_of_text) - n + 1, 1))]
        of_text = [gram for gram in of_text if gram]
        expected += of_text
        counts.append(len(of_text))
    assert grams.counts.tolist() == counts
    by_gram = dict(zip(expected, grams.hashes.tolist(), strict=True))
    assert [by_gram[gram] for gram in expected] == grams.hashes.tolist()
    assert len(set(by_gram.values())) == len(by_gram)


def test_short_texts_are_left_out_where_asked() -> None:
    grams = word_ngrams(["a b", "a b c", ""], 3, keep_short=False)
    assert grams.counts.tolist() == [0, 1, 0]


def test_hashes_do_not_depend_on_where_a_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["some text of several words " * 40, "x" * 500 + " y", "and more"]
    together = word_ngrams(texts, 3, keep_short=True).hashes
    monkeypatch.setattr(word_hashes, "_CHUNK_BYTES", 32)
    assert np.array_equal(word_ngrams(texts, 3, keep_short=True).hashes, together)
    apart = np.concatenate([word_ngrams([text], 3, keep_short=True).hashes for text in texts])
    assert np.array_equal(apart, together)


def test_hashes_are_the_same_on_every_machine() -> None:
    assert word_ngrams(["the same"], 2, keep_short=True).hashes.tolist() == [GOLDEN]


GOLDEN = 16689355855311818644


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("snake_case, e-mail\u2019s 3.5\u00a0kg", "snake case e mail s 3 5 kg"),
        ("\u00c9cole E\u0301cole", "\u00e9cole \u00e9cole"),
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u0939\u0948\u0964",
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u0939\u0948",
        ),
        ("\u65e5\u672c\u3002\u304b", "\u65e5 \u672c \u304b"),
        ("\ud55c\uad6d\uc5b4 \ub9d0!", "\ud55c\uad6d\uc5b4 \ub9d0"),
    ],
)
def test_words_of_many_scripts(text: str, expected: str) -> None:
    assert word_bytes(text).decode().split() == expected.split()


def test_lone_surrogates_are_hashed() -> None:
    assert word_ngrams(["bad \ud800 text"], 1, keep_short=True).counts.tolist() == [2]
    assert same_text_key("A \ud800") == "a \ud800"
