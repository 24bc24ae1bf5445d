"""Files of ours before they have their names, and who may read them: nobody can have put something in their place."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import petatron
from petatron.base.errors import CheckpointError, ConfigError
from petatron.base.safe_files import make_folder, write_atomic
from petatron.data.index_cache import cached_digest, load_or_build
from petatron.data.indexed_writer import IndexedWriter
from petatron.mesh.launch.rank_exit import write_error_file
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.offload_storage import DiskStorage
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from petatron.quickstart.stages import STAGES_FILE, Workspace
from petatron.train.report.metric_writers import JsonlWriter
from petatron.train.report.profiler import StepProfiler
from petatron.train.run_training import run_training
from petatron.train.state.check_run_dirs import lock_save_dir
from petatron.verify.run_proof_matrix import record_failure
from tests.longform import diagonal

WORDS = "what others keep here"
FLAGS = "--num-layers 1 --mock-data --lr 1e-3 --train-iters 1 --eval-iters 0 --live off"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file that every test must leave as it is."""
    path = tmp_path / "victim"
    path.write_text(WORDS)
    yield path
    assert path.read_text() == WORDS


def built(folder: Path) -> Path:
    """A checkpoint of a small model."""
    run = petatron.load("tiny-llama", FLAGS.split()).config
    petatron.save_checkpoint(str(folder), step=1, model=petatron.build_model(run, ParallelMesh.single()))
    return folder


# Names


def test_optimizer_state_on_disk_has_no_name_to_guess(tmp_path: Path, victim: Path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / f"optimizer-state-{os.getpid()}-0.bin").symlink_to(victim)
    memory = DiskStorage(str(folder), 8192).zeros(1000, torch.float32)
    memory.fill_(3.0)
    assert memory.sum() == 3000 and [path.is_symlink() for path in folder.iterdir()] == [True]


def test_token_files_are_written_under_names_that_nobody_guesses(tmp_path: Path, victim: Path):
    for name in ("bin", "idx", "lengths", "documents"):
        (tmp_path / f"data.{name}.{os.getpid()}.tmp").symlink_to(victim)
    for name in ("bin", "idx"):
        (tmp_path / f"data.{name}").symlink_to(victim)
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        writer.add_document([1, 2, 3])
        drafts = {path.name for path in tmp_path.glob(".data.*.tmp")}
    assert len(drafts) == 3 and not list(tmp_path.glob(".data.*"))
    assert (tmp_path / "data.bin").read_bytes() == np.array([1, 2, 3], np.uint16).tobytes()
    assert not (tmp_path / "data.idx").is_symlink()


def test_a_report_of_a_failure_follows_no_link(tmp_path: Path, victim: Path):
    for name in ("error.json.tmp", "error.json"):
        (tmp_path / name).symlink_to(victim)
    assert write_error_file(str(tmp_path / "error.json"), message="m", text="t", echo=False)
    assert "extraInfo" in (tmp_path / "error.json").read_text()


def test_a_verdict_follows_no_link(tmp_path: Path, victim: Path):
    for name in ("outcome-00000.partial", "outcome-00000.json"):
        (tmp_path / name).symlink_to(victim)
    record_failure(tmp_path, 0, "case", "why")
    assert '"why"' in (tmp_path / "outcome-00000.json").read_text()


def test_the_quickstart_follows_no_link(tmp_path: Path, victim: Path):
    space = Workspace(tmp_path / "space")
    space.open()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "letter").write_text(WORDS)
    (space.root / f"{STAGES_FILE}.tmp").symlink_to(victim)
    space.training.symlink_to(tmp_path / "theirs")
    (space.root / "data").mkdir()
    (space.root / "data" / "link").symlink_to(tmp_path / "theirs")
    space.settings.symlink_to(victim)
    space.set_stage_key("corpus", "key")
    space.open(fresh=True)
    assert space.stage_keys() == {} and not (space.root / "data").exists()
    assert (tmp_path / "theirs" / "letter").read_text() == WORDS


