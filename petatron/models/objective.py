"""`Objective`: what a run minimizes. `NextToken` is the first; `--objective NAME` chooses another that was registered.

An objective says which outputs of the model it needs, and returns named losses per token or per sample. It never knows the layout:

- tensor parallelism: logits are whole, and each rank takes its part of their gradient; token losses come from the fused output head;
- pipelines: `prepare`, `loss` and `metrics` run where the last stage is;
- context parallelism: arrays and outputs are this rank's part of each sequence. A loss may use each token by itself, and sums over
  whole sequences by `batch.sequence_sum`, which adds up all parts, gradients included;
- data parallelism: means are over the global batch. A loss that compares samples has those of its rank, or with `reads_all_samples` those
  of the micro-batches of all ranks, by `batch.all_samples`.

It may read other models (`models`): frozen ones in folders (a teacher, a reference), or the model that is trained itself, without
gradients. They run first, on the same mesh, and what is wanted of them becomes arrays of the batch, which `prepare` may turn into
others: weights of tokens, sums per sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from torch import Tensor

from petatron.base.errors import ConfigError, Problem, raise_problems
from petatron.config.build_plugin import build_plugin, find_plugin
from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.objective_and_dataset_names import LM_LOSS, NEXT_TOKEN
from petatron.config.schema.run import RunConfig
from petatron.models.batch import Batch
from petatron.models.stage_inputs_outputs import LossSpec, MetricSpec, ModelIO

_FLAG, _SETTINGS_FLAG = "--objective", "--objective-settings"


START = "start"
"""In place of a folder: the model that the run started from (`--from`, `--pretrained-checkpoint`), also after it was resumed."""


@dataclass(frozen=True, slots=True)
class ModelRole:
    """A model that an objective reads without gradients: its folder, and the outputs that are wanted of it for each micro-batch.

    Without a folder it is the model that is trained, with its weights before the step; `START` is the one that the run started from. One
    without outputs is opened alone: what makes batches reads it before the step.

    >>> ModelRole("runs/large").array("teacher", "logits")
    'teacher.logits'
    """

    folder: str | None
    outputs: tuple[str, ...] = ("logits",)

    def array(self, role: str, output: str) -> str:
        """The name of the batch's array with an output: `teacher.logits`."""
        return f"{role}.{output}"


@dataclass(frozen=True, slots=True)
class StoredRole:
    """What an objective reads of a frozen model that is not in memory: arrays that are stored for each segment or row of the data.

    arrays: their names in the batch, as the loader reads them. folder: where they are; None: a cache beside the data, which the run fills
    before it trains with what `compute` makes of the outputs of `model` and of the batch.
    """

    per: Literal["segment", "row"]
    arrays: tuple[str, ...]
    folder: str | None = None
    model: ModelRole | None = None
    compute: Callable[[Mapping[str, Tensor], Batch], Mapping[str, Tensor]] | None = None


class Objective(ABC):
    """The losses and metrics of a run. Subclasses are frozen dataclasses whose fields are settings (`--objective-settings NAME=VALUE`).

    >>> import torch
    >>> @dataclass(frozen=True)
    ... class Entropy(Objective):
    ...     weight: float = 1.0
    ...     @property
    ...     def outputs(self):
    ...         return ("logits",)
    ...     @property
    ...     def losses(self):
    ...         return (LossSpec("entropy", weight=self.weight),)
    ...     def loss(self, outputs, batch):
    ...         return {"entropy": torch.distributions.Categorical(logits=outputs["logits"]).entropy()}
    >>> register_objective("entropy", Entropy)
    >>> parse_objective("entropy", ["weight=0.5"]).losses[0].weight
    0.5
    """

    model_flags: ClassVar[str] = ""
    """Flags that give a model the outputs, where it does not have them anyway."""

    def of_run(self, run: RunConfig) -> Objective:
        """Returns the objective with what it takes from other settings of a run."""
        return self

    uses_model_losses: ClassVar[bool] = False
    """Whether the model computes the losses, and `loss` is not called."""
    measures_training: ClassVar[bool] = True
    """Whether metrics are computed in training steps too, or in evaluations alone."""

    reads_all_samples: ClassVar[bool] = False
    """Whether `loss` or `metrics` read samples of other data-parallel ranks, by `batch.all_samples`."""

    @property
    @abstractmethod
    def losses(self) -> tuple[LossSpec, ...]:
        """The losses by name, each per token or per sample, with its mask in the batch and its weight in the sum."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of the model that `loss` and `metrics` get.

        Of a decoder: "token_losses" [B, S] (the negative log-likelihood of each label, from the fused head: no logits are kept),
        "logits" [B, S, vocabulary], "hidden_states" [B, S, hidden]; in float32 or wider.
        """
        return ("token_losses",)

    @property
    def measured_outputs(self) -> tuple[str, ...]:
        """Outputs that `metrics` gets besides: the model returns them with its own losses, in evaluation."""
        return ()

    @property
    def models(self) -> Mapping[str, ModelRole]:
        """The models that it reads, by role; their outputs are arrays `role.output` of the batch."""
        return {}

    @property
    def stored_roles(self) -> Mapping[str, StoredRole]:
        """What it reads of models that are not in memory, by role."""
        return {}

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        """The names of what `metrics` returns; each is logged beside the losses, in training and evaluation."""
        return ()

    @property
    def dataset_type(self) -> str | None:
        """The kind of dataset that it reads, unless `--dataset-type` says another; None: text."""
        return None

    def prepare(self, batch: Batch) -> Batch:
        """Returns the batch with arrays that the loss needs; runs once per micro-batch, after `models` and without gradients.

        Masks that losses count by are the loader's: what is added here may weight tokens, and does not change their number.
        """
        return batch

    @abstractmethod
    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        """Returns each loss by name: [B, S], or [samples] for one per sample.

        The batch has tokens, labels and loss_mask [B, S], what its dataset adds, and the arrays of `models` and `prepare`.
        """

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        """Returns each metric by name, of the same shapes; without gradients."""
        return {}


