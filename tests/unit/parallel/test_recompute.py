"""Recompute changes no bit: losses, gradients, random streams, reports. And it repeats no more than it must."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from petatron.config import RunConfig
from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.memory import MemoryConfig
from petatron.estimate.recompute_plan import effective_modules, recompute_flops
from petatron.kernels import norm as reference_norm
from petatron.layers.dropout import Dropout
from petatron.layers.moe.experts import GroupedLinear
from petatron.layers.norm import RMSNorm
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import FULL
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.mesh.rng import RandomStreams
from petatron.models.batch import Batch
from petatron.models.registry import model_spec
from petatron.parallel.activation_recompute import RecomputeRegion, recomputed
from petatron.parallel.tensor_parallel import apply_tensor_parallel, shard_params, shard_vocabulary
from petatron.sharding.shard_spec import ModelParallelCoordinate
from tests.dist import RankPool
from tests.longform import diagonal, later, one_in
from tests.run_stage import run_stage
from tests.unit.models.kept import alive_bytes
from tests.unit.models.test_activations import (
    BASE,
    LLAMA,
    MLA,
    RECOMPUTE,
    SELECTIVE,
    batch_of,
    build,
    built,
    filled,
    recompute,
    run_of,
    take_gradients,
)

MIXTURE = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 --moe-layer-freq 2 "
    "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate --moe-input-jitter-eps 0.1"
)
MODELS = {
    "gpt": f"{BASE} --attention-dropout 0.2 --hidden-dropout 0.3",
    "llama": f"{LLAMA} --hidden-dropout 0.3 --num-query-groups 2 --qk-layernorm",
    "window": f"{LLAMA} --window-size 5 --attention-dropout 0.2",
    "mla": f"{LLAMA} {MLA} --q-lora-rank 12 --qk-layernorm --hidden-dropout 0.3 --attention-dropout 0.2",
    "moe": f"{LLAMA} --hidden-dropout 0.3 {MIXTURE}",
    "moe-gelu": f"{BASE} {MIXTURE} --moe-expert-capacity-factor 0.8",
}
DENSE = {name: memory for name, memory in RECOMPUTE.items() if name != "nothing"}
MIXED = {
    name: replace(SELECTIVE, recompute_modules=tuple(name.split()))
    for name in (
        "moe",
        "moe_act",
        "shared_experts",
        "moe layernorm attention",
        "moe_act layernorm shared_experts core_attn",
    )
} | {name: RECOMPUTE[name] for name in ("layernorm", "uniform-2")}
Bits = dict[str, Tensor]


def train(run: RunConfig, memory: MemoryConfig, *, shared: bool = False, taken: bool = False) -> Bits:
    """Everything a step leaves behind, with two micro-batches in flight as in a pipeline.

    `taken`: weight gradients go to buffers and the weights of tokens are known beforehand, as in training.
    """
    model, streams = build(run)
    buffers = take_gradients(model) if taken else [None for _ in model.parameters()]
    if shared:
        for module in model.modules():
            if isinstance(module, Dropout):
                module.generator = streams.tp_shared
    names = [name for name, _ in model.named_parameters()]
    recompute(run, model, memory, streams, in_flight=2)
    assert [name for name, _ in model.named_parameters()] == names
    torch.manual_seed(1)
    batch = batch_of(run)
    batches = [Batch(batch.tokens.roll(at, 1), batch.labels.roll(at, 1), batch.loss_mask) for at in range(3)]
    reports: list[dict[int, Tensor]] = [{} for _ in batches]
    options = {"aux_loss_scale": torch.tensor(0.25), "loss_weights_SB": torch.ones(16, 2) if taken else None}
    waiting, bits = [], {}
    for at, (batch, report) in enumerate(zip(batches, reports)):
        waiting.append(run_stage(model, batch, router_statistics=report, **options))
        bits[f"losses {at}"] = waiting[-1].detach()
        if len(waiting) == 2:
            waiting.pop(0).sum().backward()
    for losses in waiting:
        losses.sum().backward()
    bits |= {f"report {at} {number}": x for at, report in enumerate(reports) for number, x in report.items()}
    bits |= {f"random {name}": state for name, state in streams.state().items()}
    for (name, parameter), buffer in zip(model.named_parameters(), buffers, strict=True):
        parts = [part for part in (parameter.grad, buffer) if part is not None]
        bits[f"gradient {name}"] = torch.stack(parts).sum(0)
        assert bits[f"gradient {name}"].any(), name
    return bits


def assert_same(found: Bits, wanted: Bits) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@cache
def _plain(model: str, shared: bool) -> Bits:
    return train(run_of(MODELS[model]), MemoryConfig(), shared=shared)


def _in_turn(first: int) -> list[Any]:
    """Every second kind of recompute of each model, and the others in the long form; every kind has a dense model in either."""
    cases = [(model, False, (first + at) % 2) for at, model in enumerate(MODELS)]
    return [*cases, *(later(model, False, 1 - half) for model, _, half in cases)]


@diagonal(3)
@pytest.mark.parametrize(("model", "shared", "half"), [*_in_turn(0), ("gpt", True, 0), ("moe", True, 0)])
def test_no_bit_changes(model: str, shared: bool, half: int):
    run, wanted = run_of(MODELS[model]), _plain(model, shared)
    assert any(name.startswith("report") for name in wanted) == model.startswith("moe")
    for memory in list((MIXED if model.startswith("moe") else DENSE).values())[half::2]:
        assert_same(train(run, memory, shared=shared), wanted)


@diagonal(3)
@pytest.mark.parametrize("model", MODELS)
def test_no_bit_changes_where_gradients_are_taken(model: str):
    run = run_of(MODELS[model])
    wanted = train(run, MemoryConfig(), taken=True)
    for name, through_autograd in _plain(model, False).items():
        torch.testing.assert_close(wanted[name], through_autograd, atol=1e-5, rtol=1e-4, msg=name)
    kinds = MIXED if model.startswith("moe") else DENSE
    for memory in list(kinds.values())[1::2]:
        assert_same(train(run, memory, taken=True), wanted)


def test_the_test_sees_a_stream_that_is_not_restored(monkeypatch: pytest.MonkeyPatch):
    run = run_of(MODELS["llama"])
    wanted = _plain("llama", False)
    monkeypatch.setattr(RandomStreams, "restore", lambda self, states: None)
    found = train(run, RECOMPUTE["uniform-1"])
    assert any(not torch.equal(found[name], wanted[name]) for name in wanted if name.startswith("gradient"))


@cache
def _flops(flags: str, memory: MemoryConfig) -> int:
    run = run_of(flags)
    model, streams = build(run)
    recompute(run, model, memory, streams)
    with FlopCounterMode(display=False) as counter:
        run_stage(model, batch_of(run)).sum().backward()
    return counter.get_total_flops()


@diagonal(3)
@pytest.mark.parametrize("name", ["layernorm", "mlp", "core_attn", "attention", "all", "uniform-1", "uniform-2"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_last_product_of_a_branch_is_not_repeated(model: str, name: str):
    """Counted are products; the formula has attention scores, norms and activations too."""
    flags = {"gpt": f"{BASE} --hidden-dropout 0", "llama": LLAMA}[model]
    run, more = run_of(flags), _flops(flags, RECOMPUTE[name]) - _flops(flags, MemoryConfig())
    shape, layer_spec = ActivationShape.from_config(run, device="cpu"), model_spec(run).layers[0]
    tokens, hidden, inner = shape.tokens, 32, 48
    qkv, out = 6 * tokens * hidden * hidden, 2 * tokens * hidden * hidden
    first = 2 * tokens * hidden * inner * (2 if model == "llama" else 1)
    last = 2 * tokens * hidden * inner
    layer = qkv + out + first
    wanted = {
        "layernorm": 0,
        "mlp": 3 * first,
        "core_attn": 0,
        "attention": 3 * qkv,
        "all": 3 * (qkv + first),
        "uniform-1": 3 * layer,
        "uniform-2": 3 * layer + last,  # of two layers together the first is repeated to its end
    }
    assert more == wanted[name]
    modules = {"all": ("attention", "mlp", "layernorm"), "uniform-1": ("full",), "uniform-2": ("full",)}.get(
        name, (name,)
    )
    formula = 3 * recompute_flops(layer_spec, shape, effective_modules(layer_spec, shape, modules))
    uncounted = 3 * tokens * (2 * 16 * hidden + 12 * (2 * hidden + inner))
    assert more - last <= formula <= more + uncounted


@diagonal(2)
@pytest.mark.parametrize("name", ["layernorm", "moe_act", "moe_act layernorm shared_experts core_attn"])
def test_norms_and_activations_repeat_no_product(name: str):
    flags = f"{LLAMA} {MIXTURE}"
    products = [word for word in name.split() if word in ("shared_experts", "core_attn")]
    assert _flops(flags, MIXED[name]) == _flops(flags, replace(SELECTIVE, recompute_modules=tuple(products)))


EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24"


@diagonal(3)
@pytest.mark.parametrize("name", ["moe", "uniform-1"])
@pytest.mark.parametrize(
    "flags",
    [
        EXPERTS,
        f"{EXPERTS} --hidden-dropout 0.3",
        f"{EXPERTS} --add-bias-linear",
        f"{EXPERTS} --moe-latent-size 8",
        f"{EXPERTS} --moe-shared-expert-intermediate-size 40",
        f"{MIXTURE} --moe-latent-size 8",
    ],
)
def test_what_experts_repeat(flags: str, name: str):
    """Products are those of the formula, once; it has attention scores, norms and activations besides."""
    flags = f"{LLAMA} {flags} --num-layers 1"
    run = run_of(flags)
    shape, (layer,) = ActivationShape.from_config(run, device="cpu"), model_spec(run).layers
    kind = "moe" if name == "moe" else FULL
    more = _flops(flags, (MIXED | RECOMPUTE)[name]) - _flops(flags, MemoryConfig())
    scores = 2 * 16 * 32 if kind == FULL else 0
    elementwise = shape.tokens * (scores + 12 * (2 * 32 + 2 * 24 + 40))
    gate = 2 * shape.tokens * 32
    formula = recompute_flops(layer, shape, effective_modules(layer, shape, (kind,)))
    assert more - gate <= formula <= more + elementwise


class _CountingNorm:
    """The reference kernels of a norm, with what they are asked for."""

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.again: list[int] = []

    def rms_norm(self, x_RD: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.forward.append(x_RD.shape[-1])
        return reference_norm.rms_norm(x_RD, *args, **options)

    def rms_norm_backward(self, grad_RD: Tensor, *args: Any, recompute_output: bool = True, **options: Any) -> Any:
        self.again += [grad_RD.shape[-1]] * recompute_output
        return reference_norm.rms_norm_backward(grad_RD, *args, recompute_output=recompute_output, **options)


@diagonal(2)
@pytest.mark.parametrize(
    ("model", "name", "more"),
    [
        ("llama", "layernorm", 0),
        ("llama", "mlp", 3),
        ("llama", "all", 6),
        ("moe", "layernorm", 2),
        ("moe", "moe layernorm attention", 5),
        ("moe", "moe_act layernorm shared_experts core_attn", 4),
    ],
)
def test_a_norm_runs_again_for_a_branch_or_a_router(model: str, name: str, more: int):
    """Never for a product, which has its operand made by the norm's own backward pass."""
    run = run_of(MODELS[model].replace("--qk-layernorm", "").replace("--moe-input-jitter-eps 0.1", ""))
    counts: list[tuple[int, int]] = []
    for memory in (MemoryConfig(), (MIXED | DENSE)[name]):
        kernels = _CountingNorm()
        decoder, streams = build(run)
        take_gradients(decoder)
        for module in decoder.modules():
            if isinstance(module, RMSNorm):
                module.kernels = kernels
        recompute(run, decoder, memory, streams)
        run_stage(decoder, batch_of(run), aux_loss_scale=torch.tensor(0.5)).sum().backward()
        counts.append((len(kernels.forward), len(kernels.again)))
    assert counts[0] == (7, 6), "two in each of three layers, and the last one, whose output no product keeps"
    assert counts[1] == (7 + more, 6)


