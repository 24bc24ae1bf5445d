"""`TrainState`: everything a run carries from step to step, and how it is saved and found again.

A checkpoint holds, by logical tensor, the model's weights, the master weights where they differ, and the moments; and as
facts how far the run is. Random states belong to a rank, so they come back only in the layout that saved them; every
other part is the same for all layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.state import Chunk
from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.spec import Piece
from petatron.optim.master import MasterOptimizer
from petatron.optim.precision import LossScaler, build_scaler
from petatron.optim.schedule import LearningRateSchedule, WeightDecaySchedule
from petatron.parallel.model import ParallelModel
from petatron.train.batch_size import BatchSchedule
from petatron.train.build import build_model, build_optimizer

_log = get_logger(__name__)


@dataclass(slots=True)
class Progress:
    """How far a run is. Updates and their samples exclude steps that fp16 overflow left out; schedules follow them."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    updates: int = 0
    update_samples: int = 0


@dataclass(slots=True)
class TrainState:
    """The parts of a run that change, and the pure schedules they follow."""

    run: RunConfig
    mesh: ParallelMesh
    model: ParallelModel
    optimizer: MasterOptimizer
    scaler: LossScaler
    rates: LearningRateSchedule
    decays: WeightDecaySchedule
    batch_sizes: BatchSchedule
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def build(cls, run: RunConfig, mesh: ParallelMesh) -> TrainState:
        """A run at iteration 0."""
        model = build_model(run, mesh)
        return cls(
            run=run,
            mesh=mesh,
            model=model,
            optimizer=build_optimizer(run, model),
            scaler=build_scaler(run.precision),
            rates=LearningRateSchedule.from_config(run),
            decays=WeightDecaySchedule.from_config(run),
            batch_sizes=BatchSchedule.from_config(run),
        )

    def save(self, folder: str) -> None:
        """Publish a checkpoint of this iteration; every rank calls it."""
        config = self.run.checkpoint
        facts: dict[str, Any] = {
            "progress": asdict(self.progress),
            "optimizer": None if config.no_save_optim else self.optimizer.facts(),
            "scaler": self.scaler.state(),
            "schedule": self._schedule_facts(),
        }
        CheckpointManager(folder, self.mesh.world).save(
            self.progress.iteration,
            list(self._chunks(optimizer=not config.no_save_optim)),
            facts=facts,
            same_layout_key=self._layout_key(),
            local={} if config.no_save_rng else self.model.streams.state(),
        )

    def load(self, folder: str) -> bool:
        """Continue from a folder's checkpoint; False when it holds none and the run may start from scratch."""
        config = self.run.checkpoint
        manager = CheckpointManager(folder, self.mesh.world)
        if config.ckpt_step is None and manager.latest() is None:
            if config.exit_on_missing_checkpoint:
                raise CheckpointError(f"--load {folder} holds no checkpoint, and --exit-on-missing-checkpoint is set.")
            return False
        weights_only = config.finetune or config.no_load_optim
        found = manager.load(
            config.ckpt_step, list(self._chunks(optimizer=not weights_only)), same_layout_key=self._layout_key()
        )
        if weights_only:
            self.optimizer.read_weights()
        if config.finetune:
            return True
        self._restore_facts(found.facts, folder, optimizer=not weights_only)
        if found.local and not config.no_load_rng:
            self.model.streams.restore(found.local)
        elif not config.no_load_rng:
            _log.warning("random states were saved in another layout; dropout starts a new stream")
        return True

    def _restore_facts(self, facts: dict[str, Any], folder: str, *, optimizer: bool) -> None:
        if optimizer:
            if facts["optimizer"] is None:
                raise CheckpointError(
                    f"The checkpoint in {folder} was saved with --no-save-optim and holds no optimizer state. "
                    "Use --finetune to start a new run from its weights, or --no-load-optim to go on without moments."
                )
            self.optimizer.restore_facts(facts["optimizer"])
        ours = self._schedule_facts()
        if facts["schedule"] != ours and not self.run.checkpoint.override_opt_param_scheduler:
            changed = [f"{name}: {facts['schedule'].get(name)} then, {ours[name]} now" for name in ours if facts["schedule"].get(name) != ours[name]]
            raise CheckpointError(
                f"The checkpoint in {folder} was trained with another schedule ({'; '.join(changed)}). Restore those "
                "values, or say --override-opt-param-scheduler to go on with the new ones."
            )
        self.progress = Progress(**facts["progress"])
        self.scaler.restore(facts["scaler"])

    def _schedule_facts(self) -> dict[str, Any]:
        """What would change the course of a run if it changed on resume."""
        rates, decays = asdict(self.rates), asdict(self.decays)
        return {**{f"lr.{k}": v for k, v in rates.items()}, **{f"weight_decay.{k}": v for k, v in decays.items()}}

    def _layout_key(self) -> str:
        return f"{self.mesh.layout} sequence_parallel={self.run.parallel.sequence_parallel}"

    def _chunks(self, *, optimizer: bool) -> Iterator[Chunk]:
        for group in self.model.groups:
            for piece, view in group.pieces(group.weights):
                yield self._chunk("model", piece, view)
        if optimizer:
            for kind, piece, view in self.optimizer.tensors():
                yield self._chunk(kind, piece, view)

    def _chunk(self, kind: str, piece: Piece, view: Tensor) -> Chunk:
        primary = piece.primary and self.mesh.dp_cp.rank == 0
        return Chunk(f"{kind}/{piece.name}", piece.logical_shape, piece.start, view, primary)

