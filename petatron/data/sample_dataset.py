"""The loader's interface of a dataset: a length, and sample i: seq_length + 1 token ids of text, or named arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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
