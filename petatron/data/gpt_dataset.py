"""Language-model samples from one token file: sequences cut into windows of seq_length + 1 tokens (rules:
document_sample_shuffle_index.py).

The unit that is split and shuffled is the sequence, as in Megatron: mostly a whole document, a sentence in files made for that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from petatron.base.device import host_memory_bytes
from petatron.base.errors import DataError
from petatron.base.format_text import format_bytes
from petatron.base.log import get_logger
from petatron.data.document_sample_shuffle_index import build_sample_indices, index_bytes, plan_epochs
from petatron.data.index_cache import Arrays, fingerprint, load_or_build
from petatron.data.indexed_dataset import IndexedDataset

_ANNOUNCED_ENTRIES = 10_000_000
_SECONDS_PER_ENTRY = 3e-7
"""Measured on one core: two shuffles and a search per sample, limited by the memory's latency."""


class GPTDataset:
    """The i-th sample of a split, for i below the number of samples in all epochs needed for `num_samples`.

    The index is cached under the content of the token file, the split, seed, sequence length and number of epochs; so
    a longer run reuses it, and keeps its order, as long as it needs no further epoch and a short last epoch stays short.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.indexed, self.sequences, self.seq_length = indexed, sequences, seq_length
        lengths = indexed.lengths
        self.num_tokens = int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        if self.num_tokens == 0:
            raise DataError(
                f"{indexed.prefix}: {indexed.unit} {sequences.start}..{sequences.stop} hold no tokens. "
                "Give this split a larger share (--split), or use a larger dataset."
            )
        self.plan = plan_epochs(self.num_tokens, seq_length, num_samples)
        key: dict[str, object] = {
            "kind": "gpt",
            "dataset": indexed.digest(cache_dir),
            # Named by the unit: an index of whole documents, of earlier versions, is not one of their sequences.
            indexed.unit: [sequences.start, sequences.stop],
            "seq_length": seq_length,
            "seed": seed,
            "epochs": self.plan.num_epochs,
            "separate_final_epoch": self.plan.separate_final_epoch,
        }

        def build() -> Arrays:
            numbers = np.arange(sequences.start, sequences.stop)
            progress = self._announce(cache_dir)
            index = build_sample_indices(numbers, lengths, self.plan, seed, on_part=progress)
            return {"documents": index.document_index, "starts": index.sample_index, "order": index.shuffle_index}

        self.fingerprint = fingerprint(key)
        names = ("documents", "starts", "order")
        arrays = load_or_build(cache_dir, key, names, build=build)
        self._document_index, self._sample_index, self._shuffle_index = (arrays[name] for name in names)

    def _announce(self, cache_dir: str | Path | None) -> Callable[[str], None]:
        """Says what a large index will take before it is built, and refuses one that cannot be held; returns a reporter of progress."""
        size, memory = index_bytes(self.plan, len(self.sequences)), host_memory_bytes()
        what = f"{self.indexed.prefix}: the order of {self.plan.num_samples:,} samples over {self.plan.num_epochs:,} epochs"
        if size > memory:
            raise DataError(
                f"{what} takes {format_bytes(size)}, and this machine has {format_bytes(memory)}. Train for fewer iterations or "
                "samples (a run can be continued with more), or with a longer --seq-length."
            )
        log = get_logger(__name__)
        entries = self.plan.num_samples + len(self.sequences) * self.plan.num_epochs
        if entries < _ANNOUNCED_ENTRIES:
            return lambda part: None
        kept = f" and is kept in {cache_dir} for later starts" if cache_dir is not None else ""
        seconds = entries * _SECONDS_PER_ENTRY
        log.info("%s takes about %.0f s to build (%s)%s", what, seconds, format_bytes(size), kept)
        return lambda part: log.info("%s: %s", self.indexed.prefix, part)

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Sample `index` as seq_length + 1 token ids."""
        sample = int(self._shuffle_index[index])
        (first, start), (last, end) = self._sample_index[sample : sample + 2].tolist()
        read = self.indexed.get
        if first == last:
            return read(int(self._document_index[first]), start, end - start + 1).astype(np.int64)
        parts = [read(int(self._document_index[first]), start)]
        parts += [read(sequence) for sequence in self._document_index[first + 1 : last].tolist()]
        parts.append(read(int(self._document_index[last]), 0, end + 1))
        return np.concatenate(parts, dtype=np.int64, casting="unsafe")
