"""Random batches of each type of model, on the device: the same for every contender."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from petatron.config import RunConfig
from petatron.config.required_settings import known_vocab_size, required
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.models.batch import Batch
from petatron.models.encoder_decoder_model import ENCODER_TOKENS
from petatron.models.image_text_batch import image_vectors, make_image_text_batch
from petatron.models.masked_language_model import ORDER_LABELS, PREDICTED_POSITIONS, TOKEN_TYPES

_MASKED_SHARE = 0.15
PIXELS = "pixel_values"
"""Normalized images, for peers that read no patches."""


def random_batch(run: RunConfig, generator: Generator, device: torch.device) -> Batch:
    """Returns a micro-batch of rows without padding. Models of other types than ours get that of a decoder."""
    return _MAKERS.get(run.model.model_type, _next_tokens)(run, generator, device)


def _next_tokens(run: RunConfig, generator: Generator, device: torch.device) -> Batch:
    text = _tokens(run, run.model.seq_length + 1, generator, device)
    labels = text[:, 1:].contiguous()
    return Batch(text[:, :-1].contiguous(), labels, torch.ones(labels.shape, device=device))


def _masked_tokens(run: RunConfig, generator: Generator, device: torch.device) -> Batch:
    """15 % of the tokens are predicted; the second half of a row is its second segment."""
    length, count = run.model.seq_length, run.train.micro_batch_size
    labels, others = (_tokens(run, length, generator, device) for _ in range(2))
    most = max(1, round(_MASKED_SHARE * length))
    positions = torch.rand((count, length), generator=generator).argsort(dim=1)[:, :most].to(device)
    masked = torch.zeros((count, length), device=device).scatter(1, positions, 1.0)
    arrays: dict[str, Tensor] = {PREDICTED_POSITIONS: positions}
    if run.model.num_token_types:
        arrays[TOKEN_TYPES] = (torch.arange(length, device=device) >= length // 2).long().expand(count, -1).contiguous()
    if run.model.bert_binary_head:
        arrays[ORDER_LABELS] = torch.randint(2, (count,), generator=generator).to(device)
    inputs = torch.where(masked > 0, others, labels)
    return Batch(inputs, labels, masked, arrays=arrays, sequence_dims=dict.fromkeys(arrays.keys() - {TOKEN_TYPES}))


def _corrupted_spans(run: RunConfig, generator: Generator, device: torch.device) -> Batch:
    """Both sequences are as long as the run says; their tokens have nothing to do with one another."""
    model = run.model
    source = _tokens(run, model.seq_length, generator, device)
    text = _tokens(run, (model.decoder_seq_length or model.seq_length) + 1, generator, device)
    labels = text[:, 1:].contiguous()
    mask = torch.ones(labels.shape, device=device)
    return Batch(text[:, :-1].contiguous(), labels, mask, arrays={ENCODER_TOKENS: source})


def _images_and_text(run: RunConfig, generator: Generator, device: torch.device) -> Batch:
    """A square image in every row, of as many patches as the model reads, and text; `PIXELS` has it as others take it."""
    model = run.model
    side = math.isqrt((model.max_patches or 0) - model.vision_class_token) // model.vision_merge_size
    side *= model.vision_merge_size
    vectors, pixels = image_vectors((1, side, side), model), 3 * model.vision_patch_size**2
    text = torch.randint(
        known_vocab_size(model) - 1, (run.train.micro_batch_size, model.seq_length + 1), generator=generator
    )
    text[text == model.image_token_id] = known_vocab_size(model) - 1
    text[:, 1 : 1 + vectors] = required("image_token_id", model.image_token_id)
    samples, grid = [], np.array([[1, side, side]])
    for row in text.numpy():
        shape = side * side, pixels * model.vision_temporal_patch_size
        patches = torch.randint(256, shape, generator=generator, dtype=torch.uint8).numpy()
        samples.append({"tokens": row, "loss_mask": row != model.image_token_id, "patches": patches, "grids": grid})
    batch = make_image_text_batch(samples, model)
    images = images_of_patches(np.stack([sample["patches"] for sample in samples]), model)
    arrays = {**batch.arrays, PIXELS: images}
    return replace(batch, arrays=arrays, sequence_dims={**batch.sequence_dims, PIXELS: None}).to(device)


def images_of_patches(patches_NPC: NDArray[np.uint8], model: ModelConfig) -> Tensor:
    """Returns normalized images [N, 3, rows, columns] of square images whose patches are in raster order."""
    count, patches, _ = patches_NPC.shape
    side, patch = math.isqrt(patches), model.vision_patch_size
    pixels = torch.from_numpy(patches_NPC).float().view(count, side, side, 3, patch, patch) / 255.0
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (model.vision_pixel_mean, model.vision_pixel_std))
    return ((pixels - mean) / std).permute(0, 3, 1, 4, 2, 5).reshape(count, 3, side * patch, side * patch).contiguous()


def _tokens(run: RunConfig, length: int, generator: Generator, device: torch.device) -> Tensor:
    shape = run.train.micro_batch_size, length
    return torch.randint(known_vocab_size(run.model), shape, generator=generator).to(device)


_MAKERS: Mapping[str, Callable[[RunConfig, Generator, torch.device], Batch]] = {
    MASKED_LANGUAGE_MODEL: _masked_tokens,
    ENCODER_DECODER_MODEL: _corrupted_spans,
    VISION_LANGUAGE_MODEL: _images_and_text,
}
