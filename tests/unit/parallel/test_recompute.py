"""Recompute changes no bit: losses, gradients, random streams, reports. And it repeats no more than it must."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from petatron.config import RunConfig
from petatron.config.schema import MemoryConfig
from petatron.config.stages import Stage
from petatron.layers.dropout import Dropout
from petatron.layers.norm import RMSNorm
from petatron.mesh.layout import Layout
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import RandomStreams
from petatron.mesh.spec import TensorSplit
from petatron.models.activations import ActivationShape
from petatron.models.base import Batch
from petatron.models.decoder import Decoder, shards
from petatron.models.recompute_plan import effective, recompute_flops
from petatron.parallel.recompute import Region, apply_recompute, recomputed
from petatron.parallel.tensor import connect, split_vocabulary, split_weights
from tests.dist import RankPool
from tests.unit.models.kept import alive_bytes
from tests.unit.models.test_activations import BASE, LLAMA, RECOMPUTE, SELECTIVE, batch_of, build, filled, run_of

MIXTURE = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 --moe-layer-freq 2 "
    "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate --moe-input-jitter-eps 0.1"
)
MODELS = {
    "gpt": f"{BASE} --attention-dropout 0.2 --hidden-dropout 0.3",
    "llama": f"{LLAMA} --hidden-dropout 0.3 --num-query-groups 2 --qk-layernorm",
    "window": f"{LLAMA} --window-size 5 --attention-dropout 0.2",
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


def train(run: RunConfig, memory: MemoryConfig, *, shared: bool = False) -> Bits:
    """Everything a step leaves behind, with two micro-batches in flight as in a pipeline."""
    model, streams = build(run)
    if shared:
        for module in model.modules():
            if isinstance(module, Dropout):
                module.generator = streams.shared
    names = [name for name, _ in model.named_parameters()]
    apply_recompute(model, memory, streams, shape=ActivationShape.of(run, device="cpu"), in_flight=2)
    assert [name for name, _ in model.named_parameters()] == names
    torch.manual_seed(1)
    batch = batch_of(run)
    batches = [Batch(batch.tokens.roll(at, 1), batch.labels.roll(at, 1), batch.loss_mask) for at in range(3)]
    reports: list[dict[int, Tensor]] = [{} for _ in batches]
    scale = torch.tensor(0.25)
    waiting, bits = [], {}
    for at, (batch, report) in enumerate(zip(batches, reports)):
        waiting.append(model(batch, extra_loss_scale=scale, reports=report))
        bits[f"losses {at}"] = waiting[-1].detach()
        if len(waiting) == 2:
            waiting.pop(0).sum().backward()
    for losses in waiting:
        losses.sum().backward()
    bits |= {f"report {at} {number}": x for at, report in enumerate(reports) for number, x in report.items()}
    bits |= {f"random {name}": state for name, state in streams.state().items()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        bits[f"gradient {name}"] = parameter.grad
    return bits


def assert_same(found: Bits, wanted: Bits) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize(("model", "shared"), [*((name, False) for name in MODELS), ("gpt", True), ("moe", True)])
def test_no_bit_changes(model: str, shared: bool):
    run = run_of(MODELS[model])
    wanted = train(run, MemoryConfig(), shared=shared)
    assert any(name.startswith("report") for name in wanted) == model.startswith("moe")
    for memory in (MIXED if model.startswith("moe") else DENSE).values():
        assert_same(train(run, memory, shared=shared), wanted)


def test_the_test_sees_a_stream_that_is_not_restored(monkeypatch: pytest.MonkeyPatch):
    run = run_of(MODELS["llama"])
    wanted = train(run, MemoryConfig())
    monkeypatch.setattr(RandomStreams, "restore", lambda self, states: None)
    found = train(run, RECOMPUTE["uniform-1"])
    assert any(not torch.equal(found[name], wanted[name]) for name in wanted if name.startswith("gradient"))


def _flops(run: RunConfig, memory: MemoryConfig) -> int:
    model, streams = build(run)
    apply_recompute(model, memory, streams, shape=ActivationShape.of(run, device="cpu"))
    with FlopCounterMode(display=False) as counter:
        model(batch_of(run)).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["layernorm", "mlp", "core_attn", "attention", "all", "uniform-1", "uniform-2"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_last_product_of_a_branch_is_not_repeated(model: str, name: str):
    """Counted are products; the formula has attention scores, norms and activations too."""
    run = run_of({"gpt": f"{BASE} --hidden-dropout 0", "llama": LLAMA}[model])
    more = _flops(run, RECOMPUTE[name]) - _flops(run, MemoryConfig())
    shape = ActivationShape.of(run, device="cpu")
    tokens, hidden, inner = shape.tokens, 32, 48
    qkv, out = 6 * tokens * hidden * hidden, 2 * tokens * hidden * hidden
    first = 2 * tokens * hidden * inner * (2 if shape.gated else 1)
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
    formula = 3 * recompute_flops(shape, effective(modules, mixed=False))
    uncounted = 3 * tokens * (2 * 16 * hidden + 12 * (2 * hidden + inner))
    assert more - last <= formula <= more + uncounted


@pytest.mark.parametrize("name", ["moe_act", "moe_act layernorm shared_experts core_attn"])
def test_an_activation_repeats_no_expert_product(name: str):
    run = run_of(f"{LLAMA} {MIXTURE}")
    shared = replace(
        SELECTIVE, recompute_modules=tuple(word for word in name.split() if word in ("shared_experts", "core_attn"))
    )
    assert _flops(run, MIXED[name]) == _flops(run, shared)


@pytest.mark.parametrize(
    "name", ["layernorm", "all", "moe layernorm attention", "moe_act layernorm shared_experts core_attn"]
)
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_a_norm_runs_twice_however_many_use_it(model: str, name: str, monkeypatch: pytest.MonkeyPatch):
    run = run_of(MODELS[model].replace("--qk-layernorm", ""))
    decoder, streams = build(run)
    widths: list[int] = []
    forward = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: widths.append(x.shape[-1]) or forward(self, x))
    apply_recompute(decoder, (MIXED | DENSE)[name], streams, shape=ActivationShape.of(run, device="cpu"))
    decoder(batch_of(run), extra_loss_scale=torch.tensor(0.5)).sum().backward()
    assert widths == [32] * (2 * 3 * 2 + 1), "two in each of three layers, twice; the last one is not recomputed"


def test_hooks_of_a_product_run_before_it():
    """Weights may still be on their way when a step begins; a hook of each module waits for them."""
    run = run_of(MODELS["moe"])
    decoder, streams = build(run)
    apply_recompute(decoder, (MIXED | DENSE)["moe_act"], streams, shape=ActivationShape.of(run, device="cpu"))
    experts = decoder.get_submodule("layers.0.mlp.experts")
    order: list[str] = []
    product = experts.get_submodule("down").product
    experts.get_submodule("down").register_forward_pre_hook(lambda *_: order.append("hook"))
    experts.get_submodule("down").product = lambda *args: order.append("product") or product(*args)
    decoder(batch_of(run)).sum().backward()
    assert order == ["hook", "product"]


@pytest.mark.parametrize("name", [*MIXED, *DENSE])
def test_nothing_is_left_after_the_backward_pass(name: str):
    run = run_of(MODELS["moe"])
    model, streams = build(run)
    batch = batch_of(run)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply_recompute(model, (MIXED | DENSE)[name], streams, shape=ActivationShape.of(run, device="cpu"))
    known = [*model.parameters(), *(p.grad for p in model.parameters()), batch.tokens, batch.labels, batch.loss_mask]
    assert alive_bytes(lambda: model(batch).sum().backward(), without=known) == 0


def test_without_gradients_nothing_is_kept_or_repeated():
    run = run_of(MODELS["llama"])
    model, streams = build(run)
    apply_recompute(model, RECOMPUTE["three"], streams, shape=ActivationShape.of(run, device="cpu"))
    plain, _ = build(run)
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        assert torch.equal(model(batch_of(run)), plain(batch_of(run)))


@pytest.mark.parametrize("name", ["layernorm", "mlp", "all", "uniform-2"])
def test_a_graph_may_be_used_twice(name: str):
    """In two halves, input first, or again after a whole pass: each runs the regions again."""
    run = run_of(MODELS["llama"])
    found: list[list[Tensor]] = []
    for memory in (MemoryConfig(), RECOMPUTE[name]):
        model, streams = build(run, stage=Stage((0, 1, 2), embedding=True, loss=False))
        apply_recompute(model, memory, streams, shape=ActivationShape.of(run, device="cpu"))
        loss = model(batch_of(run)).square().sum()
        assert model.embedding is not None
        first = torch.autograd.grad(loss, [model.embedding.weight], retain_graph=True)
        rest = [p for p in model.parameters() if p is not model.embedding.weight]
        second = torch.autograd.grad(loss, rest, retain_graph=True)
        found.append([*first, *second, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_regions_nest():
    torch.manual_seed(0)
    streams = RandomStreams.start(3, ParallelMesh.single())
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
    streams = RandomStreams.start(3, ParallelMesh.single())
    calls: list[int] = []

    def moody(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            return x.exp() * x.sin()
        return {"shape": lambda: x[:1].exp() * x[:1].sin(), "fewer": lambda: x.exp() * 1.0}[change]()

    y = Region(moody, streams)(torch.ones(3, requires_grad=True))
    with pytest.raises(AssertionError, match="the second run saved"):
        y.sum().backward()


def _train_on_rank(flags: str, name: str) -> tuple[Bits, Counter[tuple[str, int]]]:
    run = run_of(flags, world_size=dist.get_world_size())
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    streams = RandomStreams.start(run.train.seed, mesh)
    sequence = run.parallel.sequence_parallel
    model, table = Decoder(run.model), shards(run.model)
    split_weights(model, table, TensorSplit(tp_size=mesh.tp.size, tp_rank=mesh.tp.rank, sequence_parallel=sequence))
    connect(model, table, mesh.tp, sequence=sequence, shared=streams.shared)
    split_vocabulary(model, table, mesh.tp)
    apply_recompute(filled(model), RECOMPUTE[name], streams, shape=ActivationShape.of(run, device="cpu"))
    batch = batch_of(run)
    torch.manual_seed(dist.get_rank())
    losses = model(batch)
    losses.sum().backward()
    bits: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()} | streams.state() | {"loss": losses}
    sent = Counter((event.op, event.elements) for event in mesh.record.events())
    return {name: x.detach() for name, x in bits.items()}, sent


@pytest.mark.parametrize("sequence", ["", "--sequence-parallel"])
def test_communication_inside_is_repeated(ranks: RankPool, sequence: str):
    """Each of three layers has two gathers and two scatters, or two sums; behind the last is the dropout of a whole layer."""
    flags = f"{LLAMA} --hidden-dropout 0.3 --num-query-groups 2 --vocab-size 128 --tp 2 {sequence}"
    whole = {"all_gather": 6, "reduce_scatter": 6} if sequence else {"all_reduce": 6}
    gathers = {"all_gather": 6} if sequence else {}
    plain = ranks.run(_train_on_rank, 2, flags, "nothing")
    for name, repeated in {"layernorm": gathers, "all": gathers, "uniform-1": whole}.items():
        for (bits, sent), (wanted, before) in zip(ranks.run(_train_on_rank, 2, flags, name), plain):
            assert_same(bits, wanted)
            assert sent - before == Counter({(op, 2 * 16 * 32): count for op, count in repeated.items()}), name
