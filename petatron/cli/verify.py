"""`petatron verify`: trains the same model in two layouts and compares them tensor by tensor."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.check_output_file import writable_problems
from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import count_with_noun
from petatron.cli.subcommands import verify_matrix, verify_rollouts
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.cli.train import with_preset
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.rank_exit import run_rank_main
from petatron.mesh.launch.scratch_folder import VERIFY_PREFIX, scratch_folder

if TYPE_CHECKING:
    from petatron.config import LoadedConfig
    from petatron.verify.compare_traces import TraceComparison


_COULD_NOT_RUN = 2  # 1: the layouts differ
_FP8_DOUBT = (
    "With FP8 that need not be a fault of the layout: the last bit of a float32 sum can round an operand to the next FP8 value, which is "
    "6 % away, and small gradients part by as much. Leave --fp8-format out to prove the layout."
)
_NO_LAYOUT = (
    "note: no layout is given, so one rank is compared with itself, which shows only that it repeats itself. "
    "Add a layout, for example --tp 2 --dp 2."
)


def parser() -> argparse.ArgumentParser:
    root = CommandParser(
        prog="petatron verify",
        description="Trains k steps of a configuration in a reference layout (one process) and in the layout given by the "
        "flags, on the same data from the same seed, at a constant learning rate and without dropout, and compares loss, "
        "gradients and parameters of every step by logical tensor. Exits with 1 and names the first departure if they "
        "differ by more than rounding.",
        epilog="All other words are flags of `petatron train`, for example: "
        "petatron verify tiny-llama --tp 2 --dp 2 --sequence-parallel --dtype float64. "
        "`petatron verify --matrix` runs many layouts of small models instead: see petatron verify --matrix --help. "
        "`petatron verify --rollouts` compares generation with training: see petatron verify --rollouts --help.",
    )
    add = root.add_argument
    add("--steps", type=int, default=20, help="optimizer steps to train (20)")
    text = "precision of both runs, whatever the flags say; float64 compares to 1e-9 (float32)"
    add("--dtype", choices=("float32", "float64"), default="float32", help=text)
    add("--reference", metavar="FLAGS", help="layout to compare with, as one quoted string (one process)")
    add("--inject", metavar="TENSOR[@STEP]", help="spoil one gradient in the layout: tests the check itself")
    add("--json", metavar="FILE", type=Path, help="write the comparison as JSON too")
    add("--record-into", type=Path, help=argparse.SUPPRESS)
    add("--record-ends", action="store_true", help=argparse.SUPPRESS)
    return root


def main(argv: list[str]) -> int:
    if "--matrix" in argv:
        return verify_matrix.main(argv)
    if "--rollouts" in argv:
        return verify_rollouts.main(argv)
    options, flags = parser().parse_known_args(argv)
    raise_problems(verify_matrix.problems_without_matrix(flags))
    flags = with_preset(flags)
    if options.record_into is not None:
        return run_rank_main(lambda: _record(flags, options))
    from petatron.mesh.launch.local_launcher import run_ranks
    from petatron.verify.compare_traces import TOLERANCES
    from petatron.verify.verify_layouts import (
        SINGLE_PROCESS_FLAGS,
        compare_recorded_runs,
        parse_injection,
        plan_verification,
    )

    wrong = [] if options.steps >= 1 else [Problem("--steps", str(options.steps), "is below 1", "Use 5, say.")]
    raise_problems(wrong + (writable_problems("--json", options.json) if options.json else []))
    reference = options.reference or SINGLE_PROCESS_FLAGS
    both = plan_verification(flags, steps=options.steps, dtype=options.dtype, reference=reference)
    if options.inject:
        parse_injection(options.inject, both.candidate.config)
    print(f"reference: {_layout_text(both.reference)}\nlayout:    {_layout_text(both.candidate)}")
    if both.candidate.config.parallel.world_size == 1 and options.reference is None:
        print(_NO_LAYOUT)
    for notice in both.candidate.notices:
        print(f"note: {notice}")
    if both.ignored_settings:
        print(f"not part of the comparison: {', '.join(both.ignored_settings)}")
    if not both.every_step:
        print(
            "The model is large: gradients and parameters are compared at the first and last step, losses at every step."
        )
    with scratch_folder(VERIFY_PREFIX) as scratch:
        folders = scratch / "reference", scratch / "layout"
        for folder, loaded, argv_of_ranks, inject in (
            (folders[0], both.reference, both.reference_argv, None),
            (folders[1], both.candidate, both.candidate_argv, options.inject),
        ):
            options_of_ranks = ["--record-into", str(folder)]
            options_of_ranks += [] if both.every_step else ["--record-ends"]
            options_of_ranks += ["--inject", inject] if inject else []
            command = [sys.executable, "-m", "petatron", "verify", *options_of_ranks, *argv_of_ranks]
            code = run_ranks(command, nproc=loaded.config.parallel.world_size)
            if code:
                return _COULD_NOT_RUN if code == 1 else code
        verdict = compare_recorded_runs(*folders, TOLERANCES[options.dtype])
    print(comparison_table(verdict))
    if options.json:
        options.json.write_text(json.dumps({"agrees": verdict.agrees, **asdict(verdict)}, indent=1))
    print(_conclusion(verdict, options.dtype, fp8=both.candidate.config.precision.fp8_format is not None))
    return 0 if verdict.agrees else 1


def _record(argv: list[str], options: argparse.Namespace) -> int:
    from petatron.base.log import configure_logging
    from petatron.mesh.launch.process_group import stop_process_group
    from petatron.verify.verify_layouts import parse_injection, record_run

    configure_logging(rank=max(1, read_environment().rank))  # quiet on every rank: the table is what the user came for
    injection = parse_injection(options.inject) if options.inject else None
    record_run(argv, options.record_into, every_step=not options.record_ends, injection=injection)
    stop_process_group()
    return 0


def _layout_text(loaded: LoadedConfig) -> str:
    """`tp 2 with sequence parallel, pp 2 (1f1b), dp 2, 4 micro-batches of 1, 8 ranks`; tp and dp always, others if used."""
    parallel, train, memory = loaded.config.parallel, loaded.config.train, loaded.config.memory
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    stages = f", {virtual} stages per rank" if virtual > 1 else ""
    # Sharding has an effect where weights are replicated at all.
    has_replicas = parallel.data_parallel_size * parallel.context_parallel_size > 1
    has_replicas |= loaded.config.moe.num_experts is not None
    shared = parallel.data_parallel_sharding_strategy if has_replicas else "no_shard"
    tp = parallel.tensor_model_parallel_size
    parts = [f"tp {tp}" + (" with sequence parallel" if parallel.sequence_parallel and tp > 1 else "")]
    for size, text in (
        (parallel.pipeline_model_parallel_size, f"pp {{}} ({parallel.pipeline_schedule}{stages})"),
        (parallel.context_parallel_size, f"cp {{}} ({parallel.cp_comm_type})"),
        (parallel.expert_model_parallel_size, f"ep {{}} (etp {parallel.expert_tensor_parallel_size})"),
    ):
        parts += [text.format(size)] if size > 1 else []
    parts.append(f"dp {parallel.data_parallel_size}" + ("" if shared == "no_shard" else f" ({shared} sharded)"))
    count = train.global_batch_size // (train.micro_batch_size * parallel.data_parallel_size)
    parts.append(f"{count_with_noun(count, 'micro-batch', 'es')} of {train.micro_batch_size}")
    if memory.recompute_granularity == "selective":
        parts.append(f"recompute of {' '.join(memory.recompute_modules)}")
    elif memory.recompute_granularity is not None:
        parts.append("recompute of layers")
    if memory.recompute_memory_budget_gb is not None:
        parts.append(f"recompute to fit {memory.recompute_memory_budget_gb:g} GB")
    return ", ".join([*parts, count_with_noun(parallel.world_size, "rank")])


def comparison_table(comparison: TraceComparison) -> str:
    """Formats every step: both losses, and the tensors that differ most."""
    lines = [f"{'step':>5} {'reference loss':>16} {'layout loss':>16} {'difference':>11}  worst tensors"]
    for step in comparison.steps:
        worst = ", ".join(f"{w.kind} {w.name} {w.difference:.1e}" for w in step.worst)
        losses = f"{step.reference_loss:16.9f} {step.candidate_loss:16.9f} {step.loss_difference:11.1e}"
        lines.append(f"{step.step:5d} {losses}  {worst}")
    return "\n".join(lines)


def _conclusion(comparison: TraceComparison, dtype: str, *, fp8: bool) -> str:
    if comparison.first_departure is not None:
        doubt = f"\n{_FP8_DOUBT}" if fp8 else ""
        return f"DIFFERENT: first departure at {comparison.first_departure}{doubt}"
    from petatron.verify.compare_traces import TOLERANCES

    bounds = TOLERANCES[dtype]
    return (
        f"SAME: {len(comparison.steps)} steps in {dtype}, largest relative loss difference "
        f"{comparison.largest_loss_difference:.1e} (bounds: loss {bounds.loss:.0e}, gradients {bounds.gradient:.0e}, "
        f"parameters {bounds.parameter:.0e})"
    )
