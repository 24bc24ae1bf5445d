"""Losses and datasets defined outside of the package train the same in every layout: the examples of the guide, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import petatron
from examples import losses
from petatron.base.errors import CheckpointError, ConfigError, TrainError
from petatron.config import RunConfig
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.objective import parse_objective
from petatron.train.state.train_state import TrainState
from petatron.verify.compare_traces import Tolerances
from petatron.verify.record_trace import StepTrace
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_traces, tiny_run, train, train_recorded

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


@diagonal(3)
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
def test_every_layout_minimizes_the_same(
    ranks: RankPool, alone: dict[str, list[StepTrace]], distillation: str, objective: str, layout: str, world_size: int
):
    flags = {"z-loss": Z_LOSS, "distillation": distillation}[objective]
    run = run_of(f"{flags} {layout}", world_size=world_size)
    check_traces(ranks, run, alone[objective], BOUNDS, train_rank=train_objective)


@pytest.mark.parametrize(("layout", "world_size"), [("", 1), ("--tp 2 --sequence-parallel", 2), later("--pp 2", 2)])
def test_gradients_come_from_logits_and_token_losses_at_once(
    ranks: RankPool, alone: dict[str, list[StepTrace]], layout: str, world_size: int
):
    run = run_of(f"{Z_LOSS.replace('z-loss', 'z-loss-of-both')} {layout}", world_size=world_size)
    check_traces(ranks, run, alone["z-loss"], BOUNDS, train_rank=train_objective)


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


def test_a_part_of_the_student_is_frozen_too(ranks: RankPool, distillation: str):
    frozen = f"{distillation} --freeze embedding.* layers.0.*"
    run = run_of(f"{frozen} --pp 2", world_size=2)
    check_traces(ranks, run, train(run_of(frozen)), BOUNDS, train_rank=train_objective)


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
    assert (
        "temprature=2 is no setting of --objective distillation. Did you mean temperature? It has: teacher, temperature, alpha."
        in text
    )
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


@dataclass(frozen=True)
class LateTokens(petatron.NextToken):
    """Next-token prediction that weights tokens by their labels, and measures the share of likely ones and the loss of the hardest one."""

    modulus: int = 3

    @property
    def metric_specs(self) -> tuple[petatron.MetricSpec, ...]:
        hardest = petatron.MetricSpec("hardest", per="token", reduction="max")
        return petatron.MetricSpec("likely", per="token"), hardest

    def prepare(self, batch: petatron.Batch) -> petatron.Batch:
        return batch.with_arrays(loss_weights=(batch.labels % self.modulus).double())

    def metrics(self, outputs: Mapping[str, torch.Tensor], batch: petatron.Batch) -> Mapping[str, torch.Tensor]:
        return {"likely": (outputs["lm loss"] < 5.0).double(), "hardest": outputs["lm loss"]}


@dataclass(frozen=True)
class ProbabilityRatio(petatron.Objective):
    """The ratio of each label's probability to that before the step, without gradients, on tokens of one kind."""

    @property
    def losses(self) -> tuple[petatron.LossSpec, ...]:
        return (petatron.LossSpec("ratio loss", token_weights="advantages"),)

    @property
    def models(self) -> Mapping[str, petatron.ModelRole]:
        return {"old": petatron.ModelRole(None, outputs=("token_losses",))}

    def prepare(self, batch: petatron.Batch) -> petatron.Batch:
        return batch.with_arrays(advantages=1.0 - batch.labels % 2 * 2.0)

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: petatron.Batch) -> Mapping[str, torch.Tensor]:
        return {"ratio loss": -(batch["old.token_losses"] - outputs["token_losses"]).exp()}


@dataclass(frozen=True)
class Wrong(petatron.Objective):
    """Returns what it did not declare."""

    name: str = "other"

    @property
    def losses(self) -> tuple[petatron.LossSpec, ...]:
        return (petatron.LossSpec("declared"),)

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: petatron.Batch) -> Mapping[str, torch.Tensor]:
        losses = outputs["token_losses"]
        return {"declared": losses.detach()} if self.name == "detached" else {self.name: losses.sum(1)}


@dataclass(frozen=True)
class HalfDetached(Wrong):
    """Trains with the first of its losses alone."""

    @property
    def losses(self) -> tuple[petatron.LossSpec, ...]:
        return petatron.LossSpec("declared"), petatron.LossSpec("penalty")

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: petatron.Batch) -> Mapping[str, torch.Tensor]:
        return {"declared": outputs["token_losses"], "penalty": outputs["token_losses"].detach()}


@dataclass(frozen=True)
class ZLossOfBoth(losses.ZLoss):
    """The same, with the token losses that the model computes beside the logits."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return "logits", "token_losses"

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: petatron.Batch) -> Mapping[str, torch.Tensor]:
        return {**super().loss(outputs, batch), "lm loss": outputs["token_losses"]}


petatron.register_objective("z-loss-of-both", ZLossOfBoth)
petatron.register_objective("late-tokens", LateTokens)
petatron.register_objective("ratio", ProbabilityRatio)
petatron.register_objective("wrong", Wrong)


def test_token_weights_change_the_loss_and_not_the_number_of_tokens():
    run, mesh = run_of("--objective late-tokens --objective-settings modulus=4"), ParallelMesh.single()
    model, batches = petatron.build_model(run, mesh), next(petatron.build_loader(run, mesh))
    outputs = [model.forward([batch], collect=["token_losses"])[0]["token_losses"] for batch in batches]
    weighted = [(losses * (batch.labels % 4)).sum() for losses, batch in zip(outputs, batches)]
    total = model.train_step(batches)
    assert float(total) == pytest.approx(float(sum(weighted)) / (8 * 16), rel=1e-12)
    assert float(model.named_metrics["likely"]) == float((torch.cat(outputs) < 5.0).double().mean())
    assert float(model.named_metrics["hardest"]) == pytest.approx(float(torch.cat(outputs).max()), rel=1e-12)


def hardest_tokens(run: RunConfig) -> list[float]:
    """The largest loss of a token in a step on this rank's mesh, and in an evaluation after it."""
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    model, batches = petatron.build_model(run, mesh), next(petatron.build_loader(run, mesh))
    model.train_step(batches)
    place = [spec.name for spec in (*model.objective.losses, *model.objective.metric_specs)].index("hardest")
    sums, counts = model.evaluate_objective(batches)
    return [float(model.named_metrics["hardest"]), float(sums[place] / counts[place])]


