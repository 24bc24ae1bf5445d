"""Expert parallelism at the level of one layer, in float64: every rank compares its part with the whole layer on one device.

Each rank holds its own tokens: sequences are cut over cp and tp, batches over dp. Weight gradients are summands over the ranks
that hold the same weight.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.kernels.moe.permute import REFERENCE
from petatron.layers.forward_context import ForwardContext
from petatron.layers.moe.load_balancing import ReductionGroup
from petatron.layers.moe.moe_layer import MoELayer, dispatch_locally
from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.branch_specs import moe_spec
from petatron.parallel.expert_parallel_token_dispatcher import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    apply_expert_parallel,
    build_dispatcher,
)
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shard, compute_placement
from tests.counted_rows import counted
from tests.dist import RankPool
from tests.longform import diagonal, every_second, later
from tests.seen import Seen

S, B, D, F, E = 8, 2, 6, 4, 8
MODELS = {
    "gated": ModelConfig(hidden_size=D, activation="swiglu", add_bias_linear=False),
    "plain": ModelConfig(hidden_size=D, activation="gelu", add_bias_linear=True),
}
CASES: dict[str, dict[str, object]] = {
    "aux": {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1},
    "seq-aux": {
        "moe_aux_loss_coeff": 0.5,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 3,
    },
    "global-aux": {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "global_aux_loss"},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "latent": {"moe_latent_size": 3, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "drop": {"moe_expert_capacity_factor": 0.6},
    "pad": {"moe_expert_capacity_factor": 0.8, "moe_pad_expert_input_to_capacity": True},
}
SCALE = 0.25


def config(case: str, dispatcher: str) -> MoEConfig:
    fields = {"num_experts": E, "moe_ffn_hidden_size": F, "moe_router_topk": 2, **CASES[case]}
    return MoEConfig(**fields, moe_token_dispatcher_type=dispatcher)  # pyright: ignore[reportArgumentType]


def whole_layer(model: str, moe: MoEConfig) -> MoELayer:
    layer = moe_spec(MODELS[model], moe).build(0).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    # Far from even, so that some rank gets hardly any rows.
    layer.router.weight.data[:2] *= 3
    return layer


def cut_layer(model: str, moe: MoEConfig, mesh: ParallelMesh) -> MoELayer:
    """This rank's part of the whole layer's weights, and the seams filled."""
    layer = whole_layer(model, moe)
    ep, etp = mesh["ep"], mesh["etp"]
    split = ModelParallelCoordinate(ep_size=ep.size, ep_rank=ep.rank, etp_size=etp.size, etp_rank=etp.rank)
    for name in ("gate_up", "up", "down"):
        product = getattr(layer.experts, name, None)
        if product is None:
            continue
        for leaf, parameter in list(product.named_parameters()):
            setattr(product, leaf, torch.nn.Parameter(part_of(f"{name}.{leaf}", parameter.data, split)))
    apply_expert_parallel(layer, mesh, moe)
    return layer


def part_of(name: str, whole: Tensor, split: ModelParallelCoordinate) -> Tensor:
    if name.startswith("gate_up"):
        half = Shard(ep=0, tp=1)
        return torch.cat([_box(f"x.{name}", half_of, half, split) for half_of in whole.chunk(2, dim=1)], dim=1)
    return _box(f"x.{name}", whole, Shard(ep=0, tp=2 if name.startswith("down") else 1), split)


def _box(name: str, whole: Tensor, shard: Shard, split: ModelParallelCoordinate) -> Tensor:
    (piece,) = compute_placement(name, tuple(whole.shape), shard, split).tensor_shards
    return whole[piece.logical_slices()].clone()


@dataclass
class Tokens:
    """All tokens of all ranks, and the gradients of the outputs."""

    x: Tensor
    grad: Tensor

    @classmethod
    def draw(cls, dp: int) -> Tokens:
        generator = torch.Generator().manual_seed(9)
        return cls(*(torch.randn(S, dp * B, D, dtype=torch.float64, generator=generator) for _ in range(2)))

    def part(self, dp: int, piece: int = 0, pieces: int = 1) -> tuple[Tensor, Tensor]:
        rows = slice(piece * S // pieces, (piece + 1) * S // pieces)
        x, grad = (tensor[rows, dp * B : (dp + 1) * B] for tensor in (self.x, self.grad))
        return x.clone().requires_grad_(), grad


@dataclass
class Reference:
    """The whole layer on all tokens: outputs and input gradients by (dp, piece), summed weight gradients and reports."""

    outputs: dict[tuple[int, int], tuple[Tensor, Tensor]]
    gradients: dict[str, Tensor]
    report: Tensor


def reference(model: str, moe: MoEConfig, mesh: ParallelMesh, tokens: Tokens) -> Reference:
    """Micro-batch by micro-batch; rank by rank where a capacity makes the result a matter of each rank's tokens."""
    layer, dp, pieces = whole_layer(model, moe), mesh.dp.size, mesh["sequence"].size
    by_rank = moe.moe_expert_capacity_factor is not None
    cuts = pieces if by_rank else 1
    if moe.moe_router_load_balancing_type == "global_aux_loss":
        counts = [layer.router(tokens.part(d)[0], with_loss=False)[2][:E].long() for d in range(dp)]
        layer.router.stage_group = ReductionGroup(dp, lambda x: x.copy_(sum(counts)))
    outputs, report = {}, torch.zeros(E + 6, dtype=torch.float64)
    for d in range(dp):
        for cut in range(cuts):
            x, grad = tokens.part(d, cut, cuts)
            passing = ForwardContext(aux_loss_scale=torch.tensor(SCALE))
            y = layer(x, passing)
            y.backward(grad)
            assert x.grad is not None
            report += passing.router_statistics[0]
            parts = pieces // cuts
            for i, both in enumerate(zip(y.detach().chunk(parts), x.grad.chunk(parts))):
                outputs[d, cut * parts + i] = both
    if by_rank:
        report[-1] = dp
    return Reference(outputs, {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}, report)


