"""Whether a run is running, finished, stopped or failed; its settings with origins."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from petatron.config.layout_and_precision_text import layout_text
from petatron.history.run_folder import open_run
from petatron.history.run_state import is_locked, run_state
from petatron.history.run_summary import common_step_losses, result_differences, setting_differences, summarize_run
from tests.unit.history.run_files import START_S, event, finished_run, train, valid, write_run

STOPPED = event("stopping at iteration 20: SIGTERM", 20)
SUMMARY = {"kind": "summary", "iteration": 20, "outcome": "SIGTERM"}


@pytest.mark.parametrize(
    ("records", "age_s", "state"),
    [
        (finished_run(), 1e6, "finished"),
        (finished_run()[:-1], 1e6, "finished"),
        ([train(10), train(20), STOPPED], 1.0, "stopped"),
        ([train(10), train(20), SUMMARY], 1.0, "stopped"),
        ([train(10), train(20), SUMMARY, train(30)], 1e6, "failed"),
        ([train(10), train(20), STOPPED, train(30)], 1e6, "failed"),
        ([train(10), train(20)], 60.0, "running"),
        ([train(10), train(20)], 350.0, "running"),  # 100 s per log interval: four of them may pass
        ([train(10), train(20)], 1e6, "failed"),
        ([], 0.0, "empty"),
    ],
)  # fmt: skip
def test_the_state_follows_from_the_records(tmp_path: Path, records: list[dict[str, Any]], age_s: float, state: str):
    timed = [{**record, "time": START_S} for record in records]
    metrics = open_run(write_run(tmp_path, timed)).metrics
    assert run_state(metrics, locked=False, now_s=START_S + age_s)[0] == state
    assert run_state(metrics, locked=True, now_s=START_S + age_s)[0] == "running"


def test_a_held_lock_is_seen_without_taking_it(tmp_path: Path):
    run = write_run(tmp_path, [train(10)])
    assert not is_locked(run)
    with (run / ".lock").open("w") as file:
        assert not is_locked(run)
        fcntl.flock(file, fcntl.LOCK_EX)
        if "FLOCK" not in Path("/proc/locks").read_text():
            pytest.skip("this kernel lists no locks")
        assert is_locked(run) and open_run(run).state == "running"
    assert not is_locked(run)


def test_settings_have_the_origin_that_the_start_recorded(tmp_path: Path):
    run = open_run(write_run(tmp_path, finished_run(), "--seq-length", "32"))
    values = run.settings.values
    assert (values["optim.lr"].text, values["optim.lr"].origin) == ("0.001", "--lr")
    assert values["model.num_layers"].origin == "preset tiny-llama"
    assert values["model.seq_length"].origin == "set", "nothing was recorded for it"
    assert (
        values["model.kv_channels"].origin == "derived: hidden size / heads" and values["model.kv_channels"].value == 16
    )
    assert values["optim.clip_grad"].is_default
    assert run.layout == "1 rank"


def test_a_layout_is_named_by_its_axes():
    sizes = {"tensor_model_parallel_size": 2, "data_parallel_size": 4, "world_size": 8, "context_parallel_size": 1}
    assert layout_text({**sizes, "data_parallel_sharding_strategy": "optim"}) == "tp 2, dp 4, optim sharded, 8 ranks"
    assert layout_text({"world_size": "many", "tensor_model_parallel_size": "x"}) == "1 rank"


def test_two_runs_are_compared_by_what_differs(tmp_path: Path):
    first = open_run(write_run(tmp_path / "a", finished_run()))
    second = open_run(write_run(tmp_path / "b", [train(1), train(50, 3.25)], "--num-layers", "3"))
    settings = {row.name: row for row in setting_differences(first, second)}
    assert "optim.lr" not in settings
    assert (settings["model.num_layers"].second, settings["model.num_layers"].second_origin) == ("3", "set")
    results = {row.name: (row.first, row.second) for row in result_differences(first, second)}
    assert results["last loss"] == ("2.05", "3.25") and results["steps"] == ("100 of 100", "50 of 100")
    assert results["loss at step 50"] == ("2.1", "3.25")
    assert common_step_losses([first, open_run(write_run(tmp_path / "c", [event("x", 0)]))]) is None


def test_a_run_is_summed_up(tmp_path: Path):
    found = summarize_run(open_run(write_run(tmp_path, [*finished_run(), valid(100, 2.0, split="test")])))
    assert (found.iteration, found.train_iters, found.consumed_tokens) == (100, 100, 100_000)
    assert (found.best_validation_iteration, found.best_validation_loss) == (100, 2.55)
    assert found.test_loss == 2.0 and found.first_loss == 7.0 and found.training_s == 1000.0
    assert found.peak_memory_bytes == 61_230_000_000
