"""The amax that a norm or an activation notes for FP8 casts: it spares them a pass, and changes no bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp
from petatron.config import RunConfig
from petatron.kernels import activation, norm
from petatron.kernels.activation import GluVariant
from petatron.kernels.fp8 import cast_and_gemm
from petatron.kernels.fp8.amax import amax_of, attach_amax, attached_amax
from petatron.kernels.fp8.cast_and_gemm import E4M3, E5M2, REFERENCE, Fp8Matrix
from petatron.layers.mlp import Activation
from petatron.verify.record_trace import StepTrace
from tests.parity.harness import tiny_run, train

LAYERS, ROWS, MICRO_BATCHES = 2, 32, 4
"""Micro-batches of both steps."""
SIZES = f"--num-layers {LAYERS} --hidden-size 64 --num-query-groups 4 --ffn-hidden-size 96 --seq-length {ROWS // 2} --vocab-size 96"
BATCH = f"--micro-batch-size 2 --global-batch-size {MICRO_BATCHES} --train-iters 2 --lr-warmup-iters 0"


def fp8_run(recipe: str) -> RunConfig:
    """FP8 operands, multiplied and added in float64."""
    run = tiny_run(f"{SIZES} {BATCH} --fp8-format hybrid --fp8-recipe {recipe}")
    return replace(run, precision=replace(run.precision, fp64=True))


class Casts:
    """Records the casts of a run: the type, the shape, and whether amax was known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[torch.dtype, tuple[int, ...], bool]] = []

        def cast(x: Tensor, dtype: torch.dtype, *, amax: Tensor | None = None, **options: Any) -> Fp8Matrix:
            assert amax is not None and torch.equal(amax, amax_of(x)), "another tensor's"
            self.seen.append((dtype, tuple(x.shape), True))
            return REFERENCE.cast_tensor(x, dtype, amax=amax, **options)

        def cast_speculative(x: Tensor, dtype: torch.dtype, **options: Any) -> Fp8Matrix:
            self.seen.append((dtype, tuple(x.shape), False))
            return REFERENCE.cast_speculative(x, dtype, **options)

        kernels = replace(REFERENCE, cast_tensor=cast, cast_speculative=cast_speculative)
        monkeypatch.setattr(cast_and_gemm, "REFERENCE", kernels)

    def of(self, dtype: torch.dtype, width: int) -> Counter[bool]:
        """How many casts of activations or gradients of a width knew amax; weights have other numbers of rows."""
        return Counter(known for kind, shape, known in self.seen if kind == dtype and shape == (ROWS, width))


def steps(recipe: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[StepTrace], Casts]:
    casts = Casts(monkeypatch)
    return train(fp8_run(recipe)), casts


def test_casts_of_a_step_know_amax_and_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    noted, casts = steps("tensorwise", monkeypatch)
    # Inputs of qkv and of the MLP; of the output projection, whose attention notes nothing; of the MLP's second GEMM.
    assert casts.of(E4M3, 64) == {True: 2 * LAYERS * MICRO_BATCHES, False: LAYERS * MICRO_BATCHES}
    assert casts.of(E4M3, 96) == {True: LAYERS * MICRO_BATCHES}
    # Gradients of the MLP's first GEMM, and of qkv; of what each branch adds, but for the last one's, from the final norm.
    assert casts.of(E5M2, 192) == {True: LAYERS * MICRO_BATCHES, False: LAYERS * MICRO_BATCHES}
    assert casts.of(E5M2, 64) == {True: (2 * LAYERS - 1) * MICRO_BATCHES, False: MICRO_BATCHES}
    monkeypatch.setattr("petatron.layers.ops.fp8_scaling.attached_amax", lambda x: None)
    computed, casts = steps("tensorwise", monkeypatch)
    assert True not in casts.of(E4M3, 64) | casts.of(E4M3, 96) | casts.of(E5M2, 192) | casts.of(E5M2, 64)
    for one, other in zip(noted, computed, strict=True):
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
        for mine, theirs in zip(one.shards, other.shards, strict=True):
            assert (mine.kind, mine.name) == (theirs.kind, theirs.name) and torch.equal(mine.values, theirs.values)


