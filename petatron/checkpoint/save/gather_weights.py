"""Gathers the boxes of weights that ranks hold into the whole tensors of a model folder, each on the rank that writes it.

Transfers go in rounds of bounded size, one exchange each (planned by `weight_transfers.py`), so device memory is bounded by a
round, however large a tensor is. With one rank nothing is sent, and an entry that is one box aliases that box's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from petatron.checkpoint.files.entry_layout import addressed_shape, entry_box, to_entry_layout
from petatron.checkpoint.save.file_plan import FilePlan
from petatron.checkpoint.save.weight_transfers import TransferPlan, TransferRound, WeightTransfer
from petatron.checkpoint.state import Chunk
from petatron.mesh.collectives import all_to_all
from petatron.mesh.mesh import Axis


class WeightGather:
    """Runs the transfers of a save; its buffers are allocated first, so that nothing should fail once it exists on every rank."""

    def __init__(
        self,
        files: Sequence[FilePlan],
        dtypes: Mapping[str, torch.dtype],
        transfer_plan: TransferPlan,
        chunks: Sequence[Chunk],
        world_axis: Axis,
        device: torch.device,
    ) -> None:
        """`chunks` are all of this rank's, on the device that `world_axis` communicates over."""
        self._transfer_plan, self._chunks, self._world_axis = transfer_plan, chunks, world_axis
        own_entries = (entry for file in files if file.rank == world_axis.rank for entry in file.entries)
        self._entry_tensors: dict[str, Tensor] = {}
        for entry in own_entries:
            alias = transfer_plan.aliases.get(entry.name)
            dtype = dtypes[entry.regions[0].name]
            self._entry_tensors[entry.name] = (
                torch.empty(entry.shape, dtype=dtype)
                if alias is None
                else _in_entry_layout(alias, self._local_box(alias))
            )
        self._send_buffer = torch.empty(transfer_plan.max_send_bytes, dtype=torch.uint8, device=device)
        self._recv_buffer = torch.empty(transfer_plan.max_recv_bytes, dtype=torch.uint8)

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
        region, target = transfer.region, self._entry_tensors[transfer.entry.name]
        inside = entry_box(
            transfer.box,
            region.start,
            region.start_in_entry,
            transposed=region.transposed,
            interleaved=region.interleaved,
        )
        addressed = target.view(addressed_shape(transfer.entry.shape, region.interleaved))
        addressed[inside.slices()].copy_(_in_entry_layout(transfer, values))


def _in_entry_layout(transfer: WeightTransfer, values: Tensor) -> Tensor:
    region = transfer.region
    return to_entry_layout(
        values, len(transfer.entry.shape), transposed=region.transposed, interleaved=region.interleaved
    )


def _packed_view(buffer: Tensor, offset: int, transfer: WeightTransfer) -> Tensor:
    """Returns the view of a transfer in packed memory, shaped as its box."""
    size = transfer.box.volume * transfer.dtype.itemsize
    return buffer[offset : offset + size].view(transfer.dtype).view(transfer.box.shape)
