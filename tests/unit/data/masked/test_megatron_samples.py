"""Masked samples against stored ones of megatron-core (tests/golden/make_masked.py; `make test-megatron` compares many more)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.masked.sentence_corpus import (
    CASES,
    GOLDEN,
    check_against,
    samples_of,
    write_corpus,
    write_vocabulary,
)

FILE = Path(__file__).parents[3] / "golden" / "masked" / "samples.npz"


@pytest.mark.parametrize("name", GOLDEN)
def test_samples_are_megatron_s(name: str, tmp_path: Path):
    with np.load(FILE) as stored:
        theirs = {key.partition("/")[2]: stored[key] for key in stored if key.startswith(f"{name}/")}
    ours = samples_of(write_corpus(tmp_path), write_vocabulary(tmp_path), name, GOLDEN[name])
    check_against(ours, theirs, is_t5=CASES[name][0] == "t5")


def test_a_longer_run_has_other_samples_of_the_same_documents(tmp_path: Path):
    """As in Megatron, which shuffles all epochs together."""
    prefix, tokenizer = write_corpus(tmp_path), write_vocabulary(tmp_path)
    short, long = (samples_of(prefix, tokenizer, "bert", count) for count in (10, 400))
    assert len(long) > len(short) >= 10
    assert [sample["num_tokens"] for sample in long[: len(short)]] != [sample["num_tokens"] for sample in short]
