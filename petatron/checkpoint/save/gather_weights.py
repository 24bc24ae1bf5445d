"""Gathers the boxes of weights that ranks hold into the whole tensors of a model folder, each on the rank that writes it.

Transfers go in rounds of bounded size, one exchange each (planned by `plan_weight_transfers.py`), so device memory is bounded by a
round, however large a tensor is. With one rank nothing is sent, and an entry that is one box aliases that box's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petatron.checkpoint.files.map_box_to_entry import to_entry_layout
from petatron.checkpoint.save.plan_weight_transfers import TransferRound, WeightTransfer
from petatron.checkpoint.save.save_plan import SavePlan
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.collectives import all_to_all
from petatron.mesh.mesh import Axis
from petatron.sharding.boxes import Box


class WeightGather:
    """Runs the transfers of a save; its buffers are allocated first, so that nothing should fail once it exists on every rank."""

    def __init__(self, plan: SavePlan, chunks: Sequence[Chunk], world_axis: Axis, device: torch.device) -> None:
        """`chunks` are all of this rank's, on the device that `world_axis` communicates over."""
        self._transfer_plan, self._chunks, self._world_axis = plan.transfers, chunks, world_axis
        self._entry_tensors: dict[str, Tensor] = {}
        for entry in (entry for file in plan.files if file.rank == world_axis.rank for entry in file.entries):
            alias, region = plan.transfers.aliases.get(entry.name), entry.regions[0]
            self._entry_tensors[entry.name] = (
                torch.empty(entry.shape, dtype=plan.dtypes[region.name])
                if alias is None
                else to_entry_layout(self._local_box(alias), len(entry.shape), region)
            )
        self._send_buffer = torch.empty(plan.transfers.max_send_bytes, dtype=torch.uint8, device=device)
        self._recv_buffer = torch.empty(plan.transfers.max_recv_bytes, dtype=torch.uint8)

    def run(self) -> dict[str, Tensor]:
        """Returns the whole entries of this rank's files, in host memory unless they alias a local chunk; every rank calls it."""
        for transfer in self._transfer_plan.local_copies:
            self._copy_into_entry(transfer, self._local_box(transfer))
        if self._world_axis.size > 1:
            for transfer_round in self._transfer_plan.rounds:
                self._exchange(transfer_round)
        return self._entry_tensors

    def _exchange(self, transfer_round: TransferRound) -> None:
        sent, received = [0] * self._world_axis.size, [0] * self._world_axis.size
        at = 0
        for transfer in transfer_round.sends:
            _packed_view(self._send_buffer, at, transfer).copy_(self._local_box(transfer))
            at += transfer.num_bytes
            sent[transfer.peer] += transfer.num_bytes
        for transfer in transfer_round.receives:
            received[transfer.peer] += transfer.num_bytes
        arrived = all_to_all(self._send_buffer[:at], self._world_axis, send=sent, receive=received)
        self._recv_buffer[: arrived.numel()].copy_(arrived)
        at = 0
        for transfer in transfer_round.receives:
            self._copy_into_entry(transfer, _packed_view(self._recv_buffer, at, transfer))
            at += transfer.num_bytes

    def _local_box(self, transfer: WeightTransfer) -> Tensor:
        chunk = self._chunks[transfer.chunk_index]
        return chunk.tensor.detach()[transfer.box.slices_in(chunk.box)]

    def _copy_into_entry(self, transfer: WeightTransfer, values: Tensor) -> None:
        region = transfer.region
        part = region.view_in(self._entry_tensors[transfer.entry.name])
        part[transfer.box.slices_in(Box(region.start, region.shape))].copy_(values)


def _packed_view(buffer: Tensor, offset: int, transfer: WeightTransfer) -> Tensor:
    """Returns the view of a transfer in packed memory, shaped as its box."""
    size = transfer.box.volume * transfer.dtype.itemsize
    return buffer[offset : offset + size].view(transfer.dtype).view(transfer.box.shape)
