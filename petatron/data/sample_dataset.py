"""The loader's interface of a dataset: a length, and sample i as seq_length + 1 token ids."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class SampleDataset(Protocol):
    """An indexed set of samples in the dataset's own order: sample i is the i-th used in training."""

    @property
    def fingerprint(self) -> str:
        """Equal for two datasets that contain the same samples in the same order (up to the shorter one's length)."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...
