"""Several contenders in one run of `petatron bench train`, our own bf16 among them; what is said on the way; where numbers go."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from petatron.base.check_output_file import writable_problems
from petatron.base.device import DeviceInfo
from petatron.base.errors import ConfigError, DataError
from petatron.bench import train as bench_train
from petatron.bench.measure import run_contenders as bench_runner
from petatron.bench.measure import timing as bench_timing
from petatron.bench.measure.format_si_units import format_si
from petatron.bench.measure.run_contenders import BenchRunner
from petatron.bench.peers import BenchSpec, Contender
from petatron.bench.peers.petatron_step_without_fp8 import without_fp8
from petatron.cli import bench
from petatron.models.batch import Batch
from petatron.validate import load_config
from tests.longform import diagonal

SMALL = (
    "--preset tiny-llama --device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 "
    "--ffn-hidden-size 64 --seq-length 16 --vocab-size 67 --micro-batch-size 2"
).split()
QUICK = "--warmup-seconds 0 --steps 4 --block 2".split()


def run(tmp_path: Path, flags: str) -> dict[str, Any]:
    path = tmp_path / "found.json"
    assert bench.main(["train", *QUICK, *SMALL, "--json", str(path), *flags.split()]) == 0
    return json.loads(path.read_text())


class Scripted:
    """A contender that only says that it was called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def step(self, batch: Batch) -> torch.Tensor:
        self.calls.append(self.name)
        return torch.ones(())


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever is built says when it steps, and nothing is refused."""
    calls: list[str] = []

    def build(name: str, spec: BenchSpec) -> Contender:
        return Scripted(name, calls)

    monkeypatch.setattr("petatron.bench.peers.build", build)
    monkeypatch.setattr("petatron.bench.peers.problems", lambda name, spec: ())
    return calls


def blocks(calls: Sequence[str], first_steps: int) -> list[str]:
    """Who had the turn, one after the other, once all were built."""
    return [name for name, _ in groupby(calls[first_steps:])]


def test_fp8_beside_our_own_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = run(tmp_path, "--fp8-recipe rowwise --against bf16")
    ratio, shown = found["ratio"]["bf16"], capsys.readouterr().out
    assert len(ratio["pairs"]) == 2 and ratio["spread"] == [min(ratio["pairs"]), max(ratio["pairs"])]
    assert re.search(r"speed / bf16 +\d+\.\d+x \(median of 2 pairs, ", shown) and "FP8 rowwise GEMMs" in shown
    alone = run(tmp_path, "")["contenders"]["petatron"]["losses"]
    assert found["contenders"]["bf16"]["losses"] == alone, "bf16 is what the run is without FP8"
    assert found["contenders"]["petatron"]["losses"] != alone and ratio["largest_loss_difference"] < 5e-3


def test_several_micro_batches_of_our_own(tmp_path: Path):
    assert run(tmp_path, "--fp8-recipe tensorwise --against bf16 --global-batch-size 4")["ratio"]["bf16"]["speed"] > 0


@pytest.mark.parametrize("flags", ["--against hf,bf16", "--against hf --against bf16 --against hf"])
def test_all_take_turns_after_one_warm_up(flags: str, tmp_path: Path, scripted: list[str]):
    found = run(tmp_path, flags)
    there, first_steps = ["petatron", "bf16", "hf"], 3 * bench_runner.COMPILE_STEPS
    turns = [*there, *reversed(there)]
    assert blocks(scripted, first_steps) == [name for name, _ in groupby(turns)]
    assert list(found["ratio"]) == ["bf16", "hf"] and not found["in_pairs"] and not found["apart"]
    assert all(len(ratio["pairs"]) == 2 for ratio in found["ratio"].values())


def test_two_at_a_time_where_three_do_not_fit(
    tmp_path: Path, scripted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(bench_train, "_fits_in_memory", lambda first, peers, device: len(peers) == 1)
    found = run(tmp_path, "--against hf,bf16")
    assert found["in_pairs"] and list(found["ratio"]) == ["bf16", "hf"]
    assert "bf16" not in scripted[scripted.index("hf") :], "the first peer is gone when the second comes"
    assert "alternating in one process, each peer in turn beside ours" in capsys.readouterr().out


def test_two_at_a_time_where_the_third_runs_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calls: list[str] = []
    built: list[str] = []

    def build(name: str, spec: BenchSpec) -> Contender:
        built.append(name)
        if built == ["petatron", "bf16", "hf"]:
            raise torch.OutOfMemoryError("too much")
        return Scripted(name, calls)

    monkeypatch.setattr("petatron.bench.peers.build", build)
    monkeypatch.setattr("petatron.bench.peers.problems", lambda name, spec: ())
    found = run(tmp_path, "--against hf,bf16")
    assert found["in_pairs"] and list(found["ratio"]) == ["bf16", "hf"]
    assert built == ["petatron", "bf16", "hf", "bf16", "hf"]
    assert "hf: out of memory" in capsys.readouterr().err


def test_room(capsys: pytest.CaptureFixture[str]):
    """An H200 holds the 8B shape of eight layers twice, not three times; of the 1B model it holds three."""
    device = DeviceInfo(kind="cuda", name="H200", memory_bytes=150 * 10**9, peak_flops=None, reason="")
    runner = BenchRunner("petatron", Scripted("petatron", []), [], torch.device("cpu"))
    bench.configure_logging()
    for held, peak, peers, fits in (
        (27, 60, "torchtitan", True),
        (50, 65, "torchtitan", True),
        (72, 90, "torchtitan", False),
        (20, 95, "torchtitan", False),
        (20, 95, "bf16", True),
        (54, 72, "bf16", True),
        (54, 72, "torchtitan bf16", False),
        (27, 56, "torchtitan bf16", True),
    ):
        runner.held_bytes, runner.peak_bytes = held * 10**9, peak * 10**9
        assert bench_train._fits_in_memory(runner, peers.split(), device) == fits, (held, peak, peers)
    assert "petatron, torchtitan, bf16 together would take about 191 GB of the 140 GB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--against bf16",
            "--against bf16 compares FP8 with bf16, and this run has no FP8 to compare. Add --fp8-recipe",
        ),
        ("--fp8-recipe tensorwise --against hf,bf16", "--against hf has no FP8 training"),
        ("--fp8-hybrid --against hf", "--against hf has no FP8 training"),
    ],
)
def test_what_cannot_be_compared(flags: str, message: str):
    with pytest.raises(ConfigError) as error:
        bench.main(["train", *QUICK, *SMALL, *flags.split()])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("bf16,megatron", "megatron is no peer. Use torchtitan, hf or bf16."),
        ("torchtian", "torchtian is no peer. Did you mean torchtitan?"),
        ("bf16,", "'bf16,' names nobody beside a comma. Leave the comma out."),
        ("", "'' names nobody. Use torchtitan, hf or bf16."),
    ],
)
def test_peers_nobody_knows(flag: str, told: str):
    with pytest.raises(ConfigError) as refused:
        bench.main(["train", "--against", flag])
    assert [str(problem) for problem in refused.value.problems] == [f"--against {told}"]


@pytest.mark.parametrize(
    ("flags", "format_and_recipe"),
    [
        ("--fp8-recipe rowwise", ("hybrid", "rowwise")),
        ("--fp8-recipe rowwise --fp8-format e4m3", ("e4m3", "rowwise")),
        ("--fp8-recipe rowwise --fp8-format=e4m3", ("e4m3", "rowwise")),
        ("--fp8-hybrid", ("hybrid", "tensorwise")),
        ("", (None, None)),
    ],
)
def test_fp8_is_told_by_the_run(flags: str, format_and_recipe: tuple[str | None, str | None], tmp_path: Path):
    seen: list[BenchSpec] = []

    def build(name: str, spec: BenchSpec) -> Contender:
        seen.append(spec)
        return Scripted(name, [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("petatron.bench.peers.build", build)
        found = run(tmp_path, flags)
    assert (seen[0].run.precision.fp8_format, found["fp8_recipe"]) == format_and_recipe


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]


def test_flags_that_do_nothing_are_said(tmp_path: Path, scripted: list[str], capsys: pytest.CaptureFixture[str]):
    """As `petatron train` says them; not those that the bench itself gives."""
    run(tmp_path, "--cuda-graphs --optimizer sgd --moe-router-topk 3 --peer-path /nope --peer-keeps-gathered")
    assert notes(capsys) == [
        "note: --moe-router-topk has no effect: the model has no experts",
        "note: --cuda-graphs has no effect: the CPU computes",
        "note: --peer-path has no effect: it is for --against torchtitan",
        "note: --peer-keeps-gathered has no effect: it is for --against torchtitan",
    ]
    run(tmp_path, "--optimizer sgd --adam-beta2=0.9")
    assert notes(capsys) == ["note: --adam-beta2 has no effect: the optimizer is sgd"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_graphs_without_a_gpu_that_was_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(tmp_path, "--cuda-graphs --device auto")
    assert notes(capsys) == ["note: --cuda-graphs has no effect: the CPU computes"]


def test_no_compile_is_not_said_to_do_nothing_where_a_peer_is_compiled(tmp_path: Path, scripted: list[str], capsys):
    run(tmp_path, f"--no-compile --against torchtitan --peer-path {tmp_path} --peer-keeps-gathered")
    assert notes(capsys) == []
    run(tmp_path, "--no-compile")
    assert len(notes(capsys)) == 1


def test_a_preset_may_come_first(tmp_path: Path, scripted: list[str]):
    path = tmp_path / "found.json"
    words = ["tiny-llama", *QUICK, *SMALL[2:], "--json", str(path)]
    assert SMALL[:2] == ["--preset", "tiny-llama"]
    for order in (words, [*QUICK, words[0], *words[1:]]):
        assert bench.main(["train", *order]) == 0
    with pytest.raises(ConfigError, match="tiny-lama"):
        bench.main(["train", "tiny-lama"])


def test_a_run_without_its_fp8_flags():
    words = "--bf16 --fp8-hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --lr 1e-3 --train-iters 1 --mock-data"
    plain = load_config([*SMALL, *"--bf16 --lr 1e-3 --train-iters 1 --mock-data".split()]).config
    assert without_fp8(load_config([*SMALL, *words.split()]).config) == plain


def test_progress_is_said_on_the_way(tmp_path: Path, scripted: list[str], monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(bench_timing, "LOG_INTERVAL_S", 0.0)
    run(tmp_path, "--against bf16 --warmup-seconds 0.01")
    said = capsys.readouterr().err.splitlines()
    for line in ("building petatron", "building bf16", "warming up for 0 s: petatron, bf16", "timed 1 of 2 rounds"):
        assert line in said
    assert "timing 2 rounds of 2 steps of each: petatron, bf16" in said
    assert any(line.startswith("warming up, 0 of") for line in said)


OTHERS = {
    "optimizer --device cpu --parameters 1e4 --repeat 1": (
        "building 10,000 parameters and their optimizer, and warming up",
        "timing 4 rounds of 4 steps of each: ours, norm, copy, torch",
        "timed 3 of 4 rounds",
    ),
    "kernels --device cpu --repeat 1 --only norm attention": (
        "measuring the device: a copy and a GEMM",
        "measuring norm, 1 of 2",
        "measuring attention, 2 of 2",
        "attention, packed",
    ),
    f"generate {' '.join(SMALL)} --prompt-tokens 2 --new-tokens 2 --repeat 1": (
        "building petatron",
        "timing 1 rounds of 2 tokens of each: petatron",
    ),
    "checkpoint --gigabytes 0.001 --only save": ("making 0.001 GB of state", "saving, round 4 of 4"),
    "data --size-mb 0.02 --workers 1 --vocab 300 --documents 1000": (
        "training a tokenizer",
        "tokenizing, round 3 of 3",
        "reading batches",
        "building a sample index of 1,000 documents",
    ),
}


@diagonal(3)
@pytest.mark.parametrize("words", OTHERS, ids=lambda words: words.partition(" ")[0])
def test_so_it_is_in_other_benches(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(bench_timing, "LOG_INTERVAL_S", 0.0)
    monkeypatch.chdir(tmp_path)
    assert bench.main(words.split()) == 0
    assert set(OTHERS[words]) <= set(capsys.readouterr().err.splitlines())


@pytest.mark.parametrize("name", ["checkpoint", "data", "optimizer"])
def test_no_rounds_are_refused(name: str):
    with pytest.raises(ConfigError, match="--repeat -3 is below 1"):
        bench.main([name, "--repeat", "-3"])


def test_a_file_that_cannot_be_written_is_noticed_at_once(tmp_path: Path, scripted: list[str]):
    (tmp_path / "file").touch()
    for path, rule in {
        tmp_path / "none" / "found.json": "is in a folder that does not exist. Make the folder first.",
        tmp_path: "is a folder. Give the path of a file.",
        tmp_path / "file" / "found.json": "cannot be written: Not a directory. Choose a file in a writable folder.",
    }.items():
        with pytest.raises(ConfigError) as refused:
            bench.main(["train", *QUICK, *SMALL, "--json", str(path)])
        assert [str(problem) for problem in refused.value.problems] == [f"--json {path} {rule}"]
    assert not scripted, "nothing was measured"


def test_a_file_that_can_no_longer_be_written_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "folder" / "found.json"
    path.parent.mkdir()

    def measure(_: object) -> bench.BenchResult:
        path.parent.rmdir()
        return bench.BenchResult(rows=(("speed", "1"),), values={})

    monkeypatch.setattr("petatron.bench.data.run", measure)
    with pytest.raises(DataError) as lost:
        bench.main(["data", "--json", str(path)])
    assert str(lost.value) == f"Cannot write {path}: No such file or directory. Choose a writable file."


@pytest.mark.parametrize("name", bench.BENCHES)
def test_so_it_is_in_every_bench(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unexpected(*_: object) -> None:
        raise AssertionError("the bench ran")

    monkeypatch.setattr(f"petatron.bench.{name}.run", unexpected)
    with pytest.raises(ConfigError, match=r"--json .* is in a folder that does not exist"):
        kind = ["sft"] if name == "posttrain" else []
        bench.main([name, *kind, "--json", str(tmp_path / "none" / "found.json")])


def test_looking_leaves_no_trace(tmp_path: Path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("as it was")
    assert writable_problems("--json", old) == []
    assert writable_problems("--json", new) == []
    assert old.read_text() == "as it was" and not new.exists()


@pytest.mark.parametrize(
    ("amount", "text"), [(0.0, "0.00 B/s"), (999.0, "999 B/s"), (3.14159e7, "31.4 MB/s"), (2.5e12, "2.50 TB/s")]
)
def test_units_have_something_before_the_point(amount: float, text: str):
    assert format_si(amount, "B/s") == text


def test_kernels_on_a_cpu_are_given_in_units_that_say_something(capsys: pytest.CaptureFixture[str]):
    assert bench.main(["kernels", "--device", "cpu", "--repeat", "1", "--only", "norm"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"copies [1-9][\d.]* GB/s, GEMMs [1-9][\d.]* [MG]FLOP/s", shown)
    assert " 0.00 " not in shown and "/s, " in shown
