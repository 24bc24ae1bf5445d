"""`--dataloader-type external`: micro-batches that code of the user's own makes, instead of files that a kind of dataset reads.

An imported module registers a function. It is called on every rank with a `DataloaderRequest` and returns the micro-batches of that
data-parallel rank, one after the other: anything that can be iterated. Ranks that share the data (tensor, pipeline and context parallelism)
call it with the same request and must get the same micro-batches.

Position: the function is called at the start, on resume and for every evaluation, and `consumed_samples` says where to begin. What cannot
be derived from that number is state: if the returned object has `state_dict`, that of every data-parallel rank is saved with each
checkpoint, and given to `load_state_dict` on resume, before anything is iterated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.config.import_user_modules import IMPORT_FLAG, import_installed_plugins
from petatron.config.schema.objective_and_dataset_names import EXTERNAL
from petatron.data.batch_loader import LoaderOptions, num_micro_batches
from petatron.data.dataset_kinds import Split
from petatron.data.tokenizer import Tokenizer
from petatron.models.batch import Batch

_FLAG = "--dataloader-type"
_TEXT_ARRAYS = ("tokens", "labels", "loss_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataloaderRequest:
    """What a run asks of an external loader: the micro-batches of one data-parallel rank, from a sample of the whole run on.

    consumed_samples counts those of all ranks: this rank has had consumed_samples / (dp_size x micro_batch_size) micro-batches, if the
    run has always had these sizes. In the order of Petatron's own loader its next micro-batch m has the samples
    consumed_samples + (m x dp_size + dp_rank) x micro_batch_size + [0, micro_batch_size), in every layout.

    >>> DataloaderRequest(split="train", dp_rank=0, dp_size=2, micro_batch_size=4, seq_length=16, consumed_samples=0, seed=1).dp_size
    2
    """

    split: Split
    dp_rank: int
    dp_size: int
    micro_batch_size: int
    seq_length: int
    consumed_samples: int
    seed: int
    vocab_size: int | None = None
    tokenizer: Tokenizer | None = None


MicroBatch = Mapping[str, Tensor | NDArray[Any]] | Batch
"""Arrays by name, or a `Batch`, which can say more of them."""
BuildDataloader = Callable[[DataloaderRequest], Iterable[MicroBatch]]


@dataclass(frozen=True, slots=True)
class RegisteredDataloader:
    """A function that makes micro-batches, and the splits that it has some for."""

    build: BuildDataloader
    splits: frozenset[str]

    @property
    def name(self) -> str:
        """The function and its file, wherever that is."""
        name = getattr(self.build, "__qualname__", type(self.build).__qualname__)
        file = getattr(sys.modules.get(self.build.__module__), "__file__", None) or self.build.__module__
        return f"{name} of {Path(file).name}"


_REGISTERED: list[RegisteredDataloader] = []


def register_dataloader(build: BuildDataloader, *, splits: Collection[Split] = ("train",)) -> None:
    """Makes `--dataloader-type external` use the micro-batches of a function; there can be one. Splits without any are not evaluated.

    >>> def zeros(request):
    ...     ids = np.zeros((request.micro_batch_size, request.seq_length), np.int64)
    ...     while True:
    ...         yield {"tokens": ids, "labels": ids}
    >>> register_dataloader(zeros)
    >>> registered_dataloader().build is zeros
    True
    >>> _REGISTERED.clear()
    """
    unknown = set(splits) - {"train", "valid", "test"}
    if unknown or "train" not in splits:
        text = ", ".join(map(str, splits)) or "none"
        raise ConfigError(
            [Problem(_FLAG, EXTERNAL, f"was registered for the splits {text}", "Name train, valid, test.")]
        )
    if _REGISTERED and _REGISTERED[0].build is not build:
        rule = f"has a loader already, {_REGISTERED[0].name}"
        raise ConfigError([Problem(_FLAG, EXTERNAL, rule, "Import one module that registers one.")])
    _REGISTERED[:] = [RegisteredDataloader(build, frozenset(splits))]


def registered_dataloader() -> RegisteredDataloader:
    """Returns what was registered; raises `ConfigError` if nothing was."""
    if not _REGISTERED:
        import_installed_plugins()
    if not _REGISTERED:
        fix = f"Add {IMPORT_FLAG} MODULE, the file that calls petatron.register_dataloader."
        raise ConfigError([Problem(_FLAG, EXTERNAL, "has no loader: no module has registered one", fix)])
    return _REGISTERED[0]


class ExternalLoader:
    """The micro-batches of one split on one data-parallel rank, checked.

    needs_text: whether the model takes tokens and labels of this length.
    """

    rows_are_samples = True
    step_metrics: Mapping[str, float] = MappingProxyType({})
    num_samples: int | None = None
    """It is not known how many there are."""

    def __init__(
        self, registered: RegisteredDataloader, request: DataloaderRequest, options: LoaderOptions, *, needs_text: bool
    ) -> None:
        self.request, self.options = request, options
        self.fingerprint = f"external {registered.name}"
        self._build, self._needs_text = registered.build, needs_text
        self._source: Any = None
        self._batches: Iterator[MicroBatch] = iter(())
        self._position: int | None = None
        self._num_read = 0
        self._saved_state: Any = None

    def next_step(self, global_batch_size: int, consumed_samples: int) -> list[Batch]:
        """Returns this rank's micro-batches of the step over samples consumed .. consumed + global_batch_size."""
        count = num_micro_batches(global_batch_size, self.options.micro_batch_size, self.request.dp_size)
        if self._position != consumed_samples:
            self._begin(consumed_samples)
        batches = [self._next(place, count) for place in range(count)]
        self._position = consumed_samples + global_batch_size
        return [batch.pin_memory() for batch in batches] if self.options.pin_memory else batches

    def state(self) -> Any:
        """Returns the state of what makes the micro-batches, values of JSON; None if it has none, or has not begun."""
        if self._source is None:
            return self._saved_state
        if not hasattr(self._source, "state_dict"):
            return None
        state = self._source.state_dict()
        try:
            return json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            self._raise(
                f"it has a state_dict that is no value of JSON ({error})",
                "Return numbers, texts, lists and dictionaries of them; of tensors and random generators, lists of numbers.",
            )

    def restore(self, state: Any) -> None:
        """Begins with a state that `state` returned, where the run has come to."""
        self._saved_state, self._position = state, None

    def close(self) -> None:
        """Drops what makes the micro-batches."""
        self._source, self._batches, self._position = None, iter(()), None

    def _begin(self, consumed_samples: int) -> None:
        state, self._saved_state = self._saved_state, None
        self._source = self._build(replace(self.request, consumed_samples=consumed_samples))
        self._num_read = 0
        if state is not None:
            if not hasattr(self._source, "load_state_dict"):
                rule = "it has no load_state_dict, and the checkpoint has a state of it"
                self._raise(rule, "Use the module that the run began with, or --finetune to begin the data anew.")
            self._source.load_state_dict(state)
        try:
            self._batches = iter(self._source)
        except TypeError:
            kind = type(self._source).__name__
            self._raise(f"it returned a {kind}, which cannot be iterated", "Return an iterator of micro-batches.")
        self.state()  # one that cannot be saved is an error before training, not at the first checkpoint

    def _next(self, place: int, count: int) -> Batch:
        try:
            value = next(self._batches)
        except StopIteration:
            self._raise(
                f"it ended after {self._num_read:,} micro-batches since it began, and this step takes {count - place} more",
                "Let it begin again at its end, or train and evaluate for fewer steps (--train-iters, --eval-iters).",
            )
        self._num_read += 1
        batch = value if isinstance(value, Batch) else self._from_arrays(value)
        self._check(batch)
        return batch

    def _from_arrays(self, value: Any) -> Batch:
        if not isinstance(value, Mapping) or not value:
            kind = type(value).__name__
            self._raise_batch(
                f"is a {kind} and no mapping of arrays by name", "Yield dictionaries of tensors or arrays."
            )
        arrays: dict[str, Tensor] = {}
        for name, array in value.items():
            if not isinstance(array, Tensor | np.ndarray):
                rule = f"has {name!r}, a {type(array).__name__}"
                self._raise_batch(
                    rule, "Its values are tensors or numpy arrays, with the samples along the first dimension."
                )
            arrays[name] = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
        if self._needs_text:
            if missing := [name for name in _TEXT_ARRAYS[:2] if name not in arrays]:
                self._raise_batch(
                    f"has {', '.join(arrays)} and lacks {', '.join(missing)}",
                    "A model of text takes tokens, labels (the tokens that follow), and, where not all count, loss_mask.",
                )
            arrays.setdefault("loss_mask", torch.ones(arrays["tokens"].shape))
        return Batch(arrays=arrays)

    def _check(self, batch: Batch) -> None:
        if batch.documents is not None:
            self._raise_batch("has documents", "Leave them out: each row is one document.")
        rows = self.options.micro_batch_size * batch.rows_per_sample
        for name, array in batch.arrays.items():
            if name != "positions" and (array.dim() == 0 or array.shape[0] != rows):
                rule = f"has {name} of shape {list(array.shape)}"
                self._raise_batch(rule, f"The first dimension is that of samples, --micro-batch-size: {rows}.")
        if not self._needs_text:
            return
        shape = [rows, self.request.seq_length]
        for name in _TEXT_ARRAYS:
            if list(batch[name].shape) != shape:
                rule = f"has {name} of shape {list(batch[name].shape)}"
                self._raise_batch(rule, f"It takes {shape}: --micro-batch-size x --seq-length.")
        for name in _TEXT_ARRAYS[:2]:
            self._check_ids(name, batch[name])

    def _check_ids(self, name: str, ids: Tensor) -> None:
        if ids.dtype != torch.int64:
            self._raise_batch(f"has {name} of type {ids.dtype}", "Token ids are torch.int64.")
        low, high = int(ids.min()), int(ids.max())
        size = self.request.vocab_size
        if low < 0 or (size is not None and high >= size):
            known = "" if size is None else f" to {size - 1}"
            self._raise_batch(
                f"has {name} from {low} to {high}",
                f"Ids are from 0{known}; a position that does not count has loss_mask 0, and any id as its label.",
            )

    def _raise_batch(self, rule: str, fix: str) -> NoReturn:
        self._raise(f"micro-batch {self._num_read:,} {rule}", fix)

    def _raise(self, rule: str, fix: str) -> NoReturn:
        request, name = self.request, self.fingerprint.partition(" ")[2]
        where = f"split {request.split}, data-parallel rank {request.dp_rank} of {request.dp_size}"
        raise DataError(f"The external loader {name} ({where}): {rule}. {fix}")
