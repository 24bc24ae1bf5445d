"""Rows of several documents: nothing is lost, nothing is seen by another document, and both kinds mask as alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petatron.base.errors import DataError
from petatron.data.batch_loader import LoaderOptions
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest
from petatron.data.indexed_writer import IndexedWriter
from petatron.data.masked.masked_language_dataset import MaskedLanguage, make_masked_batch
from petatron.data.masked.span_corruption_dataset import SpanCorruption
from tests.unit.data.masked.sentence_corpus import SEED, documents, write_corpus, write_vocabulary

LENGTH = 64
OPTIONS = LoaderOptions(micro_batch_size=2, seed=SEED)


def opened(folder: Path, kind: DatasetKind, count: int = 4) -> tuple[Any, Any]:
    prefix, tokenizer = write_corpus(folder), write_vocabulary(folder)
    request = DatasetRequest(
        split="train",
        num_samples=count,
        seq_length=LENGTH,
        seed=SEED,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
    )
    source = kind.open(prefix, request)
    return source.dataset(range(source.num_units), request), tokenizer


def text_of(document: list[np.ndarray]) -> tuple[int, ...]:
    return tuple(np.concatenate(document).tolist())


def test_an_epoch_of_masked_rows_has_every_token_once(tmp_path: Path):
    dataset, tokenizer = opened(tmp_path, MaskedLanguage(packed=True, has_pairs=False))
    pieces: list[tuple[int, ...]] = []
    for index in range(dataset.samples_per_epoch):
        dataset._rows._num_samples = dataset.samples_per_epoch  # all rows of an epoch
        sample = dataset[index]
        filled = int((sample["begins"] >= 0).sum())
        original = np.where(sample["loss_mask"] > 0, sample["labels"], sample["tokens"])
        assert not sample["tokens"][filled:].any() and not sample["loss_mask"][filled:].any()
        for begin in sorted(set(sample["begins"][:filled].tolist())):
            piece = original[:filled][sample["begins"][:filled] == begin]
            assert (piece[0], piece[-1]) == (tokenizer.special_ids["cls"], tokenizer.special_ids["sep"])
            pieces.append(tuple(piece[1:-1].tolist()))
        share = sample["loss_mask"].sum() / filled
        assert share <= 0.15 + 1 / filled
    cut = [
        text[place : place + LENGTH - 2]
        for text in map(text_of, documents())
        for place in range(0, len(text), LENGTH - 2)
    ]
    assert sorted(pieces) == sorted(cut)
    assert dataset.samples_per_epoch < len(cut) and "rows" in dataset.describe()
    assert dataset.trace(0).documents


def test_a_batch_of_rows_keeps_documents_apart(tmp_path: Path):
    kind = MaskedLanguage(packed=True, has_pairs=False)
    dataset, _ = opened(tmp_path, kind)
    samples = [dataset[index] for index in range(2)]
    batch = kind.collate(samples, OPTIONS)
    assert batch.documents is not None and batch.positions is not None
    begins = np.stack([sample["begins"] for sample in samples])
    filled = begins >= 0
    starts = batch.documents.starts_BS.numpy()
    assert np.array_equal(starts[filled], begins[filled]), "padding is a document of its own"
    assert np.array_equal(batch.positions.numpy()[filled], (np.arange(LENGTH) - begins)[filled])


def test_a_batch_of_pairs_has_the_masked_positions(tmp_path: Path):
    kind = MaskedLanguage()
    dataset, _ = opened(tmp_path, kind)
    samples = [dataset[index] for index in range(4)]
    batch = make_masked_batch(samples, mask_prob=0.15)
    assert batch["sentence_order"].tolist() == [int(sample["sentence_order"]) for sample in samples]
    positions, mask = batch["predicted_positions"], batch.loss_mask
    assert positions.shape[1] % 8 == 0 and int(mask.gather(1, positions).sum()) == int(mask.sum())
    assert batch.sequence_dim("sentence_order") is None and batch.sequence_dim("predicted_positions") is None


def test_rows_of_spans_have_their_text_in_both_sequences(tmp_path: Path):
    dataset, tokenizer = opened(tmp_path, SpanCorruption(packed=True, decoder_seq_length=48))
    sentinels, whole = set(tokenizer.sentinel_ids), set()
    for text in map(text_of, documents()):
        whole |= {text[place : place + size] for size in range(1, LENGTH) for place in range(len(text) - size + 1)}
    for index in range(len(dataset)):
        sample = dataset[index]
        begins = sorted(set(sample["encoder_begins"][sample["encoder_begins"] >= 0].tolist()))
        starts = sorted(set(sample["begins"][sample["begins"] >= 0].tolist()))
        assert len(begins) == len(starts) >= 1
        for begin, start in zip(begins, starts):
            encoder = sample["encoder_tokens"][sample["encoder_begins"] == begin].tolist()
            labels = sample["labels"][sample["begins"] == start].tolist()
            assert labels[-1] == tokenizer.special_ids["eos"]
            spans: dict[int, list[int]] = {}
            for token in labels[:-1]:
                if token in sentinels:
                    spans[token] = []
                else:
                    spans[list(spans)[-1]].append(token)
            text = tuple(token for item in encoder for token in spans.get(item, [item]))
            assert text in whole
        assert np.array_equal(sample["loss_mask"] > 0, sample["begins"] >= 0)


def test_random_next_takes_the_second_segment_of_another_document(tmp_path: Path):
    dataset, tokenizer = opened(tmp_path, MaskedLanguage(pair_label="random_next", short_seq_prob=0.0), 300)
    texts = [text_of(document) for document in documents()]
    labels = []
    for index in range(300):
        sample = dataset[index]
        count = int(sample["num_tokens"])
        original = np.where(sample["loss_mask"] > 0, sample["labels"], sample["tokens"])[:count]
        (middle, _) = np.flatnonzero(original == tokenizer.special_ids["sep"])
        first, second = tuple(original[1:middle].tolist()), tuple(original[middle + 1 : -1].tolist())
        together = any(
            str(first)[1:-1].rstrip(",") in str(text) and str(second)[1:-1].rstrip(",") in str(text) for text in texts
        )
        is_random = bool(sample["sentence_order"])
        labels.append(is_random)
        assert together or is_random
    assert 0.4 < np.mean(labels) < 0.6


def test_what_cannot_be_opened_or_made(tmp_path: Path):
    tokenizer = write_vocabulary(tmp_path)

    def request(**changes: Any) -> DatasetRequest:
        known: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": tokenizer.vocab_size, "num_samples": 2}
        return DatasetRequest(**{"split": "train", "seq_length": LENGTH, "seed": 1, **known, **changes})

    with IndexedWriter(tmp_path / "whole", "uint16") as writer:
        writer.add_document([7, 8, 9])
        writer.add_document([])
    whole = str(tmp_path / "whole")
    with pytest.raises(
        DataError, match=r"whole has no sentences: each document is one sequence.*--split-sentences, or give --bert-no"
    ):
        MaskedLanguage().open(whole, request())
    with pytest.raises(DataError, match=r"needs a tokenizer, which says what \[CLS\], \[SEP\], \[MASK\], \[PAD\] are"):
        MaskedLanguage(has_pairs=False).open(whole, request(tokenizer=None))
    with pytest.raises(DataError, match=r"packed=true"):
        MaskedLanguage(packed=True, has_pairs=False).mock(request())
    with pytest.raises(DataError, match=r"--mock-data needs --vocab-size or a tokenizer"):
        MaskedLanguage(has_pairs=False).mock(request(vocab_size=None))
    with pytest.raises(DataError, match=r"needs at least 24 ids, and the vocabulary has 20"):
        MaskedLanguage(has_pairs=False).mock(request(vocab_size=20, tokenizer=None))
    for kind in (
        MaskedLanguage(has_pairs=False),
        MaskedLanguage(has_pairs=False, packed=True),
        SpanCorruption(decoder_seq_length=48),
    ):
        source = kind.open(whole, request())
        with pytest.raises(DataError, match=r"documents 1\.\.2 hold no tokens"):
            source.dataset(range(1, 2), request())
        dataset: Any = source.dataset(range(2), request())
        with pytest.raises(IndexError):
            dataset[len(dataset)]
    small = write_corpus(tmp_path)
    for kind in (MaskedLanguage(), SpanCorruption(decoder_seq_length=48)):
        with pytest.raises(DataError, match=r"has the id \d+, but the vocabulary has 50 ids"):
            kind.open(small, request(vocab_size=50))
    with pytest.raises(DataError, match=r"mode_tokens \(--dataset-settings\) names <r>, <x>"):
        SpanCorruption(decoder_seq_length=48, denoisers="ul2", mode_tokens="<r>,[CLS],<x>").open(small, request())
