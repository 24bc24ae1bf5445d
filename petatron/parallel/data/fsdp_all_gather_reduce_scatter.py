"""The communication of torch's fully_shard: our axes as its meshes, our collectives in place of its own.

fully_shard gathers and scatters through objects that may be replaced. These go through `mesh/collectives.py`, so its
traffic is recorded like all other, under the axis that shards state.

A rank's message is its shard of each of a unit's parameters, padded to equal lengths. Weights that are gathered in FP8
are a byte per element, after all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from petatron.kernels.fp8.param_gather import Fp8ParamGatherKernels
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.sharding.fp8_gather import MatrixShard, ScaledMatrix, all_reduce_scales, dequantize_shards, quantize_shard

_ALIGNMENT = 16
"""Messages are a multiple of this many bytes, so that those of the next rank are aligned for any dtype."""


def device_mesh(axis: Axis, mesh: ParallelMesh) -> DeviceMesh:
    """Returns the ranks of an axis as a DeviceMesh; a rank that is alone there gets a group of its own."""
    assert dist.is_initialized(), "fully_shard needs a process group, be it of one rank"
    group = axis.group or mesh.single_rank_group()
    # On the meta device only shapes matter, which are those of any real device.
    kind = "cpu" if mesh.device.type == "meta" else mesh.device.type
    return DeviceMesh.from_group(group, kind, mesh_dim_names=(axis.name,))


class _MessageAllocator:
    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class RecordedAllGather(_MessageAllocator, AllGather):
    """fully_shard calls this on its own stream, where waiting holds up nothing but that stream."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        collectives.start_all_gather(output_tensor, input_tensor, self._axis).wait()


@dataclass(frozen=True, slots=True)
class MessageSegment:
    """A rank's shard of a parameter: its number of elements; and the matrix, if it is gathered in FP8."""

    length: int
    matrix: ScaledMatrix | None


class Fp8AllGather(RecordedAllGather):
    """All-gathers a unit, some of its weights in FP8, and dequantizes these.

    Scales are computed once, and again after `weights_changed`.
    """

    def __init__(
        self, axis: Axis, segments: Sequence[MessageSegment], *, itemsize: int, kernels: Fp8ParamGatherKernels
    ) -> None:
        """`segments` in the order of a message; `itemsize` is that of its dtype."""
        super().__init__(axis)
        self._segments, self._kernels = segments, kernels
        self._num_scales = sum(segment.matrix.num_scales for segment in segments if segment.matrix is not None)
        self._unquantized_bytes = itemsize * sum(segment.length for segment in segments if segment.matrix is None)
        num_bytes = self._unquantized_bytes + sum(segment.length for segment in segments if segment.matrix is not None)
        self._num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._scales: Tensor | None = None

    def weights_changed(self) -> None:
        self._scales = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        sent = torch.empty(1, self._num_bytes, dtype=torch.uint8, device=input_tensor.device)
        for matrix, values, message in self._segment_views(input_tensor.view(1, -1), sent):
            if matrix is None:
                message.view(values.dtype).copy_(values)
            else:
                shard, scales = self._matrix_shard(matrix, values), self._global_scales(input_tensor)
                quantize_shard(shard, scales, message.view(-1), self._kernels)
        received = sent.new_empty(self._axis.size, self._num_bytes)
        collectives.start_all_gather(received, sent, self._axis).wait()
        for matrix, out, message in self._segment_views(output_tensor.view(self._axis.size, -1), received):
            if matrix is None:
                out.copy_(message.view(out.dtype))
            else:
                dequantize_shards(matrix, message, self._global_scales(input_tensor), out, self._kernels)

    def _segment_views(self, numbers: Tensor, messages: Tensor) -> Iterator[tuple[ScaledMatrix | None, Tensor, Tensor]]:
        """Yields for each segment its values and its part of the messages, both [ranks, ...]."""
        at, plain, eight = 0, 0, self._unquantized_bytes
        for segment in self._segments:
            values = numbers[:, at : at + segment.length]
            at += segment.length
            if segment.matrix is None:
                end = plain + segment.length * numbers.element_size()
                yield None, values, messages[:, plain:end]
                plain = end
            else:
                yield segment.matrix, values, messages[:, eight : eight + segment.length]
                eight += segment.length
        assert at == numbers.shape[1], f"a message of {numbers.shape[1]} elements has a place for {at}"

    def _matrix_shard(self, matrix: ScaledMatrix, values: Tensor) -> MatrixShard:
        return MatrixShard(matrix, self._axis.rank * values.numel(), values.view(-1))

    def _global_scales(self, input_tensor: Tensor) -> Tensor:
        if self._scales is None:
            at, parts = 0, []
            for segment in self._segments:
                if segment.matrix is not None:
                    parts.append(self._matrix_shard(segment.matrix, input_tensor[at : at + segment.length]))
                at += segment.length
            self._scales = all_reduce_scales(parts, self._num_scales, self._axis, self._kernels, input_tensor.device)
        return self._scales


class RecordedReduceScatter(_MessageAllocator, ReduceScatter):
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
