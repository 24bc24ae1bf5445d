"""`petatron plan`: predicts what a layout will cost, before it is started.

`plan schedule` simulates a pipeline schedule and draws it, compares all schedules, or draws what a run has measured.
`plan memory` predicts the memory of every rank, in `plan_memory.py`, `plan cache` what generation keeps, in `plan_cache.py`, and
`plan model` lists and draws the parts of a model, in `plan_model.py`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from petatron.base.errors import ConfigError, DataError, Problem, raise_problems
from petatron.base.format_text import count_with_noun
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.plan.pipeline_simulator import ActionCosts, Simulation, bubble_fraction, simulate, theoretical_bubble
from petatron.plan.timeline_drawing import timeline_svg, timeline_text
from petatron.schedule import ScheduleShape, build_schedule
from petatron.schedule.actions import COMPUTE_KINDS, SCHEDULES, TimedAction
from petatron.schedule.measured_timeline import read_measured

_COST_NAMES = ("F", "B", "I", "W", "transfer")
_TWO_VIRTUAL_STAGES = ("interleaved", "zb-v")
MAX_SIMULATED_PASSES = 250_000
"""Ranks x virtual stages x micro-batches that are simulated, which takes about half a minute; costs are linear in it."""


def parser() -> argparse.ArgumentParser:
    root = CommandParser(
        prog="petatron plan",
        description="What a layout will cost, before it is started: `plan schedule` simulates a pipeline schedule with given costs, draws "
        "it, compares all schedules or draws what a run has measured (--pipeline-timeline); `plan memory` predicts what every rank will "
        "hold, says whether it fits a device, and which changes would make it fit; `plan cache` says what is kept of a sequence while it "
        "is generated; `plan model` lists and draws the parts of a model.",
        epilog="petatron plan schedule --help tells more, and so on.",
    )
    subcommands = root.add_subparsers(dest="what", required=True, metavar="WHAT")
    scheduling = subcommands.add_parser(
        "schedule",
        help="simulate and draw a pipeline schedule, compare all of them, or draw a measured one",
        description="Simulates a pipeline schedule with given costs: a picture, how long ranks are idle, and how many "
        "micro-batches each holds. Without --name, compares all schedules.",
        epilog="For example: petatron plan schedule --name zb-h1 --pp 4 --microbatches 16 --out timeline.svg",
    )
    add = scheduling.add_argument
    add("--name", metavar="NAME", help=f"{', '.join(SCHEDULES)} (all, as a table)")
    add("--pp", type=int, metavar="P", help="ranks of the pipeline")
    add("--virtual", type=int, metavar="V", help="stages per rank (1; interleaved and zb-v: 2)")
    add("--microbatches", type=int, metavar="M", help="micro-batches of a step")
    add("--group-size", type=int, metavar="G", help="interleaved: micro-batches per group (P)")
    add(
        "--costs",
        metavar="F=1,B=2,...",
        help="time of F forward, B backward or its halves I input gradient and W weight gradient, of a rank's whole part of "
        "the model: with V stages per rank, each takes 1/V of it; and of a transfer (F=1,I=1,W=1,B=I+W,transfer=0; with B "
        "alone, I and W are half of it, with B and one of them the other is the rest)",
    )
    add("--out", metavar="FILE.svg", type=Path, help="write the picture here")
    add("--measured", metavar="FILE.json", type=Path, help="draw the timeline a run wrote, not a simulated one")
    subcommands.add_parser(
        "memory", help="predict what every rank will hold, and what would make it fit", add_help=False
    )
    subcommands.add_parser("cache", help="say what is kept of a sequence while it is generated", add_help=False)
    subcommands.add_parser(
        "model", help="list the parts of a model, their parameters and FLOPs, and draw it", add_help=False
    )
    return root


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("memory", "cache", "model"):  # their flags are those of `petatron train`
        return importlib.import_module(f"petatron.cli.subcommands.plan_{argv[0]}").main(argv[1:])
    options = parser().parse_args(argv)
    if options.measured is not None:
        return _measured(options)
    costs, cost_problems = parse_costs(options.costs or "")
    raise_problems([*_shape_problems(options), *cost_problems])
    if options.name is None:
        for line in _comparison(options, costs):
            print(line, flush=True)
        return 0
    shape = _shape(options, options.name, options.virtual)
    if problem := shape.problem():
        raise ConfigError([Problem("--name", options.name, f"does not fit: {problem}", "Change one of the two.")])
    raise_problems(_size_problems(options, shape.virtual))
    result, title = _simulate(shape, costs), _title(shape)
    print(f"{title}\n\n{timeline_text(result.events)}\n\n{_summary(shape, result)}")
    if options.out is not None:
        _write(options.out, timeline_svg(result.events, title=title))
    return 0


def parse_costs(text: str) -> tuple[dict[str, float], list[Problem]]:
    """Parses `F=1,B=2`; returns the costs and the problems."""
    costs: dict[str, float] = {}
    problems: list[Problem] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = word.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if name not in _COST_NAMES:
            problems.append(Problem("--costs", word, "names no action", f"Use {', '.join(_COST_NAMES)}."))
        elif not (math.isfinite(value) and (value > 0 or (name == "transfer" and value == 0))):
            rule = "is not a time" if name == "transfer" else "is not a time above 0"
            problems.append(Problem("--costs", word, rule, f"Write, for example, {name}=1.5."))
        elif costs.get(name, value) != value:
            problems.append(Problem("--costs", word, f"contradicts {name}={costs[name]:g}", "Write it once."))
        else:
            costs[name] = value
    return costs, problems + _backward_cost_problems(costs)


def _backward_cost_problems(costs: dict[str, float]) -> list[Problem]:
    """A backward is its two halves, so two of the three numbers determine the third."""
    backward, halves = costs.get("B"), {name: costs[name] for name in ("I", "W") if name in costs}
    total = sum(halves.values())
    if backward is None or not halves:
        return []
    given = ",".join(f"{name}={value:g}" for name, value in halves.items())
    if len(halves) == 2 and not math.isclose(backward, total):
        rule = f"is not {given.replace(',', ' + ')} = {total:g}, the two halves it is made of"
        return [Problem("--costs", f"B={backward:g}", rule, "Leave out B, or both halves.")]
    if len(halves) == 1 and total >= backward:
        rule = f"leaves nothing of B={backward:g} for the other half"
        return [Problem("--costs", given, rule, "Give less for it, or leave out B.")]
    return []


def _shape_problems(options: argparse.Namespace) -> Iterator[Problem]:
    if options.name is not None and options.name not in SCHEDULES:
        close = difflib.get_close_matches(options.name.lower(), SCHEDULES, n=1, cutoff=0.5)
        fix = f"Did you mean {close[0]}?" if close else f"Use one of {', '.join(SCHEDULES)}."
        yield Problem("--name", options.name, "is not a schedule", fix)
    for flag, value, needed in (
        ("--pp", options.pp, True),
        ("--microbatches", options.microbatches, True),
        ("--virtual", options.virtual, False),
        ("--group-size", options.group_size, False),
    ):
        if value is None and needed:
            yield Problem(flag, "", "is missing", f"Give, for example, {flag} 4.")
        elif value is not None and value < 1:
            yield Problem(flag, str(value), "must be at least 1", f"Give, for example, {flag} 4.")
    if options.group_size is not None and options.name not in ("interleaved", None):
        rule = f"means nothing for {options.name}"
        yield Problem("--group-size", str(options.group_size), rule, "Only interleaved has groups.")
    if options.name is None and options.out is not None:
        yield Problem("--out", str(options.out), "needs a schedule to draw", "Add --name.")
    yield from _out_problems(options.out)


def _size_problems(options: argparse.Namespace, virtual: int) -> list[Problem]:
    """A simulation is a long list of actions: beyond some size it takes minutes and shows nothing that a shorter one does not."""
    num_stages = options.pp * virtual
    if num_stages * options.microbatches <= MAX_SIMULATED_PASSES:
        return []
    most = MAX_SIMULATED_PASSES // num_stages
    rule = f"on {num_stages:,} pipeline stages are more passes than the {MAX_SIMULATED_PASSES:,} that are simulated"
    fix = f"Use {most:,} or fewer: all schedules repeat themselves after a few times --pp."
    fix = fix if most else "Use fewer stages."
    return [Problem("--microbatches", str(options.microbatches), rule, fix)]


def _out_problems(out: Path | None) -> list[Problem]:
    if out is None or out.suffix == ".svg":
        return []
    return [Problem("--out", str(out), "does not end in .svg", "The picture is SVG: choose such a name.")]


def _shape(options: argparse.Namespace, name: str, virtual: int | None) -> ScheduleShape:
    virtual = virtual or (2 if name in _TWO_VIRTUAL_STAGES and options.pp > 1 else 1)
    return ScheduleShape(name, options.pp, virtual, options.microbatches, options.group_size)


def _simulate(shape: ScheduleShape, costs: dict[str, float]) -> Simulation:
    backward, virtual = costs.get("B"), shape.virtual
    half = {
        name: 1.0 if backward is None else backward - costs.get(other, backward / 2) for name, other in ("IW", "WI")
    }
    action_costs = ActionCosts(
        forward=costs.get("F", 1.0) / virtual,
        backward=None if backward is None else backward / virtual,
        input_grad=costs.get("I", half["I"]) / virtual,
        weight_grad=costs.get("W", half["W"]) / virtual,
        transfer=costs.get("transfer", 0.0),
    )
    return simulate(build_schedule(shape), action_costs)


def _title(shape: ScheduleShape) -> str:
    stages = f", {shape.virtual} stages per rank" if shape.virtual > 1 else ""
    micro_batches = count_with_noun(shape.micro_batches, "micro-batch", "es")
    return f"{shape.name}: {count_with_noun(shape.ranks, 'rank')}{stages}, {micro_batches}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f}%"


def _theory(shape: ScheduleShape) -> float | None:
    virtual, micro_batches = shape.virtual, shape.micro_batches
    return theoretical_bubble(shape.name, ranks=shape.ranks, virtual=virtual, micro_batches=micro_batches)


def _summary(shape: ScheduleShape, result: Simulation) -> str:
    theory = _theory(shape)
    part = "" if shape.virtual == 1 else f" (each of 1/{shape.virtual} of the rank's layers)"
    none = "theory            none for so few micro-batches"
    return "\n".join(
        [
            f"time              {result.makespan:g}",
            f"idle (bubble)     {_percent(result.bubble)}",
            none if theory is None else f"theory, F = I = W {_percent(theory)}",
            f"peak activations  {' '.join(str(count) for count in result.peak_activations)}{part}",
        ]
    )


def _comparison(options: argparse.Namespace, costs: dict[str, float]) -> Iterator[str]:
    """Compares all schedules on the same model: time, bubble, theory, and the most full micro-batches a rank holds."""
    raise_problems(_size_problems(options, max(2, options.virtual or 2)))
    yield f"{'schedule':<12} {'stages':>6} {'time':>10} {'idle':>8} {'theory':>8} {'peak activations':>17}"
    for name in SCHEDULES:
        # A number of stages that only interleaved supports leaves the others at their own.
        shape = _shape(options, name, options.virtual if name == "interleaved" else None)
        if problem := shape.problem():
            yield f"{name:<12} {problem}"
            continue
        result = _simulate(shape, costs)
        idle, theory, peak = result.bubble, _theory(shape), max(result.peak_activations) / shape.virtual
        times = f"{result.makespan:>10g} {_percent(idle):>8} {_percent(theory):>8}"
        yield f"{name:<12} {shape.virtual:>6} {times} {peak:>17g}"


def _measured(options: argparse.Namespace) -> int:
    rule = "goes with a simulated schedule, not with --measured"
    problems = [
        Problem(f"--{name.replace('_', '-')}", str(value), rule, "Leave one of the two out.")
        for name in ("name", "pp", "virtual", "microbatches", "group_size", "costs")
        if (value := getattr(options, name)) is not None
    ]
    raise_problems([*problems, *_out_problems(options.out)])
    measured = read_measured(options.measured)
    computed = ((timed for timed in rank if timed.action.kind in COMPUTE_KINDS) for rank in measured.ranks)
    milliseconds = [
        [TimedAction(timed.action, 1e3 * timed.start, 1e3 * timed.end) for timed in rank] for rank in computed
    ]
    if not any(milliseconds):
        raise DataError(f"{options.measured} has transfers only. A timeline needs computations to draw.")
    title = f"{measured.name}: {count_with_noun(len(measured.ranks), 'rank')}, measured"
    print(f"{title}\n\n{timeline_text(milliseconds)}\n\n{_measured_summary(milliseconds)}")
    if options.out is not None:
        _write(options.out, timeline_svg(milliseconds, title=title, unit="ms"))
    return 0


def _measured_summary(ranks: list[list[TimedAction]]) -> str:
    every = [timed for rank in ranks for timed in rank]
    lines = [
        f"time              {max(t.end for t in every) - min(t.start for t in every):.3f} ms",
        f"idle (bubble)     {_percent(bubble_fraction(tuple(tuple(rank) for rank in ranks)))}",
    ]
    means: list[str] = []
    for kind in dict.fromkeys(timed.action.kind for timed in every):
        times = [timed.end - timed.start for timed in every if timed.action.kind is kind]
        means.append(f"{kind}={sum(times) / len(times):.3f}")
    return "\n".join([*lines, f"mean per stage    {','.join(means)} ms"])


def _write(out: Path, picture: str) -> None:
    try:
        out.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot write {out}: {error.strerror}. Choose a file in a writable folder.") from error
    print(f"picture in {out}")
