"""Made-up conversations for `--mock-data`: random tokens, of which some stretches are learned, with weights."""

from __future__ import annotations

import numpy as np

from petatron.data.conversations.conversation_source import EncodedSource, Rows
from petatron.data.dataset_kinds import DatasetRequest

_RECORDS = 64
_WEIGHTS = (0.0, 1.0, 0.5)


def mock_conversations(request: DatasetRequest, *, rows_per_record: int = 1) -> EncodedSource:
    """Returns records of a few tokens up to a row's length; of each row the last token is learned."""
    size, count = request.vocab_size or 64, _RECORDS * rows_per_record
    random = np.random.default_rng((request.seed, size, request.seq_length))
    lengths = random.integers(2, request.seq_length + 1, count)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    weights = random.choice(_WEIGHTS, int(bounds[-1])).astype(np.float32)
    weights[bounds[1:] - 1] = 1.0
    rows = Rows(random.integers(0, size, int(bounds[-1])).astype(np.int32), weights, bounds.astype(np.int64))
    labels = random.integers(0, 2, _RECORDS).astype(np.float32)
    files, lines = np.zeros(_RECORDS, np.int32), np.arange(1, _RECORDS + 1)
    key = f"mock {request.seed} {size} {request.seq_length} {rows_per_record}"
    return EncodedSource("made-up conversations", rows, labels, key, ("made-up conversations",), files, lines)
