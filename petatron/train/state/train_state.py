"""`TrainState`: all state of a run between steps, and how it is saved and resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.base.untrusted_files import reading_untrusted
from petatron.checkpoint.files.signature import open_signer
from petatron.checkpoint.files.step_folder import damaged_error
from petatron.checkpoint.files.step_list import naming_step_flag
from petatron.checkpoint.manager import CheckpointManager, Retention
from petatron.checkpoint.stateful_components import Stateful, check_names
from petatron.config import CheckpointConfig, RunConfig
from petatron.data.batch_loader import StepLoader
from petatron.data.external_loader import ExternalLoader
from petatron.data.tokenizer import Tokenizer
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.optim.loss_scaler import DynamicLossScaler, LossScaler, build_loss_scaler
from petatron.optim.lr_schedule import LearningRateSchedule, RunSchedules, WeightDecaySchedule
from petatron.optim.mixed_precision import MixedPrecisionOptimizer, UpdateResult
from petatron.parallel.parallel_model import ParallelModel
from petatron.parallel.pipeline.enable_cuda_graphs import enable_auto_cuda_graphs
from petatron.pretrained.checkpoint_components import Fp8HistoryState, MomentState, RandomState, model_components
from petatron.pretrained.hf_folder_contents import CompanionFiles
from petatron.pretrained.launch_and_build_model import HasConfig, build_initial_model, config_of
from petatron.pretrained.load_checkpoint import LoadedState, has_weights, load_state
from petatron.pretrained.publish_checkpoint import publish_checkpoint
from petatron.train.build_run import RunLength, build_optimizer
from petatron.train.global_batch_size import BatchSizeSchedule
from petatron.train.state.external_data_state import ExternalDataState
from petatron.train.state.open_frozen_models import open_frozen_models
from petatron.train.state.optional_components import build_components
from petatron.train.state.resume_diff import resume_changes
from petatron.train.state.run_metadata import (
    TrainProgress,
    check_resumable,
    model_differences,
    run_settings,
)
from petatron.train.state.run_state_components import (
    AlternativeWeights,
    DataOrder,
    DataOrderState,
    LossScaleState,
    ProgressState,
)

_log = get_logger(__name__)


@dataclass(slots=True)
class TrainState:
    """The mutable state of a run, and the pure schedules it follows.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> state = TrainState.build(run, petatron.launch(run))
    >>> state.progress.iteration
    0
    """

    run: RunConfig
    mesh: ParallelMesh
    model: ParallelModel
    optimizer: MixedPrecisionOptimizer
    scaler: LossScaler
    lr_schedule: LearningRateSchedule
    decoupled_lr_schedule: LearningRateSchedule | None
    """That of embedding and output head, where they have a learning rate of their own."""
    weight_decay_schedule: WeightDecaySchedule
    batch_size_schedule: BatchSizeSchedule
    progress: TrainProgress = field(default_factory=TrainProgress)
    data_order: DataOrder = field(default_factory=DataOrder)
    resume_changes: list[str] = field(default_factory=list)
    """Differences from the checkpoint that the run was resumed from, and their effects."""
    tokenizer: Tokenizer | CompanionFiles | None = None
    """Saved with the model so that other programs can use it."""
    checkpoint_manager: CheckpointManager | None = None
    """The manager of this run's checkpoints, if it saves any."""
    weights_initialized: bool = True
    """Whether the model has initial weights, so that training may begin without a load."""
    added_components: list[Stateful] = field(default_factory=list)
    """State besides that of every run: what settings ask for, and your own (`add`)."""
    is_loaded: bool = False
    """Whether a checkpoint was loaded."""

    @classmethod
    def build(
        cls,
        run: RunConfig | HasConfig,
        mesh: ParallelMesh,
        tokenizer: Tokenizer | None = None,
        *,
        model: ParallelModel | None = None,
        init_weights: bool = True,
    ) -> TrainState:
        """Builds a run at iteration 0, of a model with initial weights or one that is given.

        Without `init_weights` the weights are zero, for a caller that loads them next: initializing those of a large model takes minutes.
        """
        run = config_of(run)
        if model is None:
            model = build_initial_model(run, mesh, init_weights=init_weights)
            open_frozen_models(run, model)
        enable_auto_cuda_graphs(run, model)
        state = cls.of(run, model, build_optimizer(run, model), tokenizer)
        state.weights_initialized = init_weights
        return state

    @classmethod
    def of(
        cls,
        run: RunConfig,
        model: ParallelModel,
        optimizer: MixedPrecisionOptimizer,
        tokenizer: Tokenizer | CompanionFiles | None,
    ) -> TrainState:
        """Returns the state at iteration 0 of a model and its optimizer."""
        state = cls(
            run=run,
            mesh=model.mesh,
            model=model,
            optimizer=optimizer,
            scaler=build_loss_scaler(run.precision),
            lr_schedule=LearningRateSchedule.from_config(run),
            decoupled_lr_schedule=LearningRateSchedule.decoupled_from_config(run),
            weight_decay_schedule=WeightDecaySchedule.from_config(run),
            batch_size_schedule=BatchSizeSchedule.from_config(run),
            tokenizer=tokenizer,
            checkpoint_manager=_build_checkpoint_manager(run.checkpoint, model.mesh),
        )
        for component in build_components(run, model, optimizer):
            state.add(component)
        return state

    @classmethod
    def build_for_load(cls, run: RunConfig, mesh: ParallelMesh, tokenizer: Tokenizer | None = None) -> TrainState:
        """Builds a run at iteration 0 for `load` or `load_pretrained_weights`; initializes weights only if neither will fill them."""
        config = run.checkpoint
        loads = config.load is not None and has_weights(config.load, mesh)
        return cls.build(run, mesh, tokenizer, init_weights=not loads and config.pretrained_checkpoint is None)

    def run_length(self) -> RunLength:
        """The length of the run, from its current position."""
        progress = self.progress
        return RunLength.from_config(self.run, iteration=progress.iteration, consumed_samples=progress.consumed_samples)

    def record_data_fingerprint(self, fingerprint: str) -> list[str]:
        """Records which data, in which order, this run trains on; warns if it is not what the run began with."""
        changed = self.data_order.fingerprint not in (None, fingerprint)
        self.data_order.fingerprint = fingerprint
        if not changed:
            return []
        return [
            "WARNING: the training data or its order differs from the checkpoint's (files, split, blend, sequence length, "
            "seed, another number of epochs, or the order of an earlier release). The run goes on at sample "
            f"{self.progress.consumed_samples:,} of the new order, so some samples may be seen again and others not at all."
        ]

    def attach_loader(self, loader: StepLoader) -> list[str]:
        """Names the loader that this run trains on, whose state it restores and saves; warns as `record_data_fingerprint` does."""
        for component in self.added_components:
            if isinstance(component, ExternalDataState) and isinstance(loader, ExternalLoader):
                component.attach(loader)
        return self.record_data_fingerprint(loader.fingerprint)

    def components(self, *, moments: bool = True, random_states: bool = True) -> list[Stateful]:
        """Returns everything that a checkpoint of this run saves and restores; without some, what flags leave out."""
        return [
            *model_components(self.model, self.optimizer, moments=moments, random_states=random_states),
            *self.own_components(),
        ]

    def own_components(self) -> list[Stateful]:
        """Returns the components that are neither the model's nor the optimizer's."""
        return [
            ProgressState(self.progress),
            LossScaleState(self.scaler),
            DataOrderState(self.data_order),
            *self.added_components,
        ]

    def alternative_weights(self) -> list[AlternativeWeights]:
        """Returns the components whose weights are evaluated beside the trained ones now."""
        components = (component for component in self.added_components if isinstance(component, AlternativeWeights))
        return [component for component in components if component.is_ready]

    def add(self, component: Stateful) -> None:
        """Adds state of your own, which checkpoints save and restore from then on; before `load`.

        >>> import petatron
        >>> class Seen(petatron.Stateful):
        ...     name, tokens = "seen", 0
        ...     def values(self):
        ...         return self.tokens
        ...     def restore(self, saved):
        ...         self.tokens = saved.values
        >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
        >>> state = TrainState.build(run, petatron.launch(run))
        >>> state.add(Seen())
        >>> state.components()[-1].name
        'seen'
        """
        if self.is_loaded:
            raise CheckpointError(
                f"{component.title or component.name} came after the checkpoint was loaded, which restores them. Add the component "
                "before state.load, or give it to petatron.restore(..., components=[...])."
            )
        check_names([*self.components(), component])
        self.added_components.append(component)

    def update_settings(self) -> dict[str, Any]:
        """Returns what `optimizer.step` takes at this point of the schedules: learning rates, weight decay, loss scale.

        >>> import petatron
        >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
        >>> TrainState.build(run, petatron.launch(run)).update_settings()["loss_scale"]
        1.0
        """
        now, decoupled = (self.progress.updates, self.progress.update_samples), self.decoupled_lr_schedule
        return {
            "lr": self.lr_schedule.at(*now),
            "decoupled_lr": None if decoupled is None else decoupled.at(*now),
            "weight_decay": self.weight_decay_schedule.at(*now),
            "loss_scale": self.scaler.scale,
        }

    def advance(
        self, batches: Sequence[Batch], update: UpdateResult | None = None, *, num_samples: int | None = None
    ) -> int:
        """Counts one step on this rank's micro-batches, and returns the samples of the global batch: the rows, unless the number is given.

        A dynamic loss scale follows `update`, what `optimizer.step` returned; reading it waits for the device.
        """
        rows = self.num_rows(batches)
        size = rows // batches[0].rows_per_sample if num_samples is None else num_samples
        overflow = isinstance(self.scaler, DynamicLossScaler) and update is not None and bool(update.skipped)
        self.scaler.update(overflow)
        progress = self.progress
        progress.iteration += 1
        progress.consumed_samples += size
        progress.consumed_tokens += rows * self.run.model.seq_length
        if not overflow:
            progress.updates += 1
            progress.update_samples += size
            for component in self.added_components:
                component.after_update(updates=progress.updates, skipped=None if update is None else update.skipped)
        return size

    def num_rows(self, batches: Sequence[Batch]) -> int:
        """Returns the rows of a step over all ranks."""
        return sum(batch.num_samples * batch.rows_per_sample for batch in batches) * self.mesh.dp.size

    def save(self, *, wait: bool = True) -> None:
        """Publishes a checkpoint of this iteration; every rank calls it. Without `wait` the save is async."""
        config = self.run.checkpoint
        assert self.checkpoint_manager is not None, "this run saves nothing"
        publish_checkpoint(
            self.checkpoint_manager,
            self.components(moments=not config.no_save_optim, random_states=not config.no_save_rng),
            step=self.progress.iteration,
            model=self.model,
            metadata=run_settings(
                self.run, RunSchedules(self.lr_schedule, self.decoupled_lr_schedule, self.weight_decay_schedule)
            ),
            tokenizer=self.tokenizer,
            wait=wait,
        )

    def load(self, folder: str) -> bool:
        """Resumes from a folder's checkpoint; False when it contains none and the run may start from scratch."""
        config = self.run.checkpoint
        differing: list[str] = []

        def approve(metadata: Mapping[str, Any]) -> None:
            if config.finetune:
                differing[:] = model_differences(self.run, metadata["model"]) if "model" in metadata else ()
                return
            check_resumable(self.run, metadata, folder)
            if config.use_checkpoint_opt_param_scheduler:
                with reading_untrusted(Path(folder), damaged_error):
                    schedules = RunSchedules.from_settings(metadata["schedule"])
                self.lr_schedule, self.decoupled_lr_schedule = schedules.lr, schedules.decoupled_lr
                self.weight_decay_schedule = schedules.weight_decay

        try:
            with naming_step_flag("--ckpt-step"):
                loaded = load_state(
                    folder,
                    self._weights_alone() if config.finetune else self.components(),
                    model=self.model,
                    step=config.ckpt_step,
                    fallback=config.load_fallback,
                    strict=not (config.finetune or config.no_load_optim),
                    skipped=_skipped_components(config),
                    check_metadata=approve,
                    starts_run=config.finetune,
                )
        except CheckpointError as error:
            if not differing:
                raise
            raise type(error)(f"{error}\nSettings of the model that differ: {'; '.join(differing)}.") from error
        if loaded is None:
            self._check_start_without(folder)
            return False
        self.is_loaded = True
        self.resume_changes = [f"{setting}: the weights are used in another model" for setting in differing]
        if config.finetune:
            self._start_components("--finetune")
        else:
            with reading_untrusted(Path(folder), damaged_error):
                self.resume_changes = self._changes_since(loaded)
        return True

    def load_pretrained_weights(self, folder: str) -> None:
        """Starts from the weights of a folder's newest checkpoint, or of a Hugging Face model, and nothing else of it."""
        loaded = load_state(
            folder, self._weights_alone(), model=self.model, step=None, fallback=False, strict=False, starts_run=True
        )
        if loaded is None:
            raise CheckpointError(
                f"--pretrained-checkpoint {folder} holds no checkpoint. Give a folder that --save wrote to, or the folder of a "
                "Hugging Face model."
            )
        self._start_components("--pretrained-checkpoint")

    def _weights_alone(self) -> list[Stateful]:
        return model_components(self.model, self.optimizer, moments=False, random_states=False)

    def _start_components(self, reason: str) -> None:
        """Starts the added components with the weights that were loaded alone."""
        for component in self.added_components:
            component.start_anew(reason)

    def _check_start_without(self, folder: str) -> None:
        """Says how a run starts whose `--load` has no checkpoint yet; raises if it has no weights."""
        source = self.run.checkpoint.pretrained_checkpoint
        if not self.weights_initialized and source is None:
            raise CheckpointError(
                f"The checkpoint in {folder} disappeared while the run started. Start it again: it takes what is there then."
            )
        begins = "at the beginning" if source is None else f"with the weights of {source}"
        _log.warning("--load %s holds no checkpoint yet; training starts %s", folder, begins)

    def _changes_since(self, loaded: LoadedState) -> list[str]:
        """Returns what differs from the checkpoint: settings, components, signature."""
        progress, checkpoint = self.progress, self.run.checkpoint
        changes = resume_changes(
            loaded.metadata["config"],
            self.run,
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            with_schedule=not checkpoint.use_checkpoint_opt_param_scheduler,
        )
        if checkpoint.use_checkpoint_opt_param_scheduler:
            changes.append(
                "--use-checkpoint-opt-param-scheduler: learning rate and weight decay follow the checkpoint's schedule"
            )
        # A changed layout says already that random states start anew.
        changes += [note for note in loaded.notes if not any(note.partition(":")[0] in said for said in changes)]
        if loaded.is_signed and checkpoint.save is not None and checkpoint.sign_key is None:
            changes.append("earlier steps are signed, new ones will not be: --sign-key was not given")
        return changes


def _skipped_components(config: CheckpointConfig) -> dict[str, str]:
    """Returns the components that a flag excludes from a load, with the flag."""
    skipped = {}
    if config.no_load_optim:
        skipped |= dict.fromkeys((MomentState.name, Fp8HistoryState.name), "--no-load-optim")
    if config.no_load_rng:
        skipped[RandomState.name] = "--no-load-rng"
    return skipped


def _build_checkpoint_manager(config: CheckpointConfig, mesh: ParallelMesh) -> CheckpointManager | None:
    if config.save is None:
        return None
    return CheckpointManager(
        config.save,
        mesh.control,
        world_axis=mesh.world,
        device=mesh.device,
        async_axis=mesh.background_control_axis() if config.async_save else None,
        retention=Retention(
            config.save_total_limit or (1 if config.save_retain_interval is not None else None),
            config.save_retain_interval,
        ),
        sign=open_signer(Path(config.sign_key)) if config.sign_key is not None else None,
    )
