"""Language-model samples from one token file: sequences cut into windows of seq_length + 1 tokens (rules: sample_index.py).

The unit that is split and shuffled is the sequence, as in Megatron: mostly a whole document, a sentence in files made for that.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.config.schema.data_blend import BlendError, parse_split
from petatron.data.index_cache import Arrays, fingerprint, load_or_build
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.sample_index import build_sample_indices, plan_epochs


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
            index = build_sample_indices(np.arange(sequences.start, sequences.stop), lengths, self.plan, seed)
            return {"documents": index.document_index, "starts": index.sample_index, "order": index.shuffle_index}

        self.fingerprint = fingerprint(key)
        arrays = load_or_build(cache_dir, key, ("documents", "starts", "order"), build=build)
        self._document_index, self._sample_index, self._shuffle_index = (
            arrays["documents"],
            arrays["starts"],
            arrays["order"],
        )

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


def split_sequences(split: str, num_sequences: int) -> tuple[range, range, range]:
    """Contiguous ranges of sequences for training, validation and test, in proportion to "969,30,1".

    >>> split_sequences("8,1,1", 10)
    (range(0, 8), range(8, 9), range(9, 10))
    """
    try:
        shares = parse_split(split)
    except BlendError as error:
        raise ConfigError([Problem("--split", split, str(error), "Write three numbers such as 969,30,1.")]) from error
    first, second = round(shares[0] * num_sequences), round((shares[0] + shares[1]) * num_sequences)
    return range(first), range(first, second), range(second, num_sequences)
