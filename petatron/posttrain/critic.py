"""`Critic`: the model that says what an answer is expected to return from each of its tokens on, trained beside the one that answers.

It is a training state of its own: a model with a head on every token (`models/value_regression.py`), its optimizer and its schedule, on the
same mesh and in the same layout. So the engine, which reads the weights of the answering model, knows nothing of it. It starts from the
model that the run starts from, with a new head, or from another, such as a reward model. Checkpoints have its state beside the run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from petatron.base.errors import ConfigError, Problem
from petatron.checkpoint.prefixed_component import PrefixedComponent
from petatron.checkpoint.stateful_components import Stateful
from petatron.config.required_settings import required
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.objective_and_dataset_names import VALUE
from petatron.config.schema.run import RunConfig
from petatron.data.packed_segments import PackedSegment
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.decoder import TOKEN_LABEL_LOGITS
from petatron.posttrain.rollout_batches import RolloutPacking
from petatron.posttrain.token_measurement import measure_tokens
from petatron.pretrained.checkpoint_components import model_components
from petatron.pretrained.from_pretrained import folder_run_config
from petatron.train.hooks.build_hooks import build_instruments
from petatron.train.state.run_state_components import LossScaleState, ProgressState
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step

_FLAG = "--critic"


class Critic:
    """Every rank calls its methods. Its weights are there after `start`."""

    def __init__(self, run: RunConfig, mesh: ParallelMesh, *, init_weights: bool) -> None:
        """Without `init_weights` they are loaded: from the run's checkpoint, or from a folder."""
        self._folder = run.rollout.critic or run.checkpoint.pretrained_checkpoint
        settings = critic_config(run, mesh)
        self._state = TrainState.build(settings, mesh, init_weights=init_weights and self._folder is None)
        self._instruments = build_instruments(self._state)
        checkpoint = run.checkpoint
        saved = [
            *model_components(
                self._state.model,
                self._state.optimizer,
                moments=not (checkpoint.no_save_optim or checkpoint.no_load_optim),
                random_states=not (checkpoint.no_save_rng or checkpoint.no_load_rng),
            ),
            ProgressState(self._state.progress),
            LossScaleState(self._state.scaler),
        ]
        self._components = [PrefixedComponent(component, "critic") for component in saved]

    def components(self) -> Sequence[Stateful]:
        return self._components

    def start(self) -> None:
        """Loads the first weights, unless a checkpoint had later ones."""
        if self._folder is not None and not any(component.is_restored for component in self._components):
            self._state.load_pretrained_weights(self._folder)

    def values(self, segments: Sequence[PackedSegment], packing: RolloutPacking) -> list[NDArray[np.float64]]:
        """Returns the value of the state before each id of each segment [ids]; that of the first one is 0."""
        model = self._state.model
        return measure_tokens(
            model,
            segments,
            packing,
            mesh=model.mesh,
            order=model.io.sequence_order,
            collect=(TOKEN_LABEL_LOGITS,),
            read=_values,
        )

    def learn(self, batches: Sequence[Batch], *, num_answers: int) -> Mapping[str, float]:
        """Takes a step towards the returns of answers; returns the loss and the norm of its gradient."""
        on_device = [batch.to(self._state.mesh.device) for batch in batches]
        metrics = train_step(self._state, on_device, self._instruments, num_samples=num_answers)
        norm = 0.0 if metrics.grad_norm is None else float(metrics.grad_norm)
        return {"value loss": float(metrics.loss), "value grad norm": norm}


def critic_config(run: RunConfig, mesh: ParallelMesh) -> RunConfig:
    """Returns the settings of a run's critic: those of the run, with another model, objective and learning rate."""
    folder, model, moe = run.rollout.critic, run.model, run.moe
    if folder is not None:
        opened = folder_run_config(folder, mesh)
        model, moe = opened.model, opened.moe
        _check_folder(folder, model, run.model)
        model = replace(model, seq_length=run.model.seq_length)
    if model.pooling is None:
        model = replace(model, pooling="last", num_labels=1, label_names=(), pooler=False, label_bias=False)
    lr = required("lr", run.optim.lr)
    peak = run.rollout.critic_lr or lr
    scale = peak / lr if lr else 1.0
    return replace(
        run,
        model=replace(model, mtp_num_layers=None),
        moe=moe,
        optim=replace(run.optim, lr=peak, decoupled_lr=None),
        schedule=replace(
            run.schedule, min_lr=run.schedule.min_lr * scale, lr_warmup_init=run.schedule.lr_warmup_init * scale
        ),
        train=replace(
            run.train,
            objective=VALUE,
            objective_settings=(),
            freeze=(),
            train_only=(),
            ema_decay=None,
            cuda_graphs="off",
            exact_rollouts=False,
        ),
        checkpoint=replace(run.checkpoint, save=None, load=None),
        log=replace(run.log, pipeline_timeline=None),
    )


def _check_folder(folder: str, critic: ModelConfig, model: ModelConfig) -> None:
    """Raises if a folder's model is no critic of this run's answers."""
    problems = []
    if critic.pooling is not None and critic.num_labels != 1:
        rule = f"has a head of {critic.num_labels} labels, and a value is one"
        problems.append(Problem(_FLAG, folder, rule, "Choose a reward model, or a model that predicts tokens."))
    if critic.vocab_size != model.vocab_size:
        rule = f"has {critic.vocab_size} token ids, and the model that is trained has {model.vocab_size}"
        problems.append(Problem(_FLAG, folder, rule, "Choose a model with the same tokenizer."))
    if problems:
        raise ConfigError(problems)


def _values(outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
    return outputs[TOKEN_LABEL_LOGITS].squeeze(-1)
