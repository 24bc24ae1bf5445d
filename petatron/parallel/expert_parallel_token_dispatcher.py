"""Expert parallelism: tokens are dispatched to the ranks that hold their experts, and combined.

The ranks of one replica of the experts are a grid of ep x etp: an expert belongs to one coordinate of ep, and each of its matrices
is sharded over etp (column, then row), so that the etp ranks' outputs are partial sums. All these ranks have different tokens.

`AllToAllDispatcher` sends a row once for every choice and etp rank and receives all partial sums, which are added at the source
together with the weights of the choices. One all-to-all each way moves what an all-to-all over ep with an all-gather and a
reduce-scatter over etp around the experts would move, in one step instead of two. The row counts are exchanged first, and the
host must read them to know the shapes. With inputs padded to capacity all shapes are known, and neither is needed. Forward has 2
all-to-alls of T K D etp elements (T tokens of this rank, K choices), backward 2 more.

With `overlap_shared_expert` the shared expert overlaps both all-to-alls, and by autograd's order (`mesh/overlapped_all_to_all.py`)
its backward overlaps those of the gradients. No bit changes: every sum keeps its order.

    communicating   dispatch            |         | combine                 combine grad          |         | dispatch grad
    computing       shared, first GEMM  | experts | shared, second GEMM     shared, second GEMM   | experts | shared, first GEMM

`before_wait` is called before each of these waits; `parallel/pipeline/combined_forward_backward.py` runs another micro-batch's pass there.

`AllGatherDispatcher` sends all tokens to all ranks of the grid, and each computes the choices of its experts. Forward an all-gather
and a reduce-scatter of ep x etp x T D elements, backward the same: less than above when K is more than ep, and always one message of
one size. The number of rows for the local experts is known on the device only. With a capacity it is bounded (about the capacity factor
times an even share), and buffers have that size. Without a capacity the bound would be all rows, ep times an even share; instead of buffers
of that size the host reads the number once per layer.

T tokens, K choices per token, D width, R rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from petatron.config.schema.model import MoEConfig
from petatron.kernels.moe.grouped_gemm import ExpertCounts
from petatron.kernels.moe.permute import Permutation, inverse_permutation, permute, reorder, unpermute
from petatron.layers.moe.load_balancing import ReductionGroup
from petatron.layers.moe.moe_layer import (
    ExpertParallelSlots,
    ExpertsFunction,
    RoutesTokens,
    SharedExpertRun,
    TokenDispatcher,
    dispatch_locally,
)
from petatron.layers.moe.router import Routing
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.mesh.overlapped_all_to_all import OverlappedAllToAll, start_overlapped_all_to_all


def apply_expert_parallel(
    model: nn.Module, mesh: ParallelMesh, moe: MoEConfig, *, before_wait: Callable[[], None] | None = None
) -> None:
    """Gives every MoE layer its token dispatcher and the reductions of its load-balancing statistics; the weights are sharded already.

    The mesh's axis `sequence` has the ranks that share sequences (cp x tp), `stage` all ranks of a pipeline stage.
    """
    sequence, stage = (
        ReductionGroup(mesh[name].size, partial(collectives.all_reduce, axis=mesh[name]))
        for name in ("sequence", "stage")
    )
    dispatcher = build_dispatcher(mesh, moe, before_wait=before_wait)
    for module in model.modules():
        if isinstance(module, RoutesTokens):
            adds_bias = mesh["etp"].rank == 0
            module.set_expert_parallel(ExpertParallelSlots(dispatcher, sequence, stage, adds_bias))


def build_dispatcher(
    mesh: ParallelMesh, moe: MoEConfig, *, before_wait: Callable[[], None] | None = None
) -> TokenDispatcher:
    """Builds the token dispatcher of this mesh."""
    if mesh["ep_etp"].size == 1:
        return dispatch_locally
    axis, ep, etp = mesh["ep_etp"], mesh["ep"].size, mesh["etp"].size
    if moe.moe_token_dispatcher_type == "allgather":
        return AllGatherDispatcher(axis, ep_size=ep, etp_size=etp)
    return AllToAllDispatcher(
        axis, ep_size=ep, etp_size=etp, overlap_shared_expert=moe.moe_shared_expert_overlap, before_wait=before_wait
    )


@dataclass(frozen=True, slots=True)
class _DispatchPlan:
    """Rows sent to and received from every rank of the grid, and the permutation of received rows into expert order.

    tokens_per_expert: received rows of each local expert. order: None when rows arrive in order.
    """

    send: list[int]
    receive: list[int]
    tokens_per_expert: ExpertCounts
    order: Tensor | None


@dataclass(frozen=True, slots=True)
class AllToAllDispatcher:
    """Sends every row to the ranks that hold its expert. The axis runs over ep, and within each over etp."""

    axis: Axis
    ep_size: int
    etp_size: int
    overlap_shared_expert: bool = True
    before_wait: Callable[[], None] | None = None

    def __call__(
        self, x_TD: Tensor, routing: Routing, experts: ExpertsFunction, shared: SharedExpertRun | None = None
    ) -> Tensor:
        overlapped = shared if self.overlap_shared_expert else None
        permutation = routing.permutation()
        plan = self._plan_dispatch(permutation.counts, routing.num_experts // self.ep_size, x_TD.device)
        permutation = permutation.truncate(sum(plan.send[:: self.etp_size]))
        copies, weights = permutation, routing.weights_TK
        if self.etp_size > 1:
            copies = self._repeat_for_etp(permutation, plan.send)
            weights = weights.repeat_interleave(self.etp_size, dim=1)
        rows = permute(x_TD, copies, kernels=experts.kernels)
        dispatch = self._start_all_to_all(rows, send=plan.send, receive=plan.receive)
        if overlapped is not None:
            overlapped.first_half()
        rows = dispatch.wait()
        if plan.order is not None:
            inverse = inverse_permutation(plan.order)
            rows = reorder(experts(reorder(rows, plan.order, inverse), plan.tokens_per_expert), inverse, plan.order)
        else:
            rows = experts(rows, plan.tokens_per_expert)
        combine = self._start_all_to_all(rows, send=plan.receive, receive=plan.send)
        if overlapped is not None:
            overlapped.second_half()
        return unpermute(combine.wait(), weights, copies, kernels=experts.kernels)

    def _start_all_to_all(self, rows: Tensor, *, send: list[int], receive: list[int]) -> OverlappedAllToAll:
        return start_overlapped_all_to_all(rows, self.axis, send=send, receive=receive, before_wait=self.before_wait)

    def _plan_dispatch(self, counts: ExpertCounts, num_local_experts: int, device: torch.device) -> _DispatchPlan:
        """Exchanges counts and orders received rows, sorted by expert within each rank, by expert first, then rank."""
        ranks = self.axis.size
        if isinstance(counts, int):
            sizes = [num_local_experts * counts] * ranks
            numbers = torch.arange(ranks * num_local_experts * counts, device=device)
            order = numbers.view(ranks, num_local_experts, counts).transpose(0, 1).flatten()
            return _DispatchPlan(sizes, sizes, ranks * counts, order if num_local_experts > 1 else None)
        by_ep_rank = counts.view(self.ep_size, 1, num_local_experts)
        send_counts = by_ep_rank.expand(-1, self.etp_size, -1).reshape(ranks, num_local_experts)
        ones = [1] * ranks
        receive_counts = collectives.all_to_all(send_counts, self.axis, send=ones, receive=ones)
        send, receive = torch.stack([send_counts.sum(1), receive_counts.sum(1)]).tolist()
        order = None
        if num_local_experts > 1:
            expert = torch.arange(num_local_experts, device=device).repeat(ranks)
            order = expert.repeat_interleave(receive_counts.flatten(), output_size=sum(receive)).argsort(stable=True)
        return _DispatchPlan(send, receive, receive_counts.sum(0), order)

    def _repeat_for_etp(self, permutation: Permutation, send: list[int]) -> Permutation:
        """Returns the permutation with each ep rank's rows repeated etp times; each repetition is a choice of its own."""
        device, etp = permutation.choice_R.device, self.etp_size
        # Equal lengths, as of padded inputs, need no copy from the host, which a CUDA graph could not capture.
        if len(set(send)) == 1:
            lengths = torch.full((self.ep_size,), send[0], device=device)
        else:
            lengths = torch.tensor(send[::etp], device=device)
        starts = lengths.cumsum(0) - lengths
        rows = permutation.choice_R.shape[0]
        block_R = torch.arange(self.ep_size, device=device).repeat_interleave(lengths, output_size=rows)
        copy = torch.arange(etp, device=device)
        # Row i of a block of n rows that begins at a: copy e of it is at etp a + e n + (i - a).
        first_R = torch.arange(rows, device=device) + (etp - 1) * starts[block_R]
        row_RC = first_R[:, None] + copy * lengths[block_R][:, None]
        choice_RC = permutation.choice_R[:, None] * etp + copy
        row = row_RC.flatten()
        valid, kept = permutation.valid_R, permutation.kept_TK
        if valid is not None:
            unfilled = torch.empty(row.shape, dtype=torch.bool, device=device)
            valid = unfilled.scatter_(0, row, valid.repeat_interleave(etp))
        return Permutation(
            choice_R=torch.empty_like(row).scatter_(0, row, choice_RC.flatten()),
            row_TK=row_RC[permutation.row_TK.clamp(max=rows - 1)].flatten(1),
            counts=permutation.counts,
            valid_R=valid,
            kept_TK=None if kept is None else kept.repeat_interleave(etp, dim=1),
        )


