"""The kind `item-histories`: histories of users, of which the last two items are left out of training.

    train   predicts every item of a history but its first one and the last two
    valid   predicts the item before the last, from all items before it
    test    predicts the last item, from all items before it

A user with fewer than three items has no item left out: all are trained on. A history that is longer than a sample becomes several,
the last of which ends with it, and every item is predicted once. In validation and test a sample has the most recent items. A history
of one item predicts nothing; the log says how many there are. `--split`, which would divide users, has no effect.

Samples end with padding: item -1, without a loss. For a sampled loss a sample has items drawn uniformly, by the seed and its number,
and the shares of all its items among the targets of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.objective_and_dataset_names import ITEM_DATASET
from petatron.config.schema.run import RunConfig
from petatron.config.schema.sections.recommender import RECOMMENDER_MODEL
from petatron.data.batch_loader import LoaderOptions, SampleDataset, epoch_permutation, stack_arrays
from petatron.data.check_token_ids import TokenPlace
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, DataSource, Split, register_dataset
from petatron.data.documents_of_sample import SampleTrace, TracedDocument
from petatron.data.index_cache import fingerprint
from petatron.data.recommendation.history_file import ItemHistories, read_histories
from petatron.models import next_item  # noqa: F401  it registers the objective
from petatron.models.batch import Batch

PADDING_ITEM = -1
LEFT_OUT = 2
"""Items at the end of a history that training does not predict: one for validation, one for test."""
_SPLIT_SEEDS: dict[Split, int] = {"train": 0, "valid": 1, "test": 2}


@dataclass(frozen=True, slots=True)
class NegativeSampling:
    """How many items are drawn uniformly for each sample."""

    count: int


@dataclass(frozen=True, slots=True)
class Windows:
    """The samples of one epoch: users, and the range of items in each one's history, the first of which predicts the second."""

    users: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.users)


