"""The config.yaml of a run: absolute paths, and no answer to a question that only one start was asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.config import RunConfig
from petatron.config.saved_config import path_fields, saved_yaml
from petatron.validate import load_config
from tests.longform import diagonal

MOCK = "--preset tiny-llama --mock-data --lr 1e-3 --train-iters 4".split()


def reloaded(folder: Path, argv: list[str]) -> RunConfig:
    """What a saved config says, read from another folder."""
    file = folder / "config.yaml"
    file.write_text(saved_yaml(load_config(argv, require_training=False)))
    return load_config(files=[file], require_training=False).config


@diagonal(2)
@pytest.mark.parametrize("name", [info.name for info in path_fields() if "private" not in info.marks])
def test_every_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    info = next(info for info in path_fields() if info.name == name)
    more = {
        "vocab_file": "--merge-file m",
        "merge_file": "--vocab-file v",
        "sample_prompts": "--sample-interval 2 --tokenizer-type ByteTokenizer",
        "eval_tasks": "--eval-tasks-interval 2 --tokenizer-type ByteTokenizer",
        "rollout_prompts": "--global-batch-size 8 --max-answer-tokens 16",
    }.get(name, "").split()
    source = [word for word in MOCK if word != "--mock-data"]
    run = reloaded(tmp_path, [*source, info.flag, "some/where", *more])
    value = getattr(getattr(run, info.section), name)
    assert value == ((str(tmp_path / "some/where"),) if info.is_list else str(tmp_path / "some/where"))


def test_experts_go_on_with_tensor_parallelism(tmp_path: Path):
    """Nobody chose to have no sequence parallelism at tp 1, and at tp 2 experts need it."""
    file = tmp_path / "config.yaml"
    file.write_text(saved_yaml(load_config([*MOCK, "--num-experts", "4"])))
    assert load_config(["--tp", "2"], files=[file], world_size=2).config.parallel.sequence_parallel


def test_weights_of_a_blend_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--data-path", "0.3", "a", "0.7", "/data/b"]
    run = reloaded(tmp_path, [*(word for word in MOCK if word != "--mock-data"), *flags])
    assert run.data.data_path == ("0.3", f"{tmp_path}/a", "0.7", "/data/b")
    assert run.data.data_cache_path == str(tmp_path / "cache")


@pytest.mark.parametrize("text", ["1 a 2 /data/b", "1 /data/a 2 /data/b"])
def test_a_list_of_relative_prefixes_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.txt").write_text(text)
    source = [word for word in MOCK if word != "--mock-data"]
    data = reloaded(tmp_path, [*source, "--data-args-path", "list.txt"]).data
    if text.startswith("1 a"):
        assert (data.data_args_path, data.data_path) == (None, ("1", f"{tmp_path}/a", "2", "/data/b"))
    else:
        assert (data.data_args_path, data.data_path) == (str(tmp_path / "list.txt"), ())


@pytest.mark.parametrize(("load", "continues"), [("run", True), ("../here/run", True), ("other", False)])
def test_what_was_meant_for_one_start_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str, continues: bool
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    flags = f"--save run --load {load} --override-opt-param-scheduler --ckpt-step 2 --no-load-optim --no-load-rng"
    checkpoint = reloaded(here, [*MOCK, *flags.split()]).checkpoint
    assert checkpoint.override_opt_param_scheduler is False
    kept = (checkpoint.ckpt_step, checkpoint.no_load_optim, checkpoint.no_load_rng)
    assert kept == ((None, False, False) if continues else (2, True, True))
    assert "# override_opt_param_scheduler: true  (for that start only;" in (here / "config.yaml").read_text()


def test_defaults_of_a_saved_config_have_no_notice(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(saved_yaml(load_config(MOCK)))
    assert [notice for notice in load_config(files=[file]).notices if "no effect" in notice] == []
    file.write_text(saved_yaml(load_config([*MOCK, "--memory-snapshot-path", "given.pickle"])))
    [notice] = [notice for notice in load_config(files=[file]).notices if "no effect" in notice]
    assert notice.startswith("memory_snapshot_path")


def test_a_default_path_that_has_an_effect_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = reloaded(tmp_path, [*MOCK, "--record-memory-history"])
    assert run.log.memory_snapshot_path == str(tmp_path / "snapshot.pickle")
