"""Log-probabilities of the reference that are stored beside the data train as those of a live one, and no reference is in memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import petatron
from petatron.base.errors import ConfigError, DataError
from petatron.config import LoadedConfig
from petatron.data import stored_outputs
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train import stored_role_outputs
from petatron.train.check_and_open_run import OpenedRun, check_start, open_run
from petatron.train.train_step import train_step
from petatron.validate import load_config
from tests.dist import RankPool
from tests.heard import heard
from tests.parity.harness import TINY, tiny_run, train
from tests.parity.models import test_preference_objectives as preferences

folder = preferences.folder
"""A model to start from, pairs, and answers that are desirable or not."""

LOG = "petatron.train.stored_role_outputs"


def load(folder: Path, objective: str, flags: str = "", world_size: int = 1) -> LoadedConfig:
    data = folder / ("single.jsonl" if objective == "kto" else "pairs.jsonl")
    micro = 4 // (2 if "--dp 2" in flags else 1)
    words = (
        f"{TINY} --fp64 {preferences._TEXT} --no-mock-data --data-path {data} --split 80,20,0 --pretrained-checkpoint {folder}/start "
        f"--micro-batch-size {micro} --global-batch-size 8 --train-iters 3 {preferences.OBJECTIVES[objective]}"
    )
    return load_config(f"{words} {flags}".replace("--mock-data ", "", 1).split(), world_size=world_size)


def open_here(loaded: LoadedConfig) -> OpenedRun:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return open_run(check_start(loaded), ParallelMesh(Layout.from_config(loaded.config.parallel), rank))


def losses(loaded: LoadedConfig) -> list[float]:
    """Returns the losses and gradient norms of three steps, the mean losses of an evaluation, and how many references are in memory."""
    torch.set_num_threads(1)
    opened, values = open_here(loaded), list[float]()
    for number in range(3):
        metrics = train_step(opened.state, opened.loaders.train.next_step(8, 8 * number))
        values += [float(metrics.loss), float(metrics.grad_norm or 0.0)]
    if opened.loaders.valid:
        sums, counts = opened.state.model.evaluate_losses(opened.loaders.valid[None].next_step(8, 0))
        values += (sums / counts).tolist()
    return [len(opened.state.model.role_models), *values]


CACHED = "--objective-settings {settings} cache_reference=true --data-cache-path {cache}"
SETTINGS = {"dpo": "beta=0.5 chosen_weight=0.2", "kto": "beta=0.5"}


def cached(folder: Path, objective: str, cache: Path, flags: str = "", world_size: int = 1) -> LoadedConfig:
    added = CACHED.format(settings=SETTINGS[objective], cache=cache)
    return load(folder, objective, f"{added} {flags}", world_size)


@pytest.mark.parametrize(
    ("objective", "layout", "world_size"),
    [
        ("dpo", "", 1),
        ("kto", "", 1),
        ("dpo", "--eval-iters 1 --eval-interval 3", 1),
        ("dpo", "--cp 2", 2),
        ("dpo", "--pp 2", 2),
        ("dpo", "--tp 2 --sequence-parallel", 2),
        ("kto", "--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
    ],
)
def test_a_cached_reference_trains_as_a_live_one(
    ranks: RankPool,
    folder: Path,
    tmp_path: Path,
    objective: str,
    layout: str,
    world_size: int,
):
    evaluates = layout if layout.startswith("--eval") else ""
    live = losses(load(folder, objective, evaluates))
    run = cached(folder, objective, tmp_path / "cache", layout, world_size)
    for parts in (
        (ranks.run(losses, world_size, run) for _ in range(2)) if world_size > 1 else ([losses(run)] for _ in "12")
    ):
        for found in parts:
            assert found[0] == 0 and live[0] == 1
            assert found[1:] == pytest.approx(live[1:], rel=1e-9, abs=1e-12)


def test_a_second_run_opens_no_reference(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of all pairs, in another order and batch size; one of other weights has a cache of its own."""
    with heard(LOG) as lines:
        open_here(cached(folder, "dpo", tmp_path, "--train-iters 20"))
    assert "outputs for the texts of this run are computed once" in lines[0]
    assert lines[1].startswith("reference: 0 stored outputs were there")
    other = f"--objective-settings beta=0.5 cache_reference=true reference={other_weights(folder, tmp_path)}"
    with heard(LOG) as lines:
        open_here(cached(folder, "dpo", tmp_path, f"--train-iters 20 {other}"))
    assert lines[1].startswith("reference: 0 stored outputs were there")
    monkeypatch.setattr(stored_role_outputs, "open_frozen_model", lambda *_: pytest.fail("a reference is opened"))
    with heard(LOG) as lines:
        open_here(cached(folder, "dpo", tmp_path, "--train-iters 20 --seed 5 --micro-batch-size 2"))
    assert len(lines) == 1 and ", 0 are computed" in lines[0]


