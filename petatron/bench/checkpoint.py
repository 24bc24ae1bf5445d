"""`petatron bench checkpoint`: saving and loading against torch.save and torch.load of the same tensors, in one run.

The state is that of a model trained in bf16 with Adam: bf16 weights, fp32 master weights and two fp32 moments, in the shapes
of a decoder, on one rank. Ours is durable, checked and atomic when a save returns, so its counterpart is torch.save followed by
fsync; torch.save alone is shown too. Loads are timed with the files dropped from the page cache (where the system allows it) and
with all of them in it, each in a process of its own (`loading/time_checkpoint_load.py`). Ours checks digests and fills existing tensors;
torch.load checks nothing and allocates new ones. What it takes with a copy into existing ones, and with equal digests, is shown too.
Every round runs everything once, in both orders by turns, and the median of the rounds' ratios counts, with their spread and the CPU
time of both sides. `--busy-processes` keeps the machine busy meanwhile. Extra memory is the growth of the process's peak.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from petatron.base.errors import Problem
from petatron.base.log import get_logger
from petatron.base.safe_files import remove_tree
from petatron.bench import BenchResult
from petatron.bench.arguments import count_problems
from petatron.bench.loading.keep_cpus_busy import BusyProcesses
from petatron.bench.loading.time_checkpoint_load import (
    COMPARED_LOADERS,
    LOADERS,
    SAME_LAYOUT_KEY,
    LoadFiles,
    LoadMeasurement,
    measure_load,
)
from petatron.bench.measure.check_arguments import positive_problems
from petatron.bench.measure.timing import alternating_orders
from petatron.checkpoint.checkpoint_contents import ModelFolder
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.mesh import ParallelMesh
from petatron.models.hf.folder_entries import EntryRegion, FolderEntry

_BYTES_PER_WEIGHT = 14  # bf16, and three times fp32
_STATES = ("cold", "warm")
_MIN_ROUNDS = 4
_MAX_CACHED_SHARE = 0.01  # of files that count as dropped
_MAX_BUSY_PROCESSES = 1024
_ACTIVITIES = {None: "saving and loading", "save": "saving", "load": "loading"}
_log = get_logger(__name__)
Times = dict[str, list[float]]
Loads = Mapping[str, Sequence[LoadMeasurement]]
"""Measurements by loader and state of the page cache."""


def argument_problems(args: argparse.Namespace) -> Iterator[Problem]:
    """Yields what is wrong with the arguments, and with the folder they name."""
    yield from positive_problems({"--gigabytes": args.gigabytes})
    yield from count_problems("checkpoint", args)
    if args.busy_own_sessions and args.busy_processes == 0:
        rule, fix = "has no effect without --busy-processes", "Give --busy-processes a number of processes."
        yield Problem("--busy-own-sessions", "", rule, fix)
    if args.busy_processes > _MAX_BUSY_PROCESSES:
        rule, fix = "would take all processes of the machine", f"Use at most {_MAX_BUSY_PROCESSES}."
        yield Problem("--busy-processes", str(args.busy_processes), rule, fix)
    folder = Path(args.folder or ".")
    needed = 4 * args.gigabytes * 1e9  # ours and torch's, and as much again in the page cache before write-back
    try:
        with _scratch_folder(folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        yield Problem("--folder", str(folder), rule, "Give a folder that is there and writable.")
        return
    if free < needed:
        rule = f"needs {needed / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} GB left"
        yield Problem("--gigabytes", f"{args.gigabytes:g}", rule, "Use fewer, or another --folder.")


def _scratch_folder(folder: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=folder, prefix="bench-checkpoint-")


def run(args: argparse.Namespace) -> BenchResult:
    """All rounds, and what they say."""
    with _scratch_folder(Path(args.folder or ".")) as path:
        _log.info("making %g GB of state", args.gigabytes)
        with BusyProcesses(args.busy_processes, own_sessions=args.busy_own_sessions) as busy:
            bench = _Bench.build(Path(path).resolve(), args.gigabytes, busy)
            bench.measure(args.only, rounds=max(_MIN_ROUNDS, args.repeat))
    return _result(bench, args)


@dataclass(slots=True)
class _Bench:
    """The state to save, its folder, and what was measured so far: seconds by name, and loads by name and state of the page cache."""

    folder: Path
    manager: CheckpointManager
    chunks: list[Chunk]
    model: ModelFolder
    busy: BusyProcesses
    times: Times = field(default_factory=dict)
    loads: dict[str, list[LoadMeasurement]] = field(default_factory=dict)

    @classmethod
    def build(cls, folder: Path, gigabytes: float, busy: BusyProcesses) -> _Bench:
        shapes = model_shapes(int(gigabytes * 1e9 / _BYTES_PER_WEIGHT))
        entries = tuple(
            FolderEntry(name, shape, (EntryRegion(name, (0,) * len(shape), shape, (0,) * len(shape)),))
            for name, shape in shapes.items()
        )
        manager = CheckpointManager(folder / "ours", ParallelMesh.single().world)
        return cls(folder, manager, list(_chunks(shapes)), ModelFolder(entries, {"config.json": b"{}\n"}), busy)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {chunk.key: chunk.tensor for chunk in self.chunks}

    def measure(self, only: Literal["save", "load"] | None, *, rounds: int) -> None:
        """Runs everything once a round. Removing files and waiting for the disk are not timed."""
        orders = list(alternating_orders(LOADERS, rounds=rounds))
        files: LoadFiles | None = None
        for number, loaders in enumerate(orders):
            _log.info("%s, round %d of %d", _ACTIVITIES[only], number + 1, len(orders))
            if files is None:
                files = self._save_both(number)
            if only != "save":
                self._load_all(files, [name for name in loaders if number < _MIN_ROUNDS or name in COMPARED_LOADERS])
            if only != "load":
                self._save_in_background(files)
                files.theirs.unlink()
                remove_tree(files.checkpoints)
                files = None
        if only == "load":
            self.times.clear()

    def _save_both(self, number: int) -> LoadFiles:
        theirs, step = self.folder / f"theirs-{number}.pt", 2 * number + 1
        saves = [partial(self._save_theirs, theirs), partial(self._save_ours, step, "save")]
        for save in saves if number % 2 == 0 else saves[::-1]:
            with self.busy.running():
                save()
        tensors = [(chunk.key, chunk.logical_shape, chunk.tensor.dtype) for chunk in self.chunks]
        return LoadFiles(self.folder / "ours", step, theirs, tensors)

    def _save_in_background(self, files: LoadFiles) -> None:
        with self.busy.running(), self._timed("background"):
            self._save_ours(files.step + 1, "stall", wait=False)
            self.manager.drain()

    def _save_ours(self, step: int, name: str, *, wait: bool = True) -> None:
        with self._timed(name):
            key, model = SAME_LAYOUT_KEY, self.model
            self.manager.save(step, self.chunks, metadata={}, same_layout_key=key, model=model, wait=wait)

    def _save_theirs(self, path: Path) -> None:
        with self._timed("torch.save + fsync"), path.open("wb") as file:
            with self._timed("torch.save"):
                torch.save(self.tensors, file)
                file.flush()
            os.fsync(file.fileno())

    def _load_all(self, files: LoadFiles, loaders: Sequence[str]) -> None:
        for state in _STATES:
            for loader in loaders:
                measured = measure_load(files, loader, cold=state == "cold", meanwhile=self.busy.running)
                self.loads.setdefault(f"{loader} {state}", []).append(measured)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.times.setdefault(name, []).append(time.perf_counter() - started)


def model_shapes(num_weights: int) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of a decoder of about `num_weights` weights: as many layers as fit, and the remainder as its embedding.

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
    for kind in ("model", "master", "exp_avg", "exp_avg_sq"):
        for name, shape in shapes.items():
            # Random bytes, so that no disk or file system compresses them better than real weights.
            values = torch.randn(shape).to(torch.bfloat16 if kind == "model" else torch.float32)
            yield Chunk(f"{kind}/{name}", shape, (0,) * len(shape), values)


def _result(bench: _Bench, args: argparse.Namespace) -> BenchResult:
    sizes = [tensor.nbytes for tensor in bench.tensors.values()]
    size, largest = sum(sizes), max(sizes)
    rows = [("state", f"{size / 1e9:.2f} GB in {len(bench.chunks)} tensors, the largest {largest / 1e6:.0f} MB")]
    if args.busy_processes:
        sessions = "in sessions of their own" if args.busy_own_sessions else "in the session of the bench"
        load = f"load average {os.getloadavg()[1]:.1f}"  # of five minutes, others included
        rows.append(("busy processes", f"{args.busy_processes} {sessions}, {os.cpu_count()} cores, {load}"))
    values: dict[str, object] = {"bytes": size, "largest_tensor_bytes": largest, "busy_processes": args.busy_processes}
    ratios: dict[str, list[float]] = {}
    if bench.times:
        rows += _save_rows(bench.times, size, ratios)
        values["stall_ratio"] = _stall_ratio(bench.times)
    if bench.loads:
        # The largest share of the files that was in the page cache when a cold load began; None if that is unknown.
        shares = [load.cached_share for loader in LOADERS for load in bench.loads[f"{loader} cold"]]
        known = [share for share in shares if share is not None]
        share = max(known) if len(known) == len(shares) else None
        rows += [("cold", _describe_cold(share)), *_load_rows(bench.loads, size, ratios)]
        values |= {
            "cpu_seconds": _by_name(bench.loads, "cpu_s"),
            "kernel_seconds": _by_name(bench.loads, "kernel_s"),
            "extra_bytes": _extra_bytes(bench.loads),
            "page_cache_dropped": share is not None and share < _MAX_CACHED_SHARE,
            "largest_cached_share_when_cold": share,
        }
    for name, rounds in ratios.items():
        faster = f"at least 1x in {_faster_rounds(rounds)} of {len(rounds)} rounds"
        rows.append((f"speed: {name}", f"{_with_spread(rounds, 'x')}, {faster}"))
    rows.append(("medians of", f"{len(next(iter(ratios.values())))} rounds"))
    values |= {
        "seconds": bench.times | _by_name(bench.loads, "seconds"),
        "speed_ratio": {name: statistics.median(rounds) for name, rounds in ratios.items()},
        "faster_rounds": {name: _faster_rounds(rounds) for name, rounds in ratios.items()},
    }
    return BenchResult(tuple(rows), values)


def _save_rows(times: Times, size: int, ratios: dict[str, list[float]]) -> list[tuple[str, str]]:
    ours = times["save"]
    for name, peer in (("save", "torch.save + fsync"), ("save, against torch.save without fsync", "torch.save")):
        ratios[name] = [theirs / our for theirs, our in zip(times[peer], ours, strict=True)]
    saves = ("save", "torch.save", "torch.save + fsync")
    stall = f"{_stall_ratio(times):.1%} of torch.save's time stalls the run ({_seconds(times['stall'])})"
    return [
        *((name, f"{size / statistics.median(times[name]) / 1e9:.2f} GB/s") for name in saves),
        ("asynchronous save", stall),
        ("  until it is on disk", _seconds(times["background"])),
    ]


def _stall_ratio(times: Times) -> float:
    return statistics.median(ours / theirs for ours, theirs in zip(times["stall"], times["torch.save"], strict=True))


def _load_rows(loads: Loads, size: int, ratios: dict[str, list[float]]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for state in _STATES:
        ours = loads[f"load {state}"]
        for loader in sorted(LOADERS):
            theirs = loads[f"{loader} {state}"]
            seconds = [load.seconds for load in theirs]
            user, kernel = map(statistics.median, zip(*((load.user_s, load.kernel_s) for load in theirs)))
            text = f"{size / statistics.median(seconds) / 1e9:.2f} GB/s: {_with_spread(seconds, ' s')}, CPU {user + kernel:.2f} s"
            rows.append((f"{loader} {state}", f"{text} ({kernel:.2f} in the kernel)"))
            if loader != "load":
                name = f"load {state}, against {loader}"
                ratios[name] = [their.seconds / our.seconds for their, our in zip(theirs, ours)]
    for name, extra in _extra_bytes(loads).items():
        rows.append((f"extra memory of {name}", f"{statistics.median(extra) / 1e6:.0f} MB"))
    return rows


def _by_name(loads: Loads, attribute: str) -> Times:
    return {name: [getattr(load, attribute) for load in measured] for name, measured in loads.items()}


def _describe_cold(share: float | None) -> str:
    if share is None:
        return "unknown whether files are in the page cache: this system cannot drop them, or does not tell"
    if share < _MAX_CACHED_SHARE:
        return f"files dropped from the page cache (mincore: at most {share:.2%} of them was there)"
    why = "as another process reads them or has them mapped"
    return f"not cold: {share:.0%} of the files stayed in the page cache, {why}"


def _extra_bytes(loads: Loads) -> dict[str, list[int]]:
    """Returns the growth of the peak by loader, where it is known; warm, where nothing waits for the disk."""
    growths = {name: [load.extra_bytes for load in loads[f"{name} warm"]] for name in LOADERS}
    return {name: [size for size in sizes if size is not None] for name, sizes in growths.items() if None not in sizes}


def _faster_rounds(ratios: Sequence[float]) -> int:
    return sum(ratio >= 1 for ratio in ratios)


def _with_spread(values: Sequence[float], unit: str) -> str:
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def _seconds(values: list[float]) -> str:
    """Separates the first one, which allocates the memory that later ones reuse."""
    return f"{values[0]:.2f} s at first, then {statistics.median(values[1:]):.2f} s"