def close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda message: f"{what}: {message}")


def check(model: str, case: str, dispatcher: str, mesh: ParallelMesh, *, batch_first: bool = False) -> None:
    """`batch_first`: this rank's tokens lie in memory sequence by sequence."""
    moe, tokens = config(case, dispatcher), Tokens.draw(mesh.dp.size)
    expected, layer = reference(model, moe, mesh, tokens), cut_layer(model, moe, mesh)
    where = f"{model} {case} {dispatcher} {mesh.layout}"
    x, grad = tokens.part(mesh.dp.rank, mesh["sequence"].rank, mesh["sequence"].size)
    if batch_first:
        x = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    passing = ForwardContext(aux_loss_scale=torch.tensor(SCALE))
    y = layer(x, passing)
    y.backward(grad)
    assert x.grad is not None and y.stride() == x.stride()
    output, x_grad = expected.outputs[mesh.dp.rank, mesh["sequence"].rank]
    close(y.detach(), output, f"{where} output")
    close(x.grad, x_grad, f"{where} input gradient")
    close(collectives.all_reduce(passing.router_statistics[0], mesh["stage"]), expected.report, f"{where} report")
    ep, etp = mesh["ep"], mesh["etp"]
    split = ModelParallelCoordinate(ep_size=ep.size, ep_rank=ep.rank, etp_size=etp.size, etp_rank=etp.rank)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{where}: {name} has no gradient"
        whole, found = expected.gradients[name], parameter.grad
        if name.startswith("experts."):
            whole = part_of(name.removeprefix("experts."), whole, split)
            if name == "experts.down.bias":
                found = collectives.all_reduce(found, etp)
            close(collectives.all_reduce(found, mesh["edp"]), whole, f"{where} {name}")
        else:
            close(collectives.all_reduce(found, mesh["stage"]), whole, f"{where} {name}")


def _compare(layout: Layout, dispatchers: tuple[str, ...], cases: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    mesh = ParallelMesh(layout, dist.get_rank())
    for dispatcher in dispatchers:
        for number, case in enumerate(cases):
            odd = number % 2 == 1
            check("gated" if odd else "plain", case, dispatcher, mesh, batch_first=odd)
            if case == "aux":
                check("gated", case, dispatcher, mesh)


LAYOUTS = {
    "ep2 over dp": Layout(dp_shard=2, ep=2),
    "ep2 over cp": Layout(cp=2, ep=2),
    "ep2 over tp": Layout(tp=2, ep=2),
    "etp2": Layout(tp=2, etp=2),
    "ep4 over dp": Layout(dp_shard=4, ep=4),
    "ep4 over tp and cp": Layout(tp=2, cp=2, ep=4),
    "ep2 etp2": Layout(tp=2, dp_shard=2, ep=2, etp=2),
    "etp2 over dp": Layout(dp_shard=4, etp=2),
    "two replicas": Layout(dp_outer=2, dp_shard=2, ep=2),
    "etp4": Layout(tp=2, cp=2, etp=4),
}


EVERY_CASE = ("ep2 over cp", "etp2", "ep2 etp2", "etp4")
MAIN_CASES = ("aux", "seq-aux", "pad")


@diagonal(3)
@pytest.mark.parametrize("layout", every_second(LAYOUTS))
def test_layouts_equal_one_device(ranks: RankPool, layout: str):
    cases = tuple(CASES) if layout in EVERY_CASE else MAIN_CASES
    ranks.run(_compare, LAYOUTS[layout].world_size, LAYOUTS[layout], ("alltoall", "allgather"), cases)


EIGHT = {
    "ep4 etp2": Layout(tp=2, cp=2, dp_shard=2, ep=4, etp=2),
    "ep8": Layout(tp=2, dp_shard=4, ep=8),
    "ep2 etp2 edp2": Layout(tp=4, dp_shard=2, ep=2, etp=2),
}


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["ep4 etp2", later("ep8"), later("ep2 etp2 edp2")])
def test_eight_ranks(ranks: RankPool, layout: str):
    ranks.run(_compare, 8, EIGHT[layout], ("alltoall", "allgather"), MAIN_CASES)


