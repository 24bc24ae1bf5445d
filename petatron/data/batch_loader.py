"""Loads the batches of one data-parallel rank, as a function of one number: the samples that the whole run has consumed.

Global samples are numbered 0, 1, 2, ... over the run; step n uses the next `global_batch_size` numbers. Micro-batch m
of rank r uses the numbers

    consumed + (m * dp_size + r) * micro_batch_size + [0, micro_batch_size)

so over all ranks and micro-batches each number of the step is used exactly once, whatever the sizes, and a run resumed
in another layout continues with exactly the samples not yet seen. The loader type maps numbers to samples:
`single` uses sample g of the dataset, in the dataset's order, once; `cyclic` uses position g mod n of a shuffle of all
n samples drawn from (seed, g div n), so an epoch may end inside a batch, and no sample is dropped or depends on layout.

The model's `Collate` function makes a batch of samples: it pads, masks and names the arrays. For text it is `make_batch`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.data.document_sample_shuffle_index import legacy_random_state
from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch

Sample = NDArray[np.int64] | Mapping[str, NDArray[Any]]
"""Token ids of text, or arrays by name."""


class SampleDataset(Protocol):
    """An indexed set of samples in the dataset's own order: sample i is the i-th used in training."""

    @property
    def fingerprint(self) -> str:
        """Equal for two datasets that contain the same samples in the same order (up to the shorter one's length)."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How samples become batches. `eod` is required by the three options that use it."""

    micro_batch_size: int
    dataloader_type: Literal["single", "cyclic"] = "single"
    seed: int
    num_workers: int = 0
    eod: int | None = None
    eod_mask_loss: bool = False
    pad: int | None = None
    """The id of padding, which the loss does not predict; None where samples have none."""
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    pin_memory: bool = False
    seq_length: int | None = None
    """Samples of token ids are checked against this and `vocab_size`; None: not checked."""
    vocab_size: int | None = None

    @property
    def needs_documents(self) -> bool:
        return self.reset_position_ids or self.reset_attention_mask


class StepLoader(Protocol):
    """What training and evaluations read: the micro-batches of one data-parallel rank, step by step.

    rows_are_samples: whether the rows of its micro-batches are the samples that a step was asked for; else these are packed into more rows
    or fewer. step_metrics: what the log says of the step that was read last, always of the same names.
    """

    @property
    def rows_are_samples(self) -> bool: ...

    @property
    def step_metrics(self) -> Mapping[str, float]: ...

    @property
    def fingerprint(self) -> str: ...
    @property
    def num_samples(self) -> int | None:
        """How many samples there are; None if that is not known."""
        ...

    def next_step(self, global_batch_size: int, consumed_samples: int) -> list[Batch]: ...
    def close(self) -> None: ...


Collate = Callable[[Sequence[Any], LoaderOptions], Batch]
"""Makes the batch of one micro-batch's samples, on the host; the loader pins it."""


