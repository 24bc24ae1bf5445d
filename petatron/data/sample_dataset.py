"""What the loader needs of a dataset: a length, and sample i as seq_length + 1 token ids."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class SampleDataset(Protocol):
    """A numbered set of samples. The order of use is the dataset's own: sample i is the i-th used in training."""

    @property
    def fingerprint(self) -> str:
        """Equal for two datasets that hold the same samples in the same order (as far as the shorter one goes)."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...
