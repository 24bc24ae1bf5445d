"""A checkpoint of every format version must load for ever, bit by bit, and be readable from its documentation alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.checkpoint.files.safetensors_file import DTYPES
from petatron.checkpoint.inspect.summarize_checkpoint import summarize_checkpoint
from petatron.checkpoint.inspect.verify_checkpoint import verify_checkpoint
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.state.train_state import TrainState
from petatron.validate import load_config
from tests.dist import RankPool
from tests.golden.make_checkpoint import LAYOUT, MODEL, RUN, STEP
from tests.golden.reader import digests, read_checkpoint
from tests.heard import heard
from tests.longform import diagonal

VERSIONS = sorted((Path(__file__).parents[2] / "golden").glob("checkpoint-v*"))


def expected(folder: Path) -> dict[str, str]:
    return json.loads((folder / "expected.json").read_text())


def step_folder(folder: Path) -> Path:
    return folder / f"step-{STEP:08d}"


def test_there_is_one():
    assert VERSIONS


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda p: p.name)
def test_verification_accepts_it(folder: Path):
    report = verify_checkpoint(step_folder(folder))
    assert report.is_valid, report.findings
    assert report.num_files == len([path for path in step_folder(folder).rglob("*") if path.is_file()]) - 1


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda p: p.name)
def test_no_temporary_folder_is_in_it(folder: Path):
    config = json.loads((step_folder(folder) / "manifest.json").read_text())["facts"]["facts"]["config"]
    assert {config["checkpoint"]["save"], config["log"]["log_dir"]} <= {"run", "/golden/run"}


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda p: p.name)
def test_the_documentation_suffices_to_read_it(folder: Path):
    assert digests(read_checkpoint(step_folder(folder))) == expected(folder)


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda p: p.name)
def test_every_tensor_loads_bitwise_on_one_rank(folder: Path):
    tensors = {
        facts.key: torch.full(facts.shape, 7, dtype=DTYPES[facts.dtype])
        for facts in summarize_checkpoint(step_folder(folder)).tensors
    }
    chunks = [Chunk(key, tuple(value.shape), (0,) * value.dim(), value) for key, value in tensors.items()]
    loaded = CheckpointManager(folder, ParallelMesh.single().world).load(None, chunks)
    assert digests(tensors) == expected(folder)
    assert (loaded.step, loaded.local) == (STEP, None)


def warnings_of_a_load(folder: str) -> list[str]:
    run = load_config(f"{MODEL} {RUN} --dp 2".split(), preset="tiny-gpt", world_size=2).config
    with heard("petatron.checkpoint.inspect.check_model_folder") as messages:
        mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
        assert TrainState.build(run, mesh).load(folder)
    return messages


@diagonal(3)
@pytest.mark.parametrize("folder", VERSIONS, ids=lambda p: p.name)
def test_damage_of_the_copy_that_no_rank_loads_is_told_by_the_first(folder: Path, ranks: RankPool, tmp_path: Path):
    assert ranks.run(warnings_of_a_load, 2, str(folder)) == [[], []]
    copied = Path(shutil.copytree(folder, tmp_path / "run"))
    names = ("model.safetensors", "generation_config.json")
    for name in names:
        path = step_folder(copied) / "model" / name
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)
    told, others = ranks.run(warnings_of_a_load, 2, str(copied))
    assert others == [] and len(told) == 2 and all(any(name in text for text in told) for name in names)


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda p: p.name)
def test_a_run_in_another_layout_continues_from_it(folder: Path):
    assert "--tp 2" in LAYOUT
    run = load_config(f"{MODEL} {RUN}".split(), preset="tiny-gpt").config
    state = TrainState.build(run, ParallelMesh.single())
    assert state.load(str(folder))
    assert (state.progress.iteration, state.progress.consumed_samples) == (STEP, 4 * STEP)
    found = {f"master/{piece.name}": view for _, piece, view in state.optimizer.master_weights()}
    found |= {f"{kind}/{piece.name}": view for kind, _, piece, view in state.optimizer.moments()}
    wanted = {key: digest for key, digest in expected(folder).items() if not key.startswith("model/")}
    assert digests(found) == wanted
