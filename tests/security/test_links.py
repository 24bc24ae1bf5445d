"""Symbolic links in a folder of checkpoints that came from others: what they point to is never written to, emptied or removed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from petatron.base.errors import CheckpointError, PetatronError, TrainError
from petatron.checkpoint.checkpoint_contents import ModelFolder
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.digested_file_io import Disk
from petatron.checkpoint.inspect.verify_checkpoint import verify_checkpoint
from petatron.checkpoint.manager import CheckpointManager, Retention
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.cli.main import main
from petatron.config import CheckpointConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.models.hf.folder_entries import EntryRegion, FolderEntry
from petatron.train.report.metric_writers import JsonlWriter
from petatron.train.run_training import run_training
from petatron.train.state.check_run_dirs import check_run_dirs, lock_save_dir
from petatron.validate import load_config
from tests.longform import diagonal

STEP = "step-00000010"
WORDS = "what others keep here"
NEXT = (".tmp", ".replaced", ".pruned")
TINY = "--mock-data --lr 1e-3 --eval-iters 0 --live off --num-layers 1 --lr-decay-iters 5"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder that no checkpoint has anything to do with."""
    folder = tmp_path / "home"
    (folder / "deep").mkdir(parents=True)
    for name in ("notes.txt", "deep/letter.txt"):
        (folder / name).write_text(WORDS)
    return folder


def untouched(victim: Path) -> bool:
    found = {path.relative_to(victim).as_posix(): path for path in victim.rglob("*") if path.is_file()}
    return set(found) == {"notes.txt", "deep/letter.txt"} and all(path.read_text() == WORDS for path in found.values())


def save(folder: Path, step: int, *, keep: int | None = None, disk: Disk | None = None) -> None:
    """Weights as a model folder in two files with an index, a document, and state of the rank."""
    weights = {name: torch.full((3, 2), float(step)) for name in ("a", "b")}
    entries = tuple(FolderEntry(name, (3, 2), (EntryRegion(name, (0, 0), (3, 2), (0, 0)),)) for name in weights)
    model = ModelFolder(entries, {"tokenizer.json": b"{}"})
    chunks = [Chunk(f"model/{name}", (3, 2), (0, 0), tensor) for name, tensor in weights.items()]
    chunks.append(Chunk("moment/a", (3, 2), (0, 0), weights["a"]))
    manager = CheckpointManager(folder, ParallelMesh.single().world, disk=disk, retention=Retention(keep))
    manager.save(step, chunks, metadata={}, same_layout_key="one", model=model, local={"rng": torch.ones(2)})


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


# Removal


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path, victim: Path):
    link(tmp_path / "folder", victim)
    link(tmp_path / "file", victim / "notes.txt")
    link(tmp_path / "nowhere", tmp_path / "missing")
    link(tmp_path / "tree/inner/folder", victim)
    link(tmp_path / "tree/file", victim / "notes.txt")
    for name in ("folder", "file", "nowhere", "tree", "missing"):
        Disk().remove(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"] and untouched(victim)


def test_prune_leaves_what_links_point_to(tmp_path: Path, victim: Path):
    for step in (10, 20, 30):
        save(tmp_path / "run", step)
    link(tmp_path / "run" / STEP / "model" / "photos", victim)
    link(tmp_path / "run" / STEP / "more", victim)
    (tmp_path / "run/step-00000020").rename(victim.parent / "elsewhere")
    link(tmp_path / "run/step-00000020", victim.parent / "elsewhere")
    link(tmp_path / "run" / f"{STEP}.pruned", victim)
    assert main(["checkpoint", "prune", str(tmp_path / "run"), "--keep", "1"]) == 0
    assert list(step_folder.list_steps(tmp_path / "run")) == [30] and untouched(victim)
    assert (tmp_path / "elsewhere" / step_folder.MANIFEST_FILE).is_file(), "the link went, not the step behind it"
    assert not any(path.is_symlink() for path in (tmp_path / "run").iterdir())


def test_prune_unlinks_what_has_names_of_ours(tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str]):
    """Also where no step is pruned. A step that is whole may be a link, to other storage."""
    run, away = tmp_path / "run", tmp_path / "away"
    for step in (10, 20, 30):
        save(run, step)
    away.mkdir()
    (run / "step-00000020").rename(away / "step-00000020")
    link(run / "step-00000020", away / "step-00000020")
    ours = [f"step-00000020{suffix}" for suffix in NEXT] + ["step-00000005", "step-00000040.tmp", "latest.tmp"]
    for name, target in zip(
        ours, [victim, away / "step-00000020", victim / "notes.txt", victim, tmp_path / "none", victim]
    ):
        link(run / name, target)
    link(run / "notes", victim)
    prune = ["checkpoint", "prune", str(run), "--keep", "3"]
    assert main([*prune, "--dry-run"]) == 0 and all((run / name).is_symlink() for name in ours)
    assert f"would remove symbolic links, not what they point to: {', '.join(sorted(ours))}" in capsys.readouterr().out
    assert main(prune) == 0
    assert untouched(victim) and (away / "step-00000020" / "manifest.json").is_file()
    assert sorted(path.name for path in run.iterdir()) == [
        ".lock", "latest", "notes", "step-00000010", "step-00000020", "step-00000030"
    ]  # fmt: skip
    assert "kept 10, 20, 30" in capsys.readouterr().out