def test_without_expert_parallelism_there_is_only_sorting():
    mesh = ParallelMesh.single()
    assert build_dispatcher(mesh, config("aux", "alltoall")) is dispatch_locally
    layer = cut_layer("plain", config("aux", "alltoall"), mesh)
    assert layer.router.sequence_group.num_ranks == 1 and layer.experts.down.bias_scale == 1.0


def _dispatchers(layout: Layout) -> list[str]:
    mesh = ParallelMesh(layout, dist.get_rank())
    return [type(build_dispatcher(mesh, config("aux", kind))).__name__ for kind in ("alltoall", "allgather")]


def test_the_dispatcher_asked_for_is_used(ranks: RankPool):
    assert (
        ranks.run(_dispatchers, 2, Layout(dp_shard=2, ep=2))
        == [[AllToAllDispatcher.__name__, AllGatherDispatcher.__name__]] * 2
    )


def _calls(layout: Layout, dispatcher: str) -> Counter[str]:
    """How often each kernel in the slot of the experts runs, forward and backward."""
    mesh = ParallelMesh(layout, dist.get_rank())
    layer = cut_layer("gated", config("aux", dispatcher), mesh)
    layer.experts.kernels, calls = counted(REFERENCE)
    x, grad = Tokens.draw(mesh.dp.size).part(mesh.dp.rank, mesh["sequence"].rank, mesh["sequence"].size)
    layer(x, ForwardContext()).backward(grad)
    return calls


def test_tokens_travel_with_the_kernels_of_their_experts(ranks: RankPool):
    layout = Layout(dp_shard=2, ep=2)
    weights_outside = Counter(permute_rows=1, unpermute_rows=2, unpermute_backward=1)
    weights_inside = Counter(permute_rows=2, unpermute_rows=2, weighted_activation=2, weighted_activation_backward=1)
    assert ranks.run(_calls, 2, layout, "alltoall") == [weights_outside] * 2
    assert ranks.run(_calls, 2, layout, "allgather") == [weights_inside] * 2


def _traffic(layout: Layout, dispatcher: str, case: str) -> tuple[list, list]:
    """Events over ep x etp of one layer: forward, backward."""
    mesh = ParallelMesh(layout, dist.get_rank())
    layer = cut_layer("gated", replace(config(case, dispatcher), moe_aux_loss_coeff=0.0), mesh)
    x, grad = Tokens.draw(mesh.dp.size).part(mesh.dp.rank, mesh["sequence"].rank, mesh["sequence"].size)
    y = layer(x, ForwardContext())
    half = mesh.record.count
    y.backward(grad)
    keep = [
        (e.sequence_number <= half, e.op, str(e.dtype)[6:], e.elements)
        for e in mesh.record.events()
        if e.axis == "ep_etp"
    ]
    return [event[1:] for event in keep if event[0]], [event[1:] for event in keep if not event[0]]


def together(results: list[tuple[list, list]], direction: int) -> list[tuple[str, str, int]]:
    """The events in order, elements added over the ranks."""
    columns = zip(*(result[direction] for result in results), strict=True)
    return [(column[0][0], column[0][1], sum(event[2] for event in column)) for column in columns]


GRIDS = [Layout(dp_shard=2, ep=2), Layout(tp=2, etp=2), Layout(tp=2, dp_shard=2, ep=2, etp=2)]


