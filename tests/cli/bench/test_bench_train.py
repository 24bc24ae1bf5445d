"""`petatron bench train` and `bench generate` on a CPU: what is measured, how it is attributed, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from petatron.base.device import DeviceInfo
from petatron.base.errors import ConfigError, TrainError
from petatron.bench import generate as bench_generate
from petatron.bench import train as bench_train
from petatron.bench.measure.hardware_and_versions import describe_readings, parse_readings, sample_gpu
from petatron.bench.measure.host_time import measure_host
from petatron.bench.measure.kernel_breakdown import KERNEL_CLASSES, break_down_kernels, kernel_class
from petatron.bench.measure.run_contenders import BenchRunner, time_alternating
from petatron.bench.measure.train_report import TrainMeasurements, merge_runs, report
from petatron.bench.peers import BenchSpec, Contender, build, problems
from petatron.bench.peers.bench_workload import NUM_BATCHES, bench_spec, make_batches
from petatron.cli.bench import main
from petatron.models.batch import Batch
from tests.load_deadline import wait_until

SMALL = (
    "--preset tiny-llama --device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 16 --vocab-size 67 --micro-batch-size 2"
).split()
QUICK = "--warmup-seconds 0 --steps 4 --block 2".split()


def spec_of(*flags: str) -> BenchSpec:
    return bench_spec([*SMALL, *flags])


def bench(tmp_path: Path, *flags: str) -> dict[str, Any]:
    path = tmp_path / "found.json"
    assert main(["train", *QUICK, *SMALL, "--json", str(path), *flags]) == 0
    return json.loads(path.read_text())


def test_our_step_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = bench(tmp_path)
    ours = found["contenders"]["petatron"]
    assert [len(block) for block in ours["blocks_ms"]] == [2, 2]
    assert ours["tokens_per_s"] == pytest.approx(2 * 16 / ours["step_ms"] * 1e3)
    assert ours["loss"]["falls"] and ours["mfu_full"] is None and ours["peak_bytes"] is None
    attention = 12 * 2 * 32 * 16
    assert found["flops_per_token"]["full"] - found["flops_per_token"]["causal"] == attention / 2
    shown = capsys.readouterr().out
    assert "12 L q (T/s) s^2/2" in shown and "12 L q (T/s) s^2 " in shown and "tok/s" in shown
    assert "alone, in one process" in shown


def test_what_our_step_costs_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench(tmp_path)["host"] is None
    found = bench(tmp_path, "--host", "--no-bf16")["host"]
    calls = measure_host([*SMALL, "--no-bf16"], steps=1)["calls"]
    assert found["depths"] == [2, 4] and found["calls"] == calls and found["us"]["forward"] > 0
    shown, told = capsys.readouterr()
    assert f"{calls['forward']:,.0f} and {calls['backward']:,.0f} calls of Python; per step elsewhere" in shown
    assert "no effect" not in told, "nobody typed --no-cuda-graphs"


def test_against_transformers_from_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = bench(tmp_path, "--against", "hf")
    assert found["ratio"]["hf"]["speed"] > 0 and len(found["ratio"]["hf"]["pairs"]) == 2
    assert found["ratio"]["hf"]["largest_loss_difference"] < 1e-3
    assert "the same: at most" in capsys.readouterr().out


def test_each_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The children are told everything, and visited there and back; one that ran out of memory is not visited again."""
    visited: list[list[str]] = []

    def child(words: list[str], **_: object) -> Any:
        visited.append(words)
        name = words[words.index("--only") + 1]
        values = {
            "blocks_ms": [[2.0, 2.0], [2.0]],
            "peak_bytes": 5,
            "losses": [1.0, 0.5],
            "build_s": 0,
            "first_steps_s": 0,
        }
        content = {"contenders": {name: {"out_of_memory": True} if name == "torchtitan" else values}}
        Path(words[words.index("--json") + 1]).write_text(json.dumps(content))
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(bench_train.subprocess, "run", child)
    package = tmp_path / "torchtitan"
    package.mkdir()
    (package / "__init__.py").touch()
    flags = ["--apart", "--against", "hf", "--against", "torchtitan", "--no-compile", "--peer-path", str(tmp_path)]
    found = bench(tmp_path, *flags)
    assert [words[words.index("--only") + 1] for words in visited] == ["petatron", "hf", "torchtitan", "hf", "petatron"]
    assert all({"--no-compile", "--peer-path", "--hidden-size"} <= set(words) for words in visited)
    assert found["apart"] and found["contenders"]["torchtitan"] == {"out_of_memory": True}
    assert found["ratio"]["hf"]["pairs"] == [1.0, 1.0] and "torchtitan" not in found["ratio"]