def test_a_folder_nested_without_end_is_an_error(tmp_path: Path):
    """Each level takes a descriptor and a place on the stack."""
    place = tmp_path.joinpath("deep", *["a"] * 150)
    place.mkdir(parents=True)
    with pytest.raises(OSError, match="nested more than 100 folders deep"):
        Disk().remove(tmp_path / "deep")


# Saving


def names_written(folder: Path) -> list[str]:
    """Every name under which a save leaves something, in the step and around it."""
    inside = [path.relative_to(folder / STEP).as_posix() for path in (folder / STEP).rglob("*")]
    around = [step_folder.LATEST_FILE, f"{step_folder.LATEST_FILE}.tmp", STEP, *(STEP + suffix for suffix in NEXT)]
    return around + [f"{STEP}{suffix}/{name}" for suffix in (".tmp", ".replaced") for name in inside]


@diagonal(3)
@pytest.mark.parametrize("kind", ["file", "folder", "nowhere"])
def test_a_save_follows_no_link_whatever_its_name(tmp_path: Path, victim: Path, kind: str):
    save(tmp_path / "like", 10)
    names = names_written(tmp_path / "like")
    assert {f"{STEP}.tmp/{name}" for name in ("manifest.json", "state/rank-00000.table.json", "model", "state")} <= set(
        names
    )
    target = {"file": victim / "notes.txt", "folder": victim, "nowhere": victim / "new"}[kind]
    for number, name in enumerate(names):
        folder = tmp_path / f"run-{number}"
        link(folder / name, target)
        save(folder, 10, keep=1)
        assert untouched(victim), name
        assert verify_checkpoint(folder / STEP, read_content=True).findings == (), name
        assert (folder / step_folder.LATEST_FILE).read_text() == f"{STEP}\n" and not (
            folder / step_folder.LATEST_FILE
        ).is_symlink()
        assert sorted(path.name for path in folder.iterdir()) == [step_folder.LATEST_FILE, STEP], name


class PlantingDisk(Disk):
    """Where a file or folder of one name is about to be made, somebody puts a link first."""

    def __init__(self, name: str, victim: Path) -> None:
        self.name, self.victim, self.planted = name, victim, False

    def _plant(self, path: Path, target: Path) -> None:
        if path.name == self.name and not self.planted:
            self.planted = True
            path.symlink_to(target)

    def write(self, path, parts):
        self._plant(path, self.victim / "notes.txt")
        return super().write(path, parts)

    def make_folder(self, path: Path) -> None:
        self._plant(path, self.victim)
        super().make_folder(path)


def test_a_link_that_appears_during_a_save_is_not_followed(tmp_path: Path, victim: Path):
    save(tmp_path / "like", 10)
    inside = {path.name for path in (tmp_path / "like" / STEP).rglob("*")}
    for number, name in enumerate(sorted(inside | {f"{STEP}.tmp", f"{step_folder.LATEST_FILE}.tmp"})):
        disk = PlantingDisk(name, victim)
        try:
            save(tmp_path / f"run-{number}", 10, disk=disk)
        except CheckpointError as error:
            assert "symbolic link" in str(error) and name in ("model", "state", f"{STEP}.tmp")
        assert disk.planted and untouched(victim), name


