"""Forecasts add up, follow the settings they should follow, and say so in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

import petatron
from petatron.config import RunConfig
from petatron.config.pipeline_stages import pipeline_stages
from petatron.estimate.activation_bytes import layer_bytes, region_bytes
from petatron.estimate.memory.forecast import (
    forecast_memory,
    format_gigabytes,
    largest_forecast,
    memory_log_line,
    moments_per_rank,
    pinned_activation_bytes,
    recompute_plans,
)
from petatron.estimate.memory.peak_moments import PeakMoment
from petatron.estimate.state_bytes import StateBytes, state_bytes
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.models.registry import model_spec

LLAMA = "--mock-data --lr 1e-4 --train-iters 1 --bf16 --vocab-size 128256 --seq-length 4096"


def run_of(flags: str = "", *, world_size: int = 1) -> RunConfig:
    return petatron.load("llama3-8b", f"{LLAMA} {flags}".split(), world_size=world_size).config


TWO = "--global-batch-size 2"


def test_one_rank_with_several_micro_batches():
    run = run_of(TWO)
    (forecast,) = forecast_memory(run, device="cuda")
    shape = ActivationShape.from_config(run, device="cuda")
    assert forecast.state == state_bytes(run)
    assert forecast.logits == model_spec(run).outer_saved_bytes(shape, pipeline_stages(run)[0])
    assert forecast.activations + forecast.logits == recompute_plans(run, device="cuda")[0].peak_bytes
    chunk = (4096 * (128256 + 4096) + 4096 * 4096) * 2  # all tokens: their logits are below the bound
    assert forecast.workspace == chunk == model_spec(run).loss_workspace_bytes(shape)
    assert forecast.total == sum(forecast.bytes_by_kind().values())
    assert forecast.state.total == 18 * 8_030_261_248


def test_a_pipeline_holds_more_micro_batches_in_front():
    run = run_of("--pp 4 --global-batch-size 8", world_size=4)
    found = forecast_memory(run, device="cuda")
    assert [forecast.pipeline_rank for forecast in found] == [0, 1, 2, 3]
    activations = [forecast.activations for forecast in found]
    assert activations == sorted(activations, reverse=True) and activations[0] > 3 * activations[3]
    assert largest_forecast(run, device="cuda").total == max(forecast.total for forecast in found)


def moments_of(flags: str) -> tuple[StateBytes, list[PeakMoment]]:
    run = run_of(flags)
    [moments] = moments_per_rank(run, recompute_plans(run, device="cuda"), device="cuda")
    return state_bytes(run), moments


def test_one_micro_batch_has_gradients_when_its_activations_are_gone():
    """Of 8 layers and 16,384 tokens: 14 bytes for each parameter, all activations, and gradients of the head and one matrix."""
    flags = "--num-layers 8 --seq-length 8192 --micro-batch-size 2"
    state, moments = moments_of(flags)
    loss, first_mlp, update = moments[0], moments[1], moments[-1]
    layer = 218_112_000
    matrix, head, total = 14336 * 4096, 128256 * 4096, 2 * 128256 * 4096 + 8 * layer + 4096
    assert state.gradients == 4 * total
    assert loss.grad_share == pytest.approx((head + 4096) / total)
    assert first_mlp.grad_share == pytest.approx((head + 4096 + matrix) / total, rel=1e-6)
    assert first_mlp.workspace == 16384 * (2 * 4096 + 4 * 14336) * 2
    assert first_mlp.activations == loss.activations
    assert (update.activations, update.grad_share) == (0, 1.0)
    shares = [moment.grad_share for moment in moments]
    assert shares == sorted(shares) and len(moments) < 12, "between equal layers nothing is larger than at an end"
    forecast = largest_forecast(run_of(flags), device="cuda")
    assert forecast.workspace == first_mlp.workspace and forecast.state.gradients == int(shares[1] * state.gradients)
    graphs = largest_forecast(run_of(f"{flags} --cuda-graphs"), device="cuda")
    assert graphs.state.gradients == state.gradients, "a captured step has them at fixed addresses"


def test_where_gradients_are_more_than_activations_they_are_the_peak():
    forecast = largest_forecast(run_of(), device="cuda")
    assert forecast.total == state_bytes(run_of()).total and forecast.activations == 0


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_fp8_weights_are_kept_for_several_micro_batches(micro_batches: int):
    fp8 = f"--fp8-format hybrid --seq-length 8192 --global-batch-size {micro_batches}"
    more = state_bytes(run_of(fp8)).weights - state_bytes(run_of()).weights
    assert more == (0 if micro_batches == 1 else 2 * 32 * 218_112_000)


def test_recompute_and_offload_of_one_micro_batch():
    """What is recomputed is there in its own backward, and of what is offloaded two layers at a time."""
    flags = "--num-layers 8 --seq-length 8192 --micro-batch-size 2"
    full = f"{flags} --recompute-granularity full --recompute-method uniform --recompute-num-layers"
    shape = ActivationShape.from_config(run_of(flags), device="cuda")
    whole, stream = layer_bytes(model_spec(run_of(flags)).layers[0], shape), 16384 * 4096 * 2
    assert [moment.activations for moment in moments_of(flags)[1]][:2] == [8 * whole] * 2
    assert [moment.activations for moment in moments_of(f"{full} 1")[1]][:2] == [8 * stream, 7 * stream + whole]
    assert [moment.activations for moment in moments_of(f"{full} 4")[1]][:2] == [2 * stream, stream + 4 * whole]
    assert [one.activations for one in moments_of(f"{flags} --cpu-offloading-num-layers 8")[1]][:1] == [2 * whole]
    mlp = moments_of(f"{flags} --recompute-granularity selective --recompute-modules mlp")[1]
    assert mlp[1].activations - mlp[0].activations == 16384 * 2 * 14336 * 2


def test_recompute_and_offload_count():
    plain = largest_forecast(run_of(TWO), device="cuda")
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert largest_forecast(run_of(f"{TWO} {full}"), device="cuda").activations < plain.activations / 4
    shape = ActivationShape.from_config(run_of(), device="cuda")
    offloaded = largest_forecast(run_of(f"{TWO} --cpu-offloading-num-layers 8"), device="cuda")
    of_a_layer = layer_bytes(model_spec(run_of()).layers[0], shape)
    assert plain.activations - offloaded.activations == 6 * of_a_layer, "two of eight are on their way"
    assert offloaded.logits == plain.logits and offloaded.state == plain.state
    assert largest_forecast(run_of(f"{TWO} --cpu-offloading-num-layers 1"), device="cuda") == plain


BY_MODULE = "--fine-grained-activation-offloading --offload-modules"


def test_offload_by_module_counts():
    """The last layer stays, and of the others two at a time are on their way."""
    layer, shape = model_spec(run_of()).layers[0], ActivationShape.from_config(run_of(), device="cuda")
    regions = region_bytes(layer, shape)
    plain = largest_forecast(run_of(TWO), device="cuda")
    for modules in (("mlp",), ("core_attn", "attn_norm")):
        size = sum(regions[name] for name in modules)
        run = run_of(f"{TWO} {BY_MODULE} {' '.join(modules)}")
        offloaded, plans = largest_forecast(run, device="cuda"), recompute_plans(run, device="cuda")
        assert plain.activations - offloaded.activations == (31 - 2) * size
        assert pinned_activation_bytes(run, plans, device="cuda") == 31 * size
    one = moments_of(f"--num-layers 8 {BY_MODULE} mlp")[1]
    assert moments_of("--num-layers 8")[1][0].activations - one[0].activations == (7 - 2) * regions["mlp"]
    assert _activations("--min-offloaded-tensor-size 1000000000") == plain.activations
    assert (
        _activations("--fine-grained-offloading-max-inflight-offloads 0")
        == plain.activations - (31 - 1) * regions["mlp"]
    )


def _activations(flags: str) -> int:
    return largest_forecast(run_of(f"{TWO} {BY_MODULE} mlp {flags}"), device="cuda").activations


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
