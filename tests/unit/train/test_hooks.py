"""What runs do beside their steps: garbage collection, checks of replicas, timers, the progress file, energy, memory."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.base.errors import TrainError
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.cli.main import main
from petatron.config import RunConfig
from petatron.config.schema.data import TokenizerConfig
from petatron.data.tokenizer import build_tokenizer
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.pretrained.model_reader import ModelReader, open_model_reader
from petatron.pretrained.stored_training_state import TrainingState
from petatron.train.hooks.energy import EnergyMeter
from petatron.train.hooks.megatron_copies import megatron_copy_problems
from petatron.train.hooks.memory_hooks import MemoryHistory, UnusedMemory
from petatron.train.hooks.replica_check import ReplicaCheck
from petatron.train.hooks.rerun_validation import ResultValidation
from petatron.train.hooks.step_hook import StepHook
from petatron.train.report.log_records import StepMetrics
from petatron.train.report.metric_writers import tagged_scalars
from petatron.train.state.train_state import TrainState
from petatron.train.training_loop import TrainingResult
from tests.dist import RankPool
from tests.parity.harness import tiny_run
from tests.unit.train.test_loop import Memory, weights
from tests.unit.train.test_loop import finish as finish_run

STEP = StepMetrics(iteration=2, consumed_samples=1, tokens=1, loss=1.0, lr=1.0, global_batch_size=1)


def finish(flags: str) -> tuple[TrainState, TrainingResult, Memory]:
    return finish_run(f"--lr-warmup-iters 0 {flags}")


def test_manual_gc_collects_at_its_interval_alone(monkeypatch: pytest.MonkeyPatch):
    collected: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(gc.isenabled()))
    finish("--train-iters 4 --manual-gc --manual-gc-interval 2")
    assert collected == [False] * 3, "at the start, and after iterations 2 and 4"
    assert gc.isenabled()
    finish("--train-iters 2 --manual-gc --eval-interval 2 --eval-iters 1")
    assert len(collected) == 3 + 1 + 2 * 2, "before and after the evaluations of validation and test data"
    finish("--train-iters 2 --manual-gc --no-manual-gc-eval --eval-interval 2 --eval-iters 1")
    assert len(collected) == 8 + 1


def test_no_hook_changes_a_number(tmp_path: Path):
    plain, _, _ = finish("--train-iters 3")
    flags = "--manual-gc --timing-log-level 2 --log-straggler --check-weight-hash-across-dp-replicas-interval 1"
    observed, _, _ = finish(f"--train-iters 3 {flags} --log-progress --save {tmp_path}")
    torch.testing.assert_close(weights(observed), weights(plain), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("option", "heading", "line"),
    [
        ("max", "max time across ranks (ms):", r"    forward-backward \.+: \d+\.\d\d"),
        ("minmax", "(min, max) time across ranks (ms):", r"    forward-backward \.+: \(\d+\.\d\d, \d+\.\d\d\)"),
        ("all", "times across ranks (ms):", r"    forward-backward:\n     rank  0: \d+\.\d\d"),
    ],
)
def test_timers_are_logged_by_option(option: str, heading: str, line: str):
    _, _, writer = finish(f"--train-iters 2 --timing-log-level 1 --timing-log-option {option}")
    timed = [record for record in writer.records if "times_ms" in record]
    assert len(timed) == 2 and list(timed[0]["times_ms"]) == ["batch-generator", "forward-backward", "optimizer"]
    assert timed[0]["message"].startswith(heading)
    assert re.search(line, timed[0]["message"])
    assert tagged_scalars(timed[0]) == {}


def test_level_two_times_passes_and_tensorboard_gets_the_largest():
    _, _, writer = finish("--train-iters 1 --timing-log-level 2 --log-timers-to-tensorboard")
    [timed] = [record for record in writer.records if "times_ms" in record]
    times = timed["times_ms"]
    assert times["forward-compute"] > 0 and times["backward-compute"] > 0
    assert times["forward-compute"] + times["backward-compute"] <= times["forward-backward"]
    assert tagged_scalars(timed)["optimizer-time"] == pytest.approx(times["optimizer"] / 1000)


def test_stragglers_are_named():
    _, _, writer = finish("--train-iters 1 --log-straggler")
    [record] = [record for record in writer.records if "compute_ms" in record]
    assert record["message"].startswith("compute time per iteration: slowest rank 0 (") and record["compute_ms"][0] > 0


def test_progress_file_has_starts_and_checkpoints(tmp_path: Path):
    finish(f"--train-iters 2 --save-interval 1 --log-progress --save {tmp_path}")
    lines = [line.split("\t") for line in (tmp_path / "progress.txt").read_text().splitlines()]
    assert [line[2:4] for line in lines] == [
        ["Starting job", "Iteration: 0"],
        ["Saved checkpoint", "Iteration: 1"],
        ["Saved checkpoint", "Iteration: 2"],
    ]
    assert (
        lines[1][1] == "# GPUs: 1" and "TFLOP/s/GPU" in lines[1][4] and lines[2][6].startswith("Tokens (in billions)")
    )


def _build(run: RunConfig) -> TrainState:
    return TrainState.build(run, ParallelMesh(Layout.from_config(run.parallel), dist.get_rank()))


def replica_check(flags: str) -> str:
    state = _build(tiny_run(flags, world_size=2))
    check = ReplicaCheck(state.model, 2)
    check.after_step(STEP)
    if dist.get_rank() == 1:
        next(iter(state.model.module.parameters())).data.view(-1)[0] += 1
    try:
        check.after_step(STEP)
    except TrainError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("flags", ["--dp 2", "--dp 2 --use-distributed-optimizer"])
def test_a_replica_with_other_weights_stops_the_run(ranks: RankPool, flags: str):
    told = ranks.run(replica_check, 2, flags)
    assert all("After iteration 2 the weights of rank 1 differ from those of its replicas" in text for text in told)


def test_energy_is_the_mean_of_the_gpus_since_the_last_log_point():
    joules, clock = iter([100.0, 160.0]), iter([0.0, 3.0])
    meter = EnergyMeter(lambda: next(joules), ParallelMesh.single().control, clock=lambda: next(clock))
    meter.after_step(STEP)
    meter.after_step(STEP)
    [record] = meter.records(2)
    assert tagged_scalars(record) == {"iter-energy/gpu": 30.0, "power/gpu": 20.0}
    assert list(meter.records(2)) == [], "no step since"


@pytest.mark.parametrize(("level", "calls"), [(1, 1), (2, 2)])
def test_unused_memory_is_returned_by_level(monkeypatch: pytest.MonkeyPatch, level: int, calls: int):
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    hook = UnusedMemory(level)
    hook.before_update(1)
    hook.after_step(STEP)
    assert len(emptied) == calls


def test_memory_history_is_written_at_log_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    recorded: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: recorded.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("history"))
    hook = MemoryHistory(tmp_path / "snapshot.pickle")
    [record] = hook.records(5)
    hook.close()
    assert (tmp_path / "snapshot.pickle").read_text() == "history" and "snapshot.pickle" in record["message"]
    assert recorded[-1] == {"enabled": None}


def test_what_measures_a_gpu_says_that_there_is_none(caplog: pytest.LogCaptureFixture):
    finish("--train-iters 1 --log-energy --empty-unused-memory-level 1")
    told = [record.message for record in caplog.records if "has no effect: the CPU computes" in record.message]
    assert [line.split()[0] for line in told] == ["--empty-unused-memory-level", "--log-energy"]


def test_a_hook_that_does_nothing_is_one():
    hook: StepHook = StepHook()
    assert isinstance(hook.records(1), Iterator) and list(hook.records(1)) == []


RERUN = "--train-iters 4 --rerun-mode validate_results --error-injection-rate 1 --error-injection-type"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("transient_error", "another result on rank 0 when it ran again: a transient error. The second result is used"),
        ("persistent_error", "and the same when it ran again"),
        ("correct_result", "and the same when it ran again"),
    ],
)
def test_a_suspicious_iteration_runs_again(kind: str, told: str):
    plain, _, before = finish("--train-iters 4 --hidden-dropout 0.1")
    reran, _, after = finish(f"{RERUN} {kind} --hidden-dropout 0.1")
    torch.testing.assert_close(weights(reran), weights(plain), rtol=0, atol=0)
    assert after.column("lm_loss") == before.column("lm_loss")
    events = [text for text in after.column("message", "event") if f"an injected {kind} on rank 0" in text]
    assert len(events) == 4 and all(told in text for text in events)


def test_every_iteration_runs_twice_for_statistics():
    _, _, writer = finish("--train-iters 2 --rerun-mode report_stats")
    assert [record["reran"] for record in writer.records if "reran" in record] == [1, 1]
    assert [record["differing"] for record in writer.records if "reran" in record] == [0, 0]


@pytest.mark.parametrize(
    ("flag", "result", "what"),
    [
        ("--check-for-spiky-loss", (11.0, 1.0), "a loss of 1.1"),
        ("--check-for-large-grads", (1.0, 11.0), "gradients with a norm of 11.000"),
        ("--check-for-nan-in-loss-and-grad", (float("nan"), 1.0), "not finite"),
    ],
)
def test_checks_say_what_is_suspicious(flag: str, result: tuple[float, float], what: str):
    run = tiny_run(f"--rerun-mode validate_results {flag}")
    validation = ResultValidation(run.train, TrainState.build(run, ParallelMesh.single()).model)
    assert validation._suspicion((1.0, 1.0), 1) == ""
    validation._remember((1.0, 1.0))
    assert what in validation._suspicion(result, 1)
    assert validation._suspicion((9.0, 9.0), 1) == ""


ROPE = "--position-embedding-type rope --untie-embeddings-and-output-weights"


@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_megatron_copies_have_weights_and_optimizer_state_and_follow_pruning(tmp_path: Path, flags: str):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    saves = f"--save {ours} --save-megatron {theirs} --save-interval 1 --save-total-limit 2 {flags}"
    (theirs / "copy_of_2").mkdir(parents=True)  # of a run that was killed
    finish(f"--train-iters 3 {ROPE} {saves}")
    assert sorted(path.name for path in theirs.iterdir()) == [
        "iter_0000002",
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]
    sources = [open_model_reader(folder) for folder in (ours, theirs)]
    assert [source.step for source in sources] == [3, 3]
    states = [source.open_training() for source in sources if source.open_training is not None]
    assert len(states) == 2 and states[0].updates == states[1].updates == 3
    wanted, copied = (_tensors(source, state) for source, state in zip(sources, states, strict=True))
    assert wanted.keys() <= copied.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, copied[name]), name


def _tensors(source: ModelReader, state: TrainingState) -> dict[str, torch.Tensor]:
    tensors = {key: torch.empty(shape) for key, shape in (*source.shapes.items(), *state.shapes.items())}
    for fill, shapes in ((source.fill, source.shapes), (state.fill, state.shapes)):
        fill([Chunk(key, shapes[key], (0,) * len(shapes[key]), tensors[key]) for key in shapes])
    return tensors


def test_the_tokenizer_is_beside_megatron_copies(tmp_path: Path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    flags = "--preset tiny-llama --mock-data --lr 1e-3 --train-iters 1 --eval-iters 0 --tokenizer-type ByteTokenizer --device cpu"
    assert main(["train", *flags.split(), "--save", str(ours), "--save-megatron", str(theirs)]) == 0
    copied = {path.name: path.read_bytes() for path in theirs.iterdir() if path.is_file()}
    assert {"tokenizer.json", "tokenizer_config.json"} <= copied.keys() and "generation_config.json" not in copied
    (saved,) = ours.rglob("tokenizer.json")
    assert copied["tokenizer.json"] == saved.read_bytes()
    assert build_tokenizer(TokenizerConfig(tokenizer_model=str(theirs))).encode("hé") == [104, 195, 169]


def test_a_megatron_copy_that_fails_costs_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    _, result, _ = finish(
        f"--train-iters 1 {ROPE} --save {tmp_path / 'ours'} --save-megatron {tmp_path / 'file' / 'inside'}"
    )
    assert result.iteration == 1
    assert "Megatron's files of iteration 1 were not written" in caplog.text and "--to megatron --step 1" in caplog.text


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--optimizer lion", "the state of --optimizer lion"),
        ("--no-save-optim", "--no-save-optim"),
        ("--freeze *norm*", "frozen parameters"),
    ],
)
def test_megatron_copies_without_optimizer_state_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: str, text: str
):
    caplog.set_level("INFO")
    finish(f"--train-iters 1 {ROPE} {flags} --save {tmp_path / 'ours'} --save-megatron {tmp_path / 'theirs'}")
    assert f"(weights alone: {text}" in caplog.text or text in caplog.text.partition("weights alone")[2]
    assert open_model_reader(tmp_path / "theirs").step == 1


def test_a_model_without_a_form_in_megatron_is_refused_before_it_trains(tmp_path: Path):
    run = tiny_run(f"--save {tmp_path} --save-megatron {tmp_path / 'theirs'} --scale-embeddings {ROPE}")
    [problem] = megatron_copy_problems(run)
    assert problem.where == "--save-megatron" and "--scale-embeddings" in problem.rule
    assert not list(megatron_copy_problems(tiny_run(f"--save {tmp_path} --scale-embeddings {ROPE}")))
