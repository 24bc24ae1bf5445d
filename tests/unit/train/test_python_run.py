"""A run that Python code advances is the run of the command line, and prints nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import petatron
from petatron.base.errors import ConfigError, DataError
from petatron.train.run_training import run_training
from petatron.validate import load_config

MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --num-query-groups 2 --ffn-hidden-size 32 --seq-length 16"
)
FLAGS = f"{MODEL} --mock-data --lr 1e-3 --train-iters 6 --eval-iters 1 --global-batch-size 2 --log-interval 2"


def _load(flags: str = "") -> petatron.Run:
    return petatron.load("tiny-llama", f"{FLAGS} {flags}".split())


def _records(folder: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == kind]


def test_losses_are_those_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_training(load_config(f"{FLAGS} --live off --log-dir {tmp_path}".split(), preset="tiny-llama"))
    by_command = {record["iteration"]: record["lm_loss"] for record in _records(tmp_path, "train")}
    capsys.readouterr()
    by_steps = {m["iteration"]: m["lm_loss"] for m in _load("--log-interval 6").train()}
    assert by_steps.keys() == {1, 6}
    run = _load()
    in_python = {m["iteration"]: m["lm_loss"] for part in (4, None) for m in run.train(steps=part)}
    assert in_python == by_command
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_steps_that_end_between_log_points_are_reported_and_counted_once():
    run = _load("--log-interval 4")
    assert [m["iteration"] for m in run.train(steps=3)] == [1, 3]
    assert [m["iteration"] for m in run.train(steps=100)] == [4, 6]
    assert list(run.train()) == []
    assert run.state.progress.iteration == 6


def test_a_caller_may_stop_and_go_on(tmp_path: Path):
    run = _load(f"--save {tmp_path / 'run'} --log-interval 1")
    for metrics in run.train():
        if metrics["iteration"] == 2:
            break
    with pytest.raises(ConfigError, match="steps 0 is not a positive number"):
        next(run.train(steps=0))
    assert [m["iteration"] for m in run.train()] == [3, 4, 5, 6]
    assert (tmp_path / "run/step-00000006/manifest.json").is_file()
    assert [record["iteration"] for record in _records(tmp_path / "run", "train")] == [1, 2, 3, 4, 5, 6]
    resumed = _load(
        f"--save {tmp_path / 'run'} --load {tmp_path / 'run'} --train-iters 7 --override-opt-param-scheduler"
    )
    assert [m["iteration"] for m in resumed.train()] == [7]


def test_evaluation_is_the_one_of_the_loop():
    run = _load("--eval-interval 6")
    assert run.evaluate().loss != run.evaluate("test").loss
    list(run.train())
    [validation] = [record for record in run.records if record["kind"] == "valid"]
    assert validation["lm_loss"] == run.evaluate().loss
    with pytest.raises(DataError, match="no valid data"):
        _load("--eval-iters 0").evaluate()


def test_text_and_a_folder(tmp_path: Path):
    run = _load("--tokenizer-type ByteTokenizer")
    text = run.generate("def ", max_new_tokens=5, temperature=0)
    assert text == run.generate(run.tokenizer.encode("def "), max_new_tokens=5, temperature=0)
    run.save_pretrained(tmp_path / "mine")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "mine").iterdir()
    }
    with pytest.raises(ConfigError, match="knows token ids only"):
        petatron.load(None, FLAGS.replace("--mock-data", "--data-path none --vocab-size 64").split()).generate("def ")


def test_a_trained_run_opens_by_its_settings(tmp_path: Path):
    run = _load(f"--save {tmp_path / 'run'} --tokenizer-type ByteTokenizer --train-iters 2")
    assert [m["iteration"] for m in run.train()] == [1, 2]
    again = petatron.load(str(tmp_path / "run/config.yaml"), ["--load", str(tmp_path / "run")])
    asked = {"max_new_tokens": 4, "temperature": 0}
    assert again.generate("def ", **asked) == run.generate("def ", **asked)
    assert again.state.progress.iteration == 2


def test_every_writer_of_the_flags_gets_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    run = _load(f"--tensorboard-dir {tmp_path / 'tb'} --train-iters 2 --rotary-base 500 --position-embedding-type none")
    assert any("--rotary-base" in notice for notice in run.notices)
    list(run.train())
    run.close()
    [folder] = (tmp_path / "runs").iterdir()
    assert [record["iteration"] for record in _records(folder, "train")] == [1, 2]
    assert any(path.stat().st_size > 500 for path in (tmp_path / "tb").rglob("events.*"))