def test_a_replaced_step_comes_back_to_a_name_that_a_link_took(tmp_path: Path, victim: Path):
    save(tmp_path, 10)
    (tmp_path / STEP).rename(tmp_path / f"{STEP}.replaced")
    link(tmp_path / STEP, victim / "missing")
    save(tmp_path, 20)
    assert (
        list(step_folder.list_steps(tmp_path)) == [10, 20] and not (tmp_path / STEP).is_symlink() and untouched(victim)
    )


def test_the_folder_itself_may_be_a_link(tmp_path: Path):
    """Scratch storage is reached that way."""
    (tmp_path / "scratch" / "runs").mkdir(parents=True)
    link(tmp_path / "runs", tmp_path / "scratch" / "runs")
    (tmp_path / "scratch" / "mine").mkdir()
    link(tmp_path / "runs" / "mine", tmp_path / "scratch" / "mine")
    folder = tmp_path / "runs" / "mine"
    check_run_dirs(CheckpointConfig(save=str(folder)))
    with lock_save_dir(str(folder), rank=0):
        for step in (10, 20, 20):
            save(folder, step, keep=1)
    JsonlWriter(folder / "metrics.jsonl").close()
    assert verify_checkpoint(folder / "step-00000020").findings == () and folder.is_symlink()
    found = sorted(path.name for path in (tmp_path / "scratch" / "mine").iterdir())
    assert found == [".lock", "latest", "metrics.jsonl", "step-00000020"]


# The other files of a run


def train(folder: Path, iterations: int) -> None:
    words = f"{TINY} --train-iters {iterations} --save {folder} --load {folder}".split()
    run_training(load_config(words, preset="tiny-llama"))


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_run_does_not_write_through_a_link(tmp_path: Path, victim: Path, name: str):
    link(tmp_path / "run" / name, victim / "notes.txt")
    with pytest.raises(PetatronError, match=rf"{name}.*symbolic link.*[Rr]emove it"):
        train(tmp_path / "run", 1)
    assert untouched(victim)


def test_a_run_replaces_a_link_by_its_settings(tmp_path: Path, victim: Path):
    link(tmp_path / "run" / "config.yaml", victim / "notes.txt")
    link(tmp_path / "run" / "step-00000001.tmp" / "state", victim)
    train(tmp_path / "run", 1)
    link(tmp_path / "run" / "step-00000002.tmp", victim)
    train(tmp_path / "run", 2)
    assert untouched(victim) and not (tmp_path / "run" / "config.yaml").is_symlink()
    assert "train_iters: 2" in (tmp_path / "run" / "config.yaml").read_text()


def test_settings_that_cannot_be_kept_are_an_error(tmp_path: Path):
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    with pytest.raises(TrainError, match=r"Cannot write .*config\.yaml: Is a directory.*--log-dir"):
        train(tmp_path / "run", 1)
    assert not list((tmp_path / "run").glob(".config*"))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_no_lock_and_no_log(tmp_path: Path, make: Callable[[Path], None]):
    """A pipe would keep whoever opens it waiting."""
    make(tmp_path / ".lock")
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"\.lock .*Remove it"), lock_save_dir(str(tmp_path), rank=0):
        pass
    with pytest.raises(TrainError, match=r"metrics\.jsonl.*--log-dir"):
        JsonlWriter(tmp_path / "metrics.jsonl")


def test_a_lock_keeps_its_content(tmp_path: Path):
    """A second name of another file, which nobody can tell from a file of ours."""
    (tmp_path / "precious").write_text(WORDS)
    os.link(tmp_path / "precious", tmp_path / ".lock")
    with lock_save_dir(str(tmp_path), rank=0):
        pass
    assert (tmp_path / "precious").read_text() == WORDS


# Verifying