@pytest.mark.parametrize("layout", GRIDS, ids=["ep2", "etp2", "ep2-etp2"])
def test_all_to_all_moves_what_theory_says(ranks: RankPool, layout: Layout):
    """Two exchanges of T K D etp elements each way, after one of the counts. Each rank's own share of an exchange is counted."""
    world, grid = layout.world_size, layout.ep * layout.etp
    results = ranks.run(_traffic, world, layout, "alltoall", "aux")
    rows = layout.dp * S * B * 2 * layout.etp * D
    counts = world * grid * E // layout.ep
    assert together(results, 0) == [("all_to_all", "int64", counts), *[("all_to_all", "float64", rows)] * 2]
    assert together(results, 1) == [("all_to_all", "float64", rows)] * 2


@pytest.mark.parametrize("layout", GRIDS, ids=["ep2", "etp2", "ep2-etp2"])
def test_padded_exchanges_need_no_counts(ranks: RankPool, layout: Layout):
    results = ranks.run(_traffic, layout.world_size, layout, "alltoall", "pad")
    tokens = S * B // (layout.tp * layout.cp)
    capacity = -(-tokens * 2 * 8 // (E * 10))
    one_rank = E * capacity * layout.etp * D
    for forward, backward in results:
        assert forward == backward == [("all_to_all", "float64", one_rank)] * 2


@pytest.mark.parametrize("layout", GRIDS, ids=["ep2", "etp2", "ep2-etp2"])
def test_all_gather_moves_what_theory_says(ranks: RankPool, layout: Layout):
    """All tokens with their weights and choices there, all results back."""
    grid = layout.ep * layout.etp
    tokens = grid * S * B // (layout.tp * layout.cp)
    for forward, backward in ranks.run(_traffic, layout.world_size, layout, "allgather", "aux"):
        assert forward == [
            ("all_gather", "float64", tokens * D),
            ("all_gather", "float64", tokens * 2),
            ("all_gather", "int64", tokens * 2),
            ("reduce_scatter", "float64", tokens * D),
        ]
        assert Counter(backward) == Counter(
            [
                ("all_gather", "float64", tokens * D),
                ("reduce_scatter", "float64", tokens * 2),
                ("reduce_scatter", "float64", tokens * D),
            ]
        )


def _looks(layout: Layout, dispatcher: str, case: str) -> int:
    """How often the host reads a number in a layer's forward and backward pass, beside the list of what is exchanged."""
    mesh = ParallelMesh(layout, dist.get_rank())
    layer = cut_layer("plain", config(case, dispatcher), mesh)
    x, grad = Tokens.draw(mesh.dp.size).part(mesh.dp.rank, mesh["sequence"].rank, mesh["sequence"].size)
    with Seen("_local_scalar_dense") as seen:
        layer(x, ForwardContext()).backward(grad)
    return seen.count


LOOKS = [
    ("allgather", "aux", 1, 0),  # without a capacity all rows may be for one rank, so it looks how many are its own
    ("allgather", "drop", 0, 0),
    ("allgather", "pad", 0, 0),
    ("alltoall", "aux", 0, 0),
    ("alltoall", "drop", 0, 0),
]


@diagonal(2)
@pytest.mark.parametrize(("dispatcher", "case", "ep", "etp"), LOOKS)
def test_the_host_looks_only_where_rows_have_no_bound(ranks: RankPool, dispatcher: str, case: str, ep: int, etp: int):
    assert ranks.run(_looks, 2, Layout(dp_shard=2, ep=2), dispatcher, case) == [ep] * 2
    assert ranks.run(_looks, 2, Layout(tp=2, etp=2), dispatcher, case) == [etp] * 2


def _balance_traffic(layout: Layout) -> dict[str, list[tuple[str, int]]]:
    """What the balance losses add, by kind."""
    mesh = ParallelMesh(layout, dist.get_rank())
    x, _ = Tokens.draw(mesh.dp.size).part(mesh.dp.rank, mesh["sequence"].rank, mesh["sequence"].size)
    found = {}
    for kind in ("aux", "seq-aux", "global-aux"):
        layer = cut_layer("gated", config(kind, "alltoall"), mesh)
        for scale in (torch.tensor(1.0), None):
            since = mesh.record.count
            layer(x, ForwardContext(aux_loss_scale=scale))
            events = [e for e in mesh.record.events(since=since) if e.axis != "ep_etp"]
            found[f"{kind} {'with' if scale is not None else 'without'}"] = [(e.axis, e.elements) for e in events]
    return found


def test_balance_sums_one_small_vector(ranks: RankPool):
    layout = Layout(tp=2, dp_shard=2, ep=4)
    for found in ranks.run(_balance_traffic, 4, layout):
        assert found == {
            "aux with": [("sequence", E)],
            "seq-aux with": [("sequence", B * E)],
            "global-aux with": [("stage", E)],
            "aux without": [],
            "seq-aux without": [],
            "global-aux without": [],
        }
