"""Mock data without files, for trying a layout: documents that count 1, 2, 3, ... up to a random length, then end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from petatron.data.document_sample_shuffle_index import legacy_random_state
from petatron.data.index_cache import fingerprint


class MockDataset:
    """`num_samples` samples of seq_length + 1 ids, sample i a pure function of (seed, i).

    Ids count from 1 and start again when they reach `eod`, which is the last id of the vocabulary unless given.
    """

    def __init__(
        self, seq_length: int, vocab_size: int, num_samples: int, *, seed: int, eod: int | None = None
    ) -> None:
        if vocab_size < 3:
            raise ValueError(f"vocab_size {vocab_size}: counting needs two ids and an end of document")
        self.seq_length, self.num_samples, self.seed = seq_length, num_samples, seed
        self.eod = vocab_size - 1 if eod is None else eod
        self.fingerprint = fingerprint(
            {"kind": "mock", "seq_length": seq_length, "vocab_size": vocab_size, "eod": self.eod, "seed": seed}
        )
        self._ids = np.array(
            [number for number in range(min(vocab_size, seq_length + 2)) if number not in (0, self.eod)]
        )

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        random = legacy_random_state(self.seed, index)
        total = self.seq_length + 1
        sample = np.empty(total, np.int64)
        filled = 0
        while filled < total:
            length = int(random.randint(2, max(3, self.seq_length)))
            document = np.resize(self._ids, length)
            document[-1] = self.eod
            taken = document[: total - filled]
            sample[filled : filled + len(taken)] = taken
            filled += len(taken)
        return sample
