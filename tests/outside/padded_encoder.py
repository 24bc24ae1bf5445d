"""Models that the package does not know: encoders that see whole samples, which are padded or packed, and decoders with a prefix.

An encoder predicts tokens that were replaced by others; a decoder with a prefix continues what all tokens of the prefix see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import petatron
from petatron.config import ModelConfig, MoEConfig
from petatron.kernels.attention.document_layout import Documents
from petatron.kernels.attention.visibility import Visibility
from petatron.layers.attention import AttentionSpec
from petatron.models.batch import Batch
from petatron.models.decoder_spec import DecoderSpec, decoder_spec
from petatron.models.model_spec import Collate


@dataclass(frozen=True, slots=True)
class PaddedEncoderSpec(DecoderSpec):
    __hash__ = DecoderSpec.__hash__

    @property
    def collate(self) -> Collate:
        return padded_samples


@dataclass(frozen=True, slots=True)
class PackedEncoderSpec(DecoderSpec):
    __hash__ = DecoderSpec.__hash__

    @property
    def collate(self) -> Collate:
        return packed_samples


@dataclass(frozen=True, slots=True)
class PrefixDecoderSpec(DecoderSpec):
    __hash__ = DecoderSpec.__hash__

    @property
    def collate(self) -> Collate:
        return samples_with_prefix


def lengths_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many tokens each sample has, from a third of its row to all of it; a function of the sample."""
    length = ids.shape[1]
    return length // 3 + ids[:, 0] % (length - length // 3 + 1)


def padded_samples(samples: Sequence[Any], options: Any) -> Batch:
    """Some tokens of each sample are replaced by token 0; then padding."""
    tokens = np.stack(samples)[:, :-1]
    lengths = lengths_of(tokens)
    is_token = np.arange(tokens.shape[1]) < lengths[:, None]
    return _denoising(tokens, is_token, Documents.of_lengths(lengths, tokens.shape[1]))


def packed_samples(samples: Sequence[Any], options: Any) -> Batch:
    """Two documents in each row, then padding."""
    tokens = np.stack(samples)[:, :-1]
    lengths, positions = lengths_of(tokens)[:, None], np.arange(tokens.shape[1])
    is_token, cut = positions < lengths, lengths * 2 // 3
    starts = np.where(positions < cut, 0, cut)
    return _denoising(tokens, is_token, Documents.build(starts, is_padding_BS=~is_token))


def samples_with_prefix(samples: Sequence[Any], options: Any) -> Batch:
    """The loss is that of the tokens after the prefix."""
    ids = np.stack(samples)
    tokens = ids[:, :-1]
    in_prefix = np.arange(tokens.shape[1]) < lengths_of(tokens)[:, None] - 1
    documents = Documents.build(np.zeros(tokens.shape, np.int64), in_prefix_BS=in_prefix)
    mask = torch.from_numpy(np.where(in_prefix, 0.0, 1.0))
    return Batch(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (tokens, ids[:, 1:])), mask, documents=documents)


def _denoising(tokens: NDArray[np.int64], is_token: NDArray[np.bool_], documents: Documents) -> Batch:
    replaced = is_token & (np.arange(tokens.shape[1]) % 3 == 1)
    seen = np.where(replaced | ~is_token, 0, tokens)
    mask = torch.from_numpy(replaced.astype(np.float64))
    return Batch(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (seen, tokens)), mask, documents=documents)


def _register(name: str, kind: type[DecoderSpec], visibility: Visibility) -> None:
    def spec_of(config: ModelConfig, moe: MoEConfig) -> DecoderSpec:
        spec = decoder_spec(config, moe)
        layers = []
        for layer in spec.layers:
            assert isinstance(layer.mixer, AttentionSpec)
            layers.append(replace(layer, mixer=replace(layer.mixer, visibility=visibility)))
        values = {field.name: getattr(spec, field.name) for field in fields(spec)}
        return kind(**{**values, "layers": tuple(layers)})

    petatron.register_model(name, spec_of)


_register("padded-encoder", PaddedEncoderSpec, Visibility.full())
_register("packed-encoder", PackedEncoderSpec, Visibility.full(window=5))
_register("prefix-decoder", PrefixDecoderSpec, Visibility.prefix())
