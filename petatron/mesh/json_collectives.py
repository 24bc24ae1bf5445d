"""Collectives of JSON values between ranks: for control, not for tensors. A pickle would run code where it is received."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from petatron.mesh.collectives import RecordedCall, all_gather_into
from petatron.mesh.mesh import Axis


def all_gather_json(value: Any, axis: Axis) -> list[Any]:
    """Returns every rank's JSON value, in axis order. Tuples become lists."""
    if axis.size == 1:
        return [value]
    with RecordedCall(axis, "gather_objects"):
        packed = _pack_json(value, axis)
        out = packed.new_empty(packed.numel() * axis.size)
        all_gather_into(out, packed, group=axis.group)
    return [_unpack_json(part) for part in out.cpu().chunk(axis.size)]


def broadcast_json(value: Any, axis: Axis, *, source: int = 0) -> Any:
    """Returns the JSON value of one rank, by default the first, on every rank: for a large value that only one has."""
    if axis.size == 1:
        return value
    with RecordedCall(axis, "broadcast_json"):
        text = json.dumps(value).encode() if axis.rank == source else b""
        size = torch.tensor([len(text)], device=_control_device(axis))
        dist.broadcast(size, axis.ranks[source], group=axis.group)
        data = torch.empty(int(size), dtype=torch.uint8, device=size.device)
        if axis.rank == source:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(data, axis.ranks[source], group=axis.group)
    return json.loads(data.cpu().numpy().tobytes())


def gather_json_to_first(value: Any, axis: Axis) -> list[Any] | None:
    """Returns every rank's JSON value on the axis's first rank, None on the others: for large values that only one needs."""
    if axis.size == 1:
        return [value]
    with RecordedCall(axis, "gather_json_to_first"):
        packed = _pack_json(value, axis)
        out = [torch.empty_like(packed) for _ in range(axis.size)] if axis.rank == 0 else None
        dist.gather(packed, out, dst=axis.ranks[0], group=axis.group)
    return None if out is None else [_unpack_json(part.cpu()) for part in out]


def _pack_json(value: Any, axis: Axis) -> Tensor:
    """Packs a value as bytes after its length, padded to the longest of all ranks."""
    text = json.dumps(value).encode()
    content = len(text).to_bytes(8, "little") + text
    longest = torch.tensor([len(content)], device=_control_device(axis))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=axis.group)
    return torch.frombuffer(bytearray(content.ljust(int(longest), b"\0")), dtype=torch.uint8).to(longest.device)


def _unpack_json(packed: Tensor) -> Any:
    content = packed.numpy().tobytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def _control_device(axis: Axis) -> torch.device:
    """Returns the device of control messages: NCCL sends only from the current GPU."""
    return torch.device("cuda" if dist.get_backend(axis.group) == "nccl" else "cpu")
