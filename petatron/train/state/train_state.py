"""`TrainState`: all state of a run between steps, and how it is saved and resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.base.untrusted_files import is_count, reading_untrusted
from petatron.checkpoint.files.signature import open_signer
from petatron.checkpoint.files.step_folder import damaged_error
from petatron.checkpoint.files.step_list import naming_step_flag
from petatron.checkpoint.manager import CheckpointManager, Retention
from petatron.config import CheckpointConfig, RunConfig
from petatron.data.tokenizer import Tokenizer
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.optim.loss_scaler import DynamicLossScaler, LossScaler, build_loss_scaler
from petatron.optim.lr_schedule import LearningRateSchedule, WeightDecaySchedule
from petatron.optim.mixed_precision import MixedPrecisionOptimizer, UpdateResult
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.build_run import RunLength, build_optimizer
from petatron.train.cuda_graphs import enable_auto_cuda_graphs
from petatron.train.global_batch_size import BatchSizeSchedule
from petatron.train.initial_model import HasConfig, build_initial_model, config_of
from petatron.train.state.export_hf_folder import CompanionFiles
from petatron.train.state.frozen_models import open_frozen_models
from petatron.train.state.resume_diff import resume_changes
from petatron.train.state.run_facts import TrainProgress, build_run_facts, check_resumable, model_differences
from petatron.train.state.save_and_load import LoadedState, has_weights, load_checkpoint, load_state, save_with_manager

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
    data_fingerprint: str | None = None
    """Fingerprint of the training data and its order, once it is known."""
    resume_changes: list[str] = field(default_factory=list)
    """Differences from the checkpoint that the run was resumed from, and their effects."""
    tokenizer: Tokenizer | CompanionFiles | None = None
    """Saved with the model so that other programs can use it."""
    checkpoint_manager: CheckpointManager | None = None
    """The manager of this run's checkpoints, if it saves any."""
    weights_initialized: bool = True
    """Whether the model has initial weights, so that training may begin without a load."""

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

        Without `init_weights` the weights are zero, for a caller that loads them next: initialising those of a large model takes minutes.
        """
        run = config_of(run)
        if model is None:
            model = build_initial_model(run, mesh, init_weights=init_weights)
            open_frozen_models(model)
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
        return cls(
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

    @classmethod
    def build_for_load(cls, run: RunConfig, mesh: ParallelMesh, tokenizer: Tokenizer | None = None) -> TrainState:
        """Builds a run at iteration 0 for `load` or `load_pretrained_weights`; initialises weights only if neither will fill them."""
        config = run.checkpoint
        loads = config.load is not None and has_weights(config.load, mesh)
        return cls.build(run, mesh, tokenizer, init_weights=not loads and config.pretrained_checkpoint is None)

    def run_length(self) -> RunLength:
        """The length of the run, from its current position."""
        progress = self.progress
        return RunLength.from_config(self.run, iteration=progress.iteration, consumed_samples=progress.consumed_samples)

    def record_data_fingerprint(self, fingerprint: str) -> list[str]:
        """Records which data, in which order, this run trains on; warns if it is not what the run began with."""
        changed = self.data_fingerprint is not None and self.data_fingerprint != fingerprint
        self.data_fingerprint = fingerprint
        if not changed:
            return []
        return [
            "WARNING: the training data or its order differs from the checkpoint's (files, split, blend, sequence length, "
            "seed, another number of epochs, or the order of an earlier release). The run goes on at sample "
            f"{self.progress.consumed_samples:,} of the new order, so some samples may be seen again and others not at all."
        ]

    def facts(self) -> dict[str, Any]:
        """What a checkpoint of this moment records besides tensors."""
        return build_run_facts(self.run, self.progress, scaler=self.scaler, data_fingerprint=self.data_fingerprint)

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

    def advance(self, batches: Sequence[Batch], update: UpdateResult | None = None) -> int:
        """Counts one step on this rank's micro-batches, and returns the samples of the global batch.

        A dynamic loss scale follows `update`, what `optimizer.step` returned; reading it waits for the device.
        """
        size = sum(batch.num_samples for batch in batches) * self.mesh.dp.size
        overflow = isinstance(self.scaler, DynamicLossScaler) and update is not None and bool(update.skipped)
        self.scaler.update(overflow)
        progress = self.progress
        progress.iteration += 1
        progress.consumed_samples += size
        progress.consumed_tokens += size * batches[0].rows_per_sample * self.run.model.seq_length
        if not overflow:
            progress.updates += 1
            progress.update_samples += size
        return size

    def save(self, *, wait: bool = True) -> None:
        """Publishes a checkpoint of this iteration; every rank calls it. Without `wait` the save is async."""
        config = self.run.checkpoint
        assert self.checkpoint_manager is not None, "this run saves nothing"
        save_with_manager(
            self.checkpoint_manager,
            step=self.progress.iteration,
            model=self.model,
            optimizer=self.optimizer,
            moments=not config.no_save_optim,
            facts=self.facts(),
            random_states=not config.no_save_rng,
            tokenizer=self.tokenizer,
            wait=wait,
        )

    def load(self, folder: str) -> bool:
        """Resumes from a folder's checkpoint; False when it contains none and the run may start from scratch."""
        config = self.run.checkpoint
        differing: list[str] = []

        def approve(facts: Mapping[str, Any]) -> None:
            if config.finetune:
                differing.extend(model_differences(self.run, facts["model"]) if "model" in facts else ())
            else:
                check_resumable(self.run, facts, folder)

        try:
            with naming_step_flag("--ckpt-step"):
                loaded = load_state(
                    folder,
                    model=self.model,
                    optimizer=self.optimizer,
                    moments=not (config.finetune or config.no_load_optim),
                    step=config.ckpt_step,
                    random_states=not (config.finetune or config.no_load_rng),
                    fallback=config.load_fallback,
                    check_facts=approve,
                )
        except CheckpointError as error:
            if not differing:
                raise
            raise type(error)(f"{error}\nSettings of the model that differ: {'; '.join(differing)}.") from error
        if loaded is None:
            if not self.weights_initialized and config.pretrained_checkpoint is None:
                raise CheckpointError(
                    f"The checkpoint in {folder} disappeared while the run started. Start it again: it takes what is there then."
                )
            source = config.pretrained_checkpoint
            begins = "at the beginning" if source is None else f"with the weights of {source}"
            _log.warning("--load %s holds no checkpoint yet; training starts %s", folder, begins)
            return False
        self.resume_changes = [f"{setting}: the weights are used in another model" for setting in differing]
        if not config.finetune:
            with reading_untrusted(Path(folder), damaged_error):
                self._restore_progress(loaded)
        return True

    def load_pretrained_weights(self, folder: str) -> None:
        """Starts from the weights of a folder's newest checkpoint, or of a Hugging Face model, and nothing else of it."""
        found = load_checkpoint(folder, model=self.model, optimizer=self.optimizer, moments=False, random_states=False)
        if found is None:
            raise CheckpointError(
                f"--pretrained-checkpoint {folder} holds no checkpoint. Give a folder that --save wrote to, or the folder of a "
                "Hugging Face model."
            )

    def _restore_progress(self, loaded: LoadedState) -> None:
        facts = loaded.facts
        known = {field.name for field in fields(TrainProgress)}
        saved = {name: value for name, value in facts["progress"].items() if name in known}
        if not all(map(is_count, saved.values())):
            raise ValueError(f"its progress is {saved}")
        self.progress = progress = TrainProgress(**saved)
        self.resume_changes = resume_changes(
            facts["config"], self.run, iteration=progress.iteration, consumed_samples=progress.consumed_samples
        )
        self.data_fingerprint = facts["data"]
        self.scaler.restore(facts["scaler"])
        self._report_random_states(loaded)
        if loaded.fp8_history_reset_reason is not None:
            why = "--no-load-optim" if self.run.checkpoint.no_load_optim else loaded.fp8_history_reset_reason
            self.resume_changes.append(f"FP8 histories start anew, and the next step scales by its own tensors: {why}")
        checkpoint = self.run.checkpoint
        if loaded.is_signed and checkpoint.save is not None and checkpoint.sign_key is None:
            self.resume_changes.append("earlier steps are signed, new ones will not be: --sign-key was not given")

    def _report_random_states(self, loaded: LoadedState) -> None:
        """Reports that RNG states restart, unless the layout change reports it already."""
        if loaded.random_states_restored or any("random states" in change for change in self.resume_changes):
            return
        why = "--no-load-rng" if self.run.checkpoint.no_load_rng else "the checkpoint has none"
        self.resume_changes.append(f"random states (dropout) start anew: {why}")


def _build_checkpoint_manager(config: CheckpointConfig, mesh: ParallelMesh) -> CheckpointManager | None:
    if config.save is None:
        return None
    return CheckpointManager(
        config.save,
        mesh.control,
        world_axis=mesh.world,
        device=mesh.device,
        async_axis=mesh.background_control_axis() if config.async_save else None,
        retention=Retention(config.save_total_limit, config.save_retain_interval),
        sign=open_signer(Path(config.sign_key)) if config.sign_key is not None else None,
    )