def test_hooks_of_a_product_run_before_it():
    """Weights may still be on their way when a step begins; a hook of each module waits for them."""
    run = run_of(MODELS["moe"])
    decoder, streams = build(run)
    recompute(run, decoder, (MIXED | DENSE)["moe_act"], streams)
    down = decoder.get_submodule("layers.0.mlp.experts.down")
    assert isinstance(down, GroupedLinear)
    order: list[str] = []
    multiplication = down.grouped_gemm
    down.register_forward_pre_hook(lambda *_: order.append("hook"))
    down.grouped_gemm = lambda counts, write: order.append("product") or multiplication(counts, write)
    run_stage(decoder, batch_of(run)).sum().backward()
    assert order == ["hook", "product"]


@diagonal(3)
@pytest.mark.parametrize(
    ("name", "taken"), one_in(3, ((name, taken) for taken in (False, True) for name in (*MIXED, *DENSE)))
)
def test_nothing_is_left_after_the_backward_pass(name: str, taken: bool):
    run = run_of(MODELS["moe"])
    model, streams = build(run)
    batch, weights_SB = batch_of(run), torch.ones(16, 2) if taken else None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [*model.parameters(), *(p.grad for p in model.parameters()), batch.tokens, batch.labels, batch.loss_mask]
    known += [weights_SB, *take_gradients(model)] if weights_SB is not None else []
    recompute(run, model, (MIXED | DENSE)[name], streams)

    def step() -> None:
        run_stage(model, batch, loss_weights_SB=weights_SB).sum().backward()

    assert alive_bytes(step, without=known) == 0


