"""A weight of a checkpoint: its shape is known, its values are read on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petatron.checkpoint.megatron.weight_names import MegatronWeight
from petatron.sharding.shard_spec import Shape


@dataclass(frozen=True, slots=True)
class LazyWeight:
    """A whole Megatron weight; `location` is the file or folder that an error should name."""

    shape: Shape
    dtype: torch.dtype
    location: str
    load: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class MegatronContents:
    """What a format's reader found: Megatron's arguments, the iteration, and the weights by the names of `weight_names.py`.

    `num_weights` counts each expert's weight separately. `lazy_weights` is called with the weights that follow from the arguments, by
    name; one whose name is not given is read as stored.
    """

    arguments: Mapping[str, Any]
    iteration: int
    num_weights: int
    lazy_weights: Callable[[Mapping[str, MegatronWeight]], Mapping[str, LazyWeight]]
