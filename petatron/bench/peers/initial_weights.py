"""The same initial weights for every contender, drawn on the device.

A run draws its weights on the CPU so that they do not depend on the device; billions of draws take longer than a measurement.
Here each logical tensor has its own generator, seeded with its name: every contender, in whichever
process, gets the same values in its fp32 weights, and computes with these or with a rounded copy. The values are not rounded to
bfloat16 first: from such a value, a contender that rounds always loses an update smaller than half the gap to the next one, and a contender
that does not (an embedding in fp32) keeps it. From values in between, rounding keeps it on average. First losses must agree, and
`petatron bench train` reports how well.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from petatron.models.model_spec import ModelSpec
from petatron.sharding.initial_values import NormalValues


class InitialWeights:
    """The initial values of a model's whole logical tensors, in float32.

    >>> from petatron.validate import load_config
    >>> from petatron.models.registry import model_spec
    >>> run = load_config(["--vocab-size", "256"], preset="tiny-llama", require_training=False).config
    >>> InitialWeights(model_spec(run), torch.device("cpu"))["norm.weight"].mean()
    tensor(1.)
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._tensors = {shard.name: (shard, param.init) for shard, param in spec.logical_tensors()}
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        shard, init = self._tensors[name]
        out = torch.empty(shard.logical_shape, device=self._device)
        if not isinstance(init, NormalValues):
            init.fill(out, shard, seed=0)
            return out
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return out.normal_(0.0, init.std, generator=generator)
