"""muP over widths: activations and their updates keep their size (the coordinate check), and the best learning rate stays."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from petatron.train.build_run import build_optimizer
from tests.unit.optim.mup_task import BASE, MUP, batches, best_exponent, model_of

STEPS, RATE = 4, 2.0**-6


def activation_sizes(width: int, flags: str) -> dict[str, float]:
    """Root mean squares of logits and of the last layer's branches after a few steps of Adam, and of how these have changed."""
    run, model = model_of(width, RATE, f"{flags} --init-method-std 0.1")
    optimizer, loader = build_optimizer(run, model), batches(seed=1)
    probe = next(batches(seed=2))
    before = activations(model.module, probe.tokens)
    for _ in range(STEPS):
        model.train_step([next(loader)])
        optimizer.step(lr=RATE)
    after = activations(model.module, probe.tokens)
    sizes = {name: float(value.square().mean().sqrt()) for name, value in after.items()}
    changes = {f"change of {name}": float((after[name] - x).square().mean().sqrt()) for name, x in before.items()}
    return sizes | changes


@torch.no_grad()
def activations(decoder: nn.Module, tokens: Tensor) -> Mapping[str, Tensor]:
    found: dict[str, Tensor] = {}
    last = decoder.layers["1"]

    def keep(name: str):
        return lambda module, inputs, output: found.__setitem__(name, output.detach().clone())

    hooks = [getattr(last, name).register_forward_hook(keep(name)) for name in ("attention", "mlp")]
    found["logits"] = decoder.logits(tokens)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("wide", [256, pytest.param(512, marks=pytest.mark.matrix)])
def test_activations_keep_their_size_over_widths(wide: int):
    """Without muP those of the MLP grow faster than the width, which is what limits the learning rate of a wide model."""
    (narrow, scaled), (standard, grown) = (
        [activation_sizes(width, flags) for width in (64, wide)] for flags in (MUP, "")
    )
    for name, size in narrow.items():
        assert 0.2 < size < 5.0 and 0.5 < scaled[name] / size < 2.0, name
    for name in ("mlp", "change of mlp"):
        assert grown[name] / standard[name] > wide / 64, name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_best_learning_rate_of_a_narrow_model_is_that_of_a_wide_one():
    """Within a factor of 2 from width 32 to 256; without muP it falls by a factor of 4 or more. The full table is in docs/optimizers.md."""
    scaled = [best_exponent(MUP, width, range(-8, -2), steps=80) for width in (BASE, 2 * BASE, 4 * BASE, 8 * BASE)]
    assert max(scaled) - min(scaled) <= 1
    standard = [best_exponent("", width, range(-10, -3), steps=80) for width in (BASE, 8 * BASE)]
    assert standard[0] - standard[1] >= 2


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("optimizer", "exponents"), [("lion", range(-9, -4)), ("muon --muon-scale-mode unit_rms_norm", range(-8, -2))]
)
def test_other_optimizers_keep_their_best_learning_rate(optimizer: str, exponents: range):
    flags = f"{MUP} --optimizer {optimizer}"
    best = [best_exponent(flags, width, exponents, steps=60) for width in (BASE, 4 * BASE)]
    assert abs(best[0] - best[1]) <= 1
