"""What a loop of one's own gets from `--load` and `--from`, what it is told, and what its checkpoints hold."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import petatron
from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.digested_file_io import Disk
from petatron.cli.main import main
from petatron.data.indexed_writer import IndexedWriter
from petatron.mesh.mesh import ParallelMesh
from tests.longform import diagonal

FLAGS = (
    "--tokenizer-type ByteTokenizer --mock-data --num-layers 1 --hidden-size 32 --num-attention-heads 2 --num-query-groups 2 "
    "--seq-length 16 --lr 1e-3 --global-batch-size 4 --train-iters 4 --eval-iters 0"
)
FIRST_STEPS = Path(__file__).parents[3] / "docs" / "first-steps.md"


def build(*flags: str) -> tuple[petatron.Run, petatron.Model]:
    run = petatron.load("tiny-llama", [*FLAGS.split(), *flags])
    return run, petatron.build_model(run, petatron.launch(run))


def train(run: petatron.Run, model: petatron.Model, optimizer: petatron.MasterOptimizer, **position) -> None:
    for _, batches in zip(range(2), petatron.build_loader(run, model.mesh, **position)):
        model.train_step(batches)
        optimizer.step()


def weights(model: petatron.Model) -> torch.Tensor:
    return torch.cat([weight.double() for group in model.param_groups for weight in group.weights()])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A checkpoint of two steps, and its weights."""
    folder = tmp_path_factory.mktemp("own") / "run"
    run, model = build()
    optimizer = petatron.build_optimizer(run, model)
    train(run, model, optimizer)
    petatron.save_checkpoint(folder, step=2, model=model, optimizer=optimizer)
    return folder, weights(model)


@pytest.mark.parametrize("start", ["--load", "--finetune --load", "--pretrained-checkpoint"])
def test_build_model_has_the_weights_that_the_run_starts_from(saved: tuple[Path, torch.Tensor], start: str):
    folder, expected = saved
    assert torch.equal(weights(build(*start.split(), str(folder))[1]), expected)
    assert not torch.equal(weights(build()[1]), expected)


def test_build_model_starts_from_a_hugging_face_folder(saved: tuple[Path, torch.Tensor]):
    flags = "--mock-data --lr 1e-3 --train-iters 2".split()
    run = petatron.load(None, ["--from", str(saved[0] / "step-00000002" / "model"), *flags])
    assert torch.equal(weights(petatron.build_model(run, petatron.launch(run))), saved[1])


def test_a_loop_that_forgets_to_restore_is_told_once(saved: tuple[Path, torch.Tensor], caplog):
    run, model = build("--load", str(saved[0]))
    with caplog.at_level(logging.WARNING):
        train(run, model, petatron.build_optimizer(run, model))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "data begins at the first sample again" in texts[0] and "has consumed 8" in texts[0]
    assert "petatron.restore(run, model, optimizer)" in texts[0]
    assert "optimizer state, loss scale and random states are not restored" in texts[1] and "--finetune" in texts[1]


@diagonal(2)
@pytest.mark.parametrize("how", ["restored", "finetune", "no optimizer", "weights only", "first start"])
def test_nothing_is_said_where_nothing_was_forgotten(
    saved: tuple[Path, torch.Tensor], tmp_path: Path, caplog, how: str
):
    folder, position = str(saved[0]), {}
    flags = {"finetune": ["--finetune"], "no optimizer": ["--no-load-optim"]}.get(how, [])
    if how == "weights only":
        petatron.save_checkpoint(tmp_path, step=0, model=build("--load", folder)[1])
        folder = str(tmp_path)
    if how == "first start":
        flags, folder = ["--save", str(tmp_path / "new")], str(tmp_path / "new")
    run, model = build("--load", folder, *flags)
    optimizer = petatron.build_optimizer(run, model)
    if how in ("restored", "no optimizer"):
        position["state"] = petatron.restore(run, model, optimizer)
        assert position["state"].progress.consumed_samples == 8
    with caplog.at_level(logging.WARNING):
        train(run, model, optimizer, **position)
    assert not [text for text in caplog.messages if "petatron.restore" in text]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loop_needs_no_validation_data_and_is_warned_on_one_rank(tmp_path: Path, caplog, rank: int):
    with IndexedWriter(str(tmp_path / "two"), np.dtype(np.uint16)) as writer:
        for _ in range(2):  # --split leaves none of them to validation and test
            writer.add_document(np.arange(7, dtype=np.uint16))
    flags = FLAGS.replace("--mock-data", f"--data-path {tmp_path}/two").replace(" --eval-iters 0", "")
    run = petatron.load("tiny-llama", [*flags.split(), "--eval-interval", "2"])
    mesh = ParallelMesh.single()
    mesh.rank = rank  # another rank of the same data
    with caplog.at_level(logging.WARNING):
        assert len(list(petatron.build_loader(run, mesh))) == 4
    few = [text for text in caplog.messages if "few tokens for training" in text or "many epochs" in text]
    assert len(few) == (1 if rank == 0 else 0) and len(caplog.messages) == len(few)


def test_weights_that_were_changed_before_the_optimizer_was_built_stay_changed(saved: tuple[Path, torch.Tensor]):
    run, model = build("--pretrained-checkpoint", str(saved[0]), "--bf16")
    model.module.norm.weight.data.fill_(3.0)
    petatron.build_optimizer(run, model)
    assert bool((model.module.norm.weight == 3.0).all())


def test_another_model_is_refused_before_it_trains(saved: tuple[Path, torch.Tensor]):
    with pytest.raises(CheckpointError, match=r"is of another model .*norm_epsilon"):
        build("--load", str(saved[0]), "--norm-epsilon", "0.1")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        build("--load", str(tmp_path))


def test_an_exported_model_is_replaced_only_on_request(saved: tuple[Path, torch.Tensor], tmp_path: Path, monkeypatch):
    first, trained = build()[1], build("--load", str(saved[0]))[1]
    first.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "old.txt").touch()
    with pytest.raises(CheckpointError, match="nothing is written over it"):
        trained.save_pretrained(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "rename", _full_disk)
        with pytest.raises(CheckpointError, match="cannot be written: no space"):
            trained.save_pretrained(tmp_path / "model", overwrite=True)
    assert (tmp_path / "model" / "old.txt").exists(), "what is there stays until the new one is complete"
    trained.save_pretrained(tmp_path / "model", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and not (tmp_path / "model" / "old.txt").exists()
    assert torch.equal(weights(petatron.from_pretrained(tmp_path / "model")), saved[1])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="nothing is written over it"):
        trained.save_pretrained(tmp_path / "other", overwrite=True)


def _full_disk(disk: Disk, old: Path, new: Path) -> None:
    if new.name == "model" and new.parent != old.parent:  # the folder's own, at the end
        raise OSError(28, "no space")
    old.rename(new)


def test_facts_of_a_loop_come_back(tmp_path: Path):
    model = build()[1]
    petatron.save_checkpoint(tmp_path, step=1, model=model, metadata={"note": [1, 2]})
    assert petatron.load_checkpoint(str(tmp_path), model=model) == {"note": [1, 2]}


def test_the_loop_of_the_readme_ends_in_a_model_that_generates(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [loop] = [
        block
        for block in re.findall(r"```python\n(.*?)```", FIRST_STEPS.read_text(), re.DOTALL)
        if "train_step" in block
    ]
    exec(compile(loop, FIRST_STEPS.name, "exec"), {})
    capsys.readouterr()
    assert main(["generate", "runs/mine", "--prompt", "def ", "--max-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip()
