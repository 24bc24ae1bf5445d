"""`petatron bench checkpoint`: saving and loading against torch.save and torch.load of the same tensors, in one run.

The state is that of a model trained in bf16 with Adam: bf16 weights, fp32 master weights and two fp32 moments, in the shapes
of a decoder, on one rank. Ours is durable, checked and atomic when a save returns, so its counterpart is torch.save followed by
fsync; torch.save alone is shown too. Loads are timed twice: with the files dropped from the page cache (where the system allows
it), and with all of them in it. Ours fills existing tensors; torch.load allocates new ones, which would still have to be copied.
Every round runs everything once, in rotating order (a disk that has just been written to is slower), and the median of the
rounds' ratios counts. Extra memory is the growth of the process's peak.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import CheckpointError, ConfigError
from petatron.base.log import get_logger
from petatron.base.safe_files import remove_tree
from petatron.bench.measure.arguments import minimum_problems, positive_problems

if TYPE_CHECKING:
    from torch import Tensor

    from petatron.bench.result import BenchResult
    from petatron.checkpoint.manager import CheckpointManager
    from petatron.checkpoint.state import Chunk, ModelFolder

_BYTES_PER_WEIGHT = 14  # bf16, and three times fp32
_LAYOUT = "one rank"
_log = get_logger(__name__)
Times = dict[str, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", type=float, default=2.0, metavar="G", help="size of the checkpoint (default: 2)")
    parser.add_argument("--folder", metavar="F", help="where to write, and so which disk is measured (default: here)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="rounds, at least 3 (default: 3)")


def run(args: argparse.Namespace) -> BenchResult:
    """All rounds, and what they say."""
    wrong = [*positive_problems({"--gigabytes": args.gigabytes}), *minimum_problems({"--repeat": (args.repeat, 1)})]
    if wrong:
        raise ConfigError(wrong)
    folder = Path(args.folder or ".")
    needed = 4 * args.gigabytes * 1e9  # ours and torch's, and as much again in the page cache before write-back
    try:
        free = shutil.disk_usage(folder).free
        scratch = tempfile.TemporaryDirectory(dir=folder, prefix="bench-checkpoint-")
    except OSError as error:
        raise CheckpointError(f"Cannot write to {folder}: {error}. Give --folder a writable folder.") from error
    with scratch as path:
        if free < needed:
            raise CheckpointError(
                f"{folder} has {free / 1e9:.1f} GB left, and this needs {needed / 1e9:.1f} GB. Give a smaller --gigabytes, or "
                "another --folder."
            )
        _log.info("making %g GB of state", args.gigabytes)
        bench, rounds = _Bench.build(Path(path), args.gigabytes), max(3, args.repeat)
        for round_number in range(rounds):
            _log.info("saving and loading, round %d of %d", round_number + 1, rounds)
            bench.round(round_number)
    return _result(bench)


@dataclass(slots=True)
class _Bench:
    """The state to save, its folder, and the seconds of everything measured so far."""

    folder: Path
    manager: CheckpointManager
    chunks: list[Chunk]
    model: ModelFolder
    times: Times
    extra_bytes: dict[str, list[int]]
    page_cache_dropped: bool = False

    @classmethod
    def build(cls, folder: Path, gigabytes: float) -> _Bench:
        from petatron.checkpoint.manager import CheckpointManager
        from petatron.checkpoint.state import ModelFolder
        from petatron.mesh.mesh import ParallelMesh
        from petatron.models.hf.folder_entries import EntryRegion, FolderEntry

        shapes = model_shapes(int(gigabytes * 1e9 / _BYTES_PER_WEIGHT))
        entries = tuple(
            FolderEntry(name, shape, (EntryRegion(name, (0,) * len(shape), shape, (0,) * len(shape)),))
            for name, shape in shapes.items()
        )
        manager = CheckpointManager(folder / "ours", ParallelMesh.single().world)
        chunks = list(_chunks(shapes))
        return cls(folder, manager, chunks, ModelFolder(entries, {"config.json": b"{}\n"}), {}, {})

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {chunk.key: chunk.tensor for chunk in self.chunks}

    def sizes(self) -> list[int]:
        return [tensor.numel() * tensor.dtype.itemsize for tensor in self.tensors.values()]

    def round(self, number: int) -> None:
        """Runs everything once. Removing files and waiting for the disk are not timed."""
        theirs, step = self.folder / f"theirs-{number}.pt", 2 * number + 1
        _run_rotated([partial(self._save_theirs, theirs), partial(self._save, step)], number)
        self._loads(step, theirs, number)
        theirs.unlink()
        with self._timed("background"):
            with self._timed("stall"):
                self.manager.save(
                    step + 1, self.chunks, facts={}, same_layout_key=_LAYOUT, model=self.model, wait=False
                )
            self.manager.drain()
        remove_tree(self.folder / "ours")

    def _save(self, step: int) -> None:
        with self._timed("save"):
            self.manager.save(step, self.chunks, facts={}, same_layout_key=_LAYOUT, model=self.model)

    def _save_theirs(self, path: Path) -> None:
        import torch

        with self._timed("torch.save + fsync"), path.open("wb") as file:
            with self._timed("torch.save"):
                torch.save(self.tensors, file)
                file.flush()
            os.fsync(file.fileno())

    def _loads(self, step: int, theirs: Path, number: int) -> None:
        import torch

        def ours() -> None:
            self.manager.load(step, self.chunks, same_layout_key=_LAYOUT)

        def torch_load() -> None:
            torch.load(theirs, weights_only=True)

        def torch_load_and_copy() -> None:
            loaded = torch.load(theirs, weights_only=True)
            for chunk in self.chunks:
                chunk.tensor.copy_(loaded[chunk.key])

        def cold(name: str, load: Callable[[], None]) -> None:
            self.page_cache_dropped = _drop_from_page_cache(self.folder)
            with self._timed(f"{name} cold"):
                load()

        def warm(name: str, load: Callable[[], None]) -> None:
            with self._timed(f"{name} warm"), self._memory_growth(name):
                load()

        loads = {"torch.load": torch_load, "torch.load + copy": torch_load_and_copy, "load": ours}
        _run_rotated([partial(cold, name, load) for name, load in loads.items()], number)
        for path in _files(self.folder):
            _read_into_page_cache(path)
        _run_rotated([partial(warm, name, load) for name, load in loads.items()], number)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.times.setdefault(name, []).append(time.perf_counter() - started)

    @contextmanager
    def _memory_growth(self, name: str) -> Iterator[None]:
        before = _reset_peak_memory()
        yield
        if before is not None:
            self.extra_bytes.setdefault(name, []).append(_status_bytes("VmHWM") - before)


def model_shapes(num_weights: int) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of a decoder of about so many weights: as many layers as fit, the remainder is embedding.

    >>> shapes = model_shapes(100_000_000)
    >>> sum(a * b for a, b in shapes.values()), shapes["embedding.weight"]
    (99999744, (34936, 1024))
    """
    widths = (16, 32, 64, 128, 256, 512, 1024, 2048)
    width = next((width for width in widths if num_weights < 24 * width * width * 6), 4096)
    inner = width * 11 // 4
    layer = {"q": (width, width), "k": (width, width), "v": (width, width), "out": (width, width)}
    layer |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    size = sum(rows * columns for rows, columns in layer.values())
    layers = max(1, (num_weights - 24 * width * width) // size)
    rows = max(24 * width, (num_weights - layers * size) // width)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (rows, width)}
    for number in range(layers):
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _chunks(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Chunk]:
    import torch

    from petatron.checkpoint.state import Chunk

    for kind in ("model", "master", "exp_avg", "exp_avg_sq"):
        for name, shape in shapes.items():
            # Random bytes, so that no disk or file system compresses them better than real weights.
            values = torch.randn(shape).to(torch.bfloat16 if kind == "model" else torch.float32)
            yield Chunk(f"{kind}/{name}", shape, (0,) * len(shape), values)


def _run_rotated(actions: Sequence[Callable[[], None]], number: int) -> None:
    """Runs all of them, each round beginning with another one."""
    first = number % len(actions)
    for action in [*actions[first:], *actions[:first]]:
        action()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _drop_from_page_cache(folder: Path) -> bool:
    """Drops the files' content, already on disk, from the page cache; returns whether the system supports it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in _files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _read_into_page_cache(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(8 << 20):
            pass


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


def _result(bench: _Bench) -> BenchResult:
    from petatron.bench.result import BenchResult

    times, size, largest = bench.times, sum(bench.sizes()), max(bench.sizes())

    def speed(name: str) -> str:
        return f"{size / statistics.median(times[name]) / 1e9:.2f} GB/s"

    def faster(name: str, yardstick: str) -> float:
        return statistics.median(theirs / ours for theirs, ours in zip(times[yardstick], times[name]))

    ratios = {
        "save": faster("save", "torch.save + fsync"),
        "save, against torch.save without fsync": faster("save", "torch.save"),
        **{
            f"load {state}, against {name}": faster(f"load {state}", f"{name} {state}")
            for state in ("cold", "warm")
            for name in ("torch.load", "torch.load + copy")
        },
    }
    stall = statistics.median(ours / theirs for ours, theirs in zip(times["stall"], times["torch.save"]))
    extra = {name: statistics.median(values) for name, values in bench.extra_bytes.items()}
    state = "files dropped from the page cache" if bench.page_cache_dropped else "page cache cannot be dropped here"
    rows = [
        ("state", f"{size / 1e9:.2f} GB in {len(bench.chunks)} tensors, the largest {largest / 1e6:.0f} MB; {state}"),
        *((name, speed(name)) for name in sorted(times) if name not in ("stall", "background")),
        *((f"speed: {name}", f"{ratio:.2f}x") for name, ratio in ratios.items()),
        ("asynchronous save", f"{stall:.1%} of torch.save's time stalls the run ({_seconds(times['stall'])})"),
        ("  until it is on disk", _seconds(times["background"])),
        *((f"extra memory of {name}", f"{value / 1e6:.0f} MB") for name, value in extra.items()),
        ("medians of", f"{len(times['save'])} rounds"),
    ]
    values = {
        "bytes": size,
        "largest_tensor_bytes": largest,
        "page_cache_dropped": bench.page_cache_dropped,
        "seconds": times,
        "speed_ratio": ratios,
        "stall_ratio": stall,
        "extra_bytes": bench.extra_bytes,
    }
    return BenchResult(tuple(rows), values)


def _seconds(values: list[float]) -> str:
    """Separates the first one, which allocates the memory that later ones reuse."""
    return f"{values[0]:.2f} s at first, then {statistics.median(values[1:]):.2f} s"