@dataclass(frozen=True, slots=True)
class AllGatherDispatcher:
    """Sends every token to every rank, which computes the choices of its experts; results are reduce-scattered."""

    axis: Axis
    ep_size: int
    etp_size: int

    def __call__(
        self, x_TD: Tensor, routing: Routing, experts: ExpertsFunction, shared: SharedExpertRun | None = None
    ) -> Tensor:
        num_local_experts = routing.num_experts // self.ep_size
        first_expert = self.axis.rank // self.etp_size * num_local_experts
        x_TD = collectives.gather_from_region(x_TD, self.axis)
        weights_TK = collectives.gather_from_region(routing.weights_TK, self.axis)
        chosen_TK = collectives.all_gather(routing.experts_TK, self.axis)
        not_local = (chosen_TK < first_expert) | (chosen_TK >= first_expert + num_local_experts)
        local_routing = Routing(
            (chosen_TK - first_expert).masked_fill(not_local, num_local_experts),
            weights_TK,
            num_local_experts,
            may_drop=routing.may_drop or self.ep_size > 1,
            capacity=None if routing.capacity is None else routing.capacity * self.axis.size,
            pad_to_capacity=routing.pad_to_capacity,
        )
        return collectives.reduce_scatter_to_region(dispatch_locally(x_TD, local_routing, experts), self.axis)
