"""Forecasts add up, follow the settings they should follow, and say so in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

import petatron
from petatron.config import RunConfig
from petatron.config.pipeline_stages import pipeline_stages
from petatron.estimate.activation_bytes import layer_bytes
from petatron.estimate.memory.forecast import (
    forecast_memory,
    format_gigabytes,
    largest_forecast,
    memory_log_line,
    recompute_plans,
)
from petatron.estimate.state_bytes import state_bytes
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.models.registry import model_spec

LLAMA = "--mock-data --lr 1e-4 --train-iters 1 --bf16 --vocab-size 128256 --seq-length 4096"


def run_of(flags: str = "", *, world_size: int = 1) -> RunConfig:
    return petatron.load("llama3-8b", f"{LLAMA} {flags}".split(), world_size=world_size).config


def test_one_rank():
    run = run_of()
    (forecast,) = forecast_memory(run, device="cuda")
    shape = ActivationShape.from_config(run, device="cuda")
    assert forecast.state == state_bytes(run)
    assert forecast.logits == model_spec(run).outer_saved_bytes(shape, pipeline_stages(run)[0])
    assert forecast.activations + forecast.logits == recompute_plans(run, device="cuda")[0].peak_bytes
    assert forecast.total == sum(forecast.bytes_by_kind().values())
    assert forecast.state.total == 18 * 8_030_261_248


def test_a_pipeline_holds_more_micro_batches_in_front():
    run = run_of("--pp 4 --global-batch-size 8", world_size=4)
    found = forecast_memory(run, device="cuda")
    assert [forecast.pipeline_rank for forecast in found] == [0, 1, 2, 3]
    activations = [forecast.activations for forecast in found]
    assert activations == sorted(activations, reverse=True) and activations[0] > 3 * activations[3]
    assert largest_forecast(run, device="cuda").total == max(forecast.total for forecast in found)


def test_recompute_and_offload_count():
    plain = largest_forecast(run_of(), device="cuda")
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert largest_forecast(run_of(full), device="cuda").activations < plain.activations / 4
    shape = ActivationShape.from_config(run_of(), device="cuda")
    offloaded = largest_forecast(run_of("--cpu-offloading-num-layers 8"), device="cuda")
    of_a_layer = layer_bytes(model_spec(run_of()).layers[0], shape)
    assert plain.activations - offloaded.activations == 6 * of_a_layer, "two of eight are on their way"
    assert offloaded.logits == plain.logits and offloaded.state == plain.state
    assert largest_forecast(run_of("--cpu-offloading-num-layers 1"), device="cuda") == plain


def test_the_line_of_the_log():
    run = run_of("--pp 2 --global-batch-size 4", world_size=2)
    line = memory_log_line(run, device="cuda", pipeline_rank=1, measured_bytes=77_000_000_000)
    predicted = forecast_memory(run, device="cuda")[1]
    assert line == f"memory: predicted {predicted.describe()}, measured peak 77.0 GB"
    assert "resident peak of the process 0.5 GB" in memory_log_line(
        run, device="cpu", pipeline_rank=0, measured_bytes=500_000_000
    )
    assert predicted.describe().startswith(f"{format_gigabytes(predicted.total)} GB (weights 8.")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (950, "9.5e-07"), (1_234_567, "0.0012"), (1.5e9, "1.50"), (98.76e9, "98.8")]
)
def test_gigabytes(size: float, text: str):
    assert format_gigabytes(size) == text


def test_plans_are_those_of_every_stage():
    run = run_of("--pp 2 --global-batch-size 4", world_size=2)
    plans = recompute_plans(replace(run), device="cuda")
    assert [plan.in_flight for plan in plans] == [2, 1]
