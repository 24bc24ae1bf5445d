"""The least number of tokens of a text: never more than it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.prompt.min_token_count import max_token_bytes
from petatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, NullTokenizer

NFC = {"type": "NFC"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


def _tokenizer(folder: Path, **changes: object) -> HuggingFaceTokenizer:
    made = train_bpe(["aaaaaaaa bbbb 각각 e\u0301e\u0301 " * 20], 300, folder / "tokenizer.json")
    content = json.loads(made.files()["tokenizer.json"])
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    return HuggingFaceTokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("normalizer", [None, NFC, {"type": "Sequence", "normalizers": [NFC, SPACES]}], ids=str)
def test_a_text_has_at_least_so_many_tokens(tmp_path: Path, normalizer: object):
    tokenizer = _tokenizer(tmp_path, normalizer=normalizer)
    longest = max_token_bytes(tokenizer)
    assert longest is not None and longest >= 8

    @settings(max_examples=60, deadline=None)
    @given(st.text(st.sampled_from("ab e\u0301\u1100\u1161\u11a8각🙂\x00") | st.characters(codec="utf-8"), max_size=60))
    def holds(text: str) -> None:
        assert -(-len(text.encode()) // longest) <= len(tokenizer.encode(text))

    holds()
    assert len(tokenizer.encode("a" * 800)) == 100  # where tokens are as long as they may be


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "b"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "bbbbbbbb"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": None},
    ],
    ids=str,
)
def test_there_is_no_such_number_where_text_may_vanish(tmp_path: Path, changes: dict[str, object]):
    assert max_token_bytes(_tokenizer(tmp_path, **changes)) is None


def test_tokenizers_without_a_file():
    assert (max_token_bytes(ByteTokenizer()), max_token_bytes(NullTokenizer(9)), max_token_bytes(None)) == (
        1,
        None,
        None,
    )
