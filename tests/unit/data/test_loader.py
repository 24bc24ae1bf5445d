from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError, DataError
from petatron.data.batch_loader import BatchLoader, LoaderOptions, epoch_permutation, make_batch, stack_arrays
from petatron.data.gpt_dataset import MockDataset
from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch
from tests.load_deadline import scaled


class Numbered:
    """Sample i is i, i + 1, i + 2: its first token is its number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> np.ndarray:
        return np.arange(index, index + 3)


def used(loader: BatchLoader, batch_size: int, consumed: int) -> list[int]:
    return [int(number) for batch in loader.next_step(batch_size, consumed) for number in batch.tokens[:, 0]]


@settings(max_examples=60, deadline=None)
@given(
    dp=st.integers(1, 6),
    micro=st.integers(1, 5),
    accumulate=st.integers(1, 4),
    consumed=st.integers(0, 200),
    kind=st.sampled_from(["single", "cyclic"]),
)
def test_ranks_together_take_the_global_batch(dp: int, micro: int, accumulate: int, consumed: int, kind: str) -> None:
    batch_size = dp * micro * accumulate
    dataset = Numbered(400)
    options = LoaderOptions(seed=1234, micro_batch_size=micro, dataloader_type=kind)  # type: ignore[arg-type]
    taken: list[int] = []
    for rank in range(dp):
        step = BatchLoader(dataset, options, dp_rank=rank, dp_size=dp).next_step(batch_size, consumed)
        assert len(step) == accumulate and all(batch.tokens.shape == (micro, 2) for batch in step)
        taken += [int(number) for batch in step for number in batch.tokens[:, 0]]
    alone = BatchLoader(dataset, LoaderOptions(seed=1234, micro_batch_size=1, dataloader_type=kind))  # type: ignore[arg-type]
    assert sorted(taken) == sorted(used(alone, batch_size, consumed))
    if kind == "single":
        assert sorted(taken) == list(range(consumed, consumed + batch_size))


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_resume_from_any_position(kind: str, workers: int) -> None:
    dataset = Numbered(50)
    options = LoaderOptions(seed=1234, micro_batch_size=2, dataloader_type=kind, num_workers=workers)  # type: ignore[arg-type]
    with BatchLoader(dataset, options) as loader:
        whole = [used(loader, 4, consumed) for consumed in range(0, 48, 4)]
    for stop in range(12):
        with BatchLoader(dataset, options) as loader:
            assert used(loader, 4, 4 * stop) == whole[stop]
    with BatchLoader(dataset, options) as loader:  # batch size that changes on the way
        assert used(loader, 2, 0) + used(loader, 2, 2) + used(loader, 6, 4) == [n for step in whole for n in step][:10]


def test_short_last_batch_is_dropped() -> None:
    loader = BatchLoader(Numbered(10), LoaderOptions(seed=1234, micro_batch_size=2))
    assert used(loader, 4, 4) == [4, 5, 6, 7]
    assert loader.next_step(4, 8) == []


def test_cyclic_epochs() -> None:
    loader = BatchLoader(Numbered(10), LoaderOptions(micro_batch_size=2, dataloader_type="cyclic", seed=3))
    taken = [number for consumed in range(0, 40, 4) for number in used(loader, 4, consumed)]
    epochs = [taken[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[2] == epoch_permutation(3, 2, 10).tolist()


def test_batch_contents() -> None:
    samples = np.array([[5, 9, 6, 7, 9, 9, 8]])
    plain = make_batch(samples, LoaderOptions(seed=1234, micro_batch_size=1))
    assert plain.tokens.tolist() == [[5, 9, 6, 7, 9, 9]] and plain.labels.tolist() == [[9, 6, 7, 9, 9, 8]]
    assert plain.loss_mask.tolist() == [[1.0] * 6] and plain.positions is None
    assert (plain.tokens.dtype, plain.labels.dtype, plain.loss_mask.dtype) == (torch.int64, torch.int64, torch.float32)
    assert plain.tokens.is_contiguous() and plain.labels.is_contiguous()
    options = LoaderOptions(seed=1234, micro_batch_size=1, eod=9, eod_mask_loss=True, reset_position_ids=True)
    masked = make_batch(samples, options)
    assert masked.loss_mask.tolist() == [[1, 0, 1, 1, 0, 0]]
    assert masked.positions is not None and masked.positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert masked.documents is None
    apart = make_batch(samples, LoaderOptions(seed=1234, micro_batch_size=1, eod=9, reset_attention_mask=True))
    assert apart.documents is not None and apart.documents.starts_BS.tolist() == [[0, 0, 2, 2, 2, 5]]
    assert apart.documents.cu_seqlens.tolist() == [0, 2, 5, 6] and apart.documents.max_seqlen == 3
    moved = apart.to(torch.device("meta"))
    assert moved.documents is not None and moved.documents.cu_seqlens.device.type == moved.tokens.device.type == "meta"


def test_refusals() -> None:
    loader = BatchLoader(Numbered(100), LoaderOptions(seed=1234, micro_batch_size=2), dp_size=3)
    with pytest.raises(
        ConfigError, match=r"--global-batch-size 8 is not a multiple of micro-batch 2 x data-parallel 3 = 6"
    ):
        loader.next_step(8, 0)
    with pytest.raises(DataError, match="end-of-document token, but the tokenizer has none"):
        BatchLoader(Numbered(10), LoaderOptions(seed=1234, micro_batch_size=1, eod_mask_loss=True))


class Broken(Numbered):
    def __getitem__(self, index: int) -> np.ndarray:
        if index >= 4:
            raise OSError(f"sample {index} is gone")
        return super().__getitem__(index)


def test_samples_that_are_no_text_of_the_run_are_refused() -> None:
    options = LoaderOptions(seed=1, micro_batch_size=2, seq_length=4, vocab_size=100)
    text = np.arange(5)
    assert make_batch([text, text], options).tokens.shape == (2, 4)
    with pytest.raises(DataError, match=r"has 3 token ids, and --seq-length 4 needs 5: one more than it"):
        make_batch([text, text[:3]], options)
    with pytest.raises(DataError, match=r"has 2 token ids, and --seq-length 4 needs 5"):
        make_batch([text[:2], text[:2]], options)
    with pytest.raises(DataError, match="has the token id 100, and the vocabulary has 100 ids"):
        make_batch([text, np.full(5, 100)], options)
    for wrong in (np.full(5, -1), np.ones(5)):
        with pytest.raises(DataError, match=r"integers from 0 on, and one has -?[01]"):
            make_batch([wrong, wrong], options)
    with pytest.raises(DataError, match=r"needs 7: .* \(Samples 2, 3 of the dataset.\)"):
        BatchLoader(Numbered(8), replace(options, seq_length=6)).next_step(2, 2)
    with pytest.raises(DataError, match=r"arrays by name \(tokens, weights\).*`collate`"):
        make_batch([{"tokens": text, "weights": text}], options)
    with pytest.raises(DataError, match="has 3 token ids, and --seq-length 1 needs 2"):
        make_batch([text[:2], text[:3]], replace(options, seq_length=None))


def test_errors_of_reading_ahead_are_raised_at_their_batch() -> None:
    with BatchLoader(Broken(20), LoaderOptions(seed=1234, micro_batch_size=2, num_workers=2)) as loader:
        assert used(loader, 2, 0) == [0, 1]
        assert used(loader, 2, 2) == [2, 3]
        with pytest.raises(OSError, match="sample 4 is gone"):
            loader.next_step(2, 4)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("petatron-loader")]


class Recording(Numbered):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.read: list[int] = []
        self.reached = threading.Event()

    def __getitem__(self, index: int) -> np.ndarray:
        self.read.append(index)
        if index == 5:
            self.reached.set()
        return super().__getitem__(index)


def test_reads_ahead_and_reads_nothing_twice() -> None:
    dataset = Recording(40)
    with BatchLoader(dataset, LoaderOptions(seed=1234, micro_batch_size=2, num_workers=2)) as loader:
        loader.next_step(2, 0)
        assert dataset.reached.wait(scaled(10)), "two further steps are read in the background"
        for consumed in range(2, 20, 2):
            loader.next_step(2, consumed)
    assert len(dataset.read) == len(set(dataset.read)) and set(range(20)) <= set(dataset.read)


def test_mock_dataset() -> None:
    data = MockDataset(16, 10, 5, seed=1)
    assert len(data) == 5
    for index in range(5):
        sample = data[index]
        assert sample.shape == (17,) and sample.dtype == np.int64 and sample.max() <= 9 and sample.min() >= 1
        assert np.array_equal(sample, MockDataset(16, 10, 9, seed=1)[index])
        assert sample[0] == 1
        following = np.where(sample[:-1] == 9, 1, sample[:-1] % 8 + 1)  # counts 1..8 and around, 1 after the end
        assert all((sample[1:] == following) | (sample[1:] == 9))
    assert not np.array_equal(data[0], data[1])
    assert not np.array_equal(data[0], MockDataset(16, 10, 5, seed=2)[0])
    with pytest.raises(IndexError):
        data[5]
    with pytest.raises(ValueError, match="counting needs"):
        MockDataset(16, 2, 5, seed=1)


def test_mock_dataset_with_another_end_of_document() -> None:
    sample = MockDataset(200, 10, 1, seed=1, eod=0)[0]
    after_end = np.where(sample[:-1] == 0, 1, sample[:-1] % 9 + 1)
    assert set(sample.tolist()) == set(range(10)) and all((sample[1:] == after_end) | (sample[1:] == 0))


class Pairs:
    """Samples of named arrays: an image without a sequence, and text."""

    fingerprint = "pairs"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"image": np.full((3, 2), float(index)), "text": np.arange(4) + index}


def collate_pairs(samples: Sequence[Mapping[str, np.ndarray]], options: LoaderOptions) -> Batch:
    return stack_arrays(samples, options, sequence_dims={"image": None})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_model_collates_its_own_arrays(num_workers: int):
    options = LoaderOptions(seed=1234, micro_batch_size=2, num_workers=num_workers)
    with BatchLoader(Pairs(), options, dp_rank=1, dp_size=2, collate=collate_pairs) as loader:
        [batch] = loader.next_step(4, 4)
    assert list(batch.arrays) == ["image", "text"] and batch.num_samples == 2
    assert batch["image"][:, 0, 0].tolist() == [6.0, 7.0] and batch["text"][:, 0].tolist() == [6, 7]
    assert (batch.sequence_dim("image"), batch.sequence_dim("text")) == (None, 1)


def test_what_a_batch_does_not_have_is_said():
    batch = Batch(arrays={"text": torch.zeros(1, 4)})
    assert "text" in batch and "tokens" not in batch and batch.positions is None
    with pytest.raises(DataError, match=r"no array 'tokens'\. Its arrays: text"):
        _ = batch.tokens


def test_copies_of_a_batch_keep_everything(monkeypatch: pytest.MonkeyPatch):
    """On another device (meta), pinned, and cloned: every array, the documents, and the declared dimensions."""
    documents = Documents.of(torch.zeros(2, 4, dtype=torch.int64))
    tokens, dims = torch.arange(8).view(2, 4), {"image": None}
    batch = Batch(tokens, documents=documents, arrays={"image": torch.ones(2, 3)}, sequence_dims=dims)
    there = batch.to(torch.device("meta"))
    assert [(x.device.type, x.shape) for x in there.arrays.values()] == [("meta", (2, 4)), ("meta", (2, 3))]
    assert there.documents is not None and there.documents.starts_BS.device.type == "meta"
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x + 1)
    pinned = batch.pin_memory()
    assert torch.equal(pinned.tokens, tokens + 1) and torch.equal(pinned["image"], torch.full((2, 3), 2.0))
    assert pinned.documents is not None and int(pinned.documents.starts_BS.max()) == 1
    copied = batch.clone()
    assert torch.equal(copied.tokens, tokens) and copied.tokens.data_ptr() != tokens.data_ptr()
    labeled = replace(batch, labels=tokens)
    assert torch.equal(labeled.labels, tokens) and "labels" not in batch
    for one in (there, pinned, copied, labeled):
        assert {"tokens", "image"} <= one.arrays.keys()
        assert one.sequence_dim("image") is None and one.documents is not None


def test_pinning_is_the_loaders():
    pinned: list[Batch] = []

    class Pinnable(Batch):
        def pin_memory(self) -> Batch:
            pinned.append(self)
            return self

    options = LoaderOptions(seed=1234, micro_batch_size=2, pin_memory=True)
    loader = BatchLoader(Pairs(), options, collate=lambda samples, _: Pinnable(arrays={"n": torch.ones(len(samples))}))
    assert loader.next_step(4, 0) == pinned and len(pinned) == 2
