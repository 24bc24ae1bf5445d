"""The losses of transformers' models of each type, from our batches: sums that equal those of our own step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from petatron.bench.peers.random_batches import PIXELS
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.models.batch import Batch
from petatron.models.encoder_decoder_model import ENCODER_TOKENS
from petatron.models.masked_language_model import ORDER_LABELS, TOKEN_TYPES

_IGNORED = -100
"""The label of a position that no loss counts."""
_NAMES = {TOKEN_TYPES: "token_type_ids", ORDER_LABELS: "next_sentence_label"}


def loss_of(model_type: str) -> Callable[[Any, Batch], Tensor]:
    """Returns what computes the loss of a batch with a model of transformers."""
    return _LOSSES.get(model_type, _next_token_loss)


def _next_token_loss(model: Any, batch: Batch) -> Tensor:
    logits = model(input_ids=batch.tokens, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten())


def _masked_token_losses(model: Any, batch: Batch) -> Tensor:
    more = {theirs: batch[ours] for ours, theirs in _NAMES.items() if ours in batch}
    labels = batch.labels.masked_fill(batch.loss_mask == 0, _IGNORED)
    return model(input_ids=batch.tokens, labels=labels, **more).loss


def _span_loss(model: Any, batch: Batch) -> Tensor:
    source = batch[ENCODER_TOKENS]
    return model(input_ids=source, decoder_input_ids=batch.tokens, labels=batch.labels, use_cache=False).loss


def _next_token_after_images_loss(model: Any, batch: Batch) -> Tensor:
    logits = model(input_ids=batch.tokens, pixel_values=batch[PIXELS], use_cache=False).logits
    labels = batch.labels.masked_fill(batch.loss_mask == 0, _IGNORED)
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)


_LOSSES: Mapping[str, Callable[[Any, Batch], Tensor]] = {
    MASKED_LANGUAGE_MODEL: _masked_token_losses,
    ENCODER_DECODER_MODEL: _span_loss,
    VISION_LANGUAGE_MODEL: _next_token_after_images_loss,
}