@dataclass(frozen=True)
class NextToken(Objective):
    """The losses that the model computes itself: of a decoder the next token, and further ones with multi-token prediction.

    Subclasses may weight tokens, by an array "loss_weights" [B, S] that `prepare` adds, and have metrics of the token losses, which they
    get by the names of the losses. The fused output head knows the weights before backward, so they cost nothing.

    >>> [loss.name for loss in NextToken().losses]
    ['lm loss']
    """

    uses_model_losses = True
    losses: tuple[LossSpec, ...] = field(  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
        default=(LossSpec(LM_LOSS, token_weights="loss_weights"),), kw_only=True, metadata=NOT_A_SETTING
    )

    @property
    def outputs(self) -> tuple[str, ...]:
        return ()

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        return outputs


def check_settings(objective: Objective, *checks: tuple[str, bool, str, str]) -> None:
    """Raises `ConfigError` with every setting that breaks a rule: its name, whether it holds, the rule, and a fix."""
    raise_problems(
        [
            Problem(_SETTINGS_FLAG, f"{name}={getattr(objective, name)}", rule, fix)
            for name, holds, rule, fix in checks
            if not holds
        ]
    )


def names_losses(objective: Objective) -> bool:
    """Whether logs name each loss: where there are several, or the only one is not that of the next token."""
    return [loss.name for loss in objective.losses] != [LM_LOSS]


_KINDS: dict[str, type[Objective]] = {NEXT_TOKEN: NextToken}


def register_objective(name: str, kind: type[Objective]) -> None:
    """Makes `--objective name` train with an objective, a frozen dataclass; the name must be new, or have the same class.

    >>> register_objective("next-token", NextToken)
    """
    if _KINDS.setdefault(name, kind) is not kind:
        raise ConfigError([Problem(_FLAG, name, "is registered already", "Register it under another name.")])


def build_objective(run: RunConfig) -> Objective:
    """Returns the objective of a run, not yet of a model."""
    train = run.train
    if train.objective is None and train.objective_settings:
        rule = "are settings of an objective, and none is given"
        raise ConfigError([Problem(_SETTINGS_FLAG, " ".join(train.objective_settings), rule, f"Add {_FLAG}.")])
    return parse_objective(train.objective or NEXT_TOKEN, train.objective_settings).of_run(run)


def parse_objective(name: str, settings: Sequence[str]) -> Objective:
    """Returns a registered objective with its settings; raises `ConfigError` with every problem."""
    kind = find_plugin(name, _KINDS, flag=_FLAG, what="objective")
    return build_plugin(kind, settings, flag=_FLAG, settings_flag=_SETTINGS_FLAG, name=name)


def model_objective(run: RunConfig, io: ModelIO) -> Objective:
    """Returns the objective of a run for its model; raises `ConfigError` if the model lacks an output that it needs."""
    objective, name = build_objective(run), str(run.train.objective)
    problems: list[Problem] = []
    missing = [output for output in (*objective.outputs, *objective.measured_outputs) if output not in io.outputs]
    if isinstance(objective, NextToken) and not missing:
        return replace(objective, losses=io.losses)
    if missing:
        rule = f"needs {', '.join(missing)} of the model, and --model-type {run.model.model_type} has {', '.join(io.outputs) or 'none'}"
        fix = f"Add {objective.model_flags}." if objective.model_flags else "Choose another model, or leave it out."
        problems.append(Problem(_FLAG, name, rule, fix))
    if run.model.mtp_num_layers:
        rule = "replaces the loss of the next token, and those of --mtp-num-layers are others"
        problems.append(Problem(_FLAG, name, rule, "Leave one of them out."))
    raise_problems(problems)
    return objective
