"""Times one checkpoint load in a process of its own, as a run loads once after it has started.

In a process that has loaded before, an allocator may give `torch.load` the memory of that load again, and whether it does depends on
what ran in between: its CPU time then varies five-fold. A new process has none. It is forked from one that has imported
everything and started no threads, so that it costs little and inherits no memory either.

The process allocates and fills the tensors that ours is loaded into, which a run has by then, drops or reads the files,
and loads. `torch.load` allocates its own; to be used they would have to be copied, which is another contender.

Before a load its files are dropped from the page cache or read into it, and what is there is counted.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from petatron.checkpoint.tensor_chunk import Chunk

_PRELOADED = ["torch", "petatron.bench.loading.time_checkpoint_load", "petatron.checkpoint.manager"]
_READ_BYTES = 8 << 20
_ATTEMPTS = 5
_WAIT_S = 0.05  # for reads ahead that are on their way
SAME_LAYOUT_KEY = "one rank"
LOADERS = ("torch.load + copy", "torch.load", "load", "torch.load + digest")
"""Ours and torch.load are neighbors, in both orders."""
COMPARED_LOADERS = LOADERS[1:3]
"""The two that every round has; the others are there for information."""


@dataclass(frozen=True, slots=True)
class LoadFiles:
    """The same tensors as a checkpoint of ours and as a file of torch.save, and what they are: key, shape and dtype."""

    checkpoints: Path
    step: int
    theirs: Path
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]]

    def paths(self) -> list[Path]:
        return [self.theirs, *(path for path in self.checkpoints.rglob("*") if path.is_file())]


@dataclass(frozen=True, slots=True)
class LoadMeasurement:
    """What a load took. `cached_share`: of the files, when it began; `extra_bytes`: growth of the peak. Both None where unknown."""

    seconds: float
    user_s: float
    kernel_s: float
    cached_share: float | None
    extra_bytes: int | None

    @property
    def cpu_s(self) -> float:
        return self.user_s + self.kernel_s


def measure_load(
    files: LoadFiles, loader: str, *, cold: bool, meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext
) -> LoadMeasurement:
    """Times one of `LOADERS` in a new process; `meanwhile` is entered for the load itself, and not for its preparation."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    pipe, other = context.Pipe()
    process = context.Process(target=_load_when_told, args=(other, files, loader, cold), daemon=True)
    process.start()
    other.close()
    try:
        pipe.recv()
        with meanwhile():
            pipe.send("load")
            measured = pipe.recv()
    except (EOFError, ConnectionError):
        process.join()
        raise CheckpointError(
            f"The process that measures {loader} ended with exit code {process.exitcode}. Out of memory (-9)? Give a smaller --gigabytes."
        ) from None
    finally:
        pipe.close()
        process.kill()
        process.join()
    if isinstance(measured, str):
        raise CheckpointError(f"{loader} failed: {measured}")
    return measured


def _load_when_told(pipe: Connection, files: LoadFiles, loader: str, cold: bool) -> None:
    import torch

    from petatron.checkpoint.tensor_chunk import Chunk

    load = _loaders(files)[loader]
    chunks = []
    if loader in ("load", "torch.load + copy"):
        chunks = [
            Chunk(key, shape, (0,) * len(shape), torch.ones(shape, dtype=dtype)) for key, shape, dtype in files.tensors
        ]
    if cold:
        share = drop_from_page_cache(files.paths())
    else:
        read_into_page_cache(files.paths())
        share = cached_share(files.paths())
    pipe.send("ready")
    pipe.recv()
    try:
        pipe.send(_timed(lambda: load(chunks), share))
    except CheckpointError as error:
        pipe.send(str(error))


def _timed(load: Callable[[], object], share: float | None) -> LoadMeasurement:
    memory_before = _reset_peak_memory()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    loaded = load()
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    extra = None if memory_before is None else _status_bytes("VmHWM") - memory_before
    del loaded  # freeing is not timed
    return LoadMeasurement(seconds, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, share, extra)


def _loaders(files: LoadFiles) -> dict[str, Callable[[Sequence[Chunk]], object]]:
    import torch

    from petatron.checkpoint.manager import CheckpointManager
    from petatron.mesh.mesh import ParallelMesh

    manager = CheckpointManager(files.checkpoints, ParallelMesh.single().world)

    def theirs(_: Sequence[Chunk] = ()) -> dict[str, Tensor]:
        return torch.load(files.theirs, weights_only=True)

    def theirs_and_copy(chunks: Sequence[Chunk]) -> None:
        loaded = theirs()
        for chunk in chunks:
            chunk.tensor.copy_(loaded[chunk.key])

    def theirs_and_digest(_: Sequence[Chunk]) -> tuple[Mapping[str, Tensor], list[str]]:
        loaded = theirs()
        return loaded, [digest for tensor in loaded.values() for digest in _block_digests(tensor)]

    def ours(chunks: Sequence[Chunk]) -> object:
        return manager.load(files.step, chunks, same_layout_key=SAME_LAYOUT_KEY)

    return dict(zip(LOADERS, (theirs_and_copy, theirs, ours, theirs_and_digest), strict=True))


def _block_digests(tensor: Tensor) -> list[str]:
    """Returns what a reader of our files computes of as many bytes."""
    import torch

    from petatron.checkpoint.files.block_digest import block_digest
    from petatron.checkpoint.files.digested_file_io import BLOCK_BYTES

    content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    digests = []
    for begin in range(0, len(content), BLOCK_BYTES):
        digest = block_digest("folded")
        digest.update(content[begin : begin + BLOCK_BYTES])
        digests.append(digest.hexdigest())
    return digests


def _reset_peak_memory() -> int | None:
    """Resets the peak memory; returns the current memory, or None where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmRSS")
    except OSError:
        return None


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


def drop_from_page_cache(paths: Iterable[Path]) -> float | None:
    """Drops the content of files that are on disk, and returns which share of it is still cached; None where the system cannot tell."""
    paths = list(paths)
    if not hasattr(os, "posix_fadvise"):
        return None
    share: float | None = None
    for _ in range(_ATTEMPTS):
        for path in paths:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        share = cached_share(paths)
        if not share:
            break
        time.sleep(_WAIT_S)
    return share


def read_into_page_cache(paths: Iterable[Path]) -> None:
    buffer = bytearray(_READ_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cached_share(paths: Iterable[Path]) -> float | None:
    """Returns which share of the pages of files is in the page cache; None where the system does not tell (mincore)."""
    pages: list[int] = []
    try:
        for path in paths:
            pages.extend(_cached_pages(path))
    except (OSError, AttributeError):  # a file system without mmap, or a system without mincore
        return None
    return sum(pages) / len(pages) if pages else 0.0


def _cached_pages(path: Path) -> bytes:
    """Returns for each page of a file whether it is cached, as 1 or 0."""
    size = path.stat().st_size
    if not size:
        return b""
    library = ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    # Private and writable: ctypes takes the address of writable memory only, and nothing is written.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = library.mincore(address, ctypes.c_size_t(size), pages)
        code = ctypes.get_errno()
        del first  # the mapping cannot be closed before
    if failed:
        raise OSError(code, os.strerror(code))
    return bytes(page & 1 for page in pages)