def test_a_child_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    done = type("Done", (), {"returncode": 3, "stderr": "no such kernel"})
    monkeypatch.setattr(bench_train.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(TrainError, match="no such kernel"):
        bench(tmp_path, "--apart")


def test_a_peer_that_does_not_fit_beside_ours_is_measured_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def build_or_fail(name: str, spec: BenchSpec) -> Contender:
        if name == "hf":
            raise torch.OutOfMemoryError("too much")
        return build(name, spec)

    answer = {"blocks_ms": [[1.0]], "peak_bytes": None, "losses": [1.0], "build_s": 0, "first_steps_s": 0}
    monkeypatch.setattr("petatron.bench.peers.build", build_or_fail)
    monkeypatch.setattr(bench_train, "_run_subprocess", lambda args, flags, name: answer)
    assert bench(tmp_path, "--against", "hf")["apart"]
    monkeypatch.setattr("petatron.bench.peers.build", lambda *_: build_or_fail("hf", spec_of()))
    assert bench(tmp_path, "--only", "petatron")["contenders"]["petatron"] == {"out_of_memory": True}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "--steps 0 is below 1. Use 1 or more."),
        ("--block 0", "--block 0 is below 1. Use 1 or more."),
        ("--warmup-seconds nan", "--warmup-seconds nan must be finite and not negative. Use 0 or more."),
        ("--host --only bf16", "--host is about our own step, and bf16 is measured alone. Leave one of them out."),
        ("--breakdown", "--breakdown needs a CUDA device. Leave it out."),
        ("--only hf --apart", "--only hf measures one alone"),
        ("--only torchtitan", "--only torchtitan needs its source. Give --peer-path"),
        ("--against hf --global-batch-size 8", "--global-batch-size 8 makes steps of several micro-batches, and peers"),
        ("--against hf --optimizer sgd", "--optimizer sgd would be ours alone: peers are measured with AdamW."),
        ("--against torchtitan", "--against torchtitan needs its source. Give --peer-path"),
        ("--against torchtitan --qk-layernorm", "--against torchtitan has no normalized query and key heads."),
        ("--no-such-flag", "--no-such-flag"),
    ],
)
def test_what_cannot_be_measured(flags: str, message: str):
    with pytest.raises(ConfigError) as error:
        main(["train", *QUICK, *SMALL, *flags.split()])
    assert message in str(error.value)


