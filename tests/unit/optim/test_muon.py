"""Muon: Newton-Schulz against singular values, a step against a few plain lines, and who iterates which matrix."""

from __future__ import annotations

import copy
import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import petatron
from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.config.schema.optimizers.muon import MuonSpec
from petatron.kernels.optimizer.newton_schulz import COEFFICIENT_SETS, newton_schulz, step_coefficients
from petatron.layers.spec.param_spec import ParamSpec
from petatron.mesh.mesh import ParallelMesh
from petatron.models.optimizer_groups import optimizer_group
from petatron.models.registry import model_spec
from petatron.optim.matrix_update import plan_rounds
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.optim.muon import MuonRule
from petatron.optim.update_rules import RuleContext
from petatron.sharding.flat_buffer import FlatBufferOptions, FlatParamGroup, assign_whole_blocks, flatten_parameters
from petatron.sharding.logical_matrices import split_into_matrices
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.sharding.shard_spec import ModelParallelCoordinate, Section, Shard, compute_placement
from petatron.validate import load_config

STEPS = {"simple": 5, "quintic": 5, "polar_express": 8}


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (3, 8, 20)])
def test_newton_schulz_is_a_polynomial_of_singular_values(name: str, shape: tuple[int, ...]):
    torch.manual_seed(5)
    x, coefficients = torch.randn(shape, dtype=torch.float64), step_coefficients(name, STEPS[name])
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(newton_schulz(x, coefficients), u @ torch.diag_embed(s) @ vh, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "spread"), [("simple", 0.35), ("quintic", 0.35), ("polar_express", 0.02)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_newton_schulz_orthogonalizes(name: str, spread: float, dtype: torch.dtype):
    torch.manual_seed(6)
    out = newton_schulz(torch.randn(32, 96).to(dtype), step_coefficients(name, STEPS[name]))
    assert out.dtype == dtype
    rounding = 0.02 if dtype == torch.bfloat16 else 0.0
    assert (torch.linalg.svdvals(out.double()) - 1).abs().max() < spread + rounding


def test_a_matrix_of_zeros_stays_zero_and_size_does_not_matter():
    coefficients = step_coefficients("quintic", 5)
    assert not newton_schulz(torch.zeros(4, 6), coefficients).any()
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(1e3 * x, coefficients), newton_schulz(1e-3 * x, coefficients))


@pytest.mark.parametrize("dim", [0, 1])
def test_newton_schulz_of_a_shard_is_not_the_shard_of_newton_schulz(dim: int):
    """Why a matrix must be whole; if these agreed, no parity test of Muon could fail."""
    torch.manual_seed(7)
    x, coefficients = torch.randn(16, 24, dtype=torch.float64), step_coefficients("quintic", 5)
    shard_of_whole = newton_schulz(x, coefficients).chunk(2, dim)[0]
    whole_of_shard = newton_schulz(x.chunk(2, dim)[0], coefficients)
    assert (whole_of_shard - shard_of_whole).norm() > 0.1 * shard_of_whole.norm()


def test_sets_of_coefficients_go_on():
    assert step_coefficients("quintic", 7)[5:] == COEFFICIENT_SETS["quintic"][:2]
    assert step_coefficients("polar_express", 10)[7:] == (COEFFICIENT_SETS["polar_express"][-1],) * 3
    assert step_coefficients("polar_express", 3) == COEFFICIENT_SETS["polar_express"][:3]


