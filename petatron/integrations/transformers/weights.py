"""A decoder's weights as logical tensors: read from a model on disk, initialized at random, or listed by the names of a Petatron folder.

A decoder fuses some logical tensors into one parameter (q, k and v); a folder has them one by one, under the same names on every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from petatron.checkpoint.tensor_chunk import Chunk, folder_tensor_key
from petatron.models.decoder import Decoder
from petatron.models.decoder_spec import DecoderSpec
from petatron.pretrained.model_reader import ModelReader
from petatron.sharding.shard_spec import ModelParallelCoordinate, TensorShard, compute_placement


def logical_parts(spec: DecoderSpec, values: Mapping[str, Tensor]) -> Iterator[tuple[TensorShard, Tensor]]:
    """Yields every logical tensor with its part of the parameter it is fused into; `values` are parameters by name."""
    for name, param in spec.params().items():
        shard = replace(param.shard, pad_to=None) if param.shard.pad_to is not None else param.shard
        placement = compute_placement(name, param.shape, shard, ModelParallelCoordinate())
        for part in placement.tensor_shards:
            yield part, values[name][part.local_slices()]


@torch.no_grad()
def read_weights(decoder: Decoder, source: ModelReader) -> None:
    """Fills a decoder from a model on disk, in the decoder's precision."""
    assert isinstance(source.spec, DecoderSpec), "a model on disk is a decoder"
    chunks = [
        Chunk(folder_tensor_key(part.name), part.logical_shape, part.start, values)
        for part, values in logical_parts(source.spec, dict(decoder.named_parameters()))
    ]
    chunks += [Chunk(folder_tensor_key(name), tuple(bias.shape), (0,), bias) for name, bias in decoder.named_buffers()]
    for chunk in chunks:  # one at a time: no second copy of the model
        read = replace(chunk, tensor=torch.empty(chunk.tensor.shape, dtype=chunk.tensor.dtype))
        source.fill([read])
        chunk.tensor.copy_(read.tensor)


@torch.no_grad()
def draw_weights(decoder: Decoder, spec: DecoderSpec, *, seed: int) -> None:
    """Fills a decoder with the initial values of a new model."""
    values = dict(decoder.named_parameters())
    inits = {part.name: param.init for part, param in spec.logical_tensors()}
    for part, target in logical_parts(spec, values):
        drawn = torch.empty(part.shape)
        inits[part.name].fill(drawn, part, seed=seed)
        target.copy_(drawn)


def folder_tensors(spec: DecoderSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a folder, from parameters and buffers by name."""
    params = spec.params()
    tensors = {part.name: values.contiguous() for part, values in logical_parts(spec, state)}
    return tensors | {name: values for name, values in state.items() if name not in params}
