"""`CheckpointManager`: all ranks save and load together, and fail together.

Every method is collective: all ranks of the world call it, in the same order. Each stage runs locally, then the ranks
exchange how it went; if any of them failed, all raise the same CheckpointError, so a full disk on one machine is an error
message and never a hang. The folder must be shared by all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.checkpoint import reading, storage
from petatron.checkpoint.state import Chunk, LoadedCheckpoint
from petatron.checkpoint.storage import Disk
from petatron.mesh.collectives import gather_objects, gather_objects_to_first
from petatron.mesh.mesh import Axis

Result = TypeVar("Result")


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

    def __init__(self, folder: str | Path, world: Axis, *, disk: Disk | None = None) -> None:
        self._folder = Path(folder)
        self._world = world
        self._leads = world.rank == 0
        self._disk = disk or Disk()

    def latest(self) -> int | None:
        """The newest complete step as the first rank sees it, or None."""
        step = self._together(lambda: storage.latest_step(self._folder) if self._leads else None)
        return gather_objects(step, self._world)[0]

    def save(
        self,
        step: int,
        chunks: Sequence[Chunk],
        *,
        facts: Mapping[str, Any],
        same_layout_key: str,
        local: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Publish a checkpoint; when this returns it is on disk, and when it raises the earlier ones are untouched.

        facts: JSON values, the same on every rank. local: this rank's own tensors, which only a run with the same
        `same_layout_key` gets back.
        """
        folder, disk = self._folder, self._disk
        fix = "Free space there or make it writable; earlier checkpoints are untouched"
        doing = f"step {step} could not be saved to {folder}"
        try:
            self._together(lambda: storage.begin(folder, step, disk) if self._leads else None, doing, fix)
            table = self._together(
                lambda: storage.write_rank(folder, step, chunks, rank=self._world.rank, local=local or {}, disk=disk),
                doing,
                fix,
            )
            tables = gather_objects_to_first(table, self._world)
            self._together(
                lambda: (
                    storage.publish(folder, step, tables, facts=facts, layout=same_layout_key, disk=disk)
                    if tables is not None
                    else None
                ),
                doing,
                fix,
            )
        except CheckpointError:
            if self._leads:  # no rank is writing any more; a draft would only keep the disk full
                with contextlib.suppress(OSError):
                    storage.recover(folder, disk)
            raise

    def load(
        self,
        step: int | None,
        chunks: Sequence[Chunk],
        *,
        same_layout_key: str | None = None,
        strict: bool = True,
        verify: bool = True,
    ) -> LoadedCheckpoint:
        """Fill every chunk from a step (None: the newest), whatever layout saved it.

        strict: every key must be there, and no key of the same kind may be left over; else keys that are missing keep
        their values and are named in the result. verify: compare digests, not only sizes, of the files that are read.
        Nothing is changed unless the whole checkpoint fits and its files are sound.
        """
        chosen = self._together(lambda: storage.choose(self._folder, step) if self._leads else None)
        source: Path = gather_objects(chosen, self._world)[0]
        manifest = self._together(lambda: storage.read_manifest(source))
        wanted = set().union(*gather_objects({chunk.key for chunk in chunks}, self._world))
        plan = self._together(lambda: reading.plan_reads(source, manifest, chunks, wanted=wanted, strict=strict))
        same_layout = manifest.layout == same_layout_key
        own_prefix = f"local/{self._world.rank}/"
        own_files = {file for name, file in manifest.local.items() if same_layout and name.startswith(own_prefix)}
        files = sorted(set().union(*gather_objects(plan.files | own_files, self._world)))

        def check_share() -> None:
            for file in files[self._world.rank :: self._world.size]:
                storage.check_file(source / file, manifest.files[file], verify=verify)

        self._together(check_share)
        self._together(lambda: reading.fill(source, plan))
        local = self._together(lambda: reading.read_local(source, manifest, self._world.rank) if same_layout else None)
        return LoadedCheckpoint(manifest.step, dict(manifest.facts), local, plan.missing)

    def _together(self, action: Callable[[], Result], doing: str = "", fix: str = "") -> Result:
        """This rank's result of an action that every rank takes; one rank's failure is a CheckpointError on all."""
        result, failure, cause = None, None, None
        try:
            result = action()
        except CheckpointError as error:
            failure, cause = str(error), error
        except Exception as error:
            doing = doing or f"a checkpoint in {self._folder} could not be read"
            failure, cause = ". ".join(filter(None, [f"{doing}: {type(error).__name__}: {error}", fix])), error
        failures = {rank: text for rank, text in enumerate(gather_objects(failure, self._world)) if text is not None}
        if failures:
            raise CheckpointError(_report(failures, self._world.size)) from cause
        return result  # pyright: ignore[reportReturnType]


def _report(failures: Mapping[int, str], world_size: int) -> str:
    """All failures, each said once with the ranks it happened on."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1 and len(failures) == world_size:
        return next(iter(ranks))
    return "\n".join(f"[rank {', '.join(map(str, where))}] {text}" for text, where in ranks.items())
