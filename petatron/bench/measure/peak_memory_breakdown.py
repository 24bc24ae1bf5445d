"""Breaks down the memory of a training step at its peak, by layer and purpose.

State (weights, gradients, master weights, moments) is known by its addresses, which the parameter groups and the optimizer have.
Activations are known from autograd's hook (`saved_tensors.py`). On CUDA the allocator's record (`allocated_blocks_at_peak.py`) says what
else is allocated at the peak, and which function allocated it: quantized weights, the logits of a chunk of the loss, a kernel's workspace.
On a CPU there is no such record, and the snapshot is state and saved tensors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petatron.bench.measure.allocated_blocks_at_peak import MemoryBlock, StackFrame, blocks_at_peak, record_step
from petatron.bench.measure.saved_tensors import SavedTensor, SavedTensorLog
from petatron.bench.peers.petatron_step import PetatronContender
from petatron.models.batch import Batch
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.train.state.train_state import TrainState

OUTSIDE_LAYERS = "outside layers"
_LAYER = re.compile(r"\blayers\.(\d+)\.?")
_PACKAGE = "petatron/"
# On the stack of all that a forward pass allocates, and of nothing in backward.
_FORWARD_FILE = "parallel/pipeline/executor.py"
_GRADIENTS = StackFrame("sharding/bucket.py", "allocate")
_PURPOSES_BY_FUNCTION = {
    StackFrame("layers/ops/fp8_weight.py", "get"): "FP8 weights",
    StackFrame("kernels/fused_linear_cross_entropy.py", "linear_cross_entropy"): "chunk of the loss",
}


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Bytes of one purpose; `layer` None means outside layers, or of no one layer."""

    purpose: str
    layer: int | None
    size: int


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """All parts at the peak of a step."""

    parts: Sequence[MemoryPart]

    @property
    def total(self) -> int:
        return sum(part.size for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        """Returns the bytes of each purpose, by layer."""
        by_layer: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for part in self.parts:
            by_layer[part.purpose][OUTSIDE_LAYERS if part.layer is None else str(part.layer)] += part.size
        return {"total": self.total, "bytes": {purpose: dict(layers) for purpose, layers in by_layer.items()}}


def snapshot_step(contender: PetatronContender, batch: Batch, device: torch.device) -> MemorySnapshot:
    """Runs one more step and returns what its memory is for at the peak."""
    state = contender.state
    modules = {module: name for stage in state.model.stages.values() for name, module in stage.named_modules()}
    log = SavedTensorLog(modules, [view for _, _, view in _state_tensors(state, gradients=False)])
    with log.recording():
        if device.type == "cuda":
            blocks = blocks_at_peak(*record_step(lambda: contender.step(batch), device))
        else:
            contender.step(batch)
            blocks = None
    log.close()
    owners: dict[int, list[MemoryPart]] = defaultdict(list)
    for purpose, name, view in _state_tensors(state):
        owners[view.untyped_storage().data_ptr()].append(MemoryPart(purpose, _layer(name), view.nbytes))
    if blocks is None:
        parts = [part for held in owners.values() for part in held]
        return MemorySnapshot([*parts, *map(_saved_part, log.at_peak)])
    return MemorySnapshot([part for block in blocks for part in _block_parts(block, owners, log.by_address)])


def _state_tensors(state: TrainState, *, gradients: bool = True) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (purpose, logical name, view) of all state on this rank."""
    for group in state.model.param_groups:
        has_gradients = gradients and group.spec.trainable
        kinds = {"weights": group.weights()} | ({"gradients": group.grads()} if has_gradients else {})
        for purpose, tensors in kinds.items():
            for shard, view in group_tensor_shards(group, tensors):
                yield purpose, shard.name, view
    if state.optimizer.has_master_weights:
        for _, shard, view in state.optimizer.master_weights():
            yield "master weights", shard.name, view
    for kind, _, shard, view in state.optimizer.moments():
        yield f"moments ({kind})", shard.name, view


def _block_parts(
    block: MemoryBlock, owners: Mapping[int, Sequence[MemoryPart]], saved: Mapping[int, SavedTensor]
) -> Iterator[MemoryPart]:
    in_package = (frame for frame in block.stack if _PACKAGE in frame.file)
    files = [StackFrame(frame.file.rpartition(_PACKAGE)[2], frame.function) for frame in in_package]
    # State is there before the step, except gradients. At the address of a gradient there may have been an activation before.
    is_state = not block.stack or _GRADIENTS in files
    held = owners.get(block.address) if is_state else None
    if held is not None:
        yield from held
        rest = block.size - sum(part.size for part in held)
        if rest > 0:
            yield MemoryPart("padding of state", None, rest)
        return
    in_forward = any(frame.file == _FORWARD_FILE for frame in files)
    if in_forward and block.address in saved:
        part = _saved_part(saved[block.address])
        yield MemoryPart(part.purpose, part.layer, block.size)
    else:
        yield MemoryPart(_purpose_by_function(files, in_forward=in_forward), None, block.size)


def _saved_part(saved: SavedTensor) -> MemoryPart:
    layer = _layer(saved.module)
    where = _LAYER.sub("", saved.module) or "layer"
    kind = "FP8" if saved.dtype.itemsize == 1 and saved.dtype.is_floating_point else str(saved.dtype)[6:]
    return MemoryPart(f"saved by {where} ({kind})", layer, saved.size)


def _purpose_by_function(frames: Sequence[StackFrame], *, in_forward: bool) -> str:
    if not frames:
        return "held between steps, or not by Python"
    other = f"{'forward' if in_forward else 'backward or update'}: {frames[0].file} {frames[0].function}"
    return next((_PURPOSES_BY_FUNCTION[frame] for frame in frames if frame in _PURPOSES_BY_FUNCTION), other)


def _layer(name: str) -> int | None:
    match = _LAYER.search(name)
    return None if match is None else int(match[1])
