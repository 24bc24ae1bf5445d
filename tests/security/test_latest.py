"""The file `latest` of a run's folder, as others may leave it: whatever it is, it is told, and no step is taken unnoticed."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.step_list import DamagedCheckpointError, resolve_step
from petatron.checkpoint.inspect.verify_checkpoint import find_checkpoint
from petatron.cli.main import main
from petatron.config import CheckpointConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.pretrained.load_checkpoint import has_weights
from petatron.pretrained.read_checkpoint_args import read_checkpoint_args
from petatron.train.state.check_run_dirs import check_run_dirs
from tests.golden.make_checkpoint import MODEL, RUN
from tests.longform import diagonal
from tests.security.limits import limited

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-v3"
ESCAPES = "\x1b]0;owned\x07\x1b[2J"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "run")
    (tmp_path / "run" / "latest").unlink(missing_ok=True)
    return tmp_path / "run"


def write(text: str | bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text.encode() if isinstance(text, str) else text)


def link_to_a_step(path: Path) -> None:
    (path.parent.parent / "elsewhere").write_text("step-00000003\n")
    path.symlink_to(path.parent.parent / "elsewhere")


NAMES_NO_STEP: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (write(""), "has '' where the name of a step should be"),
    "garbage": (write("what others wrote"), "has 'what others wrote' where the name of a step should be"),
    "a step that is being written": (write("step-00000003.tmp\n"), "has 'step-00000003.tmp' where"),
    "no text": (write(b"\xff\xfe"), "is not text"),
    "a gigabyte": (lambda path: (path.touch(), os.truncate(path, 1 << 30)), "it has 1,073,741,824 bytes"),
    "escapes": (write(ESCAPES), r"has '\u001b]0;owned\u0007\u001b[2J' where"),
    "a FIFO": (os.mkfifo, "is a FIFO, not a file"),
    "a folder": (os.mkdir, "is a folder, not a file"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
    "a link to nothing": (lambda path: path.symlink_to("missing"), "is a symbolic link that leads nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES_NO_STEP)
def test_a_run_says_what_is_wrong_and_which_step_it_takes(
    run: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, words = NAMES_NO_STEP[name]
    make(run / "latest")
    for find in (lambda: resolve_step(run, None), lambda: find_checkpoint(run)):
        caplog.clear()
        with limited(), caplog.at_level(logging.WARNING, "petatron"):
            assert find() == run / "step-00000003"
        [record] = caplog.records
        assert f"{run / 'latest'} " in record.getMessage() and words in record.getMessage()
        assert "Taking step 3" in record.getMessage() and "\x1b" not in record.getMessage()
    caplog.clear()
    assert resolve_step(run, 3) == run / "step-00000003" and not caplog.records, "the step was said"


@diagonal(2)
@pytest.mark.parametrize("name", [*NAMES_NO_STEP, "a link to a name"])
def test_verify_reports_it(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = NAMES_NO_STEP.get(name, (link_to_a_step, "is a symbolic link to"))
    make(run / "latest")
    words = "is a symbolic link to" if (run / "latest").is_symlink() else words
    with limited():
        assert main(["checkpoint", "verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert f"{run}  BROKEN" in out and words in out and "step-00000003  good" in out and "\x1b" not in out
    assert f"The newest good step is 3: --load {run} --ckpt-step 3" in out
    assert main(["checkpoint", "verify", str(run), "--all", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["sound"] is False and [found["file"] for found in told["findings"]] == [str(run / "latest")]
    assert main(["checkpoint", "verify", str(run), "--step", "3"]) == 0, "that step was asked for, and it is sound"


@pytest.mark.parametrize("text", [None, "step-00000003\n", "step-00000003"])
def test_verify_is_content_with_what_a_save_leaves(
    run: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A crash after the first step leaves none."""
    if text is not None:
        (run / "latest").write_text(text)
    assert main(["checkpoint", "verify", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_a_step_that_is_missing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "latest").write_text("step-00000009\n")
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert "latest names step-00000009, which is not there or has no manifest.json" in capsys.readouterr().out
    with pytest.raises(DamagedCheckpointError, match=r"latest names step-00000009.*take another step \(there are: 3; "):
        resolve_step(run, None)


@pytest.mark.parametrize("name", [*NAMES_NO_STEP, "a step"])
def test_where_no_step_is_left_a_run_does_not_start_anew(run: Path, name: str) -> None:
    shutil.rmtree(run / "step-00000003")
    make, words = NAMES_NO_STEP.get(name, (write("step-00000003"), "names step-00000003, which is not there"))
    make(run / "latest")
    refusal = {"match": rf"latest .*and .* holds no complete step.*remove {run / 'latest'} to start"}
    with limited(), pytest.raises(CheckpointError, **refusal) as caught:
        check_run_dirs(CheckpointConfig(load=str(run), save=str(run)))
    assert words in str(caught.value) and "\x1b" not in str(caught.value)
    with limited(), pytest.raises(CheckpointError, **refusal):
        has_weights(str(run), ParallelMesh.single())
    with limited(), pytest.raises(CheckpointError, **refusal):
        find_checkpoint(run)
    assert not (run / ".lock").exists()


def test_a_resumed_run_says_it_and_mends_it(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run / "latest").write_text(ESCAPES)
    flags = (
        f"{MODEL} {RUN} --train-iters 4 --override-opt-param-scheduler --live off --num-workers 0 --device cpu".split()
    )
    assert main(["train", "tiny-gpt", *flags, "--load", str(run), "--save", str(run)]) == 0
    err = capfd.readouterr().err
    assert r"has '\u001b]0;owned\u0007\u001b[2J' where the name of a step should be. Taking step 3" in err
    assert (run / "latest").read_text() == "step-00000004\n"


def test_a_run_that_takes_its_settings_from_there_says_it_once(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The load says it; reading the settings before need not."""
    (run / "latest").write_text("what others wrote")
    config = CheckpointConfig(load=str(run), use_checkpoint_args=True)
    with caplog.at_level(logging.WARNING, "petatron"):
        assert read_checkpoint_args(config).source == str(run / "step-00000003")
        assert read_checkpoint_args(CheckpointConfig(), str(run)).source == str(run / "step-00000003")
    assert not caplog.records


def test_a_folder_in_its_place_is_told_before_training(run: Path) -> None:
    """No file can be renamed to it, so every save would fail."""
    (run / "latest").mkdir()
    with pytest.raises(CheckpointError, match=r"latest is a folder.*Move it away"):
        check_run_dirs(CheckpointConfig(load=str(run), save=str(run)))
