"""Finds the samples that an iteration of a run trained on, from its settings and the positions that its checkpoints have recorded.

Positions and samples come from what training uses: the batch-size schedule, the datasets, the loader. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError, ConfigError, DataError, Problem
from petatron.base.log import get_logger
from petatron.base.untrusted_files import is_count
from petatron.checkpoint.files import step_folder, step_list
from petatron.checkpoint.inspect.summarize_checkpoint import run_metadata
from petatron.config import RunConfig
from petatron.config.schema.objective_and_dataset_names import EXTERNAL
from petatron.data.batch_loader import BatchLoader
from petatron.data.documents_of_sample import SampleTrace, trace_sample
from petatron.data.tokenizer import Tokenizer
from petatron.mesh.mesh import ParallelMesh
from petatron.train.build_run import RunLength, build_loaders
from petatron.train.global_batch_size import BatchSizeSchedule


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The global batch of an iteration, in its order; samples of the run are numbered from 0.

    data_changed: the data, or its order, is not what the next checkpoint (the last one, after it) has recorded.
    """

    iteration: int
    consumed_samples: int
    samples: tuple[SampleTrace, ...]
    fingerprint: str
    data_changed: bool

    def as_json(self) -> dict[str, Any]:
        samples = [
            {"sample": self.consumed_samples + place, **sample.as_json()} for place, sample in enumerate(self.samples)
        ]
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "global_batch_size": len(self.samples),
            "fingerprint": self.fingerprint,
            "data_changed": self.data_changed,
            "samples": samples,
        }


@dataclass(frozen=True, slots=True)
class RecordedPosition:
    """What a checkpoint has recorded: its iteration, the samples before the next, and the data."""

    iteration: int = 0
    consumed_samples: int = 0
    fingerprint: str | None = None


def trace_step(run: RunConfig, tokenizer: Tokenizer | None, *, iteration: int, checkpoints: Path | None) -> TracedStep:
    """Returns what an iteration, counted from 1, trains on. checkpoints: a folder with checkpoints of the run, if there is one."""
    if run.data.dataloader_type == EXTERNAL:
        raise DataError(
            "The samples of --dataloader-type external cannot be traced: its own code knows where they are from."
        )
    schedule, start = BatchSizeSchedule.from_config(run), RecordedPosition()
    recorded = None
    for position in [] if checkpoints is None else recorded_positions(checkpoints):
        if position.iteration < iteration:
            start, recorded = position, position.fingerprint
        else:
            _check_before(schedule, start, position)
            recorded = position.fingerprint
            break
    length = RunLength.from_config(run, iteration=start.iteration, consumed_samples=start.consumed_samples)
    if iteration > length.iterations:
        rule = f"is after the last iteration of the run, {length.iterations:,}"
        raise ConfigError([Problem("--iteration", f"{iteration:,}", rule, "They are counted from 1.")])
    consumed = schedule.samples_after(iteration - 1 - start.iteration, start.consumed_samples)
    loaders = build_loaders(run, ParallelMesh.single(), tokenizer, train_samples=length.samples, evaluates=False)
    assert isinstance(loaders.train, BatchLoader), "an external loader is refused above"
    with loaders.train as loader:
        dataset = loader.dataset
        indices = loader.dataset_indices(schedule.at(consumed), consumed).reshape(-1).tolist()
        samples = tuple(trace_sample(dataset, index) for index in indices)
        changed = recorded not in (None, dataset.fingerprint)
        return TracedStep(iteration, consumed, samples, dataset.fingerprint, changed)


def recorded_positions(checkpoints: Path) -> list[RecordedPosition]:
    """Returns the positions of the checkpoints in a folder, in their order; those that cannot be read are left out with a warning."""
    positions = []
    for step, path in sorted(step_list.list_steps(checkpoints).items()):
        try:
            metadata = run_metadata(step_folder.read_manifest_head(path))
        except CheckpointError as error:
            get_logger(__name__).warning("%s", error)
            continue
        progress, fingerprint = metadata.get("progress"), metadata.get("data")
        consumed = progress.get("consumed_samples") if isinstance(progress, Mapping) else None
        if isinstance(consumed, int) and is_count(consumed):
            positions.append(RecordedPosition(step, consumed, fingerprint if isinstance(fingerprint, str) else None))
    return positions


def _check_before(schedule: BatchSizeSchedule, start: RecordedPosition, later: RecordedPosition) -> None:
    """Raises where a later checkpoint shows that the run had other batch sizes than its settings say."""
    expected = schedule.samples_after(later.iteration - start.iteration, start.consumed_samples)
    if expected != later.consumed_samples:
        raise CheckpointError(
            f"The checkpoint of iteration {later.iteration:,} has consumed {later.consumed_samples:,} samples, and by these settings "
            f"it would be {expected:,}: the global batch size has changed. Give the flags of the batch size that iteration had."
        )
