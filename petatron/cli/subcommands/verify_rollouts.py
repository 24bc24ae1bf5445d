"""`petatron verify --rollouts`: compares the engine's log-probabilities with training's."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petatron.base.check_output_file import writable_problems
from petatron.base.errors import Problem, raise_problems
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.cli.train import with_preset
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.rank_exit import run_rank_main
from petatron.mesh.launch.scratch_folder import VERIFY_PREFIX, scratch_folder

if TYPE_CHECKING:
    from petatron.verify.run_rollouts import RolloutPlan

_COULD_NOT_RUN = 2  # 1: log-probabilities differ
_KEY_TILE = "key-tile"
_HEAD = (
    f"{'sequences':>9} {'prompts':>10} {'tokens':>8} {'differ':>8} {'largest':>9} {'mean':>9} {'k3':>9} "
    f"{'drawn/s':>9} {'trained/s':>10}"
)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="petatron verify --rollouts",
        description="Draws tokens with the engine in batches of several sizes, from prompts whole and in chunks, and compares the "
        "log-probability recorded of each token with the one that training computes for it. With --exact-rollouts it exits with "
        "1 if any differs; without, it measures by how much they do.",
        epilog="All other words are the model and flags of `petatron train`: "
        "petatron verify --rollouts tiny-llama --exact-rollouts --tp 2.",
    )
    add = parser.add_argument
    add("--rollouts", action="store_true", help="this mode")
    add(
        "--prompts", type=_positive, default=200, metavar="N", help="random prompts, each continued in three ways (200)"
    )
    add("--longest-prompt", type=_positive, default=96, metavar="TOKENS", help="prompts have 1 to so many tokens (96)")
    add("--new-tokens", type=_positive, default=16, metavar="TOKENS", help="tokens of an answer (16)")
    add("--batches", type=_sizes, default=(1, 4, 16, 64), metavar="N,...", help="sequences at once (1,4,16,64)")
    add("--chunk", type=_positive, default=13, metavar="TOKENS", help="prompt tokens of a step where they are cut (13)")
    add("--prompt-seed", type=int, default=1, help="what prompts are drawn with (1)")
    add("--no-cost", action="store_true", help="leave out what the same takes without --exact-rollouts")
    add("--inject", choices=(_KEY_TILE,), help="attention of the engine merges other tiles: tests the check itself")
    add("--json", metavar="FILE", type=Path, help="write all results as JSON too")
    add("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    options, flags = _parser().parse_known_args(argv)
    flags = with_preset(flags)
    if options.rank_of is not None:
        return run_rank_main(lambda: _run_rank(flags, options))
    raise_problems(writable_problems("--json", options.json) if options.json else [])
    from petatron.mesh.launch.local_launcher import run_ranks
    from petatron.verify.run_rollouts import load_rollouts

    config = load_rollouts(flags, _plan(options))
    raise_problems(_contradictions(options, exact=config.train.exact_rollouts))
    with scratch_folder(VERIFY_PREFIX) as scratch:
        command = [sys.executable, "-m", "petatron", "verify", *argv, "--rank-of", str(scratch)]
        code = run_ranks(command, nproc=config.parallel.world_size)
        if code:
            return _COULD_NOT_RUN if code == 1 else code
        results = json.loads((scratch / "results.json").read_text())
    print("\n".join(_report(results)))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return int(results["exact"] and _num_differing(results) > 0)


def _contradictions(options: argparse.Namespace, *, exact: bool) -> Iterator[Problem]:
    if options.inject and not exact:
        rule = "plants a difference among numbers that are equal, and without --exact-rollouts they are not"
        yield Problem("--inject", options.inject, rule, "Add --exact-rollouts, or leave it out.")


def _plan(options: argparse.Namespace) -> RolloutPlan:
    from petatron.verify.run_rollouts import RolloutPlan

    return RolloutPlan(
        prompts=options.prompts,
        longest=options.longest_prompt,
        new_tokens=options.new_tokens,
        batches=options.batches,
        chunk=options.chunk,
        seed=options.prompt_seed,
        inject=options.inject is not None,
        measures_cost=not options.no_cost,
    )


def _run_rank(flags: list[str], options: argparse.Namespace) -> int:
    from petatron.base.log import configure_logging
    from petatron.mesh.launch.process_group import stop_process_group
    from petatron.verify.run_rollouts import load_rollouts, measure_run

    environment = read_environment()
    configure_logging(rank=max(1, environment.rank))  # quiet on every rank: the table is what the user came for
    plan = _plan(options)
    results = measure_run(load_rollouts(flags, plan, world_size=environment.world_size), plan)
    if environment.rank == 0:
        (options.rank_of / "results.json").write_text(json.dumps(results))
    stop_process_group()
    return 0


def _report(results: Mapping[str, Any]) -> Iterator[str]:
    yield _HEAD
    others = results.get("other_mode", [])
    yield from map(_line, results["cases"])
    if others:
        yield "without --exact-rollouts:"
        yield from map(_line, others)
        yield " ".join(
            f"{work} takes {sum(case[name] for case in results['cases']) / sum(case[name] for case in others):.2f} times as long"
            + ("," if name == "draw_s" else " with --exact-rollouts.")
            for work, name in (("Drawing", "draw_s"), ("the forward pass of training", "forward_s"))
        )
    total, differing = sum(case["tokens"] for case in results["cases"]), _num_differing(results)
    if not results["exact"]:
        yield f"MEASURED: {differing:,} of {total:,} log-probabilities differ; with --exact-rollouts none does."
    elif differing:
        yield f"DIFFERENT: {differing:,} of {total:,} log-probabilities."
    else:
        yield f"SAME: 0 of {total:,} log-probabilities differ."


def _line(case: Mapping[str, Any]) -> str:
    batch, chunk = case["case"]["batch"], case["case"]["chunk"]
    prompts = "whole" if chunk is None else f"by {chunk}"
    rates = case["tokens"] / max(case["draw_s"], 1e-9), case["tokens"] / max(case["forward_s"], 1e-9)
    differences = f"{case['largest']:9.1e} {case['mean']:9.1e} {case['k3']:9.1e}"
    return f"{batch:9} {prompts:>10} {case['tokens']:8} {case['differing']:8} {differences} {rates[0]:9,.0f} {rates[1]:10,.0f}"


def _num_differing(results: Mapping[str, Any]) -> int:
    return sum(case["differing"] for case in results["cases"])


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("is below 1")
    return number


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))