def test_folders_of_peers_that_cannot_be_meant(tmp_path: Path):
    def told(*paths: Path, fp8_recipe: str | None = None) -> list[str]:
        spec = replace(spec_of(), peer_paths=paths, fp8_recipe=fp8_recipe)
        return [str(problem) for problem in problems("torchtitan", spec)]

    file, empty, good = tmp_path / "file", tmp_path / "empty", tmp_path / "good"
    file.touch()
    for package in (empty / "torchtitan", empty / "torchao", good / "torchtitan"):
        package.mkdir(parents=True)
    (good / "torchtitan" / "__init__.py").touch()
    fix = "Give the folder that holds torchtitan/, for instance an unpacked wheel."
    assert told(tmp_path / "nope", file, empty) == [
        f"--peer-path {tmp_path / 'nope'} does not exist. {fix}",
        f"--peer-path {file} is not a folder. {fix}",
        f"--peer-path {empty / 'torchtitan'} has no Python package. {fix}",
    ]
    assert told(good, empty) == []
    assert told(good, tmp_path / "nope") == [f"--peer-path {tmp_path / 'nope'} does not exist. {fix}"]
    assert told(good, empty, fp8_recipe="rowwise") == [
        f"--peer-path {empty / 'torchao'} has no Python package. {fix.replace('torchtitan', 'torchao')}"
    ]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--tp 2", "--tp 2"),
        ("--nproc-per-node=2", "--nproc-per-node 2"),
        ("--world-size 2 --hidden-size 33", "--world-size 2"),
        ("--num-experts 4 --ep 2 --dp 2", "--ep 2 --dp 2"),
    ],
)
def test_one_process_is_measured(flags: str, named: str):
    with pytest.raises(ConfigError) as error:
        main(["train", *QUICK, *SMALL, *flags.split()])
    asks, fix = ("asks", "Leave it out.") if named.count("--") == 1 else ("ask", "Leave them out.")
    assert [str(problem) for problem in error.value.problems] == [
        f"{named} {asks} for more than one process, and this bench measures one. {fix}"
    ]


