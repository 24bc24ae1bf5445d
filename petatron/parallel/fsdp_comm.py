"""What torch's fully_shard is given to communicate with: our axes as its meshes, our collectives as its own.

fully_shard gathers and scatters through objects that may be replaced. These go through `mesh/collectives.py`, so its
traffic is recorded like all other, under the axis that state is shared over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from petatron.mesh import collectives
from petatron.mesh.mesh import Axis, ParallelMesh


def device_mesh(axis: Axis, mesh: ParallelMesh) -> DeviceMesh:
    """The ranks of an axis as fully_shard wants them; a rank that is alone there gets a group of its own."""
    assert dist.is_initialized(), "fully_shard needs a process group, be it of one rank"
    group = axis.group or dist.new_group([mesh.rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    # A mesh on the meta device counts shapes only, which those of any real device are.
    kind = "cpu" if mesh.device.type == "meta" else mesh.device.type
    return DeviceMesh.from_group(group, kind, mesh_dim_names=(axis.name,))


class _Memory:
    """Fresh memory for every message."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class RecordedAllGather(_Memory, AllGather):
    """fully_shard calls this on its own stream, where waiting holds up nothing but that stream."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        collectives.start_all_gather(output_tensor, input_tensor, self._axis).wait()


class RecordedReduceScatter(_Memory, ReduceScatter):
    """Always a sum: losses are divided by the global token count before the backward pass."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        collectives.start_reduce_scatter(output_tensor, input_tensor, self._axis).wait()
