"""The same initial weights for every contender, drawn on the device.

A run draws its weights on the CPU so that they do not depend on the device; billions of draws take longer than a measurement.
Here each logical tensor has its own generator, seeded with its name: every contender, in whichever
process, gets the same values. They are rounded to bfloat16, because one contender computes with its weights and
another with a rounded copy; so their first losses must agree, and `petatron bench train` reports how well.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from petatron.config.schema.model import ModelConfig
from petatron.models.decoder import initial_constant, initial_std


def initial_weight(name: str, shape: tuple[int, ...], config: ModelConfig, *, device: torch.device) -> Tensor:
    """Returns the initial values of a whole logical tensor, in float32.

    >>> from petatron.config import load_config
    >>> model = load_config(preset="tiny-llama", require_training=False).config.model
    >>> initial_weight("norm.weight", (3,), model, device=torch.device("cpu"))
    tensor([1., 1., 1.])
    """
    std = initial_std(config, name)
    if std is None:
        return torch.full(shape, initial_constant(config, name), device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator).bfloat16().float()
