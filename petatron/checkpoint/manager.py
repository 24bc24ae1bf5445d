"""`CheckpointManager`: all ranks save and load together, and fail together.

`save` and `load` are collective: all ranks of the world call them, in the same order. Each stage runs
locally, then one small all-reduce says whether all is well; if any rank failed, all raise the same CheckpointError, so a full
disk on one machine is an error message and never a hang. The folder must be shared by all ranks.

The layout of a run does not change, so what each rank does in a save is planned at the first one and kept. A save then has the
same few small collectives whatever the model and the number of ranks, beside the rounds that bring weights to their writers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.disk import Disk
from petatron.checkpoint.files.manifest import Manifest, TableFile
from petatron.checkpoint.files.signature import Sign
from petatron.checkpoint.files.step_folder import DamagedCheckpoint
from petatron.checkpoint.load import box_reads
from petatron.checkpoint.load.rank_reader import Reader
from petatron.checkpoint.message_exchange import exchange
from petatron.checkpoint.save import weight_transfers
from petatron.checkpoint.save.async_save import Background, Staging
from petatron.checkpoint.save.gather_weights import Assembly
from petatron.checkpoint.save.rank_writer import Job, check_room, fill_job, write_job
from petatron.checkpoint.save.save_plan import Layout, SavePlan, Survey, layout_of
from petatron.checkpoint.state import Chunk, LoadedCheckpoint, ModelFolder
from petatron.mesh.collectives import all_gather, all_reduce, broadcast_object, gather_objects, largest
from petatron.mesh.mesh import Axis

_LEAST_ROUND_BYTES = 1 << 20
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
        sign: Sign | None = None,
    ) -> None:
        """`world` moves weights between devices, which are `device` on this rank; they default to `control`, all ranks over
        host memory. `background` is what ranks talk over while training goes on, and needed only for that. `sign` is the same on
        every rank: the first one signs, and all of them write digests that are worth a signature.
        """
        self._folder = Path(folder)
        self._control = control
        self._world = world or control
        self._device = device or torch.device("cpu")
        self._background_axis = background
        self._leads = control.rank == 0
        self._disk = disk or Disk()
        self._disk.strong_digests = sign is not None
        self._sign = sign
        self._retention = retention or Retention()
        self.pruned: tuple[int, ...] = ()
        """Steps that the last save let go of, as the first rank knows them."""
        self._background = Background()
        self._staging = Staging()
        self._plan: tuple[Layout, SavePlan, int] | None = None

    def latest(self) -> int | None:
        """The newest complete step as the first rank sees it, or None."""
        return self.from_first(lambda: step_folder.latest_step(self._folder))

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
        job = self._prepare(step, chunks, facts=facts, layout=same_layout_key, local=local or {}, model=model)
        if wait:
            self._finish(job, self._control)
            return
        axis = self._background_axis or self._control
        assert axis is not self._control or axis.size == 1, "ranks need an axis that the training loop does not use"
        with self._tidied_up(self._control):
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
        local: Mapping[str, Tensor],
        model: ModelFolder | None,
    ) -> Job:
        """Everything that needs the run's own tensors and the ranks' devices."""
        self.drain()
        words = self._words_for(step)
        now = layout_of(chunks, local, model)
        frozen = self._attempt(lambda: json.loads(json.dumps(dict(facts))), *words)  # as read; the caller may change it
        [changed] = self._agree(frozen, [int(self._plan is None or self._plan[0] != now)])
        if changed:
            self._plan = None
            self._plan = (now, *self._make_plan(chunks, local, model, words))
        _, plan, needed_bytes = self._plan  # pyright: ignore[reportGeneralTypeIssues]

        def begin() -> Assembly:
            if self._leads:
                documents = () if model is None else model.documents.values()
                self._make_room(needed_bytes + sum(map(len, documents)))
                step_folder.begin(self._folder, step, self._disk)
            return Assembly(plan.files, plan.dtypes, plan.transfers, chunks, self._world, self._device)

        with self._tidied_up(self._control):
            whole = self._together(begin, *words).run()
            return fill_job(
                step,
                plan,
                chunks,
                whole,
                rank=self._control.rank,
                local=local,
                model=model,
                facts=frozen.result or {},
                layout=layout,
            )

    def _make_plan(
        self,
        chunks: Sequence[Chunk],
        local: Mapping[str, Tensor],
        model: ModelFolder | None,
        words: tuple[str, str],
    ) -> tuple[SavePlan, int]:
        """What this rank does in every save of this layout, and the bytes of all ranks' tensors."""
        axis = self._control
        survey = self._together(lambda: Survey(chunks, model, rank=axis.rank, world_size=axis.size), *words)
        numbers = torch.tensor(self._together(survey.dtype_numbers, *words))
        most = largest(numbers, axis).tolist() if model is not None else []

        def messages() -> dict[int, dict[str, list[Any]]]:
            survey.agree(most)
            return survey.messages()

        received = exchange(self._together(messages, *words), axis)
        round_bytes = weight_transfers.ROUND_BYTES
        while True:
            plan = self._together(partial(survey.plan, received, round_bytes), *words)
            rounds, peak = self._agree(Attempt(plan), [len(plan.transfers.rounds), plan.transfers.bytes_out])
            if peak <= weight_transfers.ROUND_BYTES or round_bytes <= _LEAST_ROUND_BYTES:
                break
            # Some rank sends to many writers at once. If each of them takes less at a time, so does the sender's memory.
            round_bytes = max(round_bytes * weight_transfers.ROUND_BYTES // (peak + 1), _LEAST_ROUND_BYTES)
        kept = sum(tensor.numel() * tensor.dtype.itemsize for tensor in local.values())
        total = all_reduce(torch.tensor([plan.own_bytes + kept]), axis)
        return plan.with_rounds(rounds), int(total)

    def _make_room(self, needed_bytes: int) -> None:
        """What a crash left behind goes before the disk is called full."""
        step_folder.recover(self._folder, self._disk)
        check_room(self._folder, needed_bytes)

    def _words_for(self, step: int) -> tuple[str, str]:
        """What a failing save could not do, and what helps."""
        fix = "Free space there or make it writable; earlier checkpoints are untouched"
        return f"step {step} could not be saved to {self._folder}", fix

    def _finish(self, job: Job, axis: Axis) -> None:
        """Write, publish, prune; every stage on all ranks, over an axis that nothing else uses at the time."""
        folder, disk, step = self._folder, self._disk, job.step
        words = self._words_for(step)
        with self._tidied_up(axis):
            tables = self._gather_tables(self._attempt(lambda: write_job(folder, job, disk), *words), axis)
            following = tables[(axis.rank + 1) % axis.size]
            self._together(lambda: step_folder.check_seen(folder, step, following), *words, axis)

            def publish() -> None:
                if self._leads:
                    step_folder.publish(
                        folder, step, tables, facts=job.facts, layout=job.layout, disk=disk, sign=self._sign
                    )
                    # Before the others go on: they would wait for this rank in a collective that may have a time limit.
                    self._prune()

            self._together(publish, *words, axis)

    def _gather_tables(self, written: Attempt[TableFile], axis: Axis) -> list[TableFile]:
        """Every rank's table as its name, size and digest, and with them whether all is well, in one all-gather."""
        table = written.result
        digest = bytes(32) if table is None else bytes.fromhex(table.digest)
        size = 0 if table is None else table.size_bytes
        row = [int(written.failure is not None), size, *np.frombuffer(digest, dtype="<i8").tolist()]
        rows = all_gather(torch.tensor([row]), axis).tolist()
        if any(failed for failed, *_ in rows):
            self._raise(written, axis)
        return [
            TableFile(step_folder.table_path(rank), size, np.array(digest, dtype="<i8").tobytes().hex())
            for rank, (_, size, *digest) in enumerate(rows)
        ]

    @contextmanager
    def _tidied_up(self, axis: Axis) -> Iterator[None]:
        """Remove the draft of a save that fails: no rank is writing any more, and it would only keep the disk full."""
        try:
            yield
        except CheckpointError:
            if axis.rank == 0:
                with contextlib.suppress(OSError):
                    step_folder.recover(self._folder, self._disk)
            raise

    def _prune(self) -> None:
        """A step too many is no reason to stop a run."""
        keep = self._retention
        try:
            gone = step_folder.prune(self._folder, keep=keep.keep, retain_interval=keep.interval, disk=self._disk)
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
                    partial(step_folder.read_loadable, source),
                    chunks,
                    same_layout_key=same_layout_key,
                    strict=strict,
                    leaves=leaves,
                    approve=approve,
                )
            except DamagedCheckpoint as error:
                step = self.from_first(partial(step_folder.step_before, self._folder, source))
                if not fallback:
                    raise
                if step is None:
                    raise DamagedCheckpoint(f"{error}\nThere is no older step to fall back to.") from error
                if self._leads:
                    _log.error("%s\nFalling back to step %d, as --load-fallback says.", error, step)

    def _choose(self, step: int | None) -> Path:
        return Path(self.from_first(lambda: str(step_folder.choose(self._folder, step))))

    def from_first(self, ask: Callable[[], Result]) -> Result:
        """What the first rank sees on disk, on every rank; a JSON value."""
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
        """Fill chunks from a folder that a manifest describes, be it of ours or of others.

        The first rank reads the manifest, and the ranks share the tables that it names (`planning/directory.py`).
        """
        reader = Reader(source, self._control, self._together)
        head = reader.open(describe)
        if approve is not None:
            self._together(lambda: approve(head.facts))
        plan = reader.plan(chunks, strict=strict, leaves=leaves)
        self._together(lambda: box_reads.fill(source, plan, reader.files))
        same_layout = head.layout == same_layout_key
        local = self._together(lambda: reader.local() if same_layout else None)
        return LoadedCheckpoint(head.step, dict(head.facts), local, plan.missing)

    def _together(
        self, action: Callable[[], Result], doing: str = "", fix: str = "", axis: Axis | None = None
    ) -> Result:
        """This rank's result of an action that every rank takes; one rank's failure is a CheckpointError on all."""
        attempt = self._attempt(action, doing, fix)
        self._agree(attempt, [], axis)
        return attempt.result  # pyright: ignore[reportReturnType]

    def _attempt(self, action: Callable[[], Result], doing: str = "", fix: str = "") -> Attempt[Result]:
        """What came of an action on this rank alone."""
        try:
            return Attempt(action())
        except CheckpointError as error:
            return Attempt(None, str(error), isinstance(error, DamagedCheckpoint), error)
        except Exception as error:
            doing = doing or f"a checkpoint in {self._folder} could not be read"
            text = ". ".join(filter(None, [f"{doing}: {type(error).__name__}: {error}", fix]))
            return Attempt(None, text, False, error)

    def _agree(self, attempt: Attempt[Any], numbers: Sequence[int], axis: Axis | None = None) -> list[int]:
        """One small exchange: the largest of each number over all ranks, or the failure of some rank on every rank."""
        axis = axis or self._control
        failed, *found = largest(torch.tensor([int(attempt.failure is not None), *numbers]), axis).tolist()
        if failed:
            self._raise(attempt, axis)
        return found

    def _raise(self, attempt: Attempt[Any], axis: Axis) -> NoReturn:
        """Only now are texts exchanged."""
        found = gather_objects([attempt.failure, attempt.damaged], axis)
        failures = {rank: text for rank, (text, _) in enumerate(found) if text is not None}
        damaged = all(damaged for text, damaged in found if text is not None)
        kind = DamagedCheckpoint if damaged else CheckpointError
        raise kind(_report(failures, axis.size)) from attempt.cause


@dataclass(frozen=True, slots=True, eq=False)
class Attempt(Generic[Result]):
    """What came of an action on one rank: its result, or why it failed and whether a file is not what was saved."""

    result: Result | None
    failure: str | None = None
    damaged: bool = False
    cause: Exception | None = None


def _report(failures: Mapping[int, str], world_size: int) -> str:
    """All failures, each said once with the ranks it happened on."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1 and len(failures) == world_size:
        return next(iter(ranks))
    return "\n".join(f"[rank {', '.join(map(str, where))}] {text}" for text, where in ranks.items())
