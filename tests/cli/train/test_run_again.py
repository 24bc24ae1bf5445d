"""A run is started again from what it left: its config.yaml, from any folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from petatron.cli.main import main
from petatron.data.indexed_writer import IndexedWriter

MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 --eval-iters 0 --num-workers 0 "
    "--live off --log-interval 1 --vocab-size 64 --split 1,0,0"
).split()


def write_dataset(prefix: Path) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for start in range(20):
            writer.add_document(np.arange(start, start + 30, dtype=np.uint16))


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of 2 iterations whose every path was relative; the working folder is another one now."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    write_dataset(here / "data" / "text")
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    flags = [*MODEL, *"--data-path data/text --save runs/a --load runs/a --train-iters 2 --lr-decay-iters 2".split()]
    assert main(["train", *flags]) == 0
    monkeypatch.chdir(elsewhere)
    return here / "runs" / "a"


def test_a_saved_config_goes_on_from_another_folder(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(run_folder / "config.yaml"), "--train-iters", "3"]) == 0
    said = capsys.readouterr().out
    assert "resumed at iteration 2" in said and "data_path" not in said and "WARNING" not in said
    assert (run_folder / "latest").read_text().strip() == "step-00000003"
    assert list(Path.cwd().iterdir()) == []


def test_state_of_another_optimizer_is_refused_by_name(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    again = ["train", str(run_folder / "config.yaml"), "--train-iters", "3", "--optimizer", "lion"]
    assert main(again) == 1
    assert "has the state of --optimizer adam, and lion has another" in capsys.readouterr().err
    assert main([*again, "--no-load-optim"]) == 0


def test_a_saved_config_asks_about_a_changed_schedule_every_time(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    file = str(run_folder / "config.yaml")
    longer = ["train", file, "--train-iters", "3", "--lr-decay-iters", "3"]
    choice = "Restore those values, or say --override-opt-param-scheduler to go on with the new ones"
    assert main(longer) == 1
    said = capsys.readouterr().err
    assert "was trained with another schedule (lr.decay: 2 then, 3 now)" in said and choice in said
    assert "lr.decay is --lr-decay-iters, which is --train-iters unless it is given" in said
    assert main([*longer, "--override-opt-param-scheduler"]) == 0
    capsys.readouterr()
    assert main(["train", file, "--train-iters", "4", "--lr-decay-iters", "4"]) == 1
    said = capsys.readouterr().err
    assert "(lr.decay: 3 then, 4 now)" in said and choice in said, "consent to the first change is none to the second"
    assert main(["train", file, "--train-iters", "4"]) == 0


def test_an_older_checkpoints_relative_paths_are_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from petatron.train.state.resume_diff import config_for_checkpoint, resume_changes
    from petatron.validate import load_config

    monkeypatch.chdir(tmp_path)
    run = load_config([*MODEL, "--data-path", "0.5", "a", "0.5", "b", "--train-iters", "2"]).config
    then = config_for_checkpoint(run)
    assert then["data"]["data_path"] == ["0.5", str(tmp_path / "a"), "0.5", str(tmp_path / "b")]
    then["data"]["data_path"] = ["0.5", "a", "0.5", "b"]
    assert resume_changes(then, run, iteration=1, consumed_samples=1) == []
    then["data"]["data_path"] = ["0.5", "a", "0.5", "c"]
    assert len(resume_changes(then, run, iteration=1, consumed_samples=1)) == 1
