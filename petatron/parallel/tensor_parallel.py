"""Tensor and sequence parallelism: shards each layer's weights, and fills the slots that its modules declare (`layers/parallel_slots.py`).

What a layer needs follows from the `Shard` of its weight. A linear sharded along its output (column) needs the whole
input on every rank and nothing after it; one sharded along its input (row) needs its partial outputs summed. So attention and MLP
each cost one collective in forward and one in backward (Shoeybi et al., Megatron-LM):

    whole sequence on every rank       copy -> column ... row -> all-reduce
    sequence parallel                  all-gather -> column ... row -> reduce-scatter      (Korthikanti et al.)

The second moves the same bytes but shards norms, dropout and the residual stream. The gathered input is not saved: for the weight's
gradient it is gathered once more, overlapped with the GEMM of the input's gradient (`layers/ops/linear_op.py` says how), so
backward moves half as much again, overlapped. The all-reduce of a copied input's gradient overlaps the weight-gradient GEMM. The
vocabulary is sharded too, and the loss is computed where the logits are.

In forward a GEMM waits for its all-gather, and its reduce-scatter for it. `--tp-comm-overlap` cuts both into n chunks of rows,
so that one chunk is communicated while another is multiplied. A chunk has the same slice of every rank's part of the sequence:

    column    communication   gather 0 | gather 1 | ...                    (all started at once)
              computing       local    | chunk 0  | chunk 1 | ...          (a rank's own rows wait for nothing)
    row       computing       chunk 0  | chunk 1  | ...
              communication              scatter 0 | scatter 1 | ...

With x seen as [tp, part, ...], a chunk is x[:, start:stop]: tp blocks of rows, strided in memory on one side of the GEMM and adjacent
on the other, as a collective needs them. A strided batched GEMM reads and writes both without a copy. The same bytes are
communicated; the last reduce-scatter, 1 / n of a row linear's communication, stays exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from petatron.kernels.linear_gemms import ChunkedGemm, Gemm, Tensors
from petatron.layers.adapters.adapter import Adapter
from petatron.layers.ops.linear_op import DEFAULT_GEMM_OP, GemmOp, GemmResult, PendingTensor, WeightGradTarget
from petatron.layers.ops.recompute_output import DeferredOutput, RecomputableOutput, as_recomputable
from petatron.layers.parallel_slots import TensorSlot
from petatron.layers.spec.param_spec import ParamSpec
from petatron.layers.token_rows import from_rows, is_batch_first, to_rows
from petatron.layers.vocabulary.vocabulary_shard import VocabShard
from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import Axis
from petatron.sharding.shard_spec import ModelParallelCoordinate, Placement, Shard, compute_placement


def shard_params(
    model: nn.Module, params: Mapping[str, ParamSpec], coordinate: ModelParallelCoordinate
) -> dict[str, Placement]:
    """Replaces every parameter by an empty shard of this rank (still on the meta device), and returns the placements."""
    placements: dict[str, Placement] = {}
    for name, parameter in list(model.named_parameters()):
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        param = params[name]
        assert tuple(parameter.shape) == param.shape, f"{name} is {tuple(parameter.shape)}, its spec says {param.shape}"
        placement = compute_placement(name, param.shape, param.shard, coordinate)
        placements[name] = placement
        shard = torch.empty(placement.shape, dtype=parameter.dtype, device=parameter.device)
        setattr(module, leaf, nn.Parameter(shard))
        if leaf == "weight" and param.shard.tp == 0:
            for slot in slots_of(module, "sections"):
                setattr(module, slot, placement.section_rows)
    return placements


def slots_of(module: nn.Module, *kinds: TensorSlot) -> list[str]:
    """Returns the slots of some kinds that a module declares."""
    declared: Mapping[str, TensorSlot] = getattr(module, "tensor_slots", {})
    return [slot for slot, kind in declared.items() if kind in kinds]


@dataclass(frozen=True, slots=True)
class AllGatherInput:
    """All-gathers the sequence before the GEMM and reduce-scatters its input gradient."""

    axis: Axis

    def gather_input(self, x: Tensor) -> Tensor:
        return collectives.all_gather(x, self.axis)

    def start_gather_input(self, x: Tensor) -> PendingTensor:
        shard, gathered = x.contiguous(), x.new_empty((x.shape[0] * self.axis.size, *x.shape[1:]))
        return partial(_wait_for, collectives.start_all_gather(gathered, shard, self.axis), gathered, shard)

    def start_reduce_input_grad(self, grad: Tensor) -> PendingTensor:
        grad, shard = grad.contiguous(), grad.new_empty((grad.shape[0] // self.axis.size, *grad.shape[1:]))
        return partial(_wait_for, collectives.start_reduce_scatter(shard, grad, self.axis), shard, grad)


@dataclass(frozen=True, slots=True)
class ReplicatedInput:
    """Every rank has the whole sequence: no communication before the GEMM, an all-reduce of its input gradient."""

    axis: Axis

    def gather_input(self, x: Tensor) -> Tensor:
        return x

    def start_gather_input(self, x: Tensor) -> PendingTensor:
        return lambda: x

    def start_reduce_input_grad(self, grad: Tensor) -> PendingTensor:
        batch_first = is_batch_first(grad)
        rows = to_rows(grad, batch_first=batch_first)
        reduced = from_rows(rows, grad, batch_first=batch_first)
        return partial(_wait_for, collectives.start_all_reduce(rows, self.axis), reduced, rows)


def _wait_for(handle: Handle, received: Tensor, sent: Tensor) -> Tensor:
    """Waits; `sent` must live until it has been sent, so it is among the arguments."""
    handle.wait()
    return received


@dataclass(frozen=True, slots=True)
class _ChunkOverlap:
    """A forward GEMM whose sequence is communicated in chunks. A chunk has `x[:, start:stop]` of x [ranks, part, ...]."""

    axis: Axis
    num_chunks: int

    def slices(self, length: int) -> list[tuple[int, int]]:
        """Returns at most `num_chunks` consecutive slices (start, stop) of nearly equal length; the longer ones come first.

        >>> overlap = _ChunkOverlap(axis=None, num_chunks=3)
        >>> overlap.slices(8), overlap.slices(2)
        ([(0, 3), (3, 6), (6, 8)], [(0, 1), (1, 2)])
        """
        count = min(self.num_chunks, length)
        stops = [length * number // count + (length * number % count > 0) for number in range(1, count + 1)]
        return list(zip([0, *stops], stops))

    @staticmethod
    def multiply(gemm: Gemm, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Multiplies blocks [N, S, ..., D], whose tokens are adjacent in memory, as they always are in outputs."""
        assert isinstance(gemm, ChunkedGemm)
        gemm.forward_into(x.flatten(1, -2), weight, out.flatten(1, -2))


