"""Makes batches of span-corrupted texts, for an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.data.masked.packed_rows import packed_documents
from petatron.kernels.attention.document_layout import Documents, KeySpans
from petatron.models.batch import Batch


def make_span_batch(samples: Sequence[Mapping[str, NDArray[Any]]]) -> Batch:
    """Makes a batch: encoder_tokens [B, S], and tokens, labels and loss_mask of the decoder, whose documents are the batch's.

    A token of the decoder sees those of the encoder that are of its text, and none sees padding. Positions restart in each of several texts
    of a row (positions, encoder_positions).
    """

    def stacked(name: str) -> NDArray[Any]:
        return np.stack([sample[name] for sample in samples])

    arrays = {name: torch.from_numpy(stacked(name)) for name in ("encoder_tokens", "tokens", "labels", "loss_mask")}
    if "begins" not in samples[0]:
        lengths, length = stacked("num_encoder_tokens"), arrays["tokens"].shape[1]
        return Batch(
            arrays=arrays,
            documents=Documents.of_lengths(stacked("num_tokens"), length),
            source_documents=Documents.of_lengths(lengths, arrays["encoder_tokens"].shape[1]),
            key_spans=KeySpans.of_lengths(torch.from_numpy(lengths), length),
        )
    source, arrays["encoder_positions"] = packed_documents(stacked("encoder_begins"))
    documents, arrays["positions"] = packed_documents(stacked("begins"))
    spans = KeySpans.of_documents(documents, source)
    return Batch(arrays=arrays, documents=documents, source_documents=source, key_spans=spans)
