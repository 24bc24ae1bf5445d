"""A weight of a checkpoint: its shape is known, its values are read on demand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
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


_OTHER_STATE = ("optimizer", "opt_param_scheduler", "lr_scheduler", "rng_state", "rerun_state_machine")


def other_state(names: Iterable[object]) -> tuple[str, ...]:
    """Returns the kinds of state besides weights among the names of a checkpoint, which may go on after a dot or a slash.

    >>> other_state(["args", "chained_0.optimizer.state.exp_avg.output_layer.weight", "rng_state/shard_0.0_1.1"])
    ('optimizer', 'rng_state')
    """
    first = {
        re.split(r"[./]", re.sub(r"^chained_\d+\.", "", name), maxsplit=1)[0] for name in names if type(name) is str
    }
    return tuple(kind for kind in _OTHER_STATE if kind in first)


@dataclass(frozen=True, slots=True)
class MegatronContents:
    """What a format's reader found: Megatron's arguments, the iteration, and the weights by the names of `weight_names.py`.

    `other_state` names what else there is: optimizer, schedule, random states. `num_weights` counts each expert's weight separately.
    `lazy_weights` is called with the weights that follow from the arguments, by name; one whose name is not given is read as stored.
    """

    arguments: Mapping[str, Any]
    iteration: int
    num_weights: int
    other_state: tuple[str, ...]
    lazy_weights: Callable[[Mapping[str, MegatronWeight]], Mapping[str, LazyWeight]]
