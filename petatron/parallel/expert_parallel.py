"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

The ranks of one replica of the experts are a grid of ep x etp: an expert lies on one place of ep, and each of its matrices is
cut over etp (column, then row), so that the etp ranks' outputs are summands. All these ranks hold different tokens.

`AllToAll` sends a row once for every choice and etp rank: there with all copies of it, back with all summands, which are
added at the source together with the weights of the choices. One exchange there and one back move what an all-to-all over ep
with a gather and a scatter over etp around the experts would move, in one step instead of two. How many rows come from where
is exchanged first, and the host must read it to know the shapes. With inputs padded to capacity, all shapes are known, and
neither is needed. Forward 2 exchanges of T K D etp elements (T tokens of this rank, K choices), backward 2 more.

With `overlap_shared`, the shared expert runs beside both exchanges, and by the order of autograd (`mesh/overlapped_all_to_all.py`) its
backward pass beside the exchanges of the gradients. No number changes: every sum has the order it has without.

    communicating   dispatch            |         | combine                 combine grad          |         | dispatch grad
    computing       shared, first GEMM  | experts | shared, second GEMM     shared, second GEMM   | experts | shared, first GEMM

`before_wait` is called before each of these waits; `parallel/pipeline/combined_forward_backward.py` runs another micro-batch's pass there.

`AllGather` sends all tokens to all ranks of the grid, and each computes what belongs to its experts. Forward a gather and a scatter
of ep x etp x T D elements, backward the same: less than above when K is more than ep, and always one message of one size. How
many of all ranks' choices are for the experts here only the device knows. A capacity bounds them, to about its factor times an even
share, and then nothing is read back; without one they could be all, ep times an even share, and room for that many in every
tensor of the experts would cost more than one number read per layer.

T tokens, K choices per token, D width, R rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from petatron.config.schema.model import MoEConfig
from petatron.kernels.moe.grouped_gemm import Counts
from petatron.kernels.moe.permute import Arrangement, combine, inverse, reorder, take
from petatron.layers.moe.load_balancing import Together
from petatron.layers.moe.moe_layer import Dispatcher, MoE, RunExperts, SharedHalves, dispatch_here
from petatron.layers.moe.router import Routing
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.mesh.overlapped_all_to_all import Exchange, start_exchange


def connect_experts(
    model: nn.Module, mesh: ParallelMesh, moe: MoEConfig, *, before_wait: Callable[[], None] | None = None
) -> None:
    """Fill the seams of every mixture of experts; their weights are already this rank's."""
    sequence, stage = (
        Together(mesh[name].size, partial(collectives.all_reduce, axis=mesh[name])) for name in ("sequence", "stage")
    )
    dispatcher = build_dispatcher(mesh, moe, before_wait=before_wait)
    for module in model.modules():
        if isinstance(module, MoE):
            module.dispatcher = dispatcher
            module.router.sequence, module.router.stage = sequence, stage
            module.experts.down.bias_share = 1.0 if mesh["etp"].rank == 0 else 0.0


def build_dispatcher(
    mesh: ParallelMesh, moe: MoEConfig, *, before_wait: Callable[[], None] | None = None
) -> Dispatcher:
    """How tokens reach experts on this mesh."""
    if mesh["ep_etp"].size == 1:
        return dispatch_here
    axis, ep, etp = mesh["ep_etp"], mesh["ep"].size, mesh["etp"].size
    if moe.moe_token_dispatcher_type == "allgather":
        return AllGather(axis, ep=ep, etp=etp)
    return AllToAll(axis, ep=ep, etp=etp, overlap_shared=moe.moe_shared_expert_overlap, before_wait=before_wait)


