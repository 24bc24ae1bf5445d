"""`petatron bench scale`: what a start and a save cost on one rank as the world grows, in one process on one CPU.

Ranks are simulated: process groups send nothing and weights are on the meta device. Timed is what every rank computes at each start
and save (configuration, groups, pipeline schedule, its part of the model, read and write plans), what the busiest rank does with
the messages of the others, and what rank 0 does for all (the manifest). Not measured are connections, message exchanges and disks.
A quantity that grows linearly with the world has exponent 1 in the last column, a constant one 0, and exponent 2 would be fatal
for a large run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from petatron.base.errors import Problem
from petatron.base.log import get_logger
from petatron.bench import BenchResult
from petatron.bench.arguments import count_problems
from petatron.bench.simulated_checkpoint_plan import measure_checkpoint
from petatron.config import RunConfig
from petatron.mesh.launch.environment import SINGLE_PROCESS
from petatron.mesh.launch.process_group import start_process_group, stop_process_group
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import AXES, Layout
from petatron.schedule import in_flight, rank_schedule
from petatron.schedule.pipeline_plan import pipeline_plan
from petatron.train.build_run import build_model
from petatron.validate import load_config

_log = get_logger(__name__)
_BUILD = ("config", "groups", "mesh", "in flight", "schedule", "model")
_LOAD = ("read manifest", "load requests", "directory", "load plan")
_START = (*_BUILD, *_LOAD)
_FIRST_SAVE = ("survey", "messages", "save plan")
_EVERY_SAVE = ("folder entries", "layout", "table", "manifest")
_SAVE = (*_FIRST_SAVE, *_EVERY_SAVE)
_LIMIT_S, _LIMIT_RANKS = 10.0, 4096
# An exponent above this is reported, for parts that take at least so long: less is noise.
_MAX_EXPONENT, _MIN_REPORTED_S = 1.5, 1.0
Result = TypeVar("Result")


@dataclass(slots=True)
class ScaleMeasurement:
    """One world size: seconds by part, the slower of the first and a middle rank, or the busiest one's, and counts."""

    world_size: int
    layout: str
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def timed(self, name: str, work: Callable[[], Result]) -> Result:
        start = time.process_time()
        result = work()
        self.seconds[name] = max(self.seconds.get(name, 0.0), time.process_time() - start)
        return result

    def total_seconds(self, parts: Sequence[str]) -> float:
        return sum(self.seconds.get(part, 0.0) for part in parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks": self.world_size,
            "layout": self.layout,
            "seconds": {name: round(seconds, 4) for name, seconds in self.seconds.items()},
            "start_s": round(self.total_seconds(_START), 3),
            "save_s": round(self.total_seconds(_SAVE), 3),
            "later_save_s": round(self.total_seconds(_EVERY_SAVE), 3),
            **self.counts,
        }


def argument_problems(args: argparse.Namespace) -> list[Problem]:
    """Returns what is wrong with the arguments."""
    problems = count_problems("scale", args)
    if not _world_sizes(args.sizes):
        rule = "is not a list of numbers of ranks"
        problems.append(Problem("--sizes", args.sizes, rule, "Write for instance 64,1024."))
    return problems


def run(args: argparse.Namespace) -> BenchResult:
    """Every size in turn, and the table."""
    worlds: list[ScaleMeasurement] = []
    for size in _world_sizes(args.sizes):
        _log.info("%s ranks ...", f"{size:,}")
        worlds.append(_measure(args, size))
    verdict = _verdict(worlds, checkpoint=not args.without_checkpoint)
    values = {"model": args.model, "sizes": [world.as_json() for world in worlds], "verdict": verdict}
    return BenchResult((*_rows(worlds), ("verdict", verdict)), values)


def _world_sizes(text: str) -> list[int]:
    """Returns the numbers of ranks; none if the text is no list of such."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        return []
    return sizes if sizes[0] >= 1 else []


def layout_flags(size: int, *, tp: int, pp: int, cp: int) -> list[str]:
    """Returns the requested parallel sizes as far as they divide the ranks; the remaining factor is data parallel.

    >>> layout_flags(64, tp=8, pp=16, cp=1)
    ['--tp', '8', '--pp', '8', '--cp', '1']
    """
    flags: list[str] = []
    for name, most in (("tp", tp), ("pp", pp), ("cp", cp)):
        taken = math.gcd(most, size)
        size //= taken
        flags += [f"--{name}", str(taken)]
    return flags


def _run_config(args: argparse.Namespace, size: int) -> RunConfig:
    data = "--mock-data --lr 1e-4 --train-iters 1".split()
    flags = layout_flags(size, tp=args.tp, pp=args.pp, cp=args.cp)
    tp, pp, cp = (int(value) for value in flags[1::2])
    layers = load_config(data, preset=args.model, world_size=1).config.model.num_layers
    if pp > 1 and args.virtual > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(args.virtual)]
    if layers % (pp * args.virtual if pp > 1 else 1):  # count embedding and loss as layers
        flags += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    if tp > 1:
        flags.append("--sequence-parallel")
    batch = args.microbatches * (size // (tp * pp * cp))
    flags += ["--bf16", "--use-distributed-optimizer", "--global-batch-size", str(batch)]
    return load_config([*flags, *data], preset=args.model, world_size=size).config


def _measure(args: argparse.Namespace, size: int) -> ScaleMeasurement:
    world = ScaleMeasurement(size, "")
    config = world.timed("config", lambda: _run_config(args, size))
    layout = Layout.from_config(config.parallel)
    named = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "dp")}
    world.layout = " ".join(f"{name}{number}" for name, number in named.items())
    plan = pipeline_plan(config)
    for rank in sorted({0, size // 2}):
        in_flight.cache_clear()
        rank_schedule.cache_clear()
        world.timed("groups", lambda rank=rank: {name: layout.group_of(name, rank) for name in AXES})
        world.timed("in flight", lambda: plan.in_flight(args.microbatches))
        stage = layout.group_of("pp", rank).index(rank)
        schedule = world.timed("schedule", partial(plan.training_schedule, args.microbatches, rank=stage))
        world.counts["schedule_bytes"] = schedule.actions.num_bytes
        _count_peers(world, _build_rank(world, config, layout, rank))
    if not args.without_checkpoint:
        world.counts |= asdict(measure_checkpoint(config, world.timed))
    return world


def _build_rank(world: ScaleMeasurement, config: RunConfig, layout: Layout, rank: int) -> list[tuple[int, ...]]:
    """Builds one rank's groups and model on the meta device; returns the ranks of each group it is in."""
    size = layout.world_size
    start_process_group(replace(SINGLE_PROCESS, rank=rank, world_size=size, local_world_size=size), backend="fake")
    try:
        mesh = world.timed("mesh", lambda: ParallelMesh(layout, rank, device=torch.device("meta")))
        model = world.timed("model", lambda: build_model(config, mesh))
        parameters = (parameter for stage in model.stages.values() for parameter in stage.parameters())
        world.counts["parameters_of_rank"] = sum(parameter.numel() for parameter in parameters)
        return [communicator.ranks for communicator in mesh.communicators]
    finally:
        stop_process_group()


