"""Datasets of one's own: `--dataset-kind NAME` opens `--data-path` with the function that was registered under the name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from petatron.base.errors import ConfigError, Problem
from petatron.config.imports import IMPORT_FLAG, import_installed_plugins
from petatron.config.schema.fields import closest_matches
from petatron.data.sample_dataset import SampleDataset
from petatron.data.tokenizer import Tokenizer

_FLAG = "--dataset-kind"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """What a run wants of a dataset: so many samples of a split, of so many tokens (and one to predict), in an order of a seed.

    sources: the words of `--data-path`, or of `--train-data-path` and so on where those are given. The data position of a run is one
    number, so sample i is a pure function of the sources, the seed and i.

    >>> DatasetRequest(sources=(), split="train", num_samples=9, seq_length=4, seed=1, tokenizer=None).num_samples
    9
    """

    sources: tuple[str, ...]
    split: Literal["train", "valid", "test"]
    num_samples: int
    seq_length: int
    seed: int
    tokenizer: Tokenizer | None


OpenDataset = Callable[[DatasetRequest], SampleDataset]
_KINDS: dict[str, OpenDataset] = {}


def register_dataset(name: str, open_dataset: OpenDataset) -> None:
    """Makes `--dataset-kind name` open datasets with a function; the name must be new, or have the same function.

    >>> import hashlib, numpy
    >>> class Letters:
    ...     def __init__(self, request):
    ...         self._request, self.fingerprint = request, f"letters {request.seed} {request.split}"
    ...     def __len__(self):
    ...         return self._request.num_samples
    ...     def __getitem__(self, index):
    ...         return (numpy.arange(self._request.seq_length + 1) + index) % 26
    >>> register_dataset("letters", Letters)
    >>> request = DatasetRequest(sources=(), split="train", num_samples=9, seq_length=4, seed=1, tokenizer=None)
    >>> dataset_kind("letters")(request)[1]
    array([1, 2, 3, 4, 5])
    """
    if _KINDS.setdefault(name, open_dataset) is not open_dataset:
        raise ConfigError([Problem(_FLAG, name, "is registered already", "Register it under another name.")])


def dataset_kind(name: str) -> OpenDataset:
    """Returns what opens datasets of a kind."""
    if name not in _KINDS:
        import_installed_plugins()
    if name not in _KINDS:
        close = closest_matches(name, _KINDS, count=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        known = ", ".join(sorted(_KINDS)) or "none"
        fix = f"{hint}Known: {known}; add {IMPORT_FLAG} MODULE, the file or package that registers it."
        raise ConfigError([Problem(_FLAG, name, "is not a registered kind of dataset", fix)])
    return _KINDS[name]
