"""The step and the loop: batch sizes, lengths, early ends, numbers that are not finite, evaluation that only looks."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import petatron
from petatron.base.device import detect_device
from petatron.base.errors import TrainError
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.manager import CheckpointManager
from petatron.config import RunConfig
from petatron.config.pipeline_stages import PipelineStage
from petatron.data.batch_loader import BatchLoader
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.decoder import Decoder
from petatron.models.decoder_spec import DecoderSpec
from petatron.models.stage_inputs_outputs import LossSpec, ModelIO, StageOutput
from petatron.train.build_run import RunLength, build_loaders
from petatron.train.evaluate_loss import EvaluatedLosses, evaluate
from petatron.train.report.log_records import MetricRecord
from petatron.train.state.train_state import TrainState
from petatron.train.training_loop import TrainingResult, TrainLoop
from petatron.validate import load_config
from tests.dist import RankPool
from tests.load_deadline import scaled
from tests.parity.harness import TINY, tiny_run

SMALL = "--num-layers 1 --seq-length 8 --vocab-size 37 --log-interval 1"


class Memory:
    """A writer that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[MetricRecord] = []

    def write(self, record: MetricRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass

    def column(self, name: str, kind: str = "train") -> list[Any]:
        return [record[name] for record in self.records if record["kind"] == kind]


def start(run: RunConfig) -> tuple[TrainState, TrainLoop, Memory]:
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    state, writer = TrainState.build(run, mesh), Memory()
    return state, TrainLoop(state, build_loaders(run, mesh), [writer], detect_device("cpu")), writer


def finish(flags: str) -> tuple[TrainState, TrainingResult, Memory]:
    state, loop, writer = start(tiny_run(f"{SMALL} {flags}"))
    return state, loop.run(), writer


def weights(state: TrainState) -> torch.Tensor:
    return torch.cat([weight for group in state.model.param_groups for weight in group.weights()]).clone()


def sampled_run(flags: str) -> RunConfig:
    """A run measured in samples."""
    drop = ("--train-iters", "--lr-warmup-iters")
    words = TINY.split()
    kept = [word for at, word in enumerate(words) if word not in drop and (at == 0 or words[at - 1] not in drop)]
    return load_config([*kept, *SMALL.split(), *flags.split()], world_size=1).config


def test_plain_run_reports_and_ends():
    state, outcome, writer = finish("--train-iters 4")
    assert outcome == TrainingResult(4, None, None)
    assert writer.column("iteration") == [1, 2, 3, 4] and writer.column("consumed_samples") == [8, 16, 24, 32]
    assert writer.column("consumed_tokens") == [64, 128, 192, 256]
    losses = writer.column("lm_loss")
    assert losses[-1] < losses[0]
    progress = state.progress
    assert (progress.iteration, progress.updates, progress.update_samples, progress.consumed_tokens) == (4, 4, 32, 256)


def test_learning_rate_follows_the_schedule():
    state, _, writer = finish("--train-iters 6")
    assert writer.column("lr") == [state.lr_schedule.at(step, 8 * step) for step in range(6)]
    assert len(set(writer.column("lr"))) > 3 and not any("decoupled_lr" in record for record in writer.records)


def test_decoupled_learning_rate_is_reported():
    state, _, writer = finish("--train-iters 4 --decoupled-lr 1e-3 --decoupled-min-lr 1e-5")
    schedule = state.decoupled_lr_schedule
    assert schedule is not None
    assert writer.column("decoupled_lr") == [schedule.at(step, 8 * step) for step in range(4)]
    assert not set(writer.column("decoupled_lr")[1:]) & set(writer.column("lr"))


def test_log_interval_and_optional_numbers():
    state, _, writer = finish("--train-iters 5 --log-interval 2 --log-params-norm --log-num-zeros-in-grad")
    assert writer.column("iteration") == [1, 2, 4, 5], "the first and the last iteration are always logged"
    assert writer.column("params_norm")[-1] == pytest.approx(float(state.optimizer.weight_norm()))
    assert all(count > 0 for count in writer.column("num_zeros"))


def test_batch_ramp():
    """2, then 4, then 6 over 16 samples, then 8."""
    run = tiny_run(f"{SMALL} --train-iters 8 --rampup-batch-size 2 2 18 --micro-batch-size 1")
    state, loop, writer = start(run)
    seen: list[int] = []
    inner = state.model.train_step
    state.model.train_step = lambda batches, **more: (
        seen.append(sum(len(b.tokens) for b in batches)) or inner(batches, **more)
    )
    loop.run()
    assert seen == writer.column("global_batch_size") == [2, 2, 2, 4, 4, 6, 8, 8]
    assert writer.column("consumed_samples") == [2, 4, 6, 10, 14, 20, 28, 36]
    assert state.progress.update_samples == RunLength.from_config(run).samples == 36


def test_run_measured_in_samples():
    run = sampled_run("--train-samples 44 --lr-decay-samples 44 --lr-warmup-samples 16")
    assert RunLength.from_config(run) == RunLength(iterations=5, samples=44)
    state, loop, writer = start(run)
    assert loop.run() == TrainingResult(5, None, None)
    assert writer.column("consumed_samples") == [8, 16, 24, 32, 40], "a last short batch is left out"
    assert writer.column("lr") == [state.lr_schedule.at(step, 8 * step) for step in range(5)]
    assert writer.column("lr")[2] == max(writer.column("lr")), "warm-up ends after 16 samples"


def test_exit_interval_saves_and_resumes(tmp_path: Path):
    flags = f"--train-iters 5 --hidden-dropout 0.1 --save {tmp_path}"
    whole, _, _ = finish(f"--train-iters 5 --hidden-dropout 0.1 --save {tmp_path / 'whole'}")
    state, outcome, writer = finish(f"{flags} --exit-interval 3")
    assert (outcome.iteration, outcome.stop_reason) == (3, "--exit-interval 3")
    assert CheckpointManager(str(tmp_path), state.mesh.world).latest() == 3
    memory, *messages = writer.column("message", "event")
    assert memory.startswith("memory: predicted")
    assert (
        messages[0] == "stopping at iteration 3: --exit-interval 3" and "saved checkpoint of iteration 3" in messages[1]
    )

    resumed, loop, writer = start(tiny_run(f"{SMALL} {flags} --load {tmp_path}"))
    assert resumed.load(str(tmp_path))
    assert loop.run() == TrainingResult(5, None, None)
    assert writer.column("iteration") == [4, 5]
    assert torch.equal(weights(resumed), weights(whole))


def test_save_interval_saves_each_iteration_once(tmp_path: Path):
    _, _, writer = finish(f"--train-iters 4 --save {tmp_path} --save-interval 2")
    saved = [message.split(" to ")[0] for message in writer.column("message", "event")[1:]]
    assert saved == ["saved checkpoint of iteration 2", "saved checkpoint of iteration 4"]


def test_what_is_removed_is_named(tmp_path: Path):
    flags = f"--train-iters 4 --save {tmp_path} --save-interval 1"
    finish(f"{flags} --exit-interval 2")
    state, loop, writer = start(tiny_run(f"{SMALL} {flags} --load {tmp_path} --save-total-limit 1"))
    assert state.load(str(tmp_path))
    loop.run()
    removed = [message for message in writer.column("message", "event") if message.startswith("removed")]
    assert removed == ["removed the checkpoints of iterations 1, 2", "removed the checkpoint of iteration 3"]


def test_data_that_ends_early_is_an_error():
    _, loop, _ = start(tiny_run(f"{SMALL} --train-iters 6"))
    loop._loaders.train.dataset.num_samples = 20  # type: ignore[attr-defined]
    with pytest.raises(TrainError, match="ends at sample 20, but iteration 3 needs samples 16 to 24"):
        loop.run()


@pytest.mark.parametrize(("by", "iterations", "samples"), [("iterations", 4, 24), ("samples", 6, 32)])
def test_another_batch_size_after_a_resume(tmp_path: Path, by: str, iterations: int, samples: int):
    """Two steps of 8, then steps of 4: iterations are counted on, or the samples that are left are used."""

    def configured(flags: str) -> RunConfig:
        if by == "iterations":
            return tiny_run(f"{SMALL} --train-iters 4 --save {tmp_path} {flags}")
        return sampled_run(f"--train-samples 32 --save {tmp_path} {flags}")

    start(configured("--exit-interval 2"))[1].run()
    run = configured(f"--load {tmp_path} --global-batch-size 4 --override-opt-param-scheduler")
    state = TrainState.build(run, ParallelMesh.single())
    assert state.load(str(tmp_path)) and state.progress.consumed_samples == 16
    loaders = build_loaders(run, state.mesh, train_samples=state.run_length().samples)
    assert TrainLoop(state, loaders, [], detect_device("cpu")).run() == TrainingResult(iterations, None, None)
    assert state.progress.consumed_samples == samples


@pytest.mark.parametrize(
    ("flags", "valid"), [("--eval-interval 6", 32), ("--eval-interval 20", 16), ("--eval-interval 21", 8), ("", 8)]
)
def test_validation_samples_are_built_for_all_evaluations(flags: str, valid: int):
    """As Megatron builds them: (train_iters // eval_interval + 1) evaluations of 2 batches of 4; the test split has one."""
    run = tiny_run(f"{SMALL} --train-iters 20 --eval-iters 2 --global-batch-size 4 {flags}")
    loaders = build_loaders(run, ParallelMesh.single())
    assert loaders.test is not None
    assert (len(loaders.valid[None].dataset), len(loaders.test.dataset)) == (valid, 8)


def test_other_data_after_a_resume_is_noticed():
    state = TrainState.build(tiny_run(SMALL + " --train-iters 4"), ParallelMesh.single())
    assert state.record_data_fingerprint("these samples") == [] and state.record_data_fingerprint("these samples") == []
    [warning] = state.record_data_fingerprint("those samples")
    assert "differs from the checkpoint's" in warning


def spoil(state: TrainState, iteration: int, value: float = float("nan")) -> None:
    """Let a weight be `value` from the given iteration on."""
    inner = state.model.train_step

    def spoiled(batches, **more):
        if state.progress.iteration + 1 == iteration:
            state.model.param_groups[0].weights()[0][5] = value
        return inner(batches, **more)

    state.model.train_step = spoiled


@pytest.mark.parametrize(("log_interval", "noticed"), [(1, 3), (4, 4), (100, 6)])
def test_not_a_number_names_the_iteration(log_interval: int, noticed: int):
    state, loop, writer = start(tiny_run(f"{SMALL} --train-iters 6 --log-interval {log_interval}"))
    spoil(state, 3)
    with pytest.raises(TrainError, match=r"first at iteration 3\..*--no-check-for-nan-in-loss-and-grad"):
        loop.run()
    assert state.progress.iteration == noticed == writer.column("iteration")[-1]


def test_not_a_number_of_an_objective_is_told_as_its_own():
    class NotANumber(petatron.Objective):
        @property
        def losses(self) -> tuple[petatron.LossSpec, ...]:
            return (petatron.LossSpec("nan loss"),)

        def loss(self, outputs: Mapping[str, torch.Tensor], batch: petatron.Batch) -> Mapping[str, torch.Tensor]:
            return {"nan loss": outputs["token_losses"] * float("nan")}

    petatron.register_objective("not-a-number", NotANumber)
    _, loop, _ = start(tiny_run(f"{SMALL} --train-iters 2 --lr-warmup-iters 0 --objective not-a-number"))
    with pytest.raises(TrainError, match="Look at the loss of --objective not-a-number"):
        loop.run()


def test_an_infinite_step_is_noticed_at_the_next_one():
    state, loop, _ = start(tiny_run(f"{SMALL} --train-iters 6 --lr-warmup-iters 0"))
    inner = state.optimizer.step
    state.optimizer.step = lambda **more: inner(**{**more, "lr": float("inf")})  # type: ignore[method-assign]
    with pytest.raises(TrainError, match="first at iteration 2"):
        loop.run()


def test_going_on_regardless_skips_the_updates():
    state, loop, writer = start(tiny_run(f"{SMALL} --train-iters 4 --no-check-for-nan-in-loss-and-grad"))
    spoil(state, 3)
    assert loop.run().iteration == 4
    assert writer.column("skipped") == [0, 0, 1, 1] and writer.column("nan") == [0, 0, 1, 1]
    assert int(torch.isnan(weights(state)).sum()) == 1, "bad gradients must not spread"


@pytest.mark.parametrize("how", ["--save-interval 4", "--exit-interval 4"])
def test_bad_numbers_are_never_published(tmp_path: Path, how: str):
    """Between two log lines nobody looks at the device; a save looks first."""
    state, loop, _ = start(tiny_run(f"{SMALL} --train-iters 8 --log-interval 100 --save {tmp_path} {how}"))
    spoil(state, 3)
    with pytest.raises(TrainError, match="first at iteration 3"):
        loop.run()
    assert CheckpointManager(str(tmp_path), state.mesh.world).latest() is None


def _mean_loss(state: TrainState, loader: BatchLoader) -> float:
    found = evaluate(state, loader)
    assert isinstance(found, EvaluatedLosses) and found.named_losses == {"lm loss": found.loss}
    return found.loss


def _evaluated(run: RunConfig) -> tuple[float, list[float], torch.Tensor]:
    state, loop, writer = start(run)
    loop.run()
    return (
        _mean_loss(state, loop._loaders.valid[None]) if loop._loaders.valid else 0.0,
        writer.column("lm_loss", "valid"),
        weights(state),
    )


EVALUATED = f"{SMALL} --train-iters 4 --num-query-groups 1"


def test_evaluation_only_looks():
    dropout = "--hidden-dropout 0.2 --attention-dropout 0.2"
    _, none, untouched = _evaluated(tiny_run(f"{EVALUATED} {dropout}"))
    _, often, looked_at = _evaluated(tiny_run(f"{EVALUATED} {dropout} --eval-interval 1 --eval-iters 2"))
    assert none == [] and len(often) == 5, "four on the way (the last is the end), and the test split"
    assert torch.equal(untouched, looked_at)


def test_evaluation_is_the_mean_over_the_same_tokens_every_time():
    again, losses, _ = _evaluated(tiny_run(f"{EVALUATED} --eval-interval 2 --eval-iters 3"))
    assert losses[0] > losses[1] and losses[1] == again, "valid at 2 and 4, then test"


def test_evaluation_covers_the_first_batches_once_each():
    state, loop, _ = start(tiny_run(f"{SMALL} --train-iters 4 --eval-iters 3"))
    valid = loop._loaders.valid[None]
    parts = [state.model.evaluate(valid.next_step(8, first)) for first in (0, 8, 16)]
    assert len({float(total) for total, _ in parts}) == 3
    expected = float(sum(total for total, _ in parts) / sum(tokens for _, tokens in parts))
    assert _mean_loss(state, valid) == pytest.approx(expected, rel=1e-12)


def test_layouts_evaluate_alike(ranks: RankPool):
    flags = f"{EVALUATED} --eval-interval 2 --eval-iters 2"
    _, expected, _ = _evaluated(tiny_run(flags, dtype="float64"))
    run = tiny_run(f"{flags} --tp 2 --dp 2 --sequence-parallel", world_size=4, dtype="float64")
    for _, found, _ in ranks.run(_evaluated, 4, run):
        assert found == pytest.approx(expected, rel=1e-10)


def _spoiled_everywhere(run: RunConfig) -> str:
    state, loop, _ = start(run)
    if state.mesh.rank == 1:
        spoil(state, 2)
    with pytest.raises(TrainError) as caught:
        loop.run()
    return str(caught.value)


def test_every_rank_hears_of_one_ranks_bad_number(ranks: RankPool):
    """Otherwise the others would wait for a rank that has left."""
    for layout in ("--tp 2", "--dp 2"):
        texts = ranks.run(_spoiled_everywhere, 2, tiny_run(f"{SMALL} --train-iters 6 {layout}", world_size=2))
        assert all("first at iteration 2" in text for text in texts), texts


def test_a_save_that_was_begun_survives_the_end_of_the_run(tmp_path, monkeypatch):
    """A step fails while a checkpoint is still being written: it is finished first."""
    gate = threading.Event()
    publish = step_folder.publish_step

    def late(*args, **more):
        assert gate.wait(scaled(20))
        publish(*args, **more)

    monkeypatch.setattr(step_folder, "publish_step", late)
    state, loop, writer = start(
        tiny_run(f"{SMALL} --train-iters 6 --log-interval 1 --save {tmp_path} --save-interval 2 --async-save")
    )
    spoil(state, 3)
    threading.Timer(0.3, gate.set).start()
    with pytest.raises(TrainError, match="first at iteration 3"):
        loop.run()
    assert list(step_folder.list_steps(tmp_path)) == [2]
    assert f"saved checkpoint of iteration 2 to {tmp_path}" in writer.column("message", "event")


def test_a_model_with_two_losses_reports_both(monkeypatch: pytest.MonkeyPatch):
    """In training and in evaluation; the loss that is trained is their weighted sum."""
    plain = Decoder.forward

    def forward(self: Decoder, *args: Any, collect: tuple[str, ...], **options: Any) -> StageOutput:
        output = plain(self, *args, collect=("hidden_states",), **options)
        hidden_BSD = output.collected["hidden_states"]
        return StageOutput({}, output.losses | {"size loss": hidden_BSD.transpose(0, 1).square().sum(-1)}, {})

    declare = DecoderSpec.io

    def io(self: DecoderSpec, stages: Sequence[PipelineStage]) -> ModelIO:
        declared = declare(self, stages)
        return replace(declared, losses=(*declared.losses, LossSpec("size loss", weight=0.5)))

    monkeypatch.setattr(Decoder, "forward", forward)
    monkeypatch.setattr(DecoderSpec, "io", io)
    state, _, writer = finish("--train-iters 3 --eval-interval 3 --eval-iters 2")
    for kind, count in (("train", 3), ("valid", 2)):
        total, named = writer.column("lm_loss", kind), writer.column("named_losses", kind)
        assert len(total) == count and all(losses.keys() == {"lm loss", "size loss"} for losses in named)
        assert total == pytest.approx([losses["lm loss"] + 0.5 * losses["size loss"] for losses in named], rel=1e-12)
    sizes = [losses["size loss"] for losses in writer.column("named_losses")]
    assert sizes[2] < sizes[0] and state.model.named_losses["size loss"].item() == sizes[2]
