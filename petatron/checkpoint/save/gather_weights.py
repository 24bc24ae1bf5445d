"""From the boxes of weights that ranks hold to the whole tensors of a model folder, each on the one rank that writes it.

Transfers go in rounds of limited size, one exchange each (`planning/transfers.py` says what is in them), so the memory on the
device is that of a round, however large a tensor is. With one rank nothing moves, and an entry that is one box is that
box's own memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from petatron.checkpoint.files.entry_layout import entry_box, in_entry
from petatron.checkpoint.save.file_plan import FilePlan
from petatron.checkpoint.save.weight_transfers import Moves, Transfer, TransferPlan
from petatron.checkpoint.state import Chunk
from petatron.mesh.collectives import all_to_all
from petatron.mesh.mesh import Axis


class Assembly:
    """The transfers of a save, and the memory they need: once this is made on every rank, nothing of it should fail."""

    def __init__(
        self,
        files: Sequence[FilePlan],
        dtypes: Mapping[str, torch.dtype],
        plan: TransferPlan,
        chunks: Sequence[Chunk],
        world: Axis,
        device: torch.device,
    ) -> None:
        """`chunks` are all of this rank's, on the device that the world's ranks talk over."""
        self._plan, self._chunks, self._world = plan, chunks, world
        own = (entry for file in files if file.rank == world.rank for entry in file.entries)
        self._whole: dict[str, Tensor] = {}
        for entry in own:
            alias = plan.aliases.get(entry.name)
            dtype = dtypes[entry.regions[0].name]
            self._whole[entry.name] = (
                torch.empty(entry.shape, dtype=dtype) if alias is None else _entry_part(alias, self._part(alias))
            )
        self._outgoing = torch.empty(plan.bytes_out, dtype=torch.uint8, device=device)
        self._incoming = torch.empty(plan.bytes_in, dtype=torch.uint8)

    def run(self) -> dict[str, Tensor]:
        """The whole entries of this rank's files, in host memory unless they are a local chunk's own; every rank calls it."""
        for transfer in self._plan.own:
            self._place(transfer, self._part(transfer))
        if self._world.size > 1:
            for moves in self._plan.rounds:
                self._exchange(moves)
        return self._whole

    def _exchange(self, moves: Moves) -> None:
        sent, received = [0] * self._world.size, [0] * self._world.size
        at = 0
        for transfer in moves.sending:
            _values(self._outgoing, at, transfer).copy_(self._part(transfer))
            at += transfer.num_bytes
            sent[transfer.peer] += transfer.num_bytes
        for transfer in moves.receiving:
            received[transfer.peer] += transfer.num_bytes
        arrived = all_to_all(self._outgoing[:at], self._world, send=sent, receive=received)
        self._incoming[: arrived.numel()].copy_(arrived)
        at = 0
        for transfer in moves.receiving:
            self._place(transfer, _values(self._incoming, at, transfer))
            at += transfer.num_bytes

    def _part(self, transfer: Transfer) -> Tensor:
        chunk = self._chunks[transfer.index]
        return chunk.tensor.detach()[transfer.common.slices_in(chunk.box)]

    def _place(self, transfer: Transfer, values: Tensor) -> None:
        region, target = transfer.region, self._whole[transfer.entry.name]
        inside = entry_box(transfer.common, region.start, region.at, transposed=region.transposed)
        target[inside.slices()].copy_(_entry_part(transfer, values))


def _entry_part(transfer: Transfer, values: Tensor) -> Tensor:
    return in_entry(values, len(transfer.entry.shape), transposed=transfer.region.transposed)


def _values(memory: Tensor, at: int, transfer: Transfer) -> Tensor:
    """The place of a transfer in packed memory, as the box it is."""
    size = transfer.common.volume * transfer.dtype.itemsize
    return memory[at : at + size].view(transfer.dtype).view(transfer.common.shape)
