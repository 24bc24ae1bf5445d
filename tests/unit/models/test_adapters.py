"""Adapters' settings, targets, parameters and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.kernels.linear_gemms import PLAIN_GEMM
from petatron.kernels.moe.grouped_gemm import GroupedGemm
from petatron.layers.adapters.adapter_gemms import AdapterPart, LoraGemm
from petatron.layers.ops.linear_op import GemmOp
from petatron.layers.ops.recompute_output import as_recomputable
from petatron.models.frozen_params import describe_frozen, frozen_params
from petatron.models.registry import model_spec, without_adapters
from petatron.validate import load_config

WHOLE = (AdapterPart(slice(None), slice(None), slice(None)),)


def run_of(*flags: str, preset: str = "tiny-llama") -> RunConfig:
    return load_config(["--vocab-size", "256", *flags], preset=preset, require_training=False).config


def adapted(*flags: str, layer: int = 0) -> set[str]:
    names = model_spec(run_of(*flags)).logical_shapes()
    start = f"layers.{layer}."
    return {
        name.removeprefix(start).rpartition(".")[0] for name in names if name.startswith(start) and "lora_a" in name
    }


ALL = {"attention.q", "attention.k", "attention.v", "attention.out", "mlp.gate", "mlp.up", "mlp.down"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ((), ALL),
        (("all-linear",), ALL),
        (("q_proj", "v_proj"), {"attention.q", "attention.v"}),
        (("self_attn.o_proj", "mlp.*"), {"attention.out", "mlp.gate", "mlp.up", "mlp.down"}),
        (("layers.0.attention.k", "layers.1.mlp.down"), {"attention.k"}),
        (("attention.out",), {"attention.out"}),
    ],
)
def test_targets_are_named_as_here_or_in_peft(targets: tuple[str, ...], expected: set[str]):
    assert adapted("--adapter", "lora", *(("--adapter-targets", *targets) if targets else ())) == expected


def test_a_target_that_matches_nothing_is_a_problem():
    with pytest.raises(ConfigError, match=r"--adapter-targets q_prj matches no linear .* Use all-linear, or of q, k"):
        model_spec(run_of("--adapter", "lora", "--adapter-targets", "q_prj", "v_proj"))


def test_dora_is_not_beside_experts_and_has_no_dropout():
    experts = ("--num-experts", "4", "--adapter", "dora")
    assert not any("experts" in name and "lora" in name for name in model_spec(run_of(*experts)).params())
    with pytest.raises(ConfigError, match="--adapter-targets experts matches no linear"):
        model_spec(run_of(*experts, "--adapter-targets", "experts"))
    with pytest.raises(ConfigError, match=r"--adapter-dropout 0.1 and --adapter dora are not combined"):
        run_of("--adapter", "dora", "--adapter-dropout", "0.1")


def test_what_the_base_model_has_is_frozen():
    run = run_of("--adapter", "lora", "--adapter-rank", "4", "--adapter-also-train", "norm.*", "embedding.*")
    spec, frozen = model_spec(run), frozen_params(run)
    trained = spec.params().keys() - frozen.names
    assert trained == {name for name in spec.params() if "lora" in name} | {"norm.weight", "embedding.weight"}
    assert "are frozen" in describe_frozen(spec, frozen)
    assert without_adapters(spec).params().keys() == {name for name in spec.params() if "lora" not in name}
    with pytest.raises(ConfigError, match="--adapter-also-train nrm matches no parameter"):
        frozen_params(run_of("--adapter", "lora", "--adapter-also-train", "nrm"))


def check_gradients(op: GemmOp, weight: Tensor, a: nn.Parameter, b: nn.Parameter, expected: Any) -> None:
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    y, grad = op(as_recomputable(x), weight), torch.randn(6, weight.shape[-2], dtype=torch.float64)
    ours = torch.autograd.grad(y, (x, a, b), grad)
    wanted = expected(x)
    torch.testing.assert_close(y, wanted)
    for got, want in zip(ours, torch.autograd.grad(wanted, (x, a, b), grad), strict=True):
        torch.testing.assert_close(got, want)


def tensors(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]


def test_dropout_is_of_the_adapters_input_alone():
    weight, a, b = tensors((7, 5), (2, 5), (7, 2))
    mask = torch.empty(6, 5, dtype=torch.float64).bernoulli_(0.5).div_(0.5)
    gemm = LoraGemm(PLAIN_GEMM, PLAIN_GEMM, a, b, WHOLE, 0.7, lambda x: mask)
    op = GemmOp(gemm, adapter_params=(a, b))
    check_gradients(op, weight.detach(), a, b, lambda x: x @ weight.detach().t() + 0.7 * (x * mask) @ a.t() @ b.t())


def test_each_expert_has_a_and_b():
    weight, a, b = tensors((2, 7, 5), (2, 3, 5), (2, 7, 3))
    counts = torch.tensor([2, 4])
    gemm = LoraGemm(GroupedGemm(counts), GroupedGemm(counts), a, b, WHOLE, 0.7)

    def expected(x: Tensor) -> Tensor:
        parts = zip(x.split([2, 4]), weight.detach(), a, b, strict=True)
        return torch.cat([rows @ (w + 0.7 * up @ down).t() for rows, w, down, up in parts])

    check_gradients(GemmOp(gemm, adapter_params=(a, b)), weight.detach(), a, b, expected)
