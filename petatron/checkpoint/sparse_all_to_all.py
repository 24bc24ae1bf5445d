"""Sparse all-to-all of messages in about log2(ranks) steps, for plans of which each rank needs a small part.

In step k every rank forwards to the rank 2^k places further all messages whose remaining distance has bit k set (the algorithm
of Bruck et al., 1997, for all-to-all). A message makes at most log2(ranks) hops, a rank communicates with as many others, and no
rank ever holds all messages: an all-gather of the same values would bring all of them to every rank, and an all-to-all would
connect every pair of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from petatron.mesh.collectives import start_ring_shift
from petatron.mesh.mesh import Axis

_Message = tuple[int, int, bytes]
"""Remaining distance, source rank, text."""


def exchange_messages(messages: Mapping[int, Any], axis: Axis) -> dict[int, Any]:
    """Sends JSON values to ranks of an axis and returns what was received, by source rank. Every rank calls it."""
    if axis.size == 1:
        return dict(messages)
    held = [((to - axis.rank) % axis.size, axis.rank, json.dumps(value).encode()) for to, value in messages.items()]
    step = 1
    while step < axis.size:
        moving = [(distance - step, source, text) for distance, source, text in held if distance & step]
        staying = [message for message in held if not message[0] & step]
        held = staying + _unpack(_shift(_pack(moving), axis, step))
        step *= 2
    return {source: json.loads(text) for _, source, text in sorted(held, key=lambda message: message[1])}


def _shift(content: Tensor, axis: Axis, by: int) -> Tensor:
    """Sends bytes to the rank `by` places further, and receives those of the rank as far behind."""
    size, theirs = torch.tensor([content.numel()]), torch.zeros(1, dtype=torch.int64)
    for handle in start_ring_shift([theirs], [size], axis, by=by):
        handle.wait()
    arriving = torch.empty(int(theirs), dtype=torch.uint8)
    for handle in start_ring_shift([arriving], [content], axis, by=by):
        handle.wait()
    return arriving


def _pack(messages: list[_Message]) -> Tensor:
    """Packs the message count, then three integers for each, then the texts."""
    head = [len(messages), *(number for far, source, text in messages for number in (far, source, len(text)))]
    content = np.array(head, dtype="<i8").tobytes() + b"".join(text for _, _, text in messages)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _unpack(packed: Tensor) -> list[_Message]:
    content = packed.numpy().tobytes()
    count = int.from_bytes(content[:8], "little")
    at = 8 + 24 * count
    messages = []
    for far, source, size in np.frombuffer(content, dtype="<i8", offset=8, count=3 * count).reshape(-1, 3).tolist():
        messages.append((far, source, content[at : at + size]))
        at += size
    return messages
