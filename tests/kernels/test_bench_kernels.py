"""`petatron bench kernels`: on a CPU it compares and times everything, and Triton's twins take the very same calls."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from petatron.base.errors import ConfigError
from petatron.bench.kernels import OPERATION_NAMES, DeviceSpeed, KernelMeasurement, largest_error, measure_case
from petatron.bench.ops.kernel_case import BenchContext, KernelCase, MicroBatchShape
from petatron.bench.ops.training_kernel_cases import CASES
from petatron.cli import bench
from petatron.kernels.registry import OPERATIONS, KernelContext
from tests.longform import diagonal

CPU = torch.device("cpu")
HOPPER = KernelContext("cuda", (9, 0), torch.bfloat16, True, None)
TINY = MicroBatchShape("tiny", 2, 3, 32, 24, 2, 1, 40)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_a_table_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["kernels", "--device", "cpu", "--repeat", "1", "--json", str(tmp_path / "found.json")]
    assert bench.main([*words, "--only", *CASES]) == 0
    found, text = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    assert [line.partition(":")[0] for line in found["choices"]] == list(OPERATIONS)
    labels = [one["label"] for one in found["operations"]]
    assert len(labels) == len(set(labels)) and all(label in text for label in labels)
    for one in found["operations"]:
        assert one["right"] and not one["failed"], one
        assert (one["tflops"] if one["flops"] else one["tb_per_s"]) > 0 and one["share"] > 0
    assert "petatron bench optimizer" in text


@pytest.mark.parametrize("name", ["attention", "moe"])
def test_layers_have_tables_of_their_own(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    table = f"petatron.bench.ops.{name}.measure"
    monkeypatch.setattr(table, lambda device, *, repeat, warmup_s: [("a layer", f"fast, {repeat} times")])
    assert bench.main(["kernels", "--device", "cpu", "--repeat", "2", "--only", name]) == 0
    assert "fast, 2 times" in capsys.readouterr().out


def test_every_group_has_a_name():
    assert set(CASES) == set(OPERATION_NAMES) - {"attention", "moe"}


@diagonal(2)
@needs_triton
@pytest.mark.parametrize("name", [name for name in CASES if name != "weight-grad-gemm"])
def test_twins_take_the_same_calls(name: str):
    """In Triton's interpreter, which rounds to eight bits in a way of its own, and multiplies the bits of half-precision numbers in
    GEMMs; the hardware's products are left out."""
    dtype = torch.float32 if name in ("scan", "delta", "channel-delta", "latent-decode") else torch.bfloat16
    place = BenchContext(CPU, dtype, HOPPER, compile_references=False)
    seen = 0
    for case in CASES[name](place, TINY, first=name != "fp8"):
        (first, ours), *_ = case.implementations.items()
        if first.startswith("triton"):
            error = largest_error((case.checked_call or case.call)(ours), case.reference())
            assert error <= (0.15 if name == "fp8" else 1e-2), case.label
            seen += 1
    counts = {"norm": 2, "activation": 2, "rotary": 4, "loss": 2, "embedding": 1, "fp8": 6, "scan": 4, "delta": 2}
    assert seen == (counts | {"channel-delta": 2, "latent-decode": 1, "recurrent-decode": 3})[name]


@needs_triton
def test_references_are_compiled_on_request():
    """At the first shape only, since each takes the compiler seconds."""
    place = BenchContext(CPU, torch.bfloat16, HOPPER, compile_references=True)
    assert list(place.implementations("rms_norm", "rms_norm")) == ["triton", "reference", "compiled"]
    assert list(place.implementations("rms_norm")) == ["triton", "reference"]
    assert list(place.implementations("layer_norm")) == ["compiled", "reference"]
    assert list(BenchContext.from_device(CPU, allow_compile=True).implementations("rms_norm", "rms_norm")) == [
        "reference"
    ]


def case(**ways: Any) -> KernelCase:
    return KernelCase(
        label="x",
        implementations=ways,
        call=lambda run: run(),
        reference=lambda: (torch.ones(2, dtype=torch.float64),),
        moved_bytes=8e9,
    )


def fails() -> list[torch.Tensor]:
    raise ValueError("out of luck\nand more")


@pytest.mark.parametrize("value", [1.5, math.nan])
def test_a_wrong_result_is_said_to_be_wrong(value: float):
    found = measure_case(
        case(ours=lambda: [torch.full((4,), value)]), BenchContext.from_device(CPU, allow_compile=False)
    )
    assert not found.within_tolerance and "WRONG: error" in found.describe(DeviceSpeed(1.0, 1.0))


def test_what_fails_does_not_stop_the_rest():
    speed, right = DeviceSpeed(1.0, 1.0), lambda: [torch.ones(2)]
    found = measure_case(case(ours=right, theirs=fails), BenchContext.from_device(CPU, allow_compile=False))
    assert found.within_tolerance and list(found.ms) == ["ours"]
    assert found.describe(speed).endswith("theirs failed: ValueError: out of luck")
    found = measure_case(case(ours=fails), BenchContext.from_device(CPU, allow_compile=False))
    assert found.describe(speed) == "ours failed: ValueError: out of luck"
    assert found.as_json(speed)["tb_per_s"] is None and not found.within_tolerance
    found = measure_case(case(ours=fails, theirs=right), BenchContext.from_device(CPU, allow_compile=False))
    assert found.describe(speed).startswith("theirs ")


def test_rates_and_ratios():
    found = KernelMeasurement("x", {"ours": 2.0, "theirs": 3.0}, {}, 1e-3, 1e-2, 4e9, 0.0)
    assert (
        found.describe(DeviceSpeed(4.0, 800.0))
        == "ours 2.000 ms, 2.00 TB/s, 50% of a copy; theirs 3.000 ms: 1.50x; error 1.0e-03"
    )
    found = KernelMeasurement("x", {"ours": 2.0}, {}, 1e-3, 1e-2, 0.0, 8e11)
    assert found.describe(DeviceSpeed(4.0, 800.0)) == "ours 2.000 ms, 400 TFLOP/s, 50% of a GEMM; error 1.0e-03"


def test_an_error_is_that_of_the_worst_output_over_the_rows_of_the_truth():
    exact = torch.ones(2, 3, dtype=torch.float64)
    good, bad = torch.ones(5, 3), torch.full((5, 3), 1.5)
    good[2:] = 9.0
    assert largest_error([good, None, bad], [exact, None, exact]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repeat", "0"], "--repeat 0 is below 1. Use 1 or more."),
        pytest.param(
            ["--device", "cuda", "--repeat", "0"],
            r"(?s)--repeat 0 is below 1.*--device cuda needs a CUDA device and none is visible. Use --device cpu.",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_refuses(flags: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        bench.main(["kernels", *flags])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_everything_is_right_on_a_gpu(tmp_path: Path):
    """At full size, but for whole layers and what torch.compile would make."""
    words = ["kernels", "--repeat", "1", "--no-compile", "--json", str(tmp_path / "found.json")]
    assert bench.main([*words, "--only", *CASES]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["operations"]
    assert len(found) > 25
    assert [one for one in found if one["failed"] or not one["right"]] == []