@pytest.mark.parametrize("layout", ["--cp 2", "--pp 2", "--dp 2", later("--tp 2 --sequence-parallel")])
def test_the_largest_value_is_that_of_all_ranks(ranks: RankPool, layout: str):
    wanted = hardest_tokens(run_of("--objective late-tokens"))
    for found in ranks.run(hardest_tokens, 2, run_of(f"--objective late-tokens {layout}", world_size=2)):
        assert found == pytest.approx(wanted, rel=1e-12)


def test_weights_of_one_change_no_bit():
    """An objective that weights tokens keeps the fused head, whose gradients are computed in forward."""

    class Ones(LateTokens):
        def prepare(self, batch: petatron.Batch) -> petatron.Batch:
            return batch.with_arrays(loss_weights=torch.ones_like(batch.loss_mask))

    petatron.register_objective("ones", Ones)
    ones, plain = train(run_of("--objective ones")), train(run_of(""))
    for of_ones, of_plain in zip(ones, plain, strict=True):
        assert (of_ones.loss, of_ones.grad_norm) == (of_plain.loss, of_plain.grad_norm)


def test_a_pass_of_the_model_itself_gives_probabilities_before_the_step():
    run, mesh = run_of("--objective ratio"), ParallelMesh.single()
    model, batches = petatron.build_model(run, mesh), next(petatron.build_loader(run, mesh))
    total = model.train_step(batches)
    signs = torch.cat([1.0 - batch.labels % 2 * 2.0 for batch in batches])
    assert float(total) == pytest.approx(-float(signs.mean()), rel=1e-12), "nothing has changed, so every ratio is 1"
    assert any(bool(grad.any()) for group in model.param_groups for grad in group.grads())


@diagonal(2)
@pytest.mark.parametrize("objective", ["late-tokens", "ratio"])
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--cp 2", 2),
        ("--pp 2", 2),
        later("--tp 2 --sequence-parallel", 2),
        later("--dp 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
        later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
    ],
)
def test_weights_and_passes_of_the_model_itself_in_layouts(
    ranks: RankPool, weighted_alone: dict[str, list[StepTrace]], objective: str, layout: str, world_size: int
):
    run = run_of(f"--objective {objective} {layout}", world_size=world_size)
    check_traces(ranks, run, weighted_alone[objective], BOUNDS, train_rank=train_objective)


@pytest.fixture(scope="module")
def weighted_alone() -> dict[str, list[StepTrace]]:
    return {name: train(run_of(f"--objective {name}")) for name in ("late-tokens", "ratio")}


def test_further_predictions_have_the_weights_of_their_tokens():
    """Where the loader brings weights; the loss of depth 1 weights the token after the next."""
    run, mesh = run_of("--mtp-num-layers 1"), ParallelMesh.single()
    model, batches = petatron.build_model(run, mesh), next(petatron.build_loader(run, mesh))
    weighted = [batch.with_arrays(loss_weights=torch.zeros_like(batch.loss_mask)) for batch in batches]
    assert float(model.train_step(weighted)) == 0.0
    last = [batch.with_arrays(loss_weights=(torch.arange(16) == 15).double().expand(2, 16)) for batch in batches]
    model.train_step(last)
    assert all(float(loss) > 0 for loss in model.named_losses.values())


def test_losses_that_were_not_declared_are_told():
    mesh = ParallelMesh.single()
    for name, text in (
        ("other", "Wrong.loss returns other, and it declares declared"),
        ("declared", r"as \[2\], and one"),
        ("detached", "Wrong.loss returns declared without gradients, so that it would train nothing"),
    ):
        run = run_of(f"--objective wrong --objective-settings name={name}")
        with pytest.raises(TrainError, match=text):
            petatron.build_model(run, mesh).train_step(next(petatron.build_loader(run, mesh)))


def test_a_loss_without_gradients_beside_another_is_told():
    petatron.register_objective("half-detached", HalfDetached)
    run, mesh = run_of("--objective half-detached"), ParallelMesh.single()
    with pytest.raises(TrainError, match=r"HalfDetached\.loss returns penalty without gradients"):
        petatron.build_model(run, mesh).train_step(next(petatron.build_loader(run, mesh)))


def test_an_output_that_the_model_lacks_is_told():
    @dataclass(frozen=True)
    class Attention(Wrong):
        @property
        def outputs(self) -> tuple[str, ...]:
            return ("attention_maps",)

    petatron.register_objective("attention", Attention)
    with pytest.raises(ConfigError, match="needs attention_maps of the model"):
        petatron.build_model(run_of("--objective attention"), ParallelMesh.single())
