"""The MoE layer against a loop over tokens, in float64: outputs and every gradient."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.kernels.activation import ACTIVATIONS, GATE_ACTIVATIONS
from petatron.kernels.moe import grouped_gemm
from petatron.kernels.moe.permute import REFERENCE
from petatron.kernels.registry import KernelContext
from petatron.layers.forward_context import ForwardContext
from petatron.layers.moe.moe_layer import MoELayer
from petatron.layers.moe.router import Routing
from petatron.models.branch_specs import moe_spec
from petatron.parallel.select_kernels import select_kernels
from tests.counted_rows import counted
from tests.longform import diagonal
from tests.seen import Seen

S, B, D, F, E = 6, 2, 8, 5, 4
GATED_MODEL = ModelConfig(hidden_size=D, activation="swiglu", add_bias_linear=False)
PLAIN_MODEL = ModelConfig(hidden_size=D, activation="gelu", add_bias_linear=True)
MOE = MoEConfig(num_experts=E, moe_ffn_hidden_size=F, moe_router_topk=2)


def build(model: ModelConfig = GATED_MODEL, moe: MoEConfig = MOE, *, seed: int = 0) -> MoELayer:
    torch.manual_seed(seed)
    layer = moe_spec(model, moe).build(3).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def tokens(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(S, B, D, dtype=torch.float64, generator=generator).requires_grad_()


def expert(layer: MoELayer, model: ModelConfig, index: int, x: Tensor) -> Tensor:
    """One expert on one token."""
    experts = layer.experts

    def product(module: torch.nn.Module, x: Tensor) -> Tensor:
        y = module.weight[index] @ x
        return y if module.bias is None else y + module.bias[index]

    if model.activation in GATE_ACTIVATIONS:
        gate, up = product(experts.gate_up, x).chunk(2)
        return product(experts.down, ACTIVATIONS[GATE_ACTIVATIONS[model.activation]](gate) * up)
    return product(experts.down, ACTIVATIONS[model.activation](product(experts.up, x)))


def naive(layer: MoELayer, model: ModelConfig, x: Tensor, routing: Routing) -> Tensor:
    """Token by token, choice by choice."""
    inner = x if layer.latent_down is None else layer.latent_down(x)
    rows = []
    for t, token in enumerate(inner.flatten(0, 1)):
        total = torch.zeros_like(token)
        for index, weight in zip(routing.experts_TK[t].tolist(), routing.weights_TK[t]):
            if index < routing.num_experts:
                total = total + weight * expert(layer, model, index, token)
        rows.append(total)
    y = torch.stack(rows).view(S, B, -1)
    y = y if layer.latent_up is None else layer.latent_up(y)
    if layer.shared is not None:
        gate = 1.0 if layer.shared_gate is None else torch.sigmoid(layer.shared_gate(x))
        y = y + gate * layer.shared(x)
    return y


def gradients(layer: MoELayer, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    found = torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])
    return dict(zip(["x", *(name for name, _ in layer.named_parameters())], found))


VARIANTS = {
    "softmax": {},
    "one": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all": {"moe_router_topk": E},
    "pre-softmax": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk": 3},
    "shared": {"moe_shared_expert_intermediate_size": 7},
    "shared-gate": {"moe_shared_expert_intermediate_size": 7, "moe_shared_expert_gate": True},
    "latent": {"moe_latent_size": 3},
    "drop": {"moe_expert_capacity_factor": 0.7},
    "drop-position": {"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": "position"},
    "drop-pad": {"moe_expert_capacity_factor": 0.7, "moe_pad_expert_input_to_capacity": True},
    "pad": {"moe_expert_capacity_factor": 9.0, "moe_pad_expert_input_to_capacity": True},
    "looped": {"moe_grouped_gemm": False},
    "groups": {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
}


@diagonal(2)
@pytest.mark.parametrize("model", [GATED_MODEL, PLAIN_MODEL], ids=["gated", "plain-bias"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients_equal_a_naive_loop(variant: str, model: ModelConfig):
    layer, x = build(model, replace(MOE, **VARIANTS[variant])), tokens()
    routing, _, _ = layer.router(x, with_loss=False)
    expected, found = naive(layer, model, x, routing), layer(x, ForwardContext())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    theirs, ours = gradients(layer, x, expected), gradients(layer, x, found)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


DROPS = [variant for variant in VARIANTS if variant.startswith("drop")]


@diagonal(3)
@pytest.mark.parametrize("model", [GATED_MODEL, PLAIN_MODEL], ids=["gated", "plain-bias"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_may_lie_in_memory_either_way(variant: str, model: ModelConfig):
    """Sequences one after the other: the same results and gradients, lying the same way, and nothing as large as the tokens is copied."""
    layer, x = build(model, replace(MOE, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1, **VARIANTS[variant])), tokens()
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    grad = torch.randn(B, S, D, dtype=x.dtype).transpose(0, 1)
    leaves, results, reports = [*layer.parameters()], [], []
    for tensor, its_grad in ((x, grad.contiguous()), (turned, grad)):
        passing = ForwardContext(aux_loss_scale=torch.tensor(0.5))
        with Seen("clone", elements=S * B * D) as seen:
            y = layer(tensor, passing)
            found = torch.autograd.grad(y, [tensor, *leaves], its_grad)
        assert seen.count == 0
        assert y.stride() == found[0].stride() == tensor.stride()
        results.append((y, *found))
        reports.append(passing.router_statistics[3])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(*reports)


@pytest.mark.parametrize("variant", DROPS)
def test_who_is_dropped_is_no_matter_of_memory(variant: str):
    """All tokens like all experts alike: earlier positions come first, however tokens lie."""
    layer, x = build(moe=replace(MOE, **VARIANTS[variant])), tokens()
    layer.router.weight.data.zero_()
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    (plain, _, _), (found, _, _) = (layer.router(tensor, with_loss=False) for tensor in (x, turned))
    kept_SB = (plain.experts_TK < E).all(-1).view(S, B)
    assert torch.equal(kept_SB, (found.experts_TK < E).all(-1).view(B, S).t())
    room = math.ceil(0.7 * S * B * 2 / E)
    assert kept_SB.flatten().tolist() == [token < room for token in range(S * B)]


@pytest.mark.parametrize("model", [GATED_MODEL, PLAIN_MODEL], ids=["gated", "plain-bias"])
@pytest.mark.parametrize("variant", DROPS)
def test_rows_of_no_expert_reach_nothing_and_are_not_counted_by_the_host(
    variant: str, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    """The grouped kernel leaves rows beyond the counts as memory was; here they become NaN."""
    layer, x = build(model, replace(MOE, **VARIANTS[variant])), tokens().detach()
    x[..., 0], layer.router.weight.data[3, 0] = 1.0, -9.0  # the last expert is not full
    x.requires_grad_()
    true_y = layer(x, ForwardContext())
    true = gradients(layer, x, true_y)
    plain, poisoned = grouped_gemm.looped_linear, []

    def leaving_the_rest(rows: Tensor, weight: Tensor, counts: Tensor | int) -> Tensor:
        made = plain(rows, weight, counts)
        if not isinstance(counts, int):
            poisoned.append(len(made) - int(counts.sum()))
            made[int(counts.sum()) :] = torch.nan
        return made

    with Seen("_local_scalar_dense") as seen:
        gradients(layer, x, layer(x, ForwardContext()))
    assert seen.count == 0
    monkeypatch.setattr(grouped_gemm, "looped_linear", leaving_the_rest)
    y = layer(x, ForwardContext())
    torch.testing.assert_close(y, true_y)
    for name, gradient in gradients(layer, x, y).items():
        torch.testing.assert_close(gradient, true[name], msg=lambda m, n=name: f"{n}: {m}")
    assert layer.router.moe.moe_pad_expert_input_to_capacity or min(poisoned) > 0


def test_all_experts_with_equal_gates_is_the_dense_sum():
    layer, x = build(moe=replace(MOE, moe_router_topk=E)), tokens()
    layer.router.weight.data.zero_()
    dense = torch.stack(
        [sum(expert(layer, GATED_MODEL, index, token) for index in range(E)) / E for token in x.flatten(0, 1)]
    )
    torch.testing.assert_close(layer(x, ForwardContext()), dense.view(S, B, D), rtol=1e-12, atol=1e-13)


def test_permuted_tokens_give_permuted_outputs():
    layer, x = build(), tokens()
    order = torch.randperm(S * B)
    y = layer(x, ForwardContext()).flatten(0, 1)
    permuted = layer(x.flatten(0, 1)[order].view(S, B, D), ForwardContext()).flatten(0, 1)
    torch.testing.assert_close(permuted, y[order], rtol=1e-12, atol=1e-13)


def test_the_order_of_the_experts_does_not_matter():
    layer, x = build(PLAIN_MODEL), tokens()
    y = layer(x, ForwardContext())
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        for parameter in (layer.router.weight, *layer.experts.parameters()):
            parameter.copy_(parameter[order])
    torch.testing.assert_close(layer(x, ForwardContext()), y, rtol=1e-12, atol=1e-13)


def test_every_expert_weight_gets_a_gradient_even_without_tokens():
    layer, x = build(PLAIN_MODEL), tokens()
    with torch.no_grad():  # experts 2 and 3 are never chosen
        layer.router.weight.zero_()
        layer.router.weight[:2] += 10 * x.flatten(0, 1)[0]
    y = layer(x[:1, :1], ForwardContext())
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert layer.experts.up.weight.grad is not None and not layer.experts.up.weight.grad[2:].any()


def test_names_and_shapes_of_the_parameters():
    moe = replace(MOE, moe_shared_expert_intermediate_size=7, moe_shared_expert_gate=True, moe_latent_size=3)
    shapes = {
        name: tuple(parameter.shape) for name, parameter in moe_spec(GATED_MODEL, moe).build(0).named_parameters()
    }
    assert shapes == {
        "router.weight": (E, D),
        "experts.gate_up.weight": (E, 2 * F, 3),
        "experts.down.weight": (E, 3, F),
        "latent_down.weight": (3, D),
        "latent_up.weight": (D, 3),
        "shared.gate_up.weight": (14, D),
        "shared.down.weight": (D, 7),
        "shared_gate.weight": (1, D),
    }
    plain = {name: tuple(parameter.shape) for name, parameter in moe_spec(PLAIN_MODEL, MOE).build(0).named_parameters()}
    assert plain == {
        "router.weight": (E, D),
        "experts.up.weight": (E, F, D),
        "experts.up.bias": (E, F),
        "experts.down.weight": (E, D, F),
        "experts.down.bias": (E, D),
    }


def test_a_pass_gets_a_report_under_the_layers_number():
    passing = ForwardContext()
    build()(tokens(), passing)
    assert list(passing.router_statistics) == [3]
    assert passing.router_statistics[3].shape == (E + 6,) and not passing.router_statistics[3].requires_grad


@pytest.mark.parametrize(
    "moe",
    [
        replace(MOE, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2),
        replace(MOE, moe_aux_loss_coeff=0.3, moe_router_load_balancing_type="seq_aux_loss"),
    ],
)
def test_the_extra_loss_joins_the_gradient_scaled(moe: MoEConfig):
    layer, x = build(moe=moe), tokens()
    _, loss, _ = layer.router(x, with_loss=True)
    alone = gradients(layer, x, layer(x, ForwardContext()))
    both = gradients(layer, x, layer(x, ForwardContext(aux_loss_scale=torch.tensor(0.25))))
    of_x, of_router = torch.autograd.grad(loss, [x, layer.router.weight])
    torch.testing.assert_close(both["x"], alone["x"] + 0.25 * of_x)
    torch.testing.assert_close(both["router.weight"], alone["router.weight"] + 0.25 * of_router)
    assert of_router.norm() > 1e-3
    torch.testing.assert_close(both["experts.down.weight"], alone["experts.down.weight"])


def test_without_a_scale_there_is_no_extra_loss():
    layer, passing = build(moe=replace(MOE, moe_aux_loss_coeff=0.3)), ForwardContext()
    layer(tokens(), passing)
    assert passing.router_statistics[3][-3] == 0.0


def test_bfloat16_keeps_its_precision_outside_and_float32_inside():
    layer = build(moe=replace(MOE, moe_router_dtype="fp32")).to(torch.bfloat16)
    x = tokens().detach().to(torch.bfloat16)
    routing, _, _ = layer.router(x, with_loss=False)
    assert routing.weights_TK.dtype == torch.float32
    assert layer(x, ForwardContext()).dtype == torch.bfloat16
    exact = build()
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    difference = (layer(x, ForwardContext()).double() - exact(x.double(), ForwardContext())).norm() / exact(
        x.double(), ForwardContext()
    ).norm()
    assert difference < 2e-2


def test_the_kernels_of_rows_are_a_slot():
    """Plain torch until filled; where the other kernels are chosen, so are these."""
    layer = build()
    assert layer.experts.kernels is REFERENCE
    layer.experts.kernels, _ = counted(REFERENCE)
    chosen = select_kernels(layer, KernelContext("cpu", (0, 0), torch.float64, False, None))
    assert "expert permutation: reference; not triton: the device is no GPU" in map(str, chosen)
    assert layer.experts.kernels is REFERENCE


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        (
            GATED_MODEL,
            {"permute_rows": 2, "unpermute_rows": 2, "weighted_activation": 2, "weighted_activation_backward": 1},
        ),
        (PLAIN_MODEL, {"permute_rows": 1, "unpermute_rows": 2, "unpermute_backward": 1}),
    ],
    ids=["gated", "plain-bias"],
)
def test_what_is_in_the_slot_is_what_runs(model: ModelConfig, calls: dict[str, int]):
    """Forward and backward; the weighted activation a second time for the weight gradient."""
    layer = build(model)
    layer.experts.kernels, found = counted(REFERENCE)
    layer(tokens(), ForwardContext()).sum().backward()
    assert found == Counter(calls)


def test_capacity_of_a_rank():
    moe = replace(MOE, moe_expert_capacity_factor=1.1, moe_pad_expert_input_to_capacity=True)
    routing, _, report = build(moe=moe).router(tokens(), with_loss=False)
    assert routing.capacity == math.ceil(1.1 * S * B * 2 / E) == 7
    chosen = [int((routing.experts_TK == index).sum()) for index in range(E)]
    assert max(chosen) <= 7 and sum(chosen) + int(report[E]) == S * B * 2


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=CUDA) for v in ("softmax", "shared-gate", "drop", "drop-pad", "sinkhorn")]
)
def test_cuda_equals_the_cpu(variant: str):
    moe = replace(MOE, **VARIANTS[variant])
    here, x = build(PLAIN_MODEL, moe), tokens()
    there = build(PLAIN_MODEL, moe).cuda()
    far = x.detach().cuda().requires_grad_()
    y, far_y = here(x, ForwardContext()), there(far, ForwardContext())
    torch.testing.assert_close(far_y.cpu(), y, rtol=1e-9, atol=1e-11)
    near = gradients(here, x, y)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y).cuda()
    found = torch.autograd.grad((far_y * weight).sum(), [far, *there.parameters()])
    for (name, expected), ours in zip(near.items(), found, strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("model", [GATED_MODEL, PLAIN_MODEL], ids=["gated", "plain-bias"])
@pytest.mark.parametrize("variant", [pytest.param(v, marks=CUDA) for v in ("softmax", "drop", "drop-pad", "shared")])
def test_the_host_need_not_wait(variant: str, model: ModelConfig):
    """With grouped products or padding, nothing is read back from the device, forward or backward: torch would raise."""
    wide = replace(model, hidden_size=64)
    moe = replace(MOE, moe_ffn_hidden_size=32, moe_aux_loss_coeff=0.1, **VARIANTS[variant])
    layer = build(wide, moe).to(torch.bfloat16).cuda()
    select_kernels(layer, KernelContext.of(torch.device("cuda"), torch.bfloat16, allow_compile=False))
    x = torch.randn(256, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scale = torch.ones((), device="cuda")
    for mode in ("default", "error"):  # the first pass loads kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            layer(x, ForwardContext(aux_loss_scale=scale)).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None and bool(x.grad.isfinite().all()), "both passes went all the way"
