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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from petatron.base.errors import Problem
from petatron.base.log import get_logger
from petatron.bench.measure.arguments import minimum_problems

if TYPE_CHECKING:
    from petatron.bench.result import BenchResult
    from petatron.config import RunConfig
    from petatron.mesh.rank_layout import Layout

_log = get_logger(__name__)
_SIZES = "64,512,1024,4096,16384"
_BUILD = ("config", "groups", "mesh", "in flight", "schedule", "model")
_LOAD = ("read manifest", "load requests", "directory", "load plan")
_START = (*_BUILD, *_LOAD)
_FIRST_SAVE = ("survey", "messages", "save plan")
_EVERY_SAVE = ("folder entries", "layout", "table", "manifest")
_SAVE = (*_FIRST_SAVE, *_EVERY_SAVE)
_LIMIT_S, _LIMIT_RANKS = 10.0, 4096
_MAX_EXPONENT, _MIN_REPORTED_S = (
    1.5,
    1.0,
)  # an exponent above this is reported, for parts that take at least so long: less is noise
_COUNTS = ("tp", "pp", "cp", "virtual", "microbatches")
Result = TypeVar("Result")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default=_SIZES, metavar="N,...", help=f"numbers of ranks (default: {_SIZES})")
    parser.add_argument("--model", default="llama3-405b", metavar="PRESET", help="preset (default: llama3-405b)")
    parser.add_argument("--tp", type=int, default=8, metavar="N", help="tensor parallel at most (default: 8)")
    parser.add_argument("--pp", type=int, default=16, metavar="N", help="pipeline parallel at most (default: 16)")
    parser.add_argument("--cp", type=int, default=1, metavar="N", help="context parallel at most (default: 1)")
    parser.add_argument("--virtual", type=int, default=1, metavar="N", help="stages per pipeline rank (default: 1)")
    parser.add_argument("--microbatches", type=int, default=64, metavar="N", help="per step (default: 64)")
    parser.add_argument("--without-checkpoint", action="store_true", help="leave saving and loading out")


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


def argument_problems(args: argparse.Namespace) -> list[Problem]:
    """Returns what is wrong with the arguments."""
    problems = minimum_problems({f"--{name}": (getattr(args, name), 1) for name in _COUNTS})
    if not _world_sizes(args.sizes):
        rule = "is not a list of numbers of ranks"
        problems.append(Problem("--sizes", args.sizes, rule, "Write for instance 64,1024."))
    return problems


