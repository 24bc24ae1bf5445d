"""Spans of T5 and the denoisers of UL2: counts, places, sentinels, room."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.masked.denoisers import UL2, Denoiser, parse_denoisers
from petatron.data.masked.mask_tokens import NgramRule
from petatron.data.masked.masking_vocabulary import MaskingVocabulary
from petatron.data.masked.span_corruption import NgramSpans, corrupt_spans
from petatron.data.masked.span_corruption_dataset import SpanCorruption
from tests.unit.data.masked.sentence_corpus import SEED, write_corpus, write_vocabulary

VOCABULARY = MaskingVocabulary(1000, {"pad": 0, "eos": 1}, tuple(range(999, 899, -1)), np.zeros(1000, np.bool_))


def restored(encoder: list[int], decoder: list[int], sentinels: tuple[int, ...]) -> list[int]:
    """Puts the spans of the decoder back where their sentinels are."""
    spans: dict[int, list[int]] = {}
    for token in decoder:
        if token in sentinels:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    return [token for item in encoder for token in spans.get(item, [item])]


@pytest.mark.parametrize("item", UL2.split(","))
@pytest.mark.parametrize("length", [2, 3, 17, 100, 512])
def test_a_denoiser_has_its_counts_and_loses_nothing(item: str, length: int):
    (rule,), tokens = parse_denoisers(item), np.arange(2, 2 + length) % 800 + 2
    counts = rule.counts(length)
    assert 1 <= counts.corrupted < length or length == 1
    for seed in range(20):
        spans = rule.choose(tokens, length, VOCABULARY, np.random.RandomState(seed))
        assert sum(map(len, spans)) == counts.corrupted
        assert len(spans) == min(counts.spans, len(VOCABULARY.sentinel_ids))
        assert all(span == list(range(span[0], span[-1] + 1)) for span in spans)
        assert all(before[-1] + 1 < after[0] for before, after in pairwise(spans)), "a token stays between two"
        text = corrupt_spans(tokens, spans, VOCABULARY.sentinel_ids, decoder_room=10**6)
        assert restored(text.encoder, text.decoder, VOCABULARY.sentinel_ids) == tokens.tolist()
        assert text.left_out == 0 and len(text.encoder) == length - counts.corrupted + len(spans)
        if rule.mode == "S":
            assert spans[0][-1] == length - 1


def test_lengths_and_places_of_spans_are_uniform():
    """All ways to have two spans of five tokens of nine are drawn alike."""
    rule, counts = Denoiser("R", 2.5, 5 / 9), Counter()
    total = 12_000
    random = np.random.RandomState(2)
    for _ in range(total):
        counts[str(rule.choose(np.arange(9), 9, VOCABULARY, random))] += 1
    ways = 4 * 10  # (1,4) (2,3) (3,2) (4,1), and 2 of 5 places
    assert len(counts) == ways
    assert all(abs(count - total / ways) < 5 * np.sqrt(total / ways) for count in counts.values())


def test_denoisers_are_parsed_with_their_defaults_and_weights():
    assert [str(denoiser) for denoiser in parse_denoisers("ul2")] == UL2.split(",")
    mixture = parse_denoisers("R@3, X ,S:0.5@0.5")
    assert [(str(denoiser), denoiser.weight) for denoiser in mixture] == [
        ("R:3:0.15", 3.0),
        ("X:32:0.5", 1.0),
        ("S:0.5", 0.5),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Q", "'Q' begins with none of R, S, X"),
        ("", "'' begins with none of R, S, X"),
        ("R:3", "'R:3' has not the form R:MEAN_SPAN:RATE"),
        ("S:3:0.2", "'S:3:0.2' has not the form S:RATE"),
        ("R:x:0.2", "'R:x:0.2' has something that is no number"),
        ("R@x", "'R@x' has something that is no number"),
        ("R:3:1.0", "the rate of 'R:3:1.0' is not between 0 and 1"),
        ("X:0.5:0.2", "the mean span of 'X:0.5:0.2' is not a number from 1 on"),
        ("X:nan:0.2", "the mean span of 'X:nan:0.2' is not a number from 1 on"),
        ("R@0", "the weight of 'R@0' is not above 0"),
    ],
)
def test_what_is_wrong_with_a_denoiser_is_told(text: str, problem: str):
    with pytest.raises(ValueError) as caught:
        parse_denoisers(text)
    assert str(caught.value) == problem


def test_n_gram_spans_have_the_share_and_seldom_more_spans_than_counted():
    rule = NgramSpans(0.15, NgramRule(10, "geometric"), whole_words=True)
    tokens, counts = np.arange(2, 514), rule.counts(512)
    sizes = []
    for seed in range(200):
        spans = rule.choose(tokens, 512, VOCABULARY, np.random.RandomState(seed))
        assert spans == sorted(spans) and sum(map(len, spans)) <= counts.corrupted == 76
        sizes.append(len(spans))
    assert np.mean(np.array(sizes) > counts.spans) < 0.08 and np.mean(sizes) > counts.spans / 2


def test_spans_without_room_or_sentinel_stay_as_they_are():
    tokens, spans = np.arange(10, 20), [[1], [3, 4], [6], [8, 9]]
    text = corrupt_spans(tokens, spans, [99, 98], decoder_room=50)
    assert (text.left_out, text.decoder) == (2, [99, 11, 98, 13, 14])
    assert text.encoder == [10, 99, 12, 98, *range(15, 20)]
    room = corrupt_spans(tokens, spans, [99, 98, 97, 96], decoder_room=4)
    assert (room.left_out, room.decoder) == (3, [99, 11]) and room.encoder == [10, 99, *range(12, 20)]
    assert corrupt_spans(tokens[:0], [], [99], decoder_room=5) == ([], [], 0)


def samples(folder: Path, count: int, **settings: Any) -> list[dict[str, Any]]:
    prefix, tokenizer = write_corpus(folder), write_vocabulary(folder)
    request = DatasetRequest(
        split="train", num_samples=count, seq_length=96, seed=SEED, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )
    kind = SpanCorruption(**{"decoder_seq_length": 128, **settings})
    source = kind.open(prefix, request)
    dataset: Any = source.dataset(range(source.num_units), request)
    return [dataset[index] for index in range(count)]


def test_a_mixture_draws_its_denoisers_by_weight_and_marks_their_modes(tmp_path: Path):
    tokenizer = write_vocabulary(tmp_path)
    names = ("[BOS]", "[CLS]", "[SEP]")
    made = samples(
        tmp_path, 400, denoisers="R@2,S,X:8:0.5", mode_tokens=",".join(names), encoder_eos=True, short_seq_prob=0.0
    )
    modes = Counter(int(sample["encoder_tokens"][0]) for sample in made)
    ids = [tokenizer.encode(name)[0] for name in names]
    assert modes.keys() == set(ids)
    for number, share in zip(ids, (0.5, 0.25, 0.25)):
        assert abs(modes[number] / 400 - share) < 0.1
    for sample in made:
        length, decoder = int(sample["num_encoder_tokens"]), int(sample["num_tokens"])
        assert sample["encoder_tokens"][length - 1] == tokenizer.special_ids["eos"]
        assert sample["labels"][decoder - 1] == tokenizer.special_ids["eos"]
        assert np.array_equal(sample["tokens"][1:decoder], sample["labels"][: decoder - 1])
        assert sample["tokens"][0] == tokenizer.special_ids["bos"] and sample["loss_mask"].sum() == decoder
        assert not sample["encoder_tokens"][length:].any() and not sample["tokens"][decoder:].any()


def test_spans_that_do_not_fit_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    samples(tmp_path, 20, decoder_seq_length=12)
    told = [record.message for record in caplog.records if "more spans than the decoder has room" in record.message]
    assert len(told) == 1 and "raise --decoder-seq-length above 12" in told[0] and "This is said once" in told[0]
