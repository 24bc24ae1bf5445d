"""Losses and datasets defined outside of the package train the same in every layout: the examples of the guide, in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import petatron
from examples import losses
from petatron.base.errors import CheckpointError, ConfigError
from petatron.config import RunConfig
from petatron.data.build_datasets import build_datasets
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.models.objective import parse_objective
from petatron.train.state.train_state import TrainState
from petatron.verify.compare_traces import Tolerances
from petatron.verify.trace import StepTrace
from tests.dist import RankPool
from tests.longform import later
from tests.parity.harness import TINY, check_traces, tiny_run, train, train_recorded

BOUNDS = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-9)
Z_LOSS = "--objective z-loss --objective-settings weight=0.01"


def train_objective(run: RunConfig) -> tuple[list[StepTrace], list[CommEvent]]:
    """On one rank, which imports this module and with it the objectives."""
    return train_recorded(run)


def run_of(flags: str, *, world_size: int = 1) -> RunConfig:
    return tiny_run(flags, world_size=world_size, dtype="float64")


@pytest.fixture(scope="module")
def distillation(tmp_path_factory: pytest.TempPathFactory) -> str:
    """From a teacher of another size, saved as any run is."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    run = run_of("--hidden-size 48 --num-layers 4 --seed 7")
    petatron.save_checkpoint(folder, step=1, model=petatron.build_model(run, ParallelMesh.single()))
    return f"--objective distillation --objective-settings teacher={folder} alpha=0.25"


@pytest.fixture(scope="module")
def alone(distillation: str) -> dict[str, list[StepTrace]]:
    return {"z-loss": train(run_of(Z_LOSS)), "distillation": train(run_of(distillation))}


@pytest.mark.parametrize("objective", ["z-loss", "distillation"])
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2", 2),
        ("--tp 2 --sequence-parallel", 2),
        ("--pp 2", 2),
        ("--cp 2", 2),
        later("--dp 2 --use-distributed-optimizer", 2),
        later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
        later("--pp 2 --pipeline-schedule zb-h1", 2),
        later("--tp 2 --pp 2 --sequence-parallel", 4),
    ],
)
def test_every_layout_minimises_the_same(
    ranks: RankPool, alone: dict[str, list[StepTrace]], distillation: str, objective: str, layout: str, world_size: int
):
    flags = {"z-loss": Z_LOSS, "distillation": distillation}[objective]
    run = run_of(f"{flags} {layout}", world_size=world_size)
    check_traces(ranks, run, alone[objective], BOUNDS, train_rank=train_objective)


@pytest.mark.parametrize("tied", ["", "--no-untie-embeddings-and-output-weights"])
def test_without_its_weight_z_loss_is_the_loss_of_the_model(tied: str):
    """Whole logits and torch's cross-entropy give what the fused kernels give, gradients too."""
    ours, plain = train(run_of(f"--objective z-loss --objective-settings weight=0 {tied}")), train(run_of(tied))
    for one, other in zip(ours, plain, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-12)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-12)


def test_each_loss_is_reported_and_the_teacher_stays_as_it_was(distillation: str):
    run, mesh = run_of(distillation), ParallelMesh.single()
    state = TrainState.build(run, mesh)
    model = state.model
    assert isinstance(model, petatron.Model)
    teacher = model.role_models["teacher"]
    before = [weight.clone() for group in teacher.param_groups for weight in group.weights()]
    [batches] = [next(petatron.build_loader(run, mesh))]
    total = model.train_step(batches)
    named = model.named_losses
    assert float(total) == pytest.approx(float(0.75 * named["lm loss"] + 0.25 * named["distillation loss"]), rel=1e-12)
    logits = [model.forward([batch], collect=["logits"])[0]["logits"] for batch in batches]
    theirs = [teacher.forward([batch], collect=["logits"])[0]["logits"] for batch in batches]
    student, target = ((torch.cat(x) / 2).log_softmax(-1) for x in (logits, theirs))
    expected = 4 * (target.exp() * (target - student)).sum(-1).mean()
    assert float(named["distillation loss"]) == pytest.approx(float(expected), rel=1e-12)
    state.optimizer.step()
    after = [weight for group in teacher.param_groups for weight in group.weights()]
    assert all(map(torch.equal, before, after))


def test_validation_reports_the_objective(distillation: str):
    run, mesh = run_of(distillation), ParallelMesh.single()
    model = petatron.build_model(run, mesh)
    sums, tokens = model.evaluate_losses(next(petatron.build_loader(run, mesh)))
    assert sums.shape == (2,) and bool((sums > 0).all()) and bool((tokens > 0).all())


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path):
    run = run_of("--vocab-size 99")
    petatron.save_checkpoint(tmp_path, step=1, model=petatron.build_model(run, ParallelMesh.single()))
    student = run_of(f"--objective distillation --objective-settings teacher={tmp_path}")
    with pytest.raises(CheckpointError, match="has 99 token ids, and the model that is trained has 131"):
        petatron.build_model(student, ParallelMesh.single())


def test_every_wrong_setting_is_told():
    with pytest.raises(ConfigError) as error:
        parse_objective("distillation", ["alpha=much", "temprature=2", "teacher"])
    text = str(error.value)
    assert "alpha=much is not a value of alpha, which is float" in text
    assert "temprature=2 is no setting of --objective distillation. It has: teacher, temperature, alpha." in text
    assert "teacher is not NAME=VALUE" in text
    with pytest.raises(ConfigError, match="lacks teacher"):
        parse_objective("distillation", [])
    with pytest.raises(ConfigError, match=r"--objective z-los is not a registered objective\. Did you mean z-loss"):
        parse_objective("z-los", [])
    with pytest.raises(ConfigError, match="none is given"):
        petatron.build_model(run_of("--objective-settings weight=1"), ParallelMesh.single())
    with pytest.raises(ConfigError, match="--objective z-loss is registered already"):
        petatron.register_objective("z-loss", losses.Distillation)
    with pytest.raises(ConfigError, match="--mtp-num-layers"):
        petatron.build_model(run_of(f"{Z_LOSS} --mtp-num-layers 1"), ParallelMesh.single())


class Squares:
    """Sample i counts on from i squared."""

    def __init__(self, request: petatron.DatasetRequest) -> None:
        self._request, self.fingerprint = request, f"squares {request.split}"

    def __len__(self) -> int:
        return self._request.num_samples

    def __getitem__(self, index: int) -> np.ndarray:
        return (np.arange(self._request.seq_length + 1) + index * index) % 131


petatron.register_dataset("squares", Squares)


def test_a_dataset_of_ones_own_trains():
    run = run_of("--dataset-kind squares --no-mock-data --data-path anything")
    found = build_datasets(run, None, (4, 0, 0))
    assert found.valid is None and found.train is not None and found.train.fingerprint == "squares train"
    batches = next(petatron.build_loader(run, ParallelMesh.single()))
    assert torch.cat([batch.tokens for batch in batches])[:, 0].tolist() == [i * i % 131 for i in range(8)]
    assert isinstance(petatron.load(None, f"{TINY} --no-mock-data --dataset-kind squares".split()).state, TrainState)
    with pytest.raises(ConfigError, match="--mock-data makes data up"):
        run_of("--dataset-kind squares")
    with pytest.raises(ConfigError, match="--dataset-kind cubes is not a registered kind"):
        build_datasets(run_of("--dataset-kind cubes --no-mock-data --data-path anything"), None, (4, 0, 0))
