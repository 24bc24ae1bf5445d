"""Made-up text for masked samples: sentences that count, which a model learns to fill in and to put into their order."""

from __future__ import annotations

import numpy as np

from petatron.base.errors import DataError
from petatron.data.dataset_kinds import DatasetRequest, Split
from petatron.data.documents_of_sample import SampleTrace
from petatron.data.index_cache import fingerprint
from petatron.data.masked.mask_tokens import MaskingRandom
from petatron.data.masked.masking_vocabulary import MaskingVocabulary
from petatron.data.masked.text_samples import SampleText

_LONGEST_SENTENCE = 12
_SPLIT_SEEDS: dict[Split, int] = {"train": 0, "valid": 1 << 30, "test": 1 << 31}
"""Samples are seeded by the sum of the seed and their number, so splits are far apart."""


class MockText:
    """Documents that count from a random id on, in sentences of random lengths; document i is a pure function of seed, split and i."""

    def __init__(self, vocabulary: MaskingVocabulary, max_length: int, request: DatasetRequest) -> None:
        self._num_samples, self._max_length = request.num_samples, max_length
        taken = {*vocabulary.special_ids.values(), *vocabulary.sentinel_ids}
        ids = [number for number in range(vocabulary.size) if number not in taken]
        self._ids = np.array(ids[: max(8, max_length)], np.int64)
        self._random = MaskingRandom(request.seed + _SPLIT_SEEDS[request.split])
        key = {"kind": "mock sentences", "max_length": max_length, "seed": request.seed, "split": request.split}
        self.fingerprint = fingerprint({**key, "ids": self._ids.tolist()})

    def __len__(self) -> int:
        return self._num_samples

    def read(self, index: int, random: np.random.RandomState) -> SampleText:
        generator = self._random.of_sample(index)
        length = int(generator.randint(max(2, self._max_length // 2), self._max_length + 1))
        start = int(generator.randint(0, len(self._ids)))
        text = self._ids[(start + np.arange(length)) % len(self._ids)]
        longest = max(1, min(_LONGEST_SENTENCE, length // 2))
        cuts = np.cumsum(generator.randint(1, longest + 1, size=length))
        return SampleText(text, np.append(cuts[cuts < length], length), self._max_length)

    def other(self, index: int, random: np.random.RandomState) -> int:
        return int(random.randint(0, len(self)))

    def trace(self, index: int, change: str) -> SampleTrace:
        raise DataError(f"Sample {index} is made up (--mock-data), and comes from no document. Give --data-path.")