def other_weights(folder: Path, place: Path) -> Path:
    run = tiny_run(f"{preferences._TEXT} --seed 8", dtype="float64")
    petatron.save_checkpoint(place / "other", step=1, model=petatron.build_model(run, ParallelMesh.single()))
    return place / "other"


def test_a_pass_that_was_killed_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compute, calls = stored_role_outputs.compute_outputs, []

    def killed(*arguments: Any) -> None:
        compute(*arguments)
        arguments[3].flush()
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(stored_role_outputs, "compute_outputs", killed)
    with pytest.raises(KeyboardInterrupt):
        open_here(cached(folder, "dpo", tmp_path))
    monkeypatch.setattr(stored_role_outputs, "compute_outputs", compute)
    with heard(LOG) as lines:
        open_here(cached(folder, "dpo", tmp_path))
    found, computed = (int(number) for number in re.findall(r"(\d+) (?:stored|are computed)", lines[1]))
    assert 0 < found < computed + found


def test_data_without_a_place_for_a_cache_is_refused(folder: Path, tmp_path: Path):
    settings = "--objective dpo --objective-settings cache_reference=true"
    run = load_config(f"{TINY} --fp64 {preferences._TEXT} --pretrained-checkpoint {folder}/start {settings}".split())
    with pytest.raises(DataError, match="is kept beside the data, and there is no folder for it"):
        open_here(run)
    with pytest.raises(DataError, match=r"are not in the batch\. `petatron train` computes them"):
        train(run.config)  # a loop of one's own


def test_other_data_than_files_is_refused(folder: Path, tmp_path: Path):
    opened = open_here(cached(folder, "dpo", tmp_path))
    loaders: Any = replace(opened.loaders, train=object())
    with pytest.raises(ConfigError, match="is of files, and this run has other data"):
        stored_role_outputs.attach_stored_outputs(opened.state.run, opened.state.model, loaders, train_samples=8)


def test_texts_without_an_entry_are_refused(folder: Path, tmp_path: Path):
    opened = open_here(cached(folder, "dpo", tmp_path))
    store = stored_outputs.StoredOutputs(tmp_path, {})
    opened.loaders.train.extend_batches(stored_outputs.batch_extension(store, "segment", ("reference_log_probs",)))
    with pytest.raises(
        DataError, match=r"has no outputs for .* texts of a micro-batch: they were stored for other data"
    ):
        opened.loaders.train.next_step(8, 0)


def test_a_damaged_folder_is_refused(folder: Path, tmp_path: Path):
    open_here(cached(folder, "dpo", tmp_path))
    [keys] = tmp_path.glob("reference-*/*-keys.npy")
    np.save(keys, np.zeros((3, 16), np.uint8))
    with pytest.raises(DataError, match="has other entries than keys"):
        open_here(cached(folder, "dpo", tmp_path))
    with pytest.raises(DataError, match=r"has no stored-outputs\.json"):
        stored_outputs.StoredOutputs.open(tmp_path)
