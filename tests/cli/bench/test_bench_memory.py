"""`petatron bench memory`: predicted peaks beside measured ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from petatron.base.device import DeviceInfo
from petatron.base.errors import ConfigError
from petatron.bench.memory import CASES, MeasuredCase, measure_on_gpu
from petatron.bench.peers.bench_workload import bench_spec
from petatron.cli.bench import main
from petatron.estimate.memory.forecast import largest_forecast


def test_predictions_on_a_cpu_are_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "found.json"
    names = ["1b", "1b-mtp", "8b", "mixtral", "1b-last-two-layers", "8b-recompute-full"]
    assert main(["memory", "--device", "cpu", "--only", ",".join(names[:2]), *names[2:], "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    for name in names[:-1]:
        assert found["cases"][name]["ratio"] == pytest.approx(1.0, abs=0.002), name
        assert found["cases"][name]["measured_bytes"] > 1e6
    assert found["cases"]["8b-recompute-full"]["measured_bytes"] is None and found["within"] == 5
    assert len({found["cases"][name]["measured_bytes"] for name in names[:-1]}) == 5, "no form is another's"
    shown = capsys.readouterr().out
    assert "8b, a tiny form " in shown and "8b-recompute-full  " in shown
    assert "within 3%" in shown and "5 of 5 that were measured" in shown and "not measured on a CPU" in shown


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_a_run_with_a_forecast(name: str):
    spec = bench_spec(f"--preset {CASES[name].flags} --device cpu".split())
    assert 20e9 < largest_forecast(spec.run, device="cuda").total < 100e9


def test_no_flag_is_given_twice():
    for case in CASES.values():
        for flags in filter(None, (case.flags, case.tiny_flags)):
            given = [word for word in flags.split() if word.startswith("--")]
            assert len(given) == len(set(given)), flags


def test_what_a_device_cannot_hold_is_left_out():
    info = DeviceInfo(kind="cuda", name="small", memory_bytes=10**9, peak_flops=None, reason="")
    spec = bench_spec("--preset tiny-llama --micro-batch-size 64 --seq-length 8192 --device cpu".split())
    found = measure_on_gpu(spec, info)
    assert found.measured is None and found.predicted > 10**9 and "more than the 1 GB" in found.describe()


def test_what_is_apart_says_so():
    assert MeasuredCase(102, 100).describe().endswith("+2.0%")
    assert MeasuredCase(96, 100).describe().endswith("-4.0%  more than 3% apart")


@pytest.mark.parametrize(
    ("bench", "words", "message"),
    [
        ("memory", ["1b,mixtrel"], "--only 'mixtrel' is nothing that this bench measures. Did you mean mixtral?"),
        ("memory", [","], "--only '' is nothing that this bench measures. Use some of 1b, 1b-bf16-moments"),
        ("suite", ["llama-1b", "zzz"], "--only 'zzz' is nothing that this bench measures. Use some of llama-1b"),
        ("kernels", ["norm,los"], "--only 'los' is nothing that this bench measures. Did you mean loss?"),
    ],
)
def test_an_unknown_name_is_refused_alike_everywhere(bench: str, words: list[str], message: str):
    with pytest.raises(ConfigError) as refused:
        main([bench, "--device", "cpu", "--only", *words])
    assert message in str(refused.value)