@dataclass(frozen=True, slots=True)
class _Journey:
    """Rows to and from every rank of the grid, and how the arrived ones are brought into the order of the experts here.

    counts: arrived rows of each expert. order: None when the rows arrive in order.
    """

    send: list[int]
    receive: list[int]
    counts: Counts
    order: Tensor | None


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Every row to the ranks that hold its expert. The axis runs over ep, and within each over etp."""

    axis: Axis
    ep: int
    etp: int
    overlap_shared: bool = True
    before_wait: Callable[[], None] | None = None

    def __call__(
        self, x_TD: Tensor, routing: Routing, experts: RunExperts, shared: SharedHalves | None = None
    ) -> Tensor:
        beside = shared if self.overlap_shared else None
        arrangement = routing.arranged()
        journey = self._journey(arrangement.counts, routing.num_experts // self.ep, x_TD.device)
        arrangement = arrangement.cut(sum(journey.send[:: self.etp]))
        copies, weights = arrangement, routing.weights_TK
        if self.etp > 1:
            copies = self._copies(arrangement, journey.send)
            weights = weights.repeat_interleave(self.etp, dim=1)
        rows = take(x_TD, copies, kernels=experts.kernels)
        dispatch = self._start(rows, send=journey.send, receive=journey.receive)
        if beside is not None:
            beside.first_half()
        rows = dispatch.wait()
        if journey.order is not None:
            back = inverse(journey.order)
            rows = reorder(experts(reorder(rows, journey.order, back), journey.counts), back, journey.order)
        else:
            rows = experts(rows, journey.counts)
        combining = self._start(rows, send=journey.receive, receive=journey.send)
        if beside is not None:
            beside.second_half()
        return combine(combining.wait(), weights, copies, kernels=experts.kernels)

    def _start(self, rows: Tensor, *, send: list[int], receive: list[int]) -> Exchange:
        return start_exchange(rows, self.axis, send=send, receive=receive, before_wait=self.before_wait)

    def _journey(self, counts: Counts, experts_here: int, device: torch.device) -> _Journey:
        """What comes from the ranks is sorted by expert within each rank; here the experts come first, then the ranks."""
        ranks = self.axis.size
        if isinstance(counts, int):
            each = [experts_here * counts] * ranks
            numbers = torch.arange(ranks * experts_here * counts, device=device)
            order = numbers.view(ranks, experts_here, counts).transpose(0, 1).flatten()
            return _Journey(each, each, ranks * counts, order if experts_here > 1 else None)
        leaving = counts.view(self.ep, 1, experts_here).expand(-1, self.etp, -1).reshape(ranks, experts_here)
        ones = [1] * ranks
        arriving = collectives.all_to_all(leaving, self.axis, send=ones, receive=ones)
        send, receive = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()
        order = None
        if experts_here > 1:
            expert = torch.arange(experts_here, device=device).repeat(ranks)
            order = expert.repeat_interleave(arriving.flatten(), output_size=sum(receive)).argsort(stable=True)
        return _Journey(send, receive, arriving.sum(0), order)

    def _copies(self, arrangement: Arrangement, send: list[int]) -> Arrangement:
        """The arrangement in which each ep rank's rows stand etp times one after the other; each copy is a choice of its own."""
        device, etp = arrangement.choice_R.device, self.etp
        lengths = torch.tensor(send[::etp], device=device)
        starts = lengths.cumsum(0) - lengths
        rows = arrangement.choice_R.shape[0]
        block_R = torch.arange(self.ep, device=device).repeat_interleave(lengths, output_size=rows)
        copy = torch.arange(etp, device=device)
        # Row i of a block of n rows that begins at a: copy e of it is at etp a + e n + (i - a).
        first_R = torch.arange(rows, device=device) + (etp - 1) * starts[block_R]
        row_RC = first_R[:, None] + copy * lengths[block_R][:, None]
        choice_RC = arrangement.choice_R[:, None] * etp + copy
        place = row_RC.flatten()
        real, kept = arrangement.real_R, arrangement.kept_TK
        return Arrangement(
            choice_R=torch.empty_like(place).scatter_(0, place, choice_RC.flatten()),
            row_TK=row_RC[arrangement.row_TK.clamp(max=rows - 1)].flatten(1),
            counts=arrangement.counts,
            real_R=None
            if real is None
            else torch.empty(place.shape, dtype=torch.bool, device=device).scatter_(
                0, place, real.repeat_interleave(etp)
            ),
            kept_TK=None if kept is None else kept.repeat_interleave(etp, dim=1),
        )


@dataclass(frozen=True, slots=True)
class AllGather:
    """Every token to every rank, which computes what belongs to its experts; the results are summed on the way back."""

    axis: Axis
    ep: int
    etp: int

    def __call__(
        self, x_TD: Tensor, routing: Routing, experts: RunExperts, shared: SharedHalves | None = None
    ) -> Tensor:
        here = routing.num_experts // self.ep
        first = self.axis.rank // self.etp * here
        x_TD = collectives.gather(x_TD, self.axis)
        weights_TK = collectives.gather(routing.weights_TK, self.axis)
        chosen_TK = collectives.all_gather(routing.experts_TK, self.axis)
        elsewhere = (chosen_TK < first) | (chosen_TK >= first + here)
        of_these = Routing(
            (chosen_TK - first).masked_fill(elsewhere, here),
            weights_TK,
            here,
            incomplete=routing.incomplete or self.ep > 1,
            capacity=None if routing.capacity is None else routing.capacity * self.axis.size,
            padded=routing.padded,
        )
        return collectives.scatter(dispatch_here(x_TD, of_these, experts), self.axis)
