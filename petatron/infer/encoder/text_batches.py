"""Micro-batches of texts that a model reads as they are: padded on the right, and no token sees padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from petatron.base.errors import DataError
from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch
from petatron.parallel.forward_sequences import (
    MicroBatchPlan,
    check_vocabulary,
    max_inputs,
    plan_micro_batches,
    sequence_multiple,
)
from petatron.parallel.parallel_model import ParallelModel


def plan_texts(model: ParallelModel, texts: Sequence[Sequence[int]], *, batch_tokens: int) -> list[MicroBatchPlan]:
    """Returns the micro-batches of some texts; `DataError` if the model cannot read one of them."""
    if not all(texts):
        raise DataError(f"Text {[bool(ids) for ids in texts].index(False) + 1} is empty. Give at least one token.")
    longest, most = max(map(len, texts), default=0), max_inputs(model)
    if longest > most:
        raise DataError(f"A text has {longest:,} tokens, but the model reads {most:,} in this layout. Shorten it.")
    check_vocabulary(model, texts)
    return plan_micro_batches(
        [len(ids) for ids in texts],
        dp_size=model.mesh.dp.size,
        batch_tokens=batch_tokens,
        multiple=sequence_multiple(model),
        max_length=most,
    )


def batch_of_texts(texts: Sequence[Sequence[int]], plan: MicroBatchPlan, device: torch.device) -> Batch:
    """Pads a rank's texts to the length of a micro-batch; rows without a text are one token and padding."""
    tokens = np.zeros((plan.rows, plan.length), dtype=np.int64)
    lengths = np.ones(plan.rows, dtype=np.int64)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
    padded = bool((lengths < plan.length).any())
    documents = Documents.of_lengths(lengths, plan.length).to(device) if padded else None
    return Batch(torch.from_numpy(tokens).to(device), documents=documents)