class BatchLoader:
    """Yields micro-batches of one data-parallel rank. It has no position: each call gives the samples consumed so far.

    With num_workers > 0, that many steps are prefetched in background threads, assuming that the next call continues where this one
    ends; any other call reads its step directly. A prefetch error is raised by the call that would have returned the batch.
    """

    rows_are_samples = True
    step_metrics: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        dataset: SampleDataset,
        options: LoaderOptions,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        collate: Collate | None = None,
    ) -> None:
        if (options.eod_mask_loss or options.needs_documents) and options.eod is None:
            raise DataError(
                "--eod-mask-loss, --reset-position-ids and --reset-attention-mask look for the end-of-document token, but "
                "the tokenizer has none. Leave them out, or use a tokenizer that names an end-of-text token."
            )
        self.dataset, self.options = dataset, options
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self._collate: Collate = make_batch if collate is None else collate
        self._pool = ThreadPoolExecutor(options.num_workers, "petatron-loader") if options.num_workers else None
        # Two epochs are in use at once where one ends inside a batch.
        self._permutation = lru_cache(maxsize=2)(partial(epoch_permutation, options.seed))
        self._prefetched: OrderedDict[tuple[int, int], Future[list[Batch]]] = OrderedDict()
        self._extensions: list[Callable[[Batch], Batch]] = []

    def extend_batches(self, extension: Callable[[Batch], Batch]) -> None:
        """Adds what a function adds to each micro-batch, on the host, from the next one on; before the first step is read."""
        self._cancel_prefetch()
        self._extensions.append(extension)

    def next_step(self, global_batch_size: int, consumed_samples: int) -> list[Batch]:
        """Returns this rank's micro-batches of the step over samples consumed .. consumed + global_batch_size.

        An empty list when a `single` dataset has fewer samples left than that: the short batch is dropped.
        """
        num_micro_batches(global_batch_size, self.options.micro_batch_size, self.dp_size)
        if self._pool is None:
            return self._read_step(global_batch_size, consumed_samples)
        future = self._prefetched.pop((global_batch_size, consumed_samples), None)
        if future is None:
            self._cancel_prefetch()
            future = self._pool.submit(self._read_step, global_batch_size, consumed_samples)
        for step in range(1, self.options.num_workers + 1):
            key = (global_batch_size, consumed_samples + step * global_batch_size)
            if key not in self._prefetched:
                self._prefetched[key] = self._pool.submit(self._read_step, *key)
        return future.result()

    def sample_ids(self, global_batch_size: int, consumed_samples: int) -> NDArray[np.int64]:
        """Returns the global sample numbers of this rank's step: [micro-batches, micro_batch_size]."""
        micro = self.options.micro_batch_size
        count = global_batch_size // (micro * self.dp_size)
        first = consumed_samples + (np.arange(count) * self.dp_size + self.dp_rank) * micro
        return first[:, None] + np.arange(micro)

    def dataset_indices(self, global_batch_size: int, consumed_samples: int) -> NDArray[np.int64]:
        """Returns where in the dataset the samples of this rank's step are: [micro-batches, micro_batch_size]."""
        return self.places(self.sample_ids(global_batch_size, consumed_samples))

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns where in the dataset some samples of the run are, by their global numbers."""
        return self._shuffled(numbers, len(self.dataset)) if self.options.dataloader_type == "cyclic" else numbers

    @property
    def fingerprint(self) -> str:
        """That of the samples and their order."""
        return self.dataset.fingerprint

    @property
    def num_samples(self) -> int | None:
        """How many samples the dataset has."""
        return len(self.dataset)

    def close(self) -> None:
        """Stops prefetching."""
        self._cancel_prefetch()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cancel_prefetch(self) -> None:
        for future in self._prefetched.values():
            future.cancel()
        self._prefetched.clear()

    def _read_step(self, global_batch_size: int, consumed_samples: int) -> list[Batch]:
        total = len(self.dataset)
        if self.options.dataloader_type == "single" and consumed_samples + global_batch_size > total:
            return []
        batches = [self.batch(row) for row in self.dataset_indices(global_batch_size, consumed_samples)]
        return [batch.pin_memory() for batch in batches] if self.options.pin_memory else batches

    def batch(self, numbers: NDArray[np.int64]) -> Batch:
        """Returns the micro-batch of some samples of the dataset."""
        try:
            batch = self._collate([self.dataset[int(number)] for number in numbers], self.options)
            for extend in self._extensions:
                batch = extend(batch)
            return batch
        except DataError as error:
            raise DataError(f"{error} (Samples {', '.join(map(str, numbers))} of the dataset.)") from error

    def _shuffled(self, numbers: NDArray[np.int64], total: int) -> NDArray[np.int64]:
        epochs, places = np.divmod(numbers, total)
        result = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._permutation(int(epoch), total)[places[chosen]]
        return result


def num_micro_batches(global_batch_size: int, micro: int, dp_size: int) -> int:
    """Returns the micro-batches of a rank in a step; raises `ConfigError` if the sizes do not divide.

    >>> num_micro_batches(12, 2, 3)
    2
    """
    if global_batch_size < 1 or global_batch_size % (micro * dp_size):
        rule = f"is not a multiple of micro-batch {micro} x data-parallel {dp_size} = {micro * dp_size}"
        fix = f"Use {max(1, global_batch_size // (micro * dp_size)) * micro * dp_size}, or another micro-batch size."
        raise ConfigError([Problem("--global-batch-size", str(global_batch_size), rule, fix)])
    return global_batch_size // (micro * dp_size)


def epoch_permutation(seed: int, epoch: int, total: int) -> NDArray[np.integer]:
    """Returns the order of `total` samples in one epoch of the cyclic loader."""
    order = np.arange(total, dtype=np.int32 if total <= np.iinfo(np.int32).max else np.int64)
    legacy_random_state(seed, epoch).shuffle(order)
    return order


def make_batch(samples: Sequence[NDArray[np.int64]], options: LoaderOptions) -> Batch:
    """Makes a batch of samples of seq_length + 1 ids: inputs, labels one token later, loss mask, positions and documents."""
    ids = _stack_token_ids(samples, options)
    tokens = ids[:, :-1]
    mask = np.ones(tokens.shape, np.float32)
    if options.eod_mask_loss:
        mask[tokens == options.eod] = 0.0
    if options.pad is not None:
        mask[ids[:, 1:] == options.pad] = 0.0
    starts = _document_starts(tokens == options.eod) if options.needs_documents else None
    positions = None if starts is None or not options.reset_position_ids else np.arange(starts.shape[1]) - starts
    return Batch(
        _tensor(tokens),
        _tensor(ids[:, 1:]),
        _tensor(mask),
        None if positions is None else _tensor(positions),
        Documents.build(starts) if starts is not None and options.reset_attention_mask else None,
    )


def _stack_token_ids(samples: Sequence[Any], options: LoaderOptions) -> NDArray[np.int64]:
    """Returns samples as [samples, seq_length + 1] ids; raises `DataError` for those of another form, length or vocabulary."""
    if isinstance(samples[0], Mapping):
        raise DataError(
            f"The samples are arrays by name ({', '.join(samples[0])}), and their kind of dataset makes batches of token ids "
            "alone. Give it a method `collate`; petatron.stack_arrays stacks arrays of equal shapes."
        )
    lengths = sorted({len(sample) for sample in samples})
    length = lengths[0] if options.seq_length is None else options.seq_length + 1
    if lengths != [length]:
        raise DataError(
            f"A sample has {next(other for other in lengths if other != length)} token ids, and --seq-length {length - 1} needs "
            f"{length}: one more than it, to predict. Pad or cut samples to that length."
        )
    ids = np.stack(samples)
    if ids.dtype.kind not in "iu" or ids.min() < 0:
        raise DataError(f"Samples are token ids, integers from 0 on, and one has {ids.min()} ({ids.dtype}).")
    if options.vocab_size is not None and ids.max() >= options.vocab_size:
        raise DataError(
            f"A sample has the token id {ids.max()}, and the vocabulary has {options.vocab_size} ids. Use the tokenizer of "
            "the data, or set --vocab-size."
        )
    return ids


def stack_arrays(
    samples: Sequence[Mapping[str, NDArray[Any]]],
    options: LoaderOptions,
    *,
    sequence_dims: Mapping[str, int | None] | None = None,
) -> Batch:
    """Makes a batch of samples of named arrays of equal shapes; `sequence_dims` are those of `Batch`.

    >>> samples = [{"pixels": np.zeros((3, 4, 4)), "tokens": np.arange(5)}] * 2
    >>> batch = stack_arrays(samples, LoaderOptions(micro_batch_size=2, seed=1), sequence_dims={"pixels": None})
    >>> {name: tuple(x.shape) for name, x in batch.arrays.items()}
    {'pixels': (2, 3, 4, 4), 'tokens': (2, 5)}
    """
    arrays = {name: _tensor(np.stack([sample[name] for sample in samples])) for name in samples[0]}
    return Batch(arrays=arrays, sequence_dims=sequence_dims)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _document_starts(is_eod: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns for each position the first one of its document; a document ends with its end-of-document token."""
    index = np.arange(is_eod.shape[1])
    starts = np.zeros(is_eod.shape, np.int64)
    starts[:, 1:] = np.where(is_eod[:, :-1], index[1:], 0)
    return np.maximum.accumulate(starts, axis=1)