class Block(nn.Module):
    """A layer as the decoder names it: a fused weight, a plain one, a norm."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleDict({"qkv": nn.Linear(6, 12, bias=False), "out": nn.Linear(4, 6)})
        self.layers = nn.ModuleDict({"0": nn.ModuleDict({"attention": inner, "norm": nn.LayerNorm(6)})})
        self.embedding = nn.Embedding(5, 6)


SECTIONS = (Section("q", 4, 1), Section("k", 4, 1), Section("v", 4, 1))


def flatten(model: nn.Module, config: OptimizerConfig) -> list[FlatParamGroup]:
    placements, groups = {}, {}
    for name, parameter in model.named_parameters():
        shard = Shard(tp=0, sections=SECTIONS) if "qkv" in name else Shard()
        matrix = parameter.dim() > 1
        role = "hidden_matrix" if matrix and name.startswith("layers.") else "other"
        param = ParamSpec(shape=tuple(parameter.shape), shard=shard, role=role, weight_decay=matrix)
        placements[name] = compute_placement(name, param.shape, shard, ModelParallelCoordinate())
        groups[name] = optimizer_group(config, name, param)
    options, uses = FlatBufferOptions(bucket_size=10**9), Counter(model.parameters())
    mesh = ParallelMesh.single()
    return flatten_parameters([model], placements, groups, mesh, options, grads_per_micro_batch=uses)


def fill_gradients(groups: list[FlatParamGroup], step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = {}
    for group in groups:
        for slot in group.params:
            grad = torch.randn(slot.parameter.shape, generator=generator, dtype=torch.float64)
            group.param_grad(slot).copy_(grad)
            found[slot.name] = grad
    return found


def plain_muon(weights: list[Tensor], grads: list[list[Tensor]], config: OptimizerConfig, lr: float) -> list[Tensor]:
    """Matrices after some steps, as one would write it down."""
    coefficients = step_coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
    momenta, mu = [torch.zeros_like(w) for w in weights], config.muon_momentum
    for step in grads:
        for w, m, g in zip(weights, momenta, step):
            m.copy_(mu * m + (1 - mu) * g)
            x = mu * m + (1 - mu) * g if config.muon_nesterov else m
            x = x / x.norm()
            for a, b, c in coefficients:
                x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
            rows, columns = w.shape
            scale = {"spectral": max(rows, columns), "unit_rms_norm": rows / columns}.get(
                config.muon_scale_mode, max(1, rows / columns)
            )
            w -= lr * config.weight_decay * w + lr * config.muon_extra_scale_factor * math.sqrt(scale) * x
    return weights


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"muon_nesterov": True, "muon_momentum": 0.8},
        {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.2},
        {"muon_scale_mode": "shape_scaling", "muon_coefficient_type": "simple", "muon_num_ns_steps": 3},
        {"muon_split_qkv": False},
    ],
    ids=lambda settings: "-".join(settings) or "default",
)
def test_steps_equal_a_plain_implementation(settings: dict):
    config = OptimizerConfig(optimizer="muon", lr=0.05, weight_decay=0.1, clip_grad=0.0, **settings)
    torch.manual_seed(1)
    model = Block().double()
    before = copy.deepcopy(dict(model.named_parameters()))
    groups = flatten(model, config)
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())
    seen = []
    for step in range(3):
        seen.append(fill_gradients(groups, step))
        optimizer.step()
    qkv, out = "layers.0.attention.qkv.weight", "layers.0.attention.out.weight"
    cut = list if config.muon_split_qkv else lambda parts: [torch.cat(tuple(parts))]
    for name, split in ((qkv, lambda x: cut(x.split(4))), (out, lambda x: [x])):
        wanted = plain_muon(
            [w.clone() for w in split(before[name].detach())], [split(one[name]) for one in seen], config, 0.05
        )
        found = dict(model.named_parameters())[name].detach()
        torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-11, atol=1e-12)
    adam = torch.optim.AdamW([before["embedding.weight"]], lr=0.05, weight_decay=0.1)
    for one in seen:
        before["embedding.weight"].grad = one["embedding.weight"]
        adam.step()
    torch.testing.assert_close(model.embedding.weight, before["embedding.weight"], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_gradient_leaves_everything_as_it_was(bad: float, dtype: torch.dtype):
    config = OptimizerConfig(optimizer="muon", lr=0.1, muon_nesterov=True)
    groups = flatten(Block().to(dtype), config)
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())

    def everything() -> list[Tensor]:
        state = [*optimizer.master_weights()], [*optimizer.moments()]
        return [g.flat_weights.clone() for g in groups] + [one[-1].clone() for part in state for one in part]

    fill_gradients(groups, 1)
    optimizer.step()
    before, counted = everything(), optimizer.scalar_state()
    fill_gradients(groups, 2)
    groups[-1].grads()[0][3] = bad
    assert optimizer.step().skipped
    assert all(torch.equal(a, b) for a, b in zip(before, everything()))
    assert optimizer.scalar_state() == counted == {"updates": 1.0}
    fill_gradients(groups, 3)
    assert not optimizer.step().skipped
    assert not any(torch.equal(a, b) for a, b in zip(before[: len(groups)], everything()))


def test_precision_of_the_iteration():
    for word, dtype in (("medium", torch.bfloat16), ("high", torch.float32)):
        settings = OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec=word)  # type: ignore[arg-type]
        rule = MuonRule(MuonSpec(settings), RuleContext(torch.device("cpu")))
        assert rule.exchange_dtype(torch.float32) == dtype
        assert rule.exchange_dtype(torch.float64) == torch.float64


MOE = (
    "--num-experts 4 --moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --qk-layernorm "
    "--add-qkv-bias --optimizer muon --mock-data --lr 1e-3 --train-iters 1"
)


def run_of(flags: str, world_size: int = 1) -> RunConfig:
    return petatron.load("tiny-llama", flags.split(), world_size=world_size).config


def test_who_updates_what():
    run = run_of(MOE)
    model_params = model_spec(run).params()
    with torch.device("meta"):
        model = model_spec(run).build_stage(model_spec(run).whole_model)
    found: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        spec = optimizer_group(run.optim, name, model_params[name])
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        found.setdefault(f"{spec.rule} {spec.unit} {spec.weight_decay:g}", set()).add(kind)
    assert found == {
        "muon matrix 1": {
            "layers.attention.qkv.weight",
            "layers.attention.out.weight",
            "layers.mlp.gate_up.weight",
            "layers.mlp.down.weight",
            "layers.mlp.experts.gate_up.weight",
            "layers.mlp.experts.down.weight",
            "layers.mlp.shared.gate_up.weight",
            "layers.mlp.shared.down.weight",
        },
        "adam element 1": {
            "embedding.weight",
            "head.weight",
            "layers.mlp.router.weight",
            "layers.mlp.shared_gate.weight",
        },
        "adam element 0": {
            "layers.attention_norm.weight",
            "layers.mlp_norm.weight",
            "layers.attention.qkv.bias",
            "layers.attention.q_norm.weight",
            "layers.attention.k_norm.weight",
            "norm.weight",
        },
    }
    name = "layers.0.mlp.down.weight"
    assert optimizer_group(OptimizerConfig(optimizer="sgd"), name, model_params[name]) == GroupSpec(rule="sgd")


def test_multipliers_of_a_group():
    """A group of half the learning rate and twice the decay is a run of those."""
    results = []
    for spec, lr, weight_decay in (
        (GroupSpec(rule="adam", lr_scale=0.5, weight_decay=2.0), 0.2, 0.1),
        (GroupSpec(rule="adam"), 0.1, 0.2),
    ):
        torch.manual_seed(2)
        model = nn.Linear(3, 4, bias=False)
        placements = {"weight": compute_placement("weight", (4, 3), Shard(), ModelParallelCoordinate())}
        groups = flatten_parameters(
            [model], placements, {"weight": spec}, ParallelMesh.single(), FlatBufferOptions(bucket_size=1)
        )
        optimizer = MixedPrecisionOptimizer(OptimizerConfig(), groups, ParallelMesh.single())
        for step in range(2):
            fill_gradients(groups, step)
            optimizer.step(lr=lr, weight_decay=weight_decay)
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)


def test_a_stack_of_experts_is_one_matrix_each():
    spec = Shard(ep=0, tp=1, sections=(Section("gate", 6, 6), Section("up", 6, 6)))
    where = ModelParallelCoordinate(ep_size=2, ep_rank=1, etp_size=2, etp_rank=1)
    placement = compute_placement("layers.0.mlp.experts.gate_up.weight", (4, 12, 5), spec, where)
    matrices = split_into_matrices(placement, "matrix")
    assert [(m.shape, m.shards[0].name.split(".")[-2], m.shards[0].start) for m in matrices] == [
        ((6, 5), "gate", (2, 3, 0)),
        ((6, 5), "gate", (3, 3, 0)),
        ((6, 5), "up", (2, 3, 0)),
        ((6, 5), "up", (3, 3, 0)),
    ]


def test_rounds_are_short_and_keep_all_ranks_busy():
    placement = compute_placement("layers.0.mlp.up.weight", (10, 10), Shard(), ModelParallelCoordinate())
    matrices = split_into_matrices(placement, "matrix") * 7
    rounds = list(plan_rounds(matrices, [0, 0, 0, 0, 1, 1, 1], limit=250))
    assert [[owner for owner, _ in one] for one in rounds] == [[0, 0, 1, 1], [0, 0, 1]]
    assert [len(one) for one in plan_rounds(matrices, [0] * 7, limit=1)] == [1] * 7


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=30), num_shards=st.integers(1, 8))
def test_no_block_crosses_shards(sizes: list[int], num_shards: int):
    starts, length = assign_whole_blocks(sizes, num_shards)
    part = length // num_shards
    assert part * num_shards == length and part % 64 == 0
    places = sorted(zip(starts, sizes))
    assert all(start // part == (start + size - 1) // part for start, size in places)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(places))
    assert part < max(max(sizes), 4 / 3 * sum(sizes) / num_shards + max(sizes)) + 64


MUON = "--optimizer muon --mock-data --lr 1e-3 --train-iters 1"


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--muon-momentum 1", "--muon-momentum 1.0 is out of range"),
        ("--muon-num-ns-steps 0", "--muon-num-ns-steps 0 is below 1"),
        ("--muon-extra-scale-factor 0", "--muon-extra-scale-factor 0.0 is not above 0"),
        ("--optimizer-cpu-offload", "--optimizer-cpu-offload cannot be combined with --optimizer muon"),
        ("--optimizer-nvme-offload there", "--optimizer-nvme-offload there cannot be combined with --optimizer muon"),
        (
            "--muon-tp-mode blockwise",
            "--muon-tp-mode blockwise needs Newton-Schulz steps on the shards of tensor-parallel ranks",
        ),
        ("--muon-tp-mode distributed", "is not in this version"),
        ("--muon-scalar-optimizer soap", "cannot leave other parameters to soap"),
        ("--muon-coefficient-type aol", "AOL preconditioning of Muon, which is not in this version"),
        ("--muon-fp32-matmul-prec low", "is not in this version"),
        ("--optimizer adaptive_muon", "the adaptive Muon optimizer, which is not in this version"),
    ],
)
def test_what_is_refused(flags: str, rule: str):
    with pytest.raises(ConfigError) as caught:
        run_of(f"{MUON} {flags}")
    assert rule in str(caught.value)


def test_megatrons_spellings():
    flags = (
        "--muon-momentum 0.9 --muon-use-nesterov --muon-no-split-qkv --muon-scale-mode unit_rms_norm --muon-extra-scale-factor 0.2 "
        "--muon-num-ns-steps 6 --muon-coefficient-type polar_express --muon-fp32-matmul-prec high --muon-tp-mode duplicated "
        "--muon-scalar-optimizer adam"
    )
    optim = run_of(f"{MUON} {flags}").optim
    assert (optim.muon_momentum, optim.muon_nesterov, optim.muon_split_qkv) == (0.9, True, False)
    assert run_of(f"{MUON} --muon-nesterov").optim.muon_nesterov


def test_flags_of_another_optimizer_are_named():
    def notices(flags: str) -> tuple[str, ...]:
        return load_config(f"{MUON} {flags}".split(), preset="tiny-llama").notices

    assert any(
        "--muon-nesterov has no effect: the optimizer is adam" in n for n in notices("--optimizer adam --muon-nesterov")
    )
    assert not any("--adam-beta1" in n for n in notices("--adam-beta1 0.8"))