class AllGatherOverlap(_ChunkOverlap):
    """All-gathers the sequence in chunks, each overlapped with the GEMM of rows received before."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm) -> GemmResult:
        ranks, rank, part = self.axis.size, self.axis.rank, x.contiguous()
        slices = self.slices(part.shape[0])
        gathered = [x.new_empty((ranks, stop - start, *x.shape[1:])) for start, stop in slices]
        handles = [
            collectives.start_all_gather(chunk.flatten(0, 1), part[start:stop], self.axis)
            for chunk, (start, stop) in zip(gathered, slices)
        ]
        y = x.new_empty((ranks, *x.shape[:-1], weight.shape[0]))
        self.multiply(gemm, part.unsqueeze(0), weight, y[rank : rank + 1])
        others = [block for block in (slice(0, rank), slice(rank + 1, ranks)) if block.start < block.stop]
        for chunk, handle, (start, stop) in zip(gathered, handles, slices):
            handle.wait()
            for block in others:
                self.multiply(gemm, chunk[block], weight, y[block, start:stop])
        y = y if bias is None else y.add_(bias)
        return GemmResult(y.flatten(0, 1), tuple(gathered))

    def input_rows(self, gemm_input: Tensors) -> Tensor:
        return torch.cat(gemm_input, dim=1).flatten(0, -2)

    def output_grad(self, grad: Tensor) -> Tensor:
        return grad


class ReduceScatterOverlap(_ChunkOverlap):
    """Reduce-scatters the output in chunks, each overlapped with the GEMM of the next."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm) -> GemmResult:
        ranks, width = self.axis.size, weight.shape[0]
        parts = x.unflatten(0, (ranks, -1))
        y = x.new_empty((*parts.shape[1:-1], width))
        started: list[tuple[Handle, Tensor]] = []  # with the tensor being sent, which must live until then
        for start, stop in self.slices(parts.shape[1]):
            sent = x.new_empty((ranks, stop - start, *x.shape[1:-1], width))
            self.multiply(gemm, parts[:, start:stop], weight, sent)
            started.append((collectives.start_reduce_scatter(y[start:stop], sent.flatten(0, 1), self.axis), sent))
        for handle, _ in started:
            handle.wait()
        y = y if bias is None else y.add_(bias)
        batch_first = is_batch_first(x)
        return GemmResult(y, (to_rows(x, batch_first=batch_first),), batch_first=batch_first)

    def input_rows(self, gemm_input: Tensors) -> Tensor:
        return gemm_input[0]

    def output_grad(self, grad: Tensor) -> Tensor:
        return collectives.all_gather(grad, self.axis)