def test_verify_reports_links_and_strangers(tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str]):
    save(tmp_path / "run", 10)
    step = tmp_path / "run" / STEP
    document, weights = step / "model/tokenizer.json", next((step / "model").glob("*.safetensors"))
    weights.rename(tmp_path / "away")
    weights.symlink_to(tmp_path / "away")
    (tmp_path / "away too").write_bytes(document.read_bytes())
    document.unlink()
    document.symlink_to(tmp_path / "away too")
    link(step / "photos", victim)
    link(step / "state" / "photo", tmp_path / "missing")
    (step / "empty").mkdir()
    (step / "model" / "more").mkdir()
    (step / "model" / "more" / "stranger").write_text("")
    os.mkfifo(step / "pipe")
    assert main(["checkpoint", "verify", str(tmp_path / "run"), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["checkpoints"][0]["findings"]
    texts = {Path(found["file"]).relative_to(step).as_posix(): found["problem"] for found in findings}
    strangers = {"photos", "state/photo", "empty", "model/more", "pipe"}
    assert set(texts) == strangers | {"model/tokenizer.json", weights.relative_to(step).as_posix()}
    for name in ("photos", "state/photo", "model/tokenizer.json"):
        assert "is a symbolic link to" in texts[name]
    assert "the manifest does not name it" in texts["empty"]


@pytest.mark.parametrize("name", ["manifest.json", "model", "state"])
def test_verify_reports_a_link_in_the_place_of_a_part(tmp_path: Path, name: str):
    save(tmp_path / "run", 10)
    step = tmp_path / "run" / STEP
    (step / name).rename(tmp_path / "away")
    (step / name).symlink_to(tmp_path / "away")
    [finding] = verify_checkpoint(step).findings
    assert finding.file == step / name and f"is a symbolic link to {tmp_path / 'away'}" in finding.text


def test_verify_reports_a_step_that_is_a_link(tmp_path: Path):
    save(tmp_path / "other", 10)
    link(tmp_path / "run" / STEP, tmp_path / "other" / STEP)
    [finding] = verify_checkpoint(tmp_path / "run" / STEP).findings
    assert finding.file == tmp_path / "run" / STEP and "is a symbolic link to" in finding.text
    link(tmp_path / "best", tmp_path / "other" / STEP)
    assert verify_checkpoint(tmp_path / "best").is_valid, "whoever names a checkpoint may do so through a link"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "is a FIFO, not a file"),
        (os.mkdir, "is a folder, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
        (lambda path: path.symlink_to("none"), "is a symbolic link that leads nowhere"),
        (lambda path: None, "is missing"),
    ],
)
@pytest.mark.parametrize(
    "name", ["model/tokenizer.json", "state/rank-00000.safetensors", "state/rank-00000.table.json"]
)
def test_what_is_no_file_is_called_what_it_is(tmp_path: Path, name: str, make: Callable[[Path], None], words: str):
    save(tmp_path, 10)
    path = tmp_path / STEP / name
    path.unlink()
    make(path)
    assert f"{path} {words}" in verify_checkpoint(tmp_path / STEP).findings[0].text
    chunk = Chunk("moment/a", (3, 2), (0, 0), torch.zeros(3, 2))
    with pytest.raises(CheckpointError, match=words):
        CheckpointManager(tmp_path, ParallelMesh.single().world).load(10, [chunk])
        step_folder.read_manifest(tmp_path / STEP)
        step_folder.check_sizes(tmp_path / STEP, step_folder.read_manifest(tmp_path / STEP).files)


def test_a_manifest_that_is_no_file_is_called_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save(tmp_path, 10)
    (tmp_path / STEP / "manifest.json").unlink()
    os.mkfifo(tmp_path / STEP / "manifest.json")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "manifest.json cannot be read: it is a FIFO, not a file" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=rf"{STEP}/manifest\.json is a FIFO, not a file.*Restore"):
        check_run_dirs(CheckpointConfig(load=str(tmp_path), save=str(tmp_path)))


def test_a_step_in_the_hub_cache_is_sound(tmp_path: Path):
    """Where every file is a link to a blob."""
    save(tmp_path / "run", 10)
    cache = tmp_path / "hub" / "models--me--mine"
    (cache / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in (tmp_path / "run").rglob("*") if p.is_file())):
        place = cache / "snapshots" / "0a1b" / path.relative_to(tmp_path / "run")
        (cache / "blobs" / f"{number:040x}").write_bytes(path.read_bytes())
        link(place, Path(os.path.relpath(cache / "blobs" / f"{number:040x}", place.parent)))
    folder = cache / "snapshots" / "0a1b"
    assert step_folder.latest_step(folder) == 10 and verify_checkpoint(folder / STEP).findings == ()


def test_latest_may_be_anything(tmp_path: Path):
    """A pipe would hang, and a device has no end."""
    save(tmp_path, 10)
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink("missing", path)):
        (tmp_path / step_folder.LATEST_FILE).unlink()
        make(tmp_path / step_folder.LATEST_FILE)
        assert step_folder.latest_step(tmp_path) == 10
