"""What a person reads of a run: its first lines, its samples, its closing summary, and commands that work as printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from petatron.cli.main import main
from petatron.train import training_loop as loop_module

MODEL = (
    "tiny-llama --mock-data --num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-query-groups 1 --seq-length 16 "
    "--lr 1e-3 --eval-iters 1 --num-workers 0 --live off --log-interval 2 --device cpu"
).split()


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


def run(*flags: str) -> int:
    return main(["train", *MODEL, *flags])


def test_a_run_from_its_first_line_to_the_commands_after_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "prompts.txt").write_text("1 2 3\n")
    folder = str(tmp_path / "a run")
    samples = ["--sample-prompts", str(tmp_path / "prompts.txt"), "--sample-interval", "2", "--sample-tokens", "4"]
    flags = ["--train-iters", "4", "--eval-interval", "1", "--save", folder, *samples]
    assert run(*flags, "--exit-interval", "3", "--exit-duration-in-mins", "0.0001") == 0
    said, noted = capsys.readouterr()
    first = [line.split()[0] for line in said.splitlines()[:6]]
    assert first == ["model:", "data:", "length:", "layout:", "precision:", "memory:"] and noted == ""
    assert "parameters: 1 layer of width 16, 2 heads (1 kv head)" in said and "one rank on cpu" in said
    for absent in ("stage 0", "throughput per GPU", "memory: predicted", "note:"):
        assert absent not in said
    details = [record["message"] for record in records(tmp_path / "a run", "event") if record.get("detail")]
    assert details[0].startswith("stage 0: recompute: nothing") and "memory: predicted" in details[-1]
    assert "ETA: 0:00:00 (--exit-duration-in-mins)" in said
    assert "ended early: --exit-duration-in-mins 0.0001 is over, at iteration 1 of 4" in said

    [summary] = records(tmp_path / "a run", "summary")
    assert (summary["steps"], summary["tokens"], summary["checkpoint"]) == (1, 16, f"{folder}/step-00000001")
    commands = [entry["command"] for entry in summary["next_commands"]]
    resume, verify = (
        commands[0],
        next(command for command in commands if command.startswith("petatron checkpoint verify")),
    )
    assert any(command.startswith("petatron plot") for command in commands)
    assert said.splitlines()[-1] == f"  {summary['next_commands'][-1]['command']}"
    assert main([*shlex.split(resume)[1:], "--exit-duration-in-mins", "9"]) == 0
    said = capsys.readouterr().out
    assert "resumed at iteration 1" in said and "changed since" not in said
    assert "samples at iteration 2\n  > 1 2 3 => " in said, said
    [first_start, second_start] = records(tmp_path / "a run", "summary")
    assert second_start["sampling_s"] > 0 and second_start["evaluation_s"] > 0 and second_start["saving_s"] > 0
    best = min(record["lm_loss"] for record in records(tmp_path / "a run", "valid") if record["split"] == "valid")
    assert second_start["best_validation_loss"] == best and first_start["first_loss"] is not None
    assert main(shlex.split(verify)[1:]) == 0


def test_a_layout_and_its_recompute_are_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    assert run("--train-iters", "1", "--log-dir", str(tmp_path), *flags) == 0
    said = capsys.readouterr().out
    assert "precision: bf16, fp32 master weights\n" in said and "; recompute: all 1 layers whole\n" in said
    assert "checkpoint  none was saved" in said and "petatron plot" in said and "--load" not in said


def test_all_that_is_in_fp8_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = "--bf16 --fp8-hybrid --fp8-output-head-backward --vocab-size 128".split()
    assert run("--train-iters", "1", "--log-dir", str(tmp_path), *flags) == 0
    said = "precision: bf16, fp32 master weights, GEMMs in FP8 hybrid (tensorwise), those of the output head's backward too\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "outcome"), [(KeyboardInterrupt, 130, "interrupted"), (ValueError, None, "failed: ValueError")]
)
def test_a_run_that_breaks_off_leaves_its_summary(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    code: int | None,
    outcome: str,
):
    step = loop_module.train_step

    def breaks(state: Any, batches: Any, *more: Any, **named: Any) -> Any:
        if state.progress.iteration == 1:
            raise error
        return step(state, batches, *more, **named)

    monkeypatch.setattr(loop_module, "train_step", breaks)
    if code is None:
        with pytest.raises(error):
            run("--train-iters", "3", "--log-dir", str(tmp_path))
    else:
        assert run("--train-iters", "3", "--log-dir", str(tmp_path)) == code
    [summary] = records(tmp_path, "summary")
    assert (summary["outcome"], summary["steps"]) == (outcome, 1)
    printed = "summary\n" in capsys.readouterr().out
    assert printed == (code is not None), "after a failure the console is for its report"