def _gemm_input(x: Tensor | RecomputableOutput, *, save_first: bool) -> RecomputableOutput:
    """Returns the input of a GEMM, which saves the rows of one that nothing recomputes.

    In a recomputed region, or if its rows are a copy, it is saved itself, before the GEMM; so is what a pending one is made of.
    """
    if isinstance(x, RecomputableOutput):
        return x.apply() if save_first and isinstance(x, DeferredOutput) else x
    dense = x.is_contiguous() or is_batch_first(x)
    return RecomputableOutput(x, None) if dense and not save_first else as_recomputable(x)


@dataclass(frozen=True, slots=True)
class ColumnParallelOp:
    """A linear with its weight sharded along the output: every rank needs the whole input.

    `regather`: a gathered input is not saved but gathered a second time in backward. (FP8 saves its quantized input either way.)
    `save_first`: in this op and those below, an input that nothing recomputes is saved before the GEMM runs.
    """

    axis: Axis
    sequence_parallel: bool
    gemm_op: GemmOp = DEFAULT_GEMM_OP
    regather: bool = True
    overlap: AllGatherOverlap | None = None
    save_first: bool = False

    def __call__(self, x: Tensor | RecomputableOutput, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.axis.size == 1:
            return self.gemm_op(_gemm_input(x, save_first=self.save_first), weight, bias)
        if not self.sequence_parallel:
            return self.gemm_op(as_recomputable(x), weight, bias, input_comm=ReplicatedInput(self.axis))
        if self.regather:
            x = as_recomputable(x)
        else:
            x = RecomputableOutput(x.value if isinstance(x, RecomputableOutput) else x, None)
        return self.gemm_op(x, weight, bias, input_comm=AllGatherInput(self.axis), gemm_forward=self.overlap)


@dataclass(frozen=True, slots=True)
class RowParallelOp:
    """A linear with its weight sharded along the input: the ranks' outputs are partial sums, to whose total the bias is added."""

    axis: Axis
    sequence_parallel: bool
    gemm_op: GemmOp = DEFAULT_GEMM_OP
    overlap: ReduceScatterOverlap | None = None
    save_first: bool = False

    def __call__(self, x: Tensor | RecomputableOutput, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = _gemm_input(x, save_first=self.save_first)
        if self.axis.size == 1:
            return self.gemm_op(x, weight, bias)
        if self.overlap is not None:
            return self.gemm_op(x, weight, bias, gemm_forward=self.overlap)
        return self.gemm_op.add_bias(self.reduce_output(self.gemm_op(x, weight)), bias)

    def reduce_output(self, partial_sum: Tensor) -> Tensor:
        reduce = collectives.reduce_scatter_to_region if self.sequence_parallel else collectives.reduce_from_region
        return reduce(partial_sum, self.axis)


@dataclass(frozen=True, slots=True)
class ReplicatedOp:
    """A linear with its whole weight on every rank."""

    gemm_op: GemmOp = DEFAULT_GEMM_OP
    save_first: bool = False

    def __call__(self, x: Tensor | RecomputableOutput, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.gemm_op(_gemm_input(x, save_first=self.save_first), weight, bias)


def apply_tensor_parallel(
    model: nn.Module,
    params: Mapping[str, ParamSpec],
    axis: Axis,
    *,
    sequence_parallel: bool,
    shared_generator: torch.Generator | None,
    overlap_chunks: int | None = None,
    blocks: Callable[[int], Axis] | None = None,
) -> None:
    """Fills the slots that modules declare. `sequence_parallel` shards activations along the sequence; `shared_generator` is the axis's
    dropout stream.

    `overlap_chunks`: the number of chunks in which linears overlap their forward communication; the output head does not, since its loss
    already works chunk by chunk on its gathered input.
    `blocks`: returns the axis of this rank's block of adjacent ranks, given their number; needed by layers whose groups some ranks share.
    """
    column, row = ColumnParallelOp(axis, sequence_parallel), RowParallelOp(axis, sequence_parallel)
    linears = {None: ReplicatedOp(), 0: column, 1: row}
    to_whole_sequence = collectives.gather_from_region if sequence_parallel else collectives.copy_to_region
    if overlap_chunks is not None:
        assert sequence_parallel and axis.size > 1
        linears[0] = replace(column, overlap=AllGatherOverlap(axis, overlap_chunks))
        linears[1] = replace(row, overlap=ReduceScatterOverlap(axis, overlap_chunks))
    values: dict[TensorSlot, object] = {
        "column linear": column,
        "whole sequence": partial(to_whole_sequence, axis=axis),
        "summed output": row.reduce_output,
        "tensor rank": (axis.rank, axis.size),
    }
    if sequence_parallel:
        values["sequence shard"] = partial(collectives.local_slice, axis=axis)
        values["gathered sequence shards"] = partial(collectives.gather_from_region, axis=axis)
        values["sum of sequence shards"] = partial(collectives.reduce_from_region, axis=axis)
    elif axis.size > 1:
        values["shared generator"] = shared_generator
    for name, module in model.named_modules():
        declared: Mapping[str, TensorSlot] = getattr(module, "tensor_slots", {})
        for slot, kind in declared.items():
            if kind == "linear":
                setattr(module, slot, linears[params[f"{name}.weight"].shard.tp])
            elif kind in values:
                setattr(module, slot, values[kind])
        _fill_group_sums(module, axis, blocks)
        adapter = getattr(module, "adapter", None)
        if isinstance(adapter, Adapter):
            _fill_adapter(adapter, params[f"{name}.weight"].shard, axis, values)


def _fill_adapter(adapter: Adapter, weight: Shard, axis: Axis, values: Mapping[TensorSlot, object]) -> None:
    """Fills the slots of an adapter: ranks with the same input drop the same of it, and those with slices of a weight's rows add norms."""
    generator = values.get("shared generator")
    if weight.tp != 1 and isinstance(generator, torch.Generator):
        adapter.generator = generator
    if weight.tp == 1 and axis.size > 1:
        adapter.sum_over_ranks = partial(collectives.all_reduce, axis=axis)


def _fill_group_sums(module: nn.Module, axis: Axis, blocks: Callable[[int], Axis] | None) -> None:
    for slot, groups in getattr(module, "group_sum_slots", {}).items():
        if groups < axis.size:
            group_axis = axis if groups == 1 or blocks is None else blocks(axis.size // groups)
            assert group_axis.size * groups == axis.size, f"{groups} groups cannot share {axis.size} ranks"
            setattr(module, slot, partial(collectives.all_reduce, axis=group_axis))


def set_weight_grad_target(model: nn.Module, target: WeightGradTarget) -> None:
    """Makes every linear, the embedding and norms submit their weight gradients to a target instead of autograd.

    Called after `apply_tensor_parallel`, whose linear ops keep their communication, and before recompute, which wraps modules.
    """
    for module in model.modules():
        for slot in slots_of(module, "linear", "column linear"):
            linear_op = _parallel_op(module, slot)
            gemm_op = replace(linear_op.gemm_op, weight_grad_target=target)
            setattr(module, slot, replace(linear_op, gemm_op=gemm_op))
        for slot in slots_of(module, "weight-gradient target"):
            setattr(module, slot, target)


def params_with_weight_grad_target(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters whose modules submit every gradient to a target, once for each use."""
    submitted: set[nn.Parameter] = set()
    for module in model.modules():
        if any(slots_of(module, "linear", "column linear", "weight-gradient target")):
            weights: Any = module.weights() if hasattr(module, "weights") else [module.weight]  # pyright: ignore[reportCallIssue]
            submitted.update(weight for weight in weights if weight is not None)
    return submitted


def set_gemm(module: nn.Module, gemm: Gemm, *, requantizing_gemm: Gemm | None = None) -> None:
    """Makes a linear use a GEMM, or the second for inputs that are recomputed (`GemmOp`); its communication stays.

    What such a GEMM saves is no view of its input, which is saved before.
    """
    [slot] = slots_of(module, "linear")
    linear_op = _parallel_op(module, slot)
    gemm_op = replace(linear_op.gemm_op, gemm=gemm, requantizing_gemm=requantizing_gemm)
    setattr(module, slot, replace(linear_op, gemm_op=gemm_op, save_first=True))


def gemm_of(module: nn.Module) -> Gemm:
    """Returns the GEMM that a linear uses."""
    [slot] = slots_of(module, "linear")
    return _parallel_op(module, slot).gemm_op.gemm


def _parallel_op(module: nn.Module, slot: str) -> ColumnParallelOp | RowParallelOp | ReplicatedOp:
    linear_op = getattr(module, slot)
    assert isinstance(linear_op, ColumnParallelOp | RowParallelOp | ReplicatedOp)
    return linear_op


def shard_vocabulary(
    model: nn.Module, params: Mapping[str, ParamSpec], axis: Axis, *, data_axis: Axis | None = None
) -> None:
    """Sets the vocabulary shard of embedding and output head; a shard may be all padding.

    `data_axis` are the ranks that share the rows of a table with those of `axis`, if it is sharded by rows.
    """
    tables = {name: param for name, param in params.items() if param.role == "vocabulary"}
    data = axis.alone() if data_axis is None else data_axis
    coordinate = ModelParallelCoordinate(tp_size=axis.size, tp_rank=axis.rank, data_size=data.size, data_rank=data.rank)
    for name, module in model.named_modules():
        for slot in slots_of(module, "vocabulary shard"):
            size = getattr(module, slot).vocab_size
            # A tied head has no weight of its own, but the shard of the embedding.
            table = tables.get(f"{name}.weight", next(iter(tables.values())))
            shards = compute_placement(name, (size,), table.shard, coordinate).tensor_shards
            axes = [used for used in ((data, axis) if table.shard.rows_over_data else (axis,)) if used.size > 1]
            vocab_shard = VocabShard(
                vocab_size=size,
                first_id=shards[0].start[0] if shards else size,
                num_ids=shards[0].shape[0] if shards else 0,
                all_reduce_max_sum=(partial(_all_reduce, axes=axes, op="max"), partial(_all_reduce, axes=axes))
                if axes
                else None,
                all_gather_logits=partial(_all_gather, axes=axes),
            )
            setattr(module, slot, vocab_shard)


def _all_reduce(x: Tensor, axes: Sequence[Axis], op: collectives.ReduceOpName = "sum") -> Tensor:
    for axis in axes:
        collectives.all_reduce(x, axis, op=op)
    return x


def _all_gather(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Concatenates what the ranks of the first axis have, then what those of the next have of that."""
    for axis in axes:
        x = collectives.all_gather(x, axis)
    return x