def test_without_gradients_nothing_is_kept_or_repeated():
    run = run_of(MODELS["llama"])
    model, streams = build(run)
    recompute(run, model, RECOMPUTE["three"], streams)
    plain, _ = build(run)
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        assert torch.equal(run_stage(model, batch_of(run)), run_stage(plain, batch_of(run)))


@pytest.mark.parametrize("name", ["layernorm", "mlp", "all", "uniform-2"])
def test_a_graph_may_be_used_twice(name: str):
    """In two halves, input first, or again after a whole pass: each runs the regions again."""
    run = run_of(MODELS["llama"])
    found: list[list[Tensor]] = []
    for memory in (MemoryConfig(), RECOMPUTE[name]):
        model, streams = build(run, stage=PipelineStage((0, 1, 2), has_embedding=True, has_loss=False))
        recompute(run, model, memory, streams)
        loss = run_stage(model, batch_of(run)).square().sum()
        assert model.embedding is not None
        first = torch.autograd.grad(loss, [model.embedding.weight], retain_graph=True)
        rest = [p for p in model.parameters() if p is not model.embedding.weight]
        second = torch.autograd.grad(loss, rest, retain_graph=True)
        found.append([*first, *second, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_regions_nest():
    torch.manual_seed(0)
    streams = RandomStreams.seeded(3, ParallelMesh.single())
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]

    def inner(x: Tensor, factor: float) -> Tensor:
        return torch.nn.functional.dropout((x @ weights[0]).tanh() * factor, 0.5) @ weights[1]

    def gradients(nested: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        again = recomputed(inner, streams) if nested else inner

        def outer(x: Tensor) -> Tensor:
            return (again(x, 2.0).sigmoid() + again(x, 3.0)) @ weights[2]

        x = torch.ones(4, 8, requires_grad=True)
        y = recomputed(outer, streams)(x) if nested else outer(x)
        return torch.autograd.grad(y.square().sum(), [x, *weights])

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False)))