def test_a_bounded_activation_notes_nothing(monkeypatch: pytest.MonkeyPatch):
    """On a GPU torch.compile computes it, and would note the amax of its output before that is rounded."""
    casts = Casts(monkeypatch)
    run = tiny_run(f"{SIZES} {BATCH} --fp8-format hybrid --fp8-recipe tensorwise --activation-func-clamp-value 1.0")
    assert train(replace(run, precision=replace(run.precision, fp64=True)))
    assert casts.of(E4M3, 96) == {False: LAYERS * MICRO_BATCHES} and True not in casts.of(E5M2, 192)
    assert casts.of(E4M3, 64)[True]


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_recipes_without_a_scale_of_the_tensor_at_hand_note_nothing(recipe: str, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any) -> None:
        raise AssertionError("noted")

    for module in ("norm", "mlp"):
        monkeypatch.setattr(f"petatron.layers.{module}.attach_amax", fail)
    assert train(fp8_run(recipe))
    with pytest.raises(AssertionError, match="noted"):
        train(fp8_run("tensorwise"))


def test_a_note_is_of_one_tensor_as_it_was():
    x = torch.tensor([[1.0, -3.0], [2.0, 0.5]])
    assert attached_amax(x) is None
    attach_amax(x, amax := amax_of(x))
    assert attached_amax(x) is amax and amax.tolist() == [3.0]
    assert all(attached_amax(other) is None for other in (x.view(-1), x[:1], x + 0, x.detach(), x.clone()))
    x.mul_(2)
    assert attached_amax(x) is None
    attach_amax(x, amax_of(x))
    assert attached_amax(x) is not None


def test_a_tensor_of_inference_mode_gets_no_note():
    with torch.inference_mode():
        x = torch.ones(2)
        attach_amax(x, amax_of(x))
        assert attached_amax(x) is None


@pytest.mark.parametrize("used_twice", [False, True])
def test_a_note_reaches_the_node_before_unless_gradients_were_added(used_twice: bool):
    """Autograd adds gradients into a new tensor, or in place into one that has a note: both lose it."""
    seen: list[Tensor | None] = []

    class Watch(AutogradOp):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            seen.append(attached_amax(grads[0]))
            return grads[0]

    x = torch.randn(4, 8, requires_grad=True)
    act = Activation("swiglu")
    act.attaches_amax = True
    y = Watch.apply(x)
    out = act(y).value.sum() + (y.square().sum() if used_twice else 0.0)
    out.backward()
    assert x.grad is not None
    assert len(seen) == 1 and (seen[0] is None) == used_twice
    assert used_twice or torch.equal(seen[0], amax_of(x.grad))


@pytest.mark.parametrize("shape", [(6, 16), (3, 2, 16)], ids=["rows", "tokens"])
def test_amax_is_computed_where_it_stays_attached(shape: tuple[int, ...]):
    asked: list[bool] = []

    class Kernels:
        """The reference, which records whether it is asked for amax."""

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, amax: Tensor | None = None, **options: Any) -> Any:
                asked.append(amax is not None)
                return getattr(activation, name)(*args, amax=amax, **options)

            return call

    act = Activation("swiglu")
    act.attaches_amax, act.kernels = True, Kernels()
    x = torch.randn(shape, requires_grad=True)
    y = act(x).value
    y.sum().backward()
    assert asked == [len(shape) == 2] * 2 and (attached_amax(y) is not None) == (len(shape) == 2)


@pytest.mark.parametrize("variant", [None, GluVariant(clamp=1.0)], ids=["plain", "bounded"])
def test_the_reference_raises_amax(variant: GluVariant | None):
    x, weight, grad = torch.randn(6, 16), torch.rand(16) + 0.5, torch.randn(6, 16)
    low, high = (torch.tensor([number]) for number in (0.0, 1e9))
    for amax in (low, high):
        total, normal, rstd = norm.rms_norm(x, weight, eps=1e-6, zero_centered_gamma=False, amax=amax)
        assert torch.equal(amax, torch.maximum(amax, amax_of(normal)))
        act = activation.gated_activation(x, "swiglu", variant, amax=amax)
        assert float(amax) >= float(amax_of(act))
    assert high.tolist() == [1e9] and torch.equal(low, torch.maximum(amax_of(normal), amax_of(act)))
    low.zero_()
    x_grad, *_ = norm.rms_norm_backward(grad, total, rstd, weight, zero_centered_gamma=False, amax=low)
    assert torch.equal(low, amax_of(x_grad))
    low.zero_()
    x_grad, _ = activation.gated_activation_backward(
        grad[:, :8], x, "swiglu", variant, recompute_output=False, amax=low
    )
    assert torch.equal(low, amax_of(x_grad))
