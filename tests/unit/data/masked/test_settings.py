"""Settings of masked text that do not fit, each with what to do instead."""

from __future__ import annotations

import pytest

from petatron.base.errors import ConfigError
from petatron.data.build_datasets import chosen_kind
from petatron.validate import load_config

BERT = "--model-type bert --bert-no-binary-head"


@pytest.mark.parametrize(
    ("kind", "settings", "length", "text"),
    [
        ("bert", "max_ngram=0", 32, "max_ngram=0 is below 1. Give a count."),
        ("bert", "longest_sentence=-1", 32, "longest_sentence=-1 is below 1"),
        (
            "bert",
            "ngram_lengths=long!",
            32,
            "ngram_lengths=long! is no choice. Use one of short, long, geometric.",
        ),
        ("bert", "pair_label=other", 32, "pair_label=other is no choice. Use one of sentence_order, random_next."),
        (
            "bert",
            "packed=true",
            32,
            "packed=true makes rows of documents, and not pairs of segments. Add --bert-no-binary-head.",
        ),
        ("bert", "", 4, "--seq-length 4 leaves no room for two tokens beside [CLS] and two [SEP]"),
        ("bert", "unknown=1", 32, "unknown=1"),
        ("t5", "max_ngram=0", 32, "max_ngram=0 is below 1"),
        ("t5", "", 3, "--seq-length 3 leaves no room for two tokens beside two that --dataset-type t5 may add"),
        ("t5", "denoisers=Q", 32, "denoisers=Q 'Q' begins with none of R, S, X. Write R:MEAN_SPAN:RATE"),
        ("t5", "mode_tokens=a,b,c", 32, "mode_tokens=a,b,c is for denoisers, and none are given. Add denoisers=R,S,X."),
        (
            "t5",
            "denoisers=ul2 mode_tokens=a,b",
            32,
            "mode_tokens=a,b is not a token for each of R, S, X. Name three tokens, a,b,c.",
        ),
        ("t5", "", 32, "--decoder-seq-length is not set, and --dataset-type t5 makes sequences for a decoder"),
    ],
)
def test_what_is_wrong_is_told(kind: str, settings: str, length: int, text: str):
    flags = f"--dataset-type {kind} --mock-data --lr 1e-3 --train-iters 2 --seq-length {length}".split()
    given = ["--dataset-settings", *settings.split()] if settings else []
    run = load_config([*flags, *given], preset="tiny-llama").config
    with pytest.raises(ConfigError) as caught:
        chosen_kind(run)
    assert text in str(caught.value)


@pytest.mark.parametrize("flag", ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"])
def test_flags_of_the_next_token_are_refused(flag: str):
    flags = f"--dataset-type bert --mock-data --lr 1e-3 --train-iters 2 --tokenizer-type ByteTokenizer {flag}".split()
    with pytest.raises(ConfigError, match=f"{flag} is for text whose next token is predicted"):
        load_config(flags, preset="tiny-llama")
