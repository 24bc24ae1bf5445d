"""`CheckpointManager`: all ranks save and load together, and fail together.

`save` and `load` are collective: all ranks of the world call them, in the same order. Each stage runs
locally, then the ranks exchange how it went; if any of them failed, all raise the same CheckpointError, so a full disk on
one machine is an error message and never a hang. The folder must be shared by all ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.checkpoint import reading, storage
from petatron.checkpoint.background import Background, Staging
from petatron.checkpoint.disk import Disk
from petatron.checkpoint.manifest import Manifest
from petatron.checkpoint.state import Chunk, LoadedCheckpoint, ModelFolder
from petatron.checkpoint.storage import DamagedCheckpoint
from petatron.checkpoint.writing import Job, check_room, folder_chunks, plan_job, write_job
from petatron.mesh.collectives import broadcast_object, gather_objects, gather_objects_to_first
from petatron.mesh.mesh import Axis

_log = get_logger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Retention:
    """Which steps stay when a new one is there: the newest `keep` (None: all), and every multiple of `interval`."""

    keep: int | None = None
    interval: int | None = None


class CheckpointManager:
    """The checkpoints of one folder.

    >>> import tempfile, torch
    >>> from petatron.mesh.mesh import ParallelMesh
    >>> manager = CheckpointManager(tempfile.mkdtemp(), ParallelMesh.single().world)
    >>> weight = torch.ones(2, 3)
    >>> chunk = Chunk("model/weight", (2, 3), (0, 0), weight)
    >>> manager.save(10, [chunk], facts={"samples": 80}, same_layout_key="one")
    >>> _ = weight.zero_()
    >>> manager.load(None, [chunk]).facts, manager.latest(), weight.sum()
    ({'samples': 80}, 10, tensor(6.))
    """

    def __init__(
        self,
        folder: str | Path,
        control: Axis,
        *,
        world: Axis | None = None,
        background: Axis | None = None,
        device: torch.device | None = None,
        disk: Disk | None = None,
        retention: Retention | None = None,
    ) -> None:
        """`world` moves weights between devices, which are `device` on this rank; they default to `control`, all ranks over
        host memory. `background` is what ranks talk over while training goes on, and needed only for that.
        """
        self._folder = Path(folder)
        self._control = control
        self._world = world or control
        self._device = device or torch.device("cpu")
        self._background_axis = background
        self._leads = control.rank == 0
        self._disk = disk or Disk()
        self._retention = retention or Retention()
        self.pruned: tuple[int, ...] = ()
        """Steps that the last save let go of, as the first rank knows them."""
        self._background = Background()
        self._staging = Staging()

    def latest(self) -> int | None:
        """The newest complete step as the first rank sees it, or None."""
        return self.from_first(lambda: storage.latest_step(self._folder))

    def save(
        self,
        step: int,
        chunks: Sequence[Chunk],
        *,
        facts: Mapping[str, Any],
        same_layout_key: str,
        local: Mapping[str, Tensor] | None = None,
        model: ModelFolder | None = None,
        wait: bool = True,
    ) -> None:
        """Publish a checkpoint; when this returns it is on disk, and when it raises the earlier ones are untouched.

        facts: JSON values, the same on every rank. local: this rank's own tensors, which only a run with the same
        `same_layout_key` gets back. model: how the weights stand in the model folder; without it they are kept as boxes.
        wait: else it returns as soon as everything is copied (a save that is still being written is waited for first), and
        how it went is known after `drain`.
        """
        job = self._prepare(step, chunks, facts=facts, layout=same_layout_key, local=local, model=model)
        if wait:
            self._finish(job, self._control)
            return
        axis = self._background_axis or self._control
        assert axis is not self._control or axis.size == 1, "ranks need an axis that the training loop does not use"
        copied = self._together(lambda: job.copied(self._staging), *self._words_for(step))
        self._background.start(lambda: self._finish(copied, axis))

    @property
    def writing(self) -> bool:
        """Whether a save is still being written."""
        return self._background.busy

    def drain(self) -> None:
        """Wait for a save that is being written; raises if it failed. Does nothing when none was started."""
        self._background.wait()

    def _prepare(
        self,
        step: int,
        chunks: Sequence[Chunk],
        *,
        facts: Mapping[str, Any],
        layout: str,
        local: Mapping[str, Tensor] | None,
        model: ModelFolder | None,
    ) -> Job:
        self.drain()
        doing, fix = self._words_for(step)
        # As it will be read; and the caller may go on changing it.
        frozen = self._together(lambda: json.loads(json.dumps(dict(facts))), doing, fix)
        weights = [] if model is None else folder_chunks(chunks, model)
        survey = gather_objects([chunk.facts for chunk in weights], self._control)
        job = self._together(
            lambda: plan_job(
                step,
                chunks,
                weights,
                survey,
                model=model,
                local=local or {},
                rank=self._control.rank,
                layout=layout,
                facts=frozen,
            ),
            doing,
            fix,
        )
        needed = sum(gather_objects(job.bytes, self._control))
        self._together(lambda: self._make_room(needed) if self._leads else None, doing, fix)
        assembly = self._together(lambda: job.assembly(self._world, self._device), doing, fix)
        return job.with_weights(assembly.run())

    def _make_room(self, needed_bytes: int) -> None:
        """What a crash left behind goes before the disk is called full."""
        storage.recover(self._folder, self._disk)
        check_room(self._folder, needed_bytes)

    def _words_for(self, step: int) -> tuple[str, str]:
        """What a failing save could not do, and what helps."""
        fix = "Free space there or make it writable; earlier checkpoints are untouched"
        return f"step {step} could not be saved to {self._folder}", fix

    def _finish(self, job: Job, axis: Axis) -> None:
        """Write, publish, prune; every stage on all ranks, over an axis that nothing else uses at the time."""
        folder, disk, step = self._folder, self._disk, job.step
        doing, fix = self._words_for(step)
        try:
            self._together(lambda: storage.begin(folder, step, disk) if self._leads else None, doing, fix, axis)
            table = self._together(lambda: write_job(folder, job, disk), doing, fix, axis)
            tables = gather_objects_to_first(table, axis)
            self._together(
                lambda: (
                    storage.publish(folder, step, tables, facts=job.facts, layout=job.layout, disk=disk)
                    if tables is not None
                    else None
                ),
                doing,
                fix,
                axis,
            )
        except CheckpointError:
            if self._leads:  # no rank is writing any more; a draft would only keep the disk full
                with contextlib.suppress(OSError):
                    storage.recover(folder, disk)
            raise
        if self._leads:
            self._prune()

    def _prune(self) -> None:
        """A step too many is no reason to stop a run."""
        keep = self._retention
        try:
            gone = storage.prune(self._folder, keep=keep.keep, retain_interval=keep.interval, disk=self._disk)
        except OSError as error:
            _log.warning("old checkpoints in %s could not be removed: %s", self._folder, error)
            return
        self.pruned = tuple(gone)

    def load(
        self,
        step: int | None,
        chunks: Sequence[Chunk],
        *,
        same_layout_key: str | None = None,
        strict: bool = True,
        leaves: Callable[[str], bool] | None = None,
        approve: Callable[[Mapping[str, Any]], None] | None = None,
        fallback: bool = False,
    ) -> LoadedCheckpoint:
        """Fill every chunk from a step (None: the newest), whatever layout saved it.

        strict: every key must be there, and no key of the same kind may be left over; else keys that are missing keep
        their values and are named in the result. leaves: which kinds of keys may be left in the checkpoint; all that nobody
        asks for, unless it is given. approve: sees the facts before anything is filled, and may raise. fallback: if the step
        is damaged, say so and take the newest sound one before it. Nothing is changed unless the whole checkpoint fits; after
        an error about a damaged file, what the chunks hold is undefined.
        """
        self.drain()
        while True:
            source = None
            try:
                source = self._choose(step)
                return self.fill(
                    source,
                    partial(storage.read_whole, source),
                    chunks,
                    same_layout_key=same_layout_key,
                    strict=strict,
                    leaves=leaves,
                    approve=approve,
                )
            except DamagedCheckpoint as error:
                step = self.from_first(partial(storage.step_before, self._folder, source))
                if not fallback:
                    raise
                if step is None:
                    raise DamagedCheckpoint(f"{error}\nThere is no older step to fall back to.") from error
                if self._leads:
                    _log.error("%s\nFalling back to step %d, as --load-fallback says.", error, step)

    def _choose(self, step: int | None) -> Path:
        return self.from_first(lambda: storage.choose(self._folder, step))

    def from_first(self, ask: Callable[[], Result]) -> Result:
        """What the first rank sees on disk, on every rank."""
        found = self._together(lambda: ask() if self._leads else None)
        return broadcast_object(found, self._control)

    def fill(
        self,
        source: Path,
        describe: Callable[[], Manifest],
        chunks: Sequence[Chunk],
        *,
        same_layout_key: str | None = None,
        strict: bool = True,
        leaves: Callable[[str], bool] | None = None,
        approve: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> LoadedCheckpoint:
        """Fill chunks from a folder that a manifest describes, be it of ours or of others. The first rank reads it."""
        manifest = self.from_first(describe)
        if approve is not None:
            self._together(lambda: approve(manifest.facts))
        mine = {reading.source_key(manifest.tensors, chunk) for chunk in chunks}
        wanted = set().union(*gather_objects(mine, self._control))
        plan = self._together(
            lambda: reading.plan_reads(source, manifest, chunks, wanted=wanted, strict=strict, leaves=leaves)
        )
        self._together(lambda: reading.fill(source, plan, manifest.files))
        same_layout = manifest.layout == same_layout_key
        rank = self._control.rank
        local = self._together(lambda: reading.read_local(source, manifest, rank) if same_layout else None)
        return LoadedCheckpoint(manifest.step, dict(manifest.facts), local, plan.missing)

    def _together(
        self, action: Callable[[], Result], doing: str = "", fix: str = "", axis: Axis | None = None
    ) -> Result:
        """This rank's result of an action that every rank takes; one rank's failure is a CheckpointError on all."""
        axis = axis or self._control
        result, failure, cause = None, None, None
        try:
            result = action()
        except CheckpointError as error:
            failure, cause = _Failure(str(error), isinstance(error, DamagedCheckpoint)), error
        except Exception as error:
            doing = doing or f"a checkpoint in {self._folder} could not be read"
            text = ". ".join(filter(None, [f"{doing}: {type(error).__name__}: {error}", fix]))
            failure, cause = _Failure(text, False), error
        failures = {rank: found for rank, found in enumerate(gather_objects(failure, axis)) if found is not None}
        if failures:
            kind = DamagedCheckpoint if all(found.damaged for found in failures.values()) else CheckpointError
            raise kind(_report({rank: found.text for rank, found in failures.items()}, axis.size)) from cause
        return result  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class _Failure:
    """What went wrong on a rank, and whether it was a file that is not what was saved."""

    text: str
    damaged: bool


def _report(failures: Mapping[int, str], world_size: int) -> str:
    """All failures, each said once with the ranks it happened on."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1 and len(failures) == world_size:
        return next(iter(ranks))
    return "\n".join(f"[rank {', '.join(map(str, where))}] {text}" for text, where in ranks.items())