def run(args: argparse.Namespace) -> BenchResult:
    """Every size in turn, and the table."""
    from petatron.bench.result import BenchResult

    sizes = _world_sizes(args.sizes)
    found: list[ScaleMeasurement] = []
    for size in sizes:
        _log.info("%s ranks ...", f"{size:,}")
        found.append(_measure(args, size))
    verdict = _verdict(found, checkpoint=not args.without_checkpoint)
    values: dict[str, Any] = {
        "model": args.model,
        "sizes": [
            {
                "ranks": one.world_size,
                "layout": one.layout,
                "seconds": {name: round(seconds, 4) for name, seconds in one.seconds.items()},
                "start_s": round(one.total_seconds(_START), 3),
                "save_s": round(one.total_seconds(_SAVE), 3),
                "later_save_s": round(one.total_seconds(_EVERY_SAVE), 3),
                **one.counts,
            }
            for one in found
        ],
        "verdict": verdict,
    }
    return BenchResult((*_rows(found), ("verdict", verdict)), values)


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
    from petatron.validate import load_config

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
    from petatron.bench.scale_checkpoint import measure_checkpoint
    from petatron.mesh.rank_layout import Layout
    from petatron.schedule import in_flight, rank_schedule
    from petatron.schedule.pipeline_plan import pipeline_plan

    found = ScaleMeasurement(size, "")
    config = found.timed("config", lambda: _run_config(args, size))
    layout = Layout.from_config(config.parallel)
    named = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "dp")}
    found.layout = " ".join(f"{name}{number}" for name, number in named.items())
    plan = pipeline_plan(config)
    for rank in sorted({0, size // 2}):
        in_flight.cache_clear()
        rank_schedule.cache_clear()
        found.timed("groups", partial(_rank_groups, layout, rank))
        found.timed("in flight", lambda: plan.in_flight(args.microbatches))
        own = layout.group_of("pp", rank).index(rank)
        schedule = found.timed("schedule", partial(plan.training_schedule, args.microbatches, rank=own))
        found.counts["schedule_bytes"] = schedule.actions.num_bytes
        _count_peers(found, _build_rank(found, config, layout, rank))
    if not args.without_checkpoint:
        found.counts |= asdict(measure_checkpoint(config, found.timed))
    return found


def _rank_groups(layout: Layout, rank: int) -> Mapping[str, tuple[int, ...]]:
    from petatron.mesh.rank_layout import AXES

    return {name: layout.group_of(name, rank) for name in AXES}


def _build_rank(found: ScaleMeasurement, config: RunConfig, layout: Layout, rank: int) -> list[tuple[int, ...]]:
    """Builds one rank's groups and model on the meta device; returns the ranks of each group it is in."""
    import torch

    from petatron.mesh.launch.environment import SINGLE_PROCESS
    from petatron.mesh.launch.process_group import start_process_group, stop_process_group
    from petatron.mesh.mesh import ParallelMesh
    from petatron.train.build_run import build_model

    world = layout.world_size
    start_process_group(replace(SINGLE_PROCESS, rank=rank, world_size=world, local_world_size=world), backend="fake")
    try:
        mesh = found.timed("mesh", lambda: ParallelMesh(layout, rank, device=torch.device("meta")))
        model = found.timed("model", lambda: build_model(config, mesh))
        found.counts["parameters_of_rank"] = sum(
            parameter.numel() for stage in model.stages.values() for parameter in stage.parameters()
        )
        return [communicator.ranks for communicator in mesh.communicators]
    finally:
        stop_process_group()


def _count_peers(found: ScaleMeasurement, groups: Sequence[tuple[int, ...]]) -> None:
    """Counts the peers of the rank that is in most groups."""
    counts = found.counts
    counts["communicators"] = max(counts.get("communicators", 0), len(groups))
    counts["communicator_ranks"] = max(counts.get("communicator_ranks", 0), sum(map(len, groups)))
    smaller = {rank for ranks in groups if len(ranks) < found.world_size for rank in ranks}
    counts["peers"] = max(counts.get("peers", 0), len(smaller) - 1)
    counts["control_peers"] = control_peers(found.world_size)


def control_peers(size: int) -> int:
    """Returns how many ranks one rank connects to over the CPU group `control`, which gloo connects pair by pair on demand.

    All communication there is with ranks at distances of powers of two: rings (all-reduce, all-gather) at 1, trees (broadcast),
    barriers and the checkpoint's exchange of messages at all of them, in both directions.

    >>> control_peers(4096)
    23
    """
    steps = [1 << bit for bit in range((size - 1).bit_length())]
    return len({distance % size for step in steps for distance in (step, -step)})


def _rows(found: Sequence[ScaleMeasurement]) -> list[tuple[str, str]]:
    rows = [
        ("ranks", _line([f"{one.world_size:,}" for one in found], "growth")),
        ("layout", _line([o.layout for o in found])),
    ]
    for title, parts in (("start overhead, s", _START), ("first save, s", _SAVE), ("later saves, s", _EVERY_SAVE)):
        measured = [part for part in parts if part in found[0].seconds]
        if not measured:
            continue
        rows.append((title, _series([one.total_seconds(parts) for one in found], found, "{:.2f}")))
        shown = [part for part in measured if parts is not _SAVE or part in _FIRST_SAVE]
        rows += [(f"  {part}", _series([one.seconds[part] for one in found], found, "{:.3f}")) for part in shown]
    for name in found[0].counts:
        rows.append((name.replace("_", " "), _series([one.counts[name] for one in found], found, "{:,}")))
    return rows


def _series(values: Sequence[float], found: Sequence[ScaleMeasurement], form: str) -> str:
    exponent = growth_exponent(values, [one.world_size for one in found])
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


def _verdict(found: Sequence[ScaleMeasurement], *, checkpoint: bool) -> str:
    """Compares with the limits at 4,096 ranks, and names what grows faster than the world."""
    judged = [one for one in found if one.world_size <= _LIMIT_RANKS]
    words: list[str] = []
    for title, parts in (("start", _START), ("save", _SAVE))[: 2 if checkpoint else 1]:
        worst = max(judged, key=lambda one: one.total_seconds(parts), default=None)
        if worst is not None:
            seconds = worst.total_seconds(parts)
            within = "within" if seconds <= _LIMIT_S else "ABOVE"
            words.append(f"{title} {seconds:.1f} s at {worst.world_size:,} ranks, {within} {_LIMIT_S:.0f} s")
    if not judged:
        words.append(f"no size up to {_LIMIT_RANKS:,} ranks, so no bar applies")
    sizes = [one.world_size for one in found]
    for part in found[-1].seconds:
        values = [one.seconds[part] for one in found]
        exponent = growth_exponent(values, sizes)
        if exponent is not None and exponent > _MAX_EXPONENT and values[-1] >= _MIN_REPORTED_S:
            words.append(f"{part} grows as N^{exponent:.1f}")
    return "; ".join(words)
