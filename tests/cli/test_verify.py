"""`petatron verify`: agreement, a planted fault, and mistakes in the question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from petatron.base.errors import ConfigError
from petatron.cli.main import main
from petatron.cli.verify import _conclusion
from petatron.verify.compare_traces import TraceComparison
from petatron.verify.verify_layouts import parse_injection, plan_verification

TINY = "tiny-llama --num-layers 1 --hidden-size 32 --seq-length 16 --vocab-size 61 --global-batch-size 4 --num-workers 0".split()


@pytest.mark.usefixtures("forked_ranks")
def test_same_as_another_layout(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    layout = [
        "--tp",
        "2",
        "--sequence-parallel",
        "--steps",
        "2",
        "--dtype",
        "float64",
        "--reference",
        "--tp 1 --dp 2 --no-sequence-parallel",
        "--json",
        str(tmp_path / "out.json"),
    ]
    assert main(["verify", *TINY, *layout]) == 0
    out = capfd.readouterr().out
    assert "SAME: 2 steps in float64" in out and "tp 2 with sequence parallel" in out
    assert "reference: tp 1, dp 2" in out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["agrees"] and len(report["steps"]) == 2
    assert all(step["loss_difference"] <= 1e-9 for step in report["steps"])


@pytest.mark.usefixtures("forked_ranks")
def test_planted_fault_is_named(capfd: pytest.CaptureFixture[str]):
    fault = ["--tp", "2", "--steps", "2", "--dtype", "float64", "--inject", "layers.0.mlp.up.weight@2"]
    assert main(["verify", *TINY, *fault]) == 1
    out = capfd.readouterr().out
    assert "DIFFERENT: first departure at step 2: gradient layers.0.mlp.up.weight" in out


def test_unknown_tensor_is_an_error(capfd: pytest.CaptureFixture[str]):
    assert main(["verify", *TINY, "--steps", "1", "--inject", "layers.0.mlp.upp.weight"]) == 2
    assert "layers.0.mlp.up.weight" in capfd.readouterr().err


def test_what_is_left_out_is_said():
    both = plan_verification(
        ["--preset", *TINY, "--tp", "2", "--bf16", "--hidden-dropout", "0.3"], steps=2, dtype="float32"
    )
    why = "(both runs are in float32, since bounds for rounding are those of --dtype)"
    assert both.ignored_settings == ("--hidden-dropout 0.3", f"--bf16 {why}")
    assert plan_verification(["--preset", *TINY, "--load", "x"], steps=2, dtype="float64").ignored_settings == (
        "--load x",
    )


def test_eight_bits_are_compared_over_float32(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(
        "petatron.mesh.launch.local_launcher.run_ranks", lambda *_, **__: 3
    )  # only what is said before anything runs
    words = ["verify", *TINY, "--tp", "2", "--bf16", "--fp8-hybrid"]
    assert main(words) == 3
    out = capsys.readouterr().out
    assert "note: --fp8-format hybrid is emulated" in out and "Add --bf16" not in out
    assert "not part of the comparison: --bf16 (both runs are in float32" in out
    assert main([*words, "--dtype", "float64"]) == 2
    assert "--dtype float64 leaves no room for --fp8-format hybrid" in capsys.readouterr().err


def test_a_difference_in_fp8_need_not_be_a_fault():
    departed = TraceComparison(steps=(), first_departure="step 1: gradient x differs")
    assert "Leave --fp8-format out to prove the layout" in _conclusion(departed, "float32", fp8=True)
    assert _conclusion(departed, "float32", fp8=False) == "DIFFERENT: first departure at step 1: gradient x differs"


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert main(["verify", *TINY, "--steps", "0", "--json", str(tmp_path / "none" / "out.json")]) == 2
    err = capfd.readouterr().err
    assert "--steps 0 is below 1" in err and "out.json is in a folder that does not exist" in err


def test_bad_layout_is_refused_before_anything_runs(capfd: pytest.CaptureFixture[str]):
    assert main(["verify", *TINY, "--tp", "3"]) == 2
    captured = capfd.readouterr()
    assert "--tensor-model-parallel-size 3 does not divide" in captured.err and "reference" not in captured.out


def test_bad_injection_step():
    with pytest.raises(ConfigError, match="@STEP"):
        parse_injection("head.weight@last")


def test_both_runs_differ_only_in_layout():
    both = plan_verification(["--preset", *TINY, "--tp", "2", "--dp", "2"], steps=2, dtype="float32")
    reference, candidate = both.reference.config, both.candidate.config
    assert (reference.parallel.world_size, candidate.parallel.world_size) == (1, 4)
    assert (
        reference.train == candidate.train and reference.model == candidate.model and reference.optim == candidate.optim
    )
    assert candidate.data.mock_data and candidate.model.hidden_dropout == 0.0


def test_the_layout_names_what_is_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(
        "petatron.mesh.launch.local_launcher.run_ranks", lambda *_, **__: 3
    )  # only what is said before anything runs
    flags = ["--sequence-parallel", "--use-distributed-optimizer", "--reference", "--dp 1"]
    assert main(["verify", *TINY, *flags, "--recompute-granularity", "selective"]) == 3
    reference, layout, *notes = capsys.readouterr().out.splitlines()
    said = "tp 1, dp 1, 4 micro-batches of 1, recompute of core_attn, 1 rank"
    assert reference == f"reference: {said}" and layout == f"layout:    {said}"
    assert notes[0] == "note: --sequence-parallel has no effect: the tensor-parallel size is 1"
    assert any(note.startswith("note: --use-distributed-optimizer has no effect") for note in notes)


def test_the_layout_names_recompute_of_one_side(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("petatron.mesh.launch.local_launcher.run_ranks", lambda *_, **__: 3)
    other = ["--reference", "--dp 1 --recompute-memory-budget-gb 1"]
    assert main(["verify", *TINY, "--dp", "2", "--use-distributed-optimizer", *other]) == 3
    reference, layout, *_ = capsys.readouterr().out.splitlines()
    assert reference.endswith(", recompute to fit 1 GB, 1 rank") and "recompute" not in layout
    assert "dp 2 (optim sharded)" in layout
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    assert main(["verify", *TINY, *full]) == 3
    assert capsys.readouterr().out.count(", recompute of layers, 1 rank") == 2


def test_without_a_layout_it_says_that_nothing_was_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        "petatron.mesh.launch.local_launcher.run_ranks", lambda *_, **__: 3
    )  # the note comes before any run
    assert main(["verify", *TINY, "--steps", "1"]) == 3
    assert "one rank is compared with itself" in capsys.readouterr().out
    for layout in (["--tp", "2"], ["--reference", "--tp 2"]):
        assert main(["verify", *TINY, "--steps", "1", *layout]) == 3
        assert "compared with itself" not in capsys.readouterr().out