@pytest.mark.parametrize("change", ["shape", "fewer"])
def test_a_second_run_that_differs_is_noticed(change: str):
    streams = RandomStreams.seeded(3, ParallelMesh.single())
    calls: list[int] = []

    def moody(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            return x.exp() * x.sin()
        return {"shape": lambda: x[:1].exp() * x[:1].sin(), "fewer": lambda: x.exp() * 1.0}[change]()

    y = RecomputeRegion(moody, streams)(torch.ones(3, requires_grad=True))
    with pytest.raises(AssertionError, match="the second run saved"):
        y.sum().backward()


def _train_on_rank(flags: str, name: str) -> tuple[Bits, Counter[tuple[str, int]]]:
    run = run_of(flags, world_size=dist.get_world_size())
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    streams = RandomStreams.seeded(run.train.seed, mesh)
    sequence = run.parallel.sequence_parallel
    model, table = built(run), model_spec(run).params()
    shard_params(model, table, ModelParallelCoordinate.from_mesh(mesh, sequence_parallel=sequence))
    apply_tensor_parallel(model, table, mesh.tp, sequence_parallel=sequence, shared_generator=streams.tp_shared)
    shard_vocabulary(model, table, mesh.tp)
    recompute(run, filled(model), RECOMPUTE[name], streams)
    batch = batch_of(run)
    torch.manual_seed(dist.get_rank())
    losses = run_stage(model, batch)
    losses.sum().backward()
    bits: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()} | streams.state() | {"loss": losses}
    sent = Counter((event.op, event.elements) for event in mesh.record.events())
    return {name: x.detach() for name, x in bits.items()}, sent


@diagonal(2)
@pytest.mark.parametrize("sequence", ["", "--sequence-parallel"])
def test_communication_inside_is_repeated(ranks: RankPool, sequence: str):
    """Each of three layers has two scatters, or two sums; behind the last is the dropout of a whole layer.

    Gathers are not repeated: what a second run gathers need not be gathered in the backward pass, as it is without recompute.
    """
    flags = f"{LLAMA} --hidden-dropout 0.3 --num-query-groups 2 --vocab-size 128 --tp 2 {sequence}"
    whole = {"reduce_scatter": 6} if sequence else {"all_reduce": 6}
    plain = ranks.run(_train_on_rank, 2, flags, "nothing")
    for name, repeated in {"layernorm": {}, "mlp": {}, "all": {}, "uniform-1": whole}.items():
        for (bits, sent), (wanted, before) in zip(ranks.run(_train_on_rank, 2, flags, name), plain):
            assert_same(bits, wanted)
            more = Counter(sent)
            more.subtract(before)
            assert {key: count for key, count in more.items() if count} == {
                (op, 2 * 16 * 32): count for op, count in repeated.items()
            }, name
