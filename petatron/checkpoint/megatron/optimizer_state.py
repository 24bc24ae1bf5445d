"""The state of Megatron's optimizer in a checkpoint: which kinds are read, its tensors by weight, its step, its loss scale.

Its dictionary has one of these forms, and where experts have an optimizer of their own there is one for each, in a list or by number:

    plain, float32         {state, param_groups}
    plain, 16 bits         {optimizer: {state, param_groups}, fp32_from_fp16_params, grad_scaler}
    distributed            {optimizer: {param_groups}, grad_scaler, param_state_sharding_type}

The step is in each group (Transformer Engine's and Apex's kernels), beside the moments of each weight (torch's), or `common_step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.untrusted_files import is_count

RESHARDABLE = "fully_reshardable"
_REMEDY = (
    "Save it once more with --dist-ckpt-optim-fully-reshardable (--ckpt-format torch_dist), or convert the weights alone "
    "with --no-optim"
)
_SHARDING = "param_state_sharding_type"


def optimizer_parts(optimizer: Any, path: Path) -> list[dict[str, Any]]:
    """Returns the dictionaries of the chained optimizers; of one if they are not chained."""
    parts: Any = optimizer
    if isinstance(optimizer, dict) and optimizer and all(is_count(key) for key in optimizer):
        parts = [optimizer[key] for key in sorted(optimizer)]
    parts = parts if isinstance(parts, list) else [parts]
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(f"{path} has an optimizer that is not understood. {_REMEDY}.")
    return parts


def torch_state(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the state dictionary of torch's optimizer inside of Megatron's."""
    inner = part.get("optimizer", part.get("optimizer_state_dict", part))
    return inner if isinstance(inner, Mapping) else {}


def check_readable(parts: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], path: Path) -> None:
    """Raises for the state of an optimizer that is stored in a way that is not read, by its name."""
    name = arguments.get("optimizer") or "adam"
    if name != "adam":
        raise CheckpointError(
            f"{path} has the state of --optimizer {name}, of which only adam's is converted. Convert the weights alone with --no-optim."
        )
    if arguments.get("decoupled_weight_decay") is False:
        raise CheckpointError(
            f"{path} was trained with --no-decoupled-weight-decay, and Petatron's adam decouples it. Convert the weights alone with "
            "--no-optim."
        )
    kinds = [part[_SHARDING] for part in parts if isinstance(part.get(_SHARDING), str)]
    for kind in kinds:
        if kind != RESHARDABLE:
            raise unreadable_kind(kind, path)


def unreadable_kind(kind: str, path: Path) -> CheckpointError:
    """Returns the error for the state of a distributed optimizer in a form that depends on its run's buckets."""
    return CheckpointError(f"{path} stores the state of its optimizer as {kind}, which is not read. {_REMEDY}.")


def read_step(parts: Sequence[Mapping[str, Any]], path: Path) -> int:
    """Returns how many updates the optimizer has made."""
    steps = {float(step) for part in parts for step in _steps(torch_state(part))}
    if len(steps) != 1 or not (step := steps.pop()).is_integer() or not is_count(int(step)):
        raise CheckpointError(
            f"{path} does not say how many updates its optimizer has made. Convert the weights alone with --no-optim."
        )
    return int(step)


def _steps(state: Mapping[str, Any]) -> Iterator[Any]:
    states: Any = state.get("state")
    states, groups = states if isinstance(states, Mapping) else {}, state.get("param_groups")
    candidates: list[Any] = [
        states.get("common_step"),
        *(value.get("step") for value in states.values() if isinstance(value, dict)),
    ]
    candidates += [group.get("step") for group in groups or () if isinstance(group, Mapping)]
    for step in candidates:
        if isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1):
            yield step


def read_grad_scaler(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the state of a dynamic loss scale as a run of ours has it; empty without one."""
    kept = parts[0].get("grad_scaler")
    if not isinstance(kept, Mapping) or "scale" not in kept:
        return {}
    return {
        "value": float(kept["scale"]),
        "clean_steps": int(kept["growth_tracker"]),
        "patience": int(kept["hysteresis_tracker"]),
    }