def windows_of(lengths: NDArray[np.int64], split: Split, seq_length: int) -> Windows:
    """Returns the samples of a split.

    >>> windows = windows_of(np.array([1, 2, 9]), "train", 4)
    >>> [(int(u), int(b), int(e)) for u, b, e in zip(windows.users, windows.begins, windows.ends)]
    [(1, 0, 2), (2, 0, 3), (2, 2, 7)]
    """
    users = np.arange(len(lengths))
    has_left_out = lengths > LEFT_OUT
    if split != "train":
        users, ends = users[has_left_out], lengths[has_left_out] - (LEFT_OUT - _SPLIT_SEEDS[split])
        return Windows(users, np.maximum(0, ends - seq_length - 1), ends)
    trained = np.where(has_left_out, lengths - LEFT_OUT, lengths)
    counts = np.maximum(0, -(-(trained - 1) // seq_length))
    users = np.repeat(users, counts)
    before_end = np.concatenate([np.arange(count)[::-1] for count in counts]) if len(users) else users
    ends = trained[users] - before_end.astype(np.int64) * seq_length
    return Windows(users, np.maximum(0, ends - seq_length - 1), ends)


class ItemHistoryDataset:
    """The samples of one split; sample i is a pure function of the histories, the seed and i."""

    def __init__(
        self,
        histories: ItemHistories,
        windows: Windows,
        request: DatasetRequest,
        negatives: NegativeSampling | None,
        *,
        name: str = "item histories",
    ) -> None:
        self._histories, self._windows, self._request, self._negatives, self._name = (
            histories,
            windows,
            request,
            negatives,
            name,
        )
        key = {"kind": "item histories", "histories": histories.fingerprint, "split": request.split}
        count = 0 if negatives is None else negatives.count
        self.fingerprint = fingerprint(
            {**key, "seed": request.seed, "seq_length": request.seq_length, "negatives": count}
        )
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_permutation(request.seed, epoch, len(windows)))
        self._shares = None if negatives is None else target_shares(histories)

    def __len__(self) -> int:
        return self._request.num_samples

    def _window(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        epoch, place = divmod(index, len(self._windows))
        return int(self._order(epoch)[place]) if self._request.split == "train" else place

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Returns tokens, labels and loss_mask, with times also timestamps, all [seq_length]."""
        window, length = self._window(index), self._request.seq_length
        user, begin, end = (int(x[window]) for x in (self._windows.users, self._windows.begins, self._windows.ends))
        items = self._histories.user(user)[begin:end]
        num_inputs = len(items) - 1
        sample: dict[str, NDArray[Any]] = {
            "tokens": _padded(items[:-1], length, PADDING_ITEM),
            "labels": _padded(items[1:], length, 0),
            "loss_mask": np.zeros(length, np.float32),
        }
        sample["loss_mask"][(0 if self._request.split == "train" else num_inputs - 1) : num_inputs] = 1.0
        times = self._histories.times
        if times is not None:
            of_user = times[self._histories.offsets[user] + begin :][:num_inputs]
            sample["timestamps"] = _padded(of_user, length, int(of_user[-1]))
        if self._negatives is not None and self._shares is not None:
            seed = (self._request.seed, _SPLIT_SEEDS[self._request.split], index)
            drawn = np.random.default_rng(seed).integers(0, self._histories.num_items, self._negatives.count)
            sample["negatives"] = drawn
            sample["negative_shares"] = self._shares[drawn]
            sample["label_shares"] = self._shares[sample["labels"]]
        return sample

    def trace(self, index: int) -> SampleTrace:
        """Returns the history that a sample is of, with the range of its items."""
        window = self._window(index)
        user, begin, end = (int(x[window]) for x in (self._windows.users, self._windows.begins, self._windows.ends))
        document = TracedDocument(TokenPlace(user, None, begin), end - begin, None)
        return SampleTrace(self._name, index, (document,))


def target_shares(histories: ItemHistories) -> NDArray[np.float64]:
    """Returns the share of each item among the items that training predicts."""
    lengths = histories.lengths
    trained = np.where(lengths > LEFT_OUT, lengths - LEFT_OUT, lengths)
    places = np.arange(len(histories.items)) - np.repeat(histories.offsets[:-1], lengths)
    is_target = (places >= 1) & (places < np.repeat(trained, lengths))
    counts = np.bincount(histories.items[is_target], minlength=histories.num_items)
    return counts / max(1, counts.sum())


def _padded(values: NDArray[np.int64], length: int, padding: int) -> NDArray[np.int64]:
    out = np.full(length, padding, np.int64)
    out[: len(values)] = values
    return out


class HistorySource(DataSource):
    """A file of histories, of which every split has all users."""

    unit, size_unit, splits_units = "users", "users", False

    def __init__(self, name: str, histories: ItemHistories, negatives: NegativeSampling | None) -> None:
        super().__init__(name, num_units=histories.num_users)
        self._histories, self._negatives = histories, negatives

    def _windows(self, request: DatasetRequest) -> Windows:
        return windows_of(self._histories.lengths, request.split, request.seq_length)

    def samples_per_epoch(self, units: range, request: DatasetRequest) -> int:
        return len(self._windows(request))

    def dataset(self, units: range, request: DatasetRequest) -> SampleDataset:
        windows = self._windows(request)
        if not len(windows):
            least = 2 if request.split == "train" else LEFT_OUT + 1
            raise DataError(
                f"{self.name}: no history has the {least} items that a sample of the {request.split} split needs. Give a file with "
                "longer ones."
            )
        return ItemHistoryDataset(self._histories, windows, request, self._negatives, name=self.name)


@dataclass(frozen=True)
class ItemHistoryKind(DatasetKind):
    reads: ClassVar[str] = "files of item histories"
    negatives: NegativeSampling | None = field(default=None, metadata=NOT_A_SETTING)
    """What a sampled loss needs; from the settings of the model."""

    def of_run(self, run: RunConfig) -> ItemHistoryKind:
        model = run.model
        if model.model_type != RECOMMENDER_MODEL or model.item_loss != "sampled_softmax":
            return self
        return replace(self, negatives=NegativeSampling(model.num_item_negatives))

    def open(self, source: str, request: DatasetRequest) -> HistorySource:
        histories = read_histories(Path(source))
        if request.vocab_size is not None and histories.num_items > request.vocab_size:
            raise DataError(
                f"{source} has {histories.num_items:,} items, and the model {request.vocab_size:,}. Use --vocab-size {histories.num_items}."
            )
        alone = int((histories.lengths == 1).sum())
        if alone and request.split == "train":
            get_logger(__name__).info("%s: %s histories have one item, which predicts nothing", source, f"{alone:,}")
        return HistorySource(source, histories, self.negatives)

    def mock(self, request: DatasetRequest) -> SampleDataset:
        histories = mock_histories(request)
        windows = windows_of(histories.lengths, request.split, request.seq_length)
        return ItemHistoryDataset(histories, windows, request, self.negatives, name="mock histories")

    def collate(self, samples: Sequence[Mapping[str, NDArray[Any]]], options: LoaderOptions) -> Batch:
        drawn = {name: None for name in ("negatives", "negative_shares") if name in samples[0]}
        return stack_arrays(samples, options, sequence_dims=drawn)


def mock_histories(request: DatasetRequest) -> ItemHistories:
    """Returns made-up histories in which an item often follows from the one before it, some of them short."""
    num_items, length = request.vocab_size or 64, request.seq_length
    random = np.random.default_rng((request.seed, num_items, length))
    items, times = [], []
    for _ in range(64):
        count = int(random.integers(3, length + LEFT_OUT + 2))
        history = random.integers(0, num_items, count)
        for place in range(1, count):
            if random.random() < 0.7:
                history[place] = (3 * history[place - 1] + 1) % num_items
        items.append(history)
        times.append(np.cumsum(random.integers(0, 10_000, count)))
    return ItemHistories.of_users(items, times, num_items=num_items)


register_dataset(ITEM_DATASET, ItemHistoryKind)