def test_one_process_is_measured_whatever_a_file_says(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("parallel:\n  context_parallel_size: 2\n")
    with pytest.raises(ConfigError, match=r"--context-parallel-size \(.*run.yaml:2\) 2 asks for more than one process"):
        main(["train", *QUICK, *SMALL, "--config", str(file), "--tp", "1"])


def test_bf16_alone_needs_no_fp8(tmp_path: Path):
    assert list(bench(tmp_path, "--only", "bf16")["contenders"]) == ["bf16"]


def test_how_one_was_measured():
    assert (
        TrainMeasurements(contenders={"petatron": {}}, separate_processes=True).description
        == "alone, in two processes of its own"
    )
    assert TrainMeasurements(contenders={"petatron": {}, "hf": {}}).description == "alternating in one process"


def test_other_benches_take_no_run_flags(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["data", "--hidden-size", "8"])
    assert "unrecognized arguments: --hidden-size 8" in capsys.readouterr().err


def test_fp8_against_peers_that_have_no_such_recipe(tmp_path: Path):
    spec = replace(spec_of(), fp8_recipe="blockwise")
    told = [str(problem) for name in ("torchtitan", "hf") for problem in problems(name, spec)]
    assert any("blockwise is no recipe of torchtitan's" in text for text in told)
    assert any("needs torchao for FP8" in text for text in told)
    assert any("hf has no FP8 training" in text for text in told)
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").touch()
    told = [str(problem) for problem in problems("torchtitan", replace(spec, peer_paths=(tmp_path,)))]
    assert not any("torchao" in text for text in told)


def test_a_model_transformers_cannot_express_is_refused():
    assert problems("hf", spec_of("--position-embedding-type", "none"))


class Scripted:
    """A contender that only says that it was called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def step(self, batch: Batch) -> torch.Tensor:
        self.calls.append(self.name)
        return torch.zeros(())


def test_contenders_alternate_in_both_orders():
    calls: list[str] = []
    batch = Batch(*[torch.zeros(1, 1)] * 3)
    runners = [BenchRunner(name, Scripted(name, calls), [batch], torch.device("cpu")) for name in "ab"]
    time_alternating(runners, steps=6, block=2, warmup_s=0.0)
    assert "".join(calls) == "aabbbbaa" * 2  # three rounds become four, so that both orders come as often
    assert [len(runner.blocks_ms) for runner in runners] == [4, 4]
    calls.clear()
    time_alternating(runners[:1], steps=3, block=5, warmup_s=0.01)
    assert len(calls) >= 5 + 3 and len(runners[0].blocks_ms[-1]) == 3


def test_losses_are_compared_over_a_cycle_of_batches():
    """The same tokens at the start and at the end, as many as there are different ones."""
    spec, device = spec_of(), DeviceInfo(kind="cpu", name="x", memory_bytes=1, peak_flops=None, reason="")
    assert len(make_batches(spec)) == NUM_BATCHES
    losses = [4.0] * NUM_BATCHES + [3.0] * 7 + [2.0] * NUM_BATCHES
    values = {"blocks_ms": [[1.0]], "losses": losses, "peak_bytes": None, "build_s": 0.0, "first_steps_s": 0.0}
    contenders = report(spec, device, TrainMeasurements(contenders={"petatron": values})).values["contenders"]
    assert contenders["petatron"]["loss"] == {"first": 4.0, "last": 2.0, "falls": True}  # type: ignore[index]


def test_a_slow_outlier_does_not_change_the_ratio():
    spec, device = (
        spec_of(),
        DeviceInfo(kind="cuda", name="x", memory_bytes=1, peak_flops={"bfloat16": 1e9}, reason=""),
    )
    values = {"losses": [2.0, 1.0], "peak_bytes": 10, "build_s": 0.0, "first_steps_s": 0.0, "breakdown": None}
    found = TrainMeasurements(
        contenders={
            "petatron": {**values, "blocks_ms": [[1.0, 1.0, 50.0]]},
            "hf": {**values, "blocks_ms": [[1.5, 1.5, 1.5]], "peak_bytes": 20, "losses": [2.0, 1.5]},
        },
        paired_speedups={"hf": [1.5]},
    )
    result = report(spec, device, found)
    contenders, ratio = result.values["contenders"], result.values["ratio"]
    assert contenders["petatron"]["tokens_per_s"] == 32_000  # type: ignore[index]
    flops = result.values["flops_per_token"]["full"]  # type: ignore[index]
    assert contenders["petatron"]["mfu_full"] == pytest.approx(32_000 * flops / 1e9)  # type: ignore[index]
    assert ratio["hf"]["speed"] == 1.5 and ratio["hf"]["memory"] == 0.5  # type: ignore[index]
    rows = dict(result.rows)
    assert rows["loss / hf"].startswith("NOT the same: at most 25.00% of the first apart")
    assert merge_runs([{"out_of_memory": True}]) == {"out_of_memory": True}


KERNELS = {
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT": "GEMM",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GroupedGemm>>": "GEMM",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "GEMM",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "GEMM",
    "triton_tem_fused_mm_4": "GEMM",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31_64x64x128": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_mm_2": "elementwise",
    "triton_red_fused__fused_rms_norm_add_5": "elementwise",
    "_forward": "elementwise",
    "_losses_and_gradient_kernel": "elementwise",
    "cast_block_128x128_tile": "elementwise",
    "row_and_column_amax_of_tile": "elementwise",
    "update_scale_from_history": "elementwise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>": "copies",
    "Memcpy DtoD (Device -> Device)": "copies",
    "Memset (Device)": "copies",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
    "void at::native::multi_tensor_apply_kernel<LpNormFunctor<float>>": "optimizer",
    "void at::native::multi_tensor_apply_kernel<Copy<float, c10::BFloat16>>": "copies",
    "_adamw": "optimizer",
    "_sum_of_squares": "optimizer",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "communication",
    "something_nobody_has_heard_of": "other",
}


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_kernels_are_told_apart_by_name(name: str, kind: str):
    assert kernel_class(name) == kind


def kernel(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


def test_breakdown_of_a_made_up_trace():
    """Two steps of 10 ms in microseconds: overlap counts once as busy, gaps are idle, what the host does is left out."""
    step = [
        kernel("nvjet_a", 0, 4000),
        kernel("cudnn_sdpa", 3000, 2000),  # runs beside the product for one millisecond
        kernel("Memcpy DtoD", 6000, 1000, "gpu_memcpy"),
        kernel("_adamw_kernel", 8000, 2000),
        kernel("aten::mm", 0, 9000, "cpu_op"),
        kernel("ProfilerStep#1", 0, 10_000, "gpu_user_annotation"),
        {"ph": "M", "name": "process_name"},
    ]
    events = step + [{**event, "ts": event["ts"] + 10_000} for event in step if "ts" in event]  # type: ignore[operator]
    found = break_down_kernels(events, steps=2, top=2)
    assert found["step_ms"] == 10.0
    busy = {"GEMM": 4.0, "attention": 2.0, "copies": 1.0, "optimizer": 2.0}
    assert found["ms"] == {**dict.fromkeys(KERNEL_CLASSES, 0.0), **busy, "idle": 2.0}
    assert found["top"][0] == {"name": "nvjet_a", "class": "GEMM", "ms": 4.0, "calls": 1} and len(found["top"]) == 2
    assert json.loads(json.dumps(found)) == found
    assert break_down_kernels([], steps=1)["step_ms"] == 0.0


def test_clocks_are_read_where_there_is_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with sample_gpu(torch.device("cpu")) as readings:
        pass
    assert "unknown" in describe_readings(readings)
    told, fake = tmp_path / "told", tmp_path / "nvidia-smi"
    fake.write_text(
        f"#!/bin/sh\necho '1500, 650.5, 60'; echo '[N/A], 1, 1'; echo '1600, 661.5, 62'; touch {told}; exec sleep 60\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _: str(fake))
    with sample_gpu(torch.device("cuda", 0)) as readings:
        wait_until(told.exists, "the readings", seconds=20)
    assert describe_readings(readings) == "1,550 MHz, 656 W, 61 °C (medians of 2 readings)"
    assert parse_readings("1, 2\n1, 2, 3") == [(1.0, 2.0, 3.0)]


def test_generation_says_what_transformers_says(tmp_path: Path):
    path = tmp_path / "found.json"
    flags = "--prompt-tokens 6 --new-tokens 4 --repeat 2 --against hf".split()
    assert main(["generate", *flags, *SMALL, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["same_tokens"] == 4 and found["tokens_per_s"].keys() == {"petatron", "hf"}
    assert 0 < found["share_of_limit"] == pytest.approx(found["tokens_per_s"]["petatron"] / found["limit_tokens_per_s"])


def test_a_ragged_batch_says_what_transformers_says(tmp_path: Path):
    path = tmp_path / "found.json"
    flags = "--prompt-tokens 6 --new-tokens 4 --repeat 1 --batch 3 --ragged --against hf".split()
    assert main(["generate", *flags, *SMALL, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["same_tokens"] == 4


def test_generation_takes_turns_in_both_orders_equally_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []

    def side(name: str) -> Any:
        return lambda *_, **__: lambda count: calls.append(name) or [0] * count

    monkeypatch.setattr(bench_generate, "_ours", side("a"))
    monkeypatch.setattr(bench_generate, "_transformers", side("b"))
    flags = "--new-tokens 2 --repeat 3 --json".split()
    assert main(["generate", *flags, str(tmp_path / "found.json"), "--against", "hf", *SMALL]) == 0
    assert "".join(calls) == "ab" + "aabbbbaa" * 2  # once to warm up; then each a token and all of them
    calls.clear()
    assert main(["generate", *flags, str(tmp_path / "found.json"), *SMALL]) == 0
    assert "".join(calls) == "a" + "aa" * 3


def test_generation_refuses_what_it_cannot_time():
    with pytest.raises(ConfigError) as error:
        main(["generate", "--new-tokens", "1", "--repeat", "0", *SMALL])
    assert [problem.where for problem in error.value.problems] == ["--new-tokens", "--repeat"]