def _count_peers(world: ScaleMeasurement, groups: Sequence[tuple[int, ...]]) -> None:
    """Counts the peers of the rank that is in most groups."""
    counts = world.counts
    counts["communicators"] = max(counts.get("communicators", 0), len(groups))
    counts["communicator_ranks"] = max(counts.get("communicator_ranks", 0), sum(map(len, groups)))
    smaller = {rank for ranks in groups if len(ranks) < world.world_size for rank in ranks}
    counts["peers"] = max(counts.get("peers", 0), len(smaller) - 1)
    counts["control_peers"] = control_peers(world.world_size)


def control_peers(size: int) -> int:
    """Returns how many ranks one rank connects to over the CPU group `control`, which gloo connects pair by pair on demand.

    All communication there is with ranks at distances of powers of two: rings (all-reduce, all-gather) at 1, trees (broadcast),
    barriers and the checkpoint's exchange of messages at all of them, in both directions.

    >>> control_peers(4096)
    23
    """
    steps = [1 << bit for bit in range((size - 1).bit_length())]
    return len({distance % size for step in steps for distance in (step, -step)})


def _rows(worlds: Sequence[ScaleMeasurement]) -> list[tuple[str, str]]:
    rows = [
        ("ranks", _line([f"{world.world_size:,}" for world in worlds], "growth")),
        ("layout", _line([world.layout for world in worlds])),
    ]
    for title, parts in (("start overhead, s", _START), ("first save, s", _SAVE), ("later saves, s", _EVERY_SAVE)):
        measured = [part for part in parts if part in worlds[0].seconds]
        if not measured:
            continue
        rows.append((title, _series([world.total_seconds(parts) for world in worlds], worlds, "{:.2f}")))
        shown = [part for part in measured if parts is not _SAVE or part in _FIRST_SAVE]
        rows += [(f"  {part}", _series([world.seconds[part] for world in worlds], worlds, "{:.3f}")) for part in shown]
    for name in worlds[0].counts:
        rows.append((name.replace("_", " "), _series([world.counts[name] for world in worlds], worlds, "{:,}")))
    return rows


def _series(values: Sequence[float], worlds: Sequence[ScaleMeasurement], form: str) -> str:
    exponent = growth_exponent(values, [world.world_size for world in worlds])
    return _line([form.format(value) for value in values], "" if exponent is None else f"N^{exponent:.1f}")


def _line(cells: Sequence[str], last: str = "") -> str:
    return "".join(f"{cell:>20}" for cell in cells) + f"{last:>10}"


def growth_exponent(values: Sequence[float], sizes: Sequence[int]) -> float | None:
    """Returns the exponent of a quantity's growth with the number of ranks between the last two sizes.

    >>> growth_exponent([0.1, 1.0, 4.0], [64, 1024, 4096])
    1.0
    """
    if len(values) < 2 or min(values[-2:]) <= 0:
        return None
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])


def _verdict(worlds: Sequence[ScaleMeasurement], *, checkpoint: bool) -> str:
    """Compares with the limits at 4,096 ranks, and names what grows faster than the world."""
    judged = [world for world in worlds if world.world_size <= _LIMIT_RANKS]
    texts: list[str] = []
    for title, parts in (("start", _START), ("save", _SAVE))[: 2 if checkpoint else 1]:
        worst = max(judged, key=lambda world: world.total_seconds(parts), default=None)
        if worst is not None:
            seconds = worst.total_seconds(parts)
            within = "within" if seconds <= _LIMIT_S else "ABOVE"
            texts.append(f"{title} {seconds:.1f} s at {worst.world_size:,} ranks, {within} {_LIMIT_S:.0f} s")
    if not judged:
        texts.append(f"no size up to {_LIMIT_RANKS:,} ranks, so no bar applies")
    sizes = [world.world_size for world in worlds]
    for part in worlds[-1].seconds:
        values = [world.seconds[part] for world in worlds]
        exponent = growth_exponent(values, sizes)
        if exponent is not None and exponent > _MAX_EXPONENT and values[-1] >= _MIN_REPORTED_S:
            texts.append(f"{part} grows as N^{exponent:.1f}")
    return "; ".join(texts)
