"""`CheckpointManager`: all ranks save and load together, and fail together.

`save` and `load` are collective: all ranks of the world call them, in the same order. Each stage runs on all ranks and fails on all
(`run_on_all_ranks.py`). The folder must be shared by all ranks.

The layout does not change during a run, so the save plan is made at the first save and cached. A save then has the same few small
collectives whatever the model and the number of ranks, plus the rounds that gather weights on their writers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.checkpoint.checkpoint_contents import LoadedCheckpoint, ModelFolder
from petatron.checkpoint.files import step_folder, step_list
from petatron.checkpoint.files.digested_file_io import Disk
from petatron.checkpoint.files.manifest import Manifest, TableFile
from petatron.checkpoint.files.signature import SIGNATURE_FILE, SignFunction
from petatron.checkpoint.files.step_list import DamagedCheckpointError
from petatron.checkpoint.load import reshard_reads
from petatron.checkpoint.load.rank_reader import RankReader
from petatron.checkpoint.run_on_all_ranks import AllRanks, LocalResult
from petatron.checkpoint.save import plan_weight_transfers
from petatron.checkpoint.save.async_save import AsyncSaveThread, StagingBuffer
from petatron.checkpoint.save.gather_weights import WeightGather
from petatron.checkpoint.save.rank_writer import (
    RankWriteJob,
    SaveRequest,
    build_write_job,
    check_free_space,
    write_rank_files,
)
from petatron.checkpoint.save.save_plan import SavePlan, SavePlanKey, SavePlanner, save_plan_key
from petatron.checkpoint.sparse_all_to_all import exchange_messages
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.collectives import all_gather, all_reduce, recursive_doubling_max
from petatron.mesh.json_collectives import broadcast_json
from petatron.mesh.mesh import Axis

_MIN_ROUND_BYTES = 1 << 20
_log = get_logger(__name__)
Result = TypeVar("Result")
SelectChunks = Callable[[Mapping[str, Any]], Sequence[Chunk]]
"""Returns the chunks to load, given the metadata of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Decides which steps survive pruning: the newest `keep` (None: all), and every multiple of `retain_interval`."""

    keep: int | None = None
    retain_interval: int | None = None


class CheckpointManager:
    """Saves, loads and prunes the checkpoints of one folder.

    >>> import tempfile, torch
    >>> from petatron.mesh.mesh import ParallelMesh
    >>> manager = CheckpointManager(tempfile.mkdtemp(), ParallelMesh.single().world)
    >>> weight = torch.ones(2, 3)
    >>> chunk = Chunk("model/weight", (2, 3), (0, 0), weight)
    >>> manager.save(10, [chunk], metadata={"samples": 80}, same_layout_key="one")
    >>> _ = weight.zero_()
    >>> manager.load(None, [chunk]).metadata, manager.latest(), weight.sum()
    ({'samples': 80}, 10, tensor(6.))
    """

    def __init__(
        self,
        folder: str | Path,
        control_axis: Axis,
        *,
        world_axis: Axis | None = None,
        async_axis: Axis | None = None,
        device: torch.device | None = None,
        disk: Disk | None = None,
        retention: Retention | None = None,
        sign: SignFunction | None = None,
    ) -> None:
        """`world_axis` carries weights between devices, `device` on this rank; they default to `control_axis`, all ranks over host memory.
        `async_axis` is used by async saves only, so that they never share a communicator with training. `sign` is the same on every
        rank: rank 0 signs, and all ranks write SHA-256 digests for the signature to cover.
        """
        self._folder = Path(folder)
        self._control_axis = control_axis
        self._ranks = AllRanks(control_axis, default_failure=f"a checkpoint in {folder} could not be read")
        self._world_axis = world_axis or control_axis
        self._device = device or torch.device("cpu")
        self._async_axis = async_axis
        self._is_first_rank = control_axis.rank == 0
        self._disk = disk or Disk()
        self._disk.sha256_digests = sign is not None
        self._sign = sign
        self._retention = retention or Retention()
        self.pruned: tuple[int, ...] = ()
        """Steps that the last save pruned, known on rank 0."""
        self._save_thread = AsyncSaveThread()
        self._staging = StagingBuffer()
        self._cached_plan: tuple[SavePlanKey, SavePlan, int] | None = None

    def latest(self) -> int | None:
        """Returns the newest complete step that rank 0 sees, or None."""
        return self.broadcast_from_rank0(lambda: step_list.latest_step(self._folder))

    def save(
        self,
        step: int,
        chunks: Sequence[Chunk],
        *,
        metadata: Mapping[str, Any],
        same_layout_key: str,
        local: Mapping[str, Tensor] | None = None,
        model: ModelFolder | None = None,
        wait: bool = True,
    ) -> None:
        """Publishes a checkpoint; when this returns it is on disk, and when it raises the earlier ones are untouched.

        metadata: JSON values, the same on every rank. local: this rank's own tensors, returned only to a run with the same
        `same_layout_key`. model: how weights map to the model folder; without it they are saved as boxes. wait: False returns as soon
        as everything is copied (after waiting for an earlier async save), and `drain` tells the outcome.
        """
        job = self._prepare(SaveRequest(step, chunks, same_layout_key, local or {}, model), metadata)
        if wait:
            self._write_and_publish(job, self._control_axis)
            return
        axis = self._async_axis or self._control_axis
        assert axis is not self._control_axis or axis.size == 1, (
            "ranks need an axis that the training loop does not use"
        )
        with self._removing_tmp_on_error(self._control_axis):
            copied = self._ranks.run(lambda: job.staged(self._staging), *self._save_error_texts(step))
        self._save_thread.start(lambda: self._write_and_publish(copied, axis))

    @property
    def is_saving(self) -> bool:
        """Whether an async save is still being written."""
        return self._save_thread.is_running

    def drain(self) -> None:
        """Waits for an async save and raises if it failed. Does nothing when none was started."""
        self._save_thread.wait()

    def _prepare(self, request: SaveRequest, metadata: Mapping[str, Any]) -> RankWriteJob:
        """Does everything that needs the run's own tensors and the ranks' devices."""
        self.drain()
        step, chunks, _, local, model = request
        error_texts = self._save_error_texts(step)
        now = save_plan_key(chunks, local, model)
        # As read; the caller may change it.
        frozen = self._ranks.run_locally(lambda: json.loads(json.dumps(dict(metadata))), *error_texts)
        [changed] = self._ranks.max_or_raise(frozen, [int(self._cached_plan is None or self._cached_plan[0] != now)])
        if changed:
            self._cached_plan = None
            self._cached_plan = (now, *self._make_plan(request))
        _, plan, needed_bytes = self._cached_plan  # pyright: ignore[reportGeneralTypeIssues]

        def begin() -> WeightGather:
            if self._is_first_rank:
                documents = () if model is None else model.aux_files.values()
                step_folder.recover_interrupted(self._folder, self._disk)  # before calling the disk full
                check_free_space(self._folder, needed_bytes + sum(map(len, documents)))
                step_folder.begin_step(self._folder, step, self._disk)
            return WeightGather(plan, chunks, self._world_axis, self._device)

        with self._removing_tmp_on_error(self._control_axis):
            gathered = self._ranks.run(begin, *error_texts).run()
            rank = self._control_axis.rank
            return build_write_job(request, plan, gathered, rank=rank, metadata=frozen.result or {})

    def _make_plan(self, request: SaveRequest) -> tuple[SavePlan, int]:
        """Returns this rank's plan for every save of this layout, and the bytes of all ranks' tensors."""
        axis, error_texts = self._control_axis, self._save_error_texts(request.step)
        _, chunks, _, local, model = request
        survey = self._ranks.run(lambda: SavePlanner(chunks, model, rank=axis.rank, world_size=axis.size), *error_texts)
        numbers = torch.tensor(self._ranks.run(survey.encoded_dtypes, *error_texts))
        most = recursive_doubling_max(numbers, axis).tolist() if model is not None else []

        def messages() -> dict[int, dict[str, list[Any]]]:
            survey.set_agreed_dtypes(most)
            return survey.messages()

        received = exchange_messages(self._ranks.run(messages, *error_texts), axis)
        round_bytes = plan_weight_transfers.ROUND_BYTES
        while True:
            plan = self._ranks.run(partial(survey.plan, received, round_bytes), *error_texts)
            rounds, peak = self._ranks.max_or_raise(
                LocalResult(plan), [len(plan.transfers.rounds), plan.transfers.max_send_bytes]
            )
            if peak <= plan_weight_transfers.ROUND_BYTES or round_bytes <= _MIN_ROUND_BYTES:
                break
            # Some rank sends to many writers at once. Smaller rounds for each of them bound the sender's memory.
            round_bytes = max(round_bytes * plan_weight_transfers.ROUND_BYTES // (peak + 1), _MIN_ROUND_BYTES)
        kept = sum(tensor.numel() * tensor.dtype.itemsize for tensor in local.values())
        return plan.with_rounds(rounds), int(all_reduce(torch.tensor([plan.primary_bytes + kept]), axis))

    def _save_error_texts(self, step: int) -> tuple[str, str]:
        """Returns what a failing save could not do, and what helps."""
        fix = "Free space there or make it writable; earlier checkpoints are untouched"
        return f"step {step} could not be saved to {self._folder}", fix

    def _write_and_publish(self, write_job: RankWriteJob, axis: Axis) -> None:
        """Writes, publishes and prunes; every stage on all ranks, over an axis that nothing else uses at the time."""
        folder, disk, step = self._folder, self._disk, write_job.step
        error_texts = self._save_error_texts(step)
        with self._removing_tmp_on_error(axis):
            tables = self._gather_tables(
                self._ranks.run_locally(lambda: write_rank_files(folder, write_job, disk), *error_texts), axis
            )
            following = tables[(axis.rank + 1) % axis.size]
            self._ranks.run(lambda: step_folder.check_visible(folder, step, following), *error_texts, axis)

            def publish() -> None:
                if self._is_first_rank:
                    recorded = {"metadata": write_job.metadata, "layout": write_job.layout}
                    step_folder.publish_step(folder, step, tables, **recorded, disk=disk, sign=self._sign)
                    # Before the other ranks continue: they would wait for this one in a collective that may time out.
                    self._prune()

            self._ranks.run(publish, *error_texts, axis)

    def _gather_tables(self, write_result: LocalResult[TableFile], axis: Axis) -> list[TableFile]:
        """Gathers every rank's table as name, size and digest, together with its success, in one all-gather."""
        table = write_result.result
        digest = bytes(32) if table is None else bytes.fromhex(table.digest)
        size = 0 if table is None else table.size_bytes
        row = [int(write_result.error_text is not None), size, *np.frombuffer(digest, dtype="<i8").tolist()]
        rows = all_gather(torch.tensor([row]), axis).tolist()
        if any(failed for failed, *_ in rows):
            self._ranks.raise_failure(write_result, axis)
        return [
            TableFile(step_folder.table_path(rank), size, np.array(digest, dtype="<i8").tobytes().hex())
            for rank, (_, size, *digest) in enumerate(rows)
        ]

    @contextmanager
    def _removing_tmp_on_error(self, axis: Axis) -> Iterator[None]:
        """Removes the temporary folder of a failed save: no rank writes to it any more, and it would keep the disk full."""
        try:
            yield
        except CheckpointError:
            if axis.rank == 0:
                with contextlib.suppress(OSError):
                    step_folder.recover_interrupted(self._folder, self._disk)
            raise

    def _prune(self) -> None:
        """Prunes old steps; a step that cannot be removed is no reason to stop a run."""
        keep = self._retention
        try:
            gone = step_folder.prune_steps(
                self._folder, keep=keep.keep, retain_interval=keep.retain_interval, disk=self._disk
            )
        except OSError as error:
            _log.warning("old checkpoints in %s could not be removed: %s", self._folder, error)
            return
        self.pruned = tuple(gone)

    def load(
        self,
        step: int | None,
        chunks: Sequence[Chunk] | SelectChunks,
        *,
        read_manifest: Callable[[Path], Manifest] = step_folder.read_manifest_head_to_load,
        has_steps: bool = True,
        same_layout_key: str | None = None,
        strict: bool = True,
        may_ignore_key: Callable[[str], bool] | None = None,
        may_lack_key: Callable[[str], bool] | None = None,
        check_all_files: bool = True,
        fallback: bool = False,
    ) -> LoadedCheckpoint:
        """Fills every chunk from a step (None: the newest), whatever layout saved it (reshards).

        chunks: or what selects them, given the checkpoint's metadata; it may raise. read_manifest: of a step, or of the folder itself if it
        has no steps: another program's model. strict: every key must be in the checkpoint, and no key of the same kind may be left over;
        otherwise missing keys keep their values and are named in the result, as those of `may_lack_key` are in any case. may_ignore_key:
        which keys may be left unread; by default, those of kinds that no rank requests. check_all_files: whether files that are not read
        must be there too. fallback: if the step is damaged, warn and load the newest sound one before it. Nothing is changed unless the
        whole checkpoint fits; after an error about a damaged file, the content of the chunks is undefined.
        """
        self.drain()

        def fill(source: Path) -> LoadedCheckpoint:
            """Rank 0 reads the manifest, and the ranks share its tables (`load/stored_box_lookup.py`)."""
            reader = RankReader(source, self._control_axis, self._ranks)
            head = reader.read_manifest(partial(read_manifest, source))
            selected = self._ranks.run(lambda: chunks(head.metadata) if callable(chunks) else chunks)
            plan = reader.plan_reads(
                selected,
                strict=strict,
                may_ignore_key=may_ignore_key,
                may_lack_key=may_lack_key,
                check_all_files=check_all_files,
            )
            self._ranks.run(lambda: reshard_reads.execute_reads(source, plan, reader.files))
            local = self._ranks.run(lambda: reader.read_local() if head.layout == same_layout_key else None)
            is_signed = os.path.lexists(source / SIGNATURE_FILE)
            return LoadedCheckpoint(head.step, dict(head.metadata), local, plan.missing_keys, is_signed, source)

        if not has_steps:
            return fill(self._folder)
        while True:
            source = None
            try:
                resolve = partial(step_list.resolve_step, self._folder, step)
                source = Path(self.broadcast_from_rank0(lambda resolve=resolve: str(resolve())))
                return fill(source)
            except DamagedCheckpointError as error:
                step = self.broadcast_from_rank0(partial(step_list.previous_step, self._folder, source))
                if not fallback:
                    raise
                if step is None:
                    raise DamagedCheckpointError(f"{error}\nThere is no older step to fall back to.") from error
                if self._is_first_rank:
                    _log.error("%s\nFalling back to step %d, as --load-fallback says.", error, step)

    def broadcast_from_rank0(self, read: Callable[[], Result]) -> Result:
        """Returns on every rank what rank 0 reads on disk; a JSON value."""
        return broadcast_json(self._ranks.run(lambda: read() if self._is_first_rank else None), self._control_axis)