def test_a_trace_follows_no_link(tmp_path: Path, victim: Path):
    words = f"{FLAGS} --save {tmp_path} --profile --profile-step-start 1 --profile-step-end 2".split()
    run = petatron.load("tiny-llama", words).config

    def trace() -> None:
        with StepProfiler(
            run, rank=0, iterations=1, device=torch.device("cpu"), log_event=lambda text: None
        ) as profile:
            profile.begin(1)
            profile.end(1)

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "profile").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"--profile-dir .*a symbolic link"):
        trace()
    (tmp_path / "profile").unlink()
    (tmp_path / "profile").mkdir()
    place = tmp_path / "profile" / "iterations-1-1-rank-0.json.gz"
    place.symlink_to(victim)
    trace()
    assert not place.is_symlink() and [path.name for path in place.parent.iterdir()] == [place.name]


@pytest.mark.parametrize("kind", ["nowhere", "folder"])
def test_a_draft_of_a_model_is_a_folder_of_its_own(tmp_path: Path, victim: Path, kind: str):
    source = built(tmp_path / "run")
    (tmp_path / "theirs").mkdir()
    target = tmp_path / ("theirs" if kind == "folder" else "nothing")
    (tmp_path / "new.tmp").symlink_to(target)
    (tmp_path / "link").symlink_to(target)
    model = petatron.from_pretrained(source)
    for path, rule in ((tmp_path / "new", "new.tmp is in the way"), (tmp_path / "link", "link is already there")):
        with pytest.raises(CheckpointError, match=rule):
            convert(open_model_reader(source), path, ConversionOptions(target_format="huggingface"))
        with pytest.raises(CheckpointError, match=rule):
            model.save_pretrained(path)
    assert not list((tmp_path / "theirs").iterdir()) and (tmp_path / "new.tmp").is_symlink()


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_atomic(tmp_path / "file", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "old"


def test_a_file_in_the_place_of_a_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="not a folder"):
        make_folder(tmp_path / "file")


# Permissions


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _train(folder: Path) -> None:
    run_training(petatron.load_config([*FLAGS.split(), "--save", str(folder)], preset="tiny-llama"))


def _convert(folder: Path) -> None:
    model = folder.parent / "model"
    petatron.from_pretrained(built(folder.parent / "run")).save_pretrained(model)
    (model / "chat_template.jinja").write_text("private")
    (model / "chat_template.jinja").chmod(0o600)
    for to in ("huggingface", "petatron", "megatron"):
        convert(open_model_reader(model), folder / to, ConversionOptions(target_format=to))


def _cache(folder: Path) -> None:
    load_or_build(folder, {"a": 1}, ("x",), build=lambda: {"x": np.arange(3)})
    source = folder.parent / "source"
    source.write_text("")
    os.utime(source, (1, 1))
    cached_digest(folder, source, "s", lambda: "digest")


def _data(folder: Path) -> None:
    with IndexedWriter(folder / "data", "uint16") as writer:
        writer.add_document([1])


def _others(folder: Path) -> None:
    JsonlWriter(folder / "deep" / "metrics.jsonl").close()
    write_error_file(str(folder / "error.json"), message="m", text="t", echo=False)
    with lock_save_dir(str(folder), rank=0):
        pass


@diagonal(3)
@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002], ids=oct)
@pytest.mark.parametrize("make", [_train, _convert, _cache, _data, _others])
def test_the_umask_decides_who_may_read(tmp_path: Path, make: Callable[[Path], None], mask: int):
    folder = tmp_path / "made"
    with umask(mask):
        folder.mkdir()
        make(folder)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert len(modes) > 1
    wrong = {
        str(path): oct(mode) for path, mode in modes.items() if mode != (0o777 if path.is_dir() else 0o666) & ~mask
    }
    assert not wrong
