"""Number formats and the loss scale."""

import json

import pytest
import torch

from petatron.config.schema.precision import PrecisionConfig
from petatron.optim.loss_scaler import DynamicLossScaler, LossScaler, build_loss_scaler, compute_dtype


@pytest.mark.parametrize(
    ("precision", "compute"),
    [
        (PrecisionConfig(), torch.float32),
        (PrecisionConfig(fp16=True), torch.float16),
        (PrecisionConfig(bf16=True), torch.bfloat16),
        (PrecisionConfig(fp64=True), torch.float64),
    ],
)
def test_dtypes(precision, compute):
    assert compute_dtype(precision) == compute


def scale(**settings) -> DynamicLossScaler:
    values = {"initial_loss_scale": 16.0, "min_loss_scale": 2.0, "loss_scale_window": 3, "hysteresis": 2, **settings}
    return DynamicLossScaler(PrecisionConfig(fp16=True, **values))


def values(scaler: DynamicLossScaler, story: str) -> list[float]:
    """The scale after each step of a story of clean (.) and overflowing (x) steps."""
    seen = []
    for step in story:
        scaler.update(step == "x")
        seen.append(scaler.scale)
    return seen


def test_overflows_add_up_and_then_each_one_halves():
    assert values(scale(), "x.x.x") == [16, 16, 8, 8, 4]


def test_a_clean_window_doubles_and_gives_patience_back():
    assert values(scale(), "xx...xx") == [16, 8, 8, 8, 16, 16, 8]


def test_an_overflow_restarts_the_window():
    assert values(scale(), "..x...") == [16, 16, 16, 16, 16, 32]


def test_never_below_the_minimum():
    assert values(scale(hysteresis=1), "xxxxx") == [8, 4, 2, 2, 2]


def test_state_survives_json_and_continues_alike():
    first = scale()
    values(first, "xx..")
    second = scale()
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    assert values(second, ".x.x...") == values(first, ".x.x...")


def test_dynamic_scale_starts_fresh_from_a_constant_one():
    scaler = scale()
    scaler.restore(LossScaler(4.0).state())
    assert scaler.scale == 16.0


def test_build():
    dynamic = build_loss_scaler(PrecisionConfig(fp16=True))
    assert isinstance(dynamic, DynamicLossScaler) and dynamic.scale == 2.0**32
    constant = build_loss_scaler(PrecisionConfig(fp16=True, loss_scale=128.0))
    constant.update(True)
    constant.restore({"value": 3.0})
    assert type(constant) is LossScaler and constant.scale == 128.0 and constant.state() == {}
    assert build_loss_scaler(PrecisionConfig(bf16=True, loss_scale=8.0)).scale == 1.0
    assert build_loss_scaler(PrecisionConfig()).scale == 1.0
