"""The floor of a training step in `petatron bench train`: arithmetic at the peak, and bytes that must move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from petatron.base.device import DeviceInfo
from petatron.bench.measure.step_time_roofline import step_floor
from petatron.bench.measure.train_report import TrainMeasurements, report
from petatron.bench.peers.bench_workload import bench_spec
from petatron.estimate.flops import model_flops_per_token, parameter_count
from petatron.models.registry import model_spec

EXPERTS = (
    "--preset mixtral-slice --device cpu --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 16 --vocab-size 128"
).split()
GPU = DeviceInfo(
    kind="cuda", name="a GPU", memory_bytes=10**9, peak_flops={"bfloat16": 1e9, "float8": 2e9}, reason="test"
)


def test_floor_adds_the_bytes_of_the_optimizer_to_the_arithmetic():
    spec = bench_spec(EXPERTS)
    model = model_spec(spec.run)
    floor = step_floor(spec, GPU, bandwidth=1e9)
    assert floor is not None
    assert floor.arithmetic_ms == pytest.approx(16 * model_flops_per_token(model) / 1e6)
    assert floor.optimizer_bytes == 34 * parameter_count(model)  # as `bench optimizer` counts them
    assert floor.weight_bytes == 8 * parameter_count(model)
    assert floor.total_ms == pytest.approx(floor.arithmetic_ms + floor.optimizer_bytes / 1e6)


def test_few_tokens_are_bound_by_reading_the_weights():
    spec = bench_spec([*EXPERTS, "--seq-length", "1", "--clip-grad", "0"])
    floor = step_floor(spec, GPU, bandwidth=1e8)
    assert floor is not None and floor.optimizer_bytes == 30 * parameter_count(model_spec(spec.run))
    assert floor.total_ms == pytest.approx((floor.weight_bytes + floor.optimizer_bytes) / 1e5)


def test_float32_has_no_master_weights_and_fp8_another_peak():
    spec = bench_spec([*EXPERTS, "--no-bf16"])
    floor = step_floor(spec, GPU, bandwidth=1e9)
    assert floor is not None and floor.optimizer_bytes == 32 * parameter_count(model_spec(spec.run))
    faster = step_floor(replace(spec, fp8_recipe="tensorwise"), GPU, bandwidth=1e9)
    assert faster is not None and faster.arithmetic_ms == pytest.approx(floor.arithmetic_ms / 2)


def test_floor_is_reported_with_what_ours_takes():
    spec = bench_spec(EXPERTS)
    floor = step_floor(spec, GPU, bandwidth=1e9)
    assert floor is not None
    values = {"blocks_ms": [[2 * floor.total_ms]], "losses": [1.0], "peak_bytes": 1, "build_s": 0, "first_steps_s": 0}
    result = report(spec, GPU, TrainMeasurements(contenders={"petatron": values}), bandwidth=1e9)
    rows = dict(result.rows)
    assert rows["floor of a step"].endswith("; our step takes 2.00x as long")
    found = result.values["contenders"]
    assert isinstance(found, dict)
    assert f"so MFU {2 * found['petatron']['mfu_full']:.1%} at most" in rows["floor of a step"]
    assert result.values["floor"] == floor.as_json()


@pytest.mark.parametrize("bandwidth", [None, 1e9])
def test_a_device_without_a_published_peak_has_no_floor(bandwidth: float | None):
    device = replace(GPU, peak_flops=None) if bandwidth else GPU
    assert step_floor(bench_spec(EXPERTS), device, bandwidth=bandwidth) is None
