"""A weight as it lies in a checkpoint: its shape is known, its values are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petatron.checkpoint.megatron.weight_names import WeightLayout
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
    """What a reader of one format found: Megatron's arguments, the iteration, and the weights by the names of `weight_names.py`.

    `num_weights` is how many weights are there, an expert's being one. `lazy_weights` wants to know how ranks share each weight, which
    follows from the arguments; a name that it is not told is taken as it lies.
    """

    arguments: Mapping[str, Any]
    iteration: int
    num_weights: int
    lazy_weights: Callable[[Mapping[str, WeightLayout]], Mapping[str, LazyWeight]]
