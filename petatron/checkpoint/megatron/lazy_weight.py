"""Lazily read weights of a Megatron checkpoint: their shapes are known, their values are read on demand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from petatron.checkpoint.megatron.weight_names import MegatronWeight
from petatron.sharding.shard_spec import Shape

StateKind = Literal["master", "exp_avg", "exp_avg_sq"]
"""The master weights, and the moments of Adam."""
STATE_KINDS: tuple[StateKind, ...] = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class LazyWeight:
    """A whole Megatron weight; `location` is the file or folder that an error should name."""

    shape: Shape
    dtype: torch.dtype
    location: str
    load: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """The state of an optimizer: tensors of each kind by the names of `weight_names.py`, the number of updates, the loss scale's state.

    Weights in float32 may have no master weight of their own.
    """

    tensors: Mapping[StateKind, Mapping[str, LazyWeight]]
    step: int
    grad_scaler: Mapping[str, Any]


_OTHER_STATE = ("optimizer", "opt_param_scheduler", "lr_scheduler", "rng_state", "rerun_state_machine")

_OLD_SCHEDULER_NAMES = {
    "start_lr": "max_lr", "warmup_steps": "lr_warmup_steps", "decay_steps": "lr_decay_steps", "decay_style": "lr_decay_style",
}  # fmt: skip


def other_state(names: Iterable[object]) -> tuple[str, ...]:
    """Returns the kinds of state besides weights among the names of a checkpoint, which may go on after a dot or a slash.

    >>> other_state(["args", "chained_0.optimizer.state.exp_avg.output_layer.weight", "rng_state/shard_0.0_1.1"])
    ('optimizer', 'rng_state')
    """
    first = {
        re.split(r"[./]", re.sub(r"^chained_\d+\.", "", name), maxsplit=1)[0] for name in names if type(name) is str
    }
    return tuple(kind for kind in _OTHER_STATE if kind in first)


def stored_scheduler(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of the schedule of learning rate and weight decay, under the names of today."""
    kept: Any = content.get("opt_param_scheduler") or content.get("lr_scheduler")
    named = kept if isinstance(kept, dict) else {}
    return {_OLD_SCHEDULER_NAMES.get(str(name), str(name)): value for name, value in named.items()}


@dataclass(frozen=True, slots=True)
class MegatronContents:
    """What a format's reader found: Megatron's arguments, the iteration, and the weights by the names of `weight_names.py`.

    `other_state` names what else there is: optimizer, schedule, random states. `num_weights` counts each expert's weight separately.
    `lazy_weights` is called with the weights that follow from the arguments, by name; one whose name is not given is read as stored.
    `scheduler` is the state of the schedule, empty without one. `optimizer` opens the optimizer's state, given the same weights; it raises
    if that state is stored in a way that is not read.
    """

    arguments: Mapping[str, Any]
    iteration: int
    num_weights: int
    other_state: tuple[str, ...]
    lazy_weights: Callable[[Mapping[str, MegatronWeight]], Mapping[str, LazyWeight]]
    scheduler: Mapping[str, Any]
    optimizer: Callable[[Mapping[str, MegatronWeight]], StoredOptimizer] | None
