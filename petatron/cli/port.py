"""`petatron port`: a Megatron script or functional-test file as a configuration, checked and planned, or trained as a toy."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from petatron.base.check_output_file import writable_problems
from petatron.base.errors import ConfigError, PetatronError, Problem, raise_problems
from petatron.base.format_text import count_with_noun
from petatron.base.safe_files import write_atomic
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.port.environment_variable_names import shell_quoted
from petatron.port.plan_and_toy_settings import (
    assumed_vocabulary,
    planned_yaml,
    toy_flags,
    toy_omissions,
    toy_problems,
    toy_yaml,
)
from petatron.port.ported_inference import PortedInference, answers_prompts, port_inference
from petatron.port.ported_run import PortedRun, port_script
from petatron.port.ported_yaml import is_unchanged
from petatron.port.read_script import read_script
from petatron.validate import resolve_config, without_problems

_BLOCKED = 1
_TOY_RANKS = 4
"""Ranks that a toy may have on a machine with fewer cores and no GPU."""


def parser() -> argparse.ArgumentParser:
    root = CommandParser(
        prog="petatron port",
        description="Reads a Megatron shell script, or one of its functional-test YAML files, without running anything of it, and writes a "
        "configuration with a comment for every flag: kept, translated, dropped as implied, or blocking with what to do. Then checks "
        "it, plans memory at the script's own number of ranks, and prints the command that starts it. Exits with 1 if something blocks.",
        epilog="For example: petatron port train_llama3_8b.sh --set TOKENIZER_MODEL=/data/tokenizer --set NUM_NODES=4",
        allow_abbrev=False,
    )
    add = root.add_argument
    add("script", type=Path, metavar="SCRIPT", help="shell script, or functional-test file (.yaml)")
    text = "value of a variable, or of an argument as 1=VALUE; it wins over the value in the script"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "leave out flags of the script, named without dashes"
    add("--without", action="append", default=[], metavar="FLAG[,FLAG...]", help=text)
    add("--world-size", type=int, metavar="N", help="ranks to check and plan for (those of the script)")
    add("--device-memory-gb", type=float, metavar="N", help="memory of a device, to be told whether the run fits")
    add("--out", type=Path, metavar="FILE", help="where to write (SCRIPT's name with .petatron.yaml, in this folder)")
    add("--force", action="store_true", help="replace a file that was edited since it was written")
    add("--run", action="store_true", help="train it here and now, with --toy")
    add("--toy", action="store_true", help="with --run: at toy size, with mock data")
    add("--train-iters", type=int, default=5, metavar="N", help="with --run: iterations to train (5)")
    return root


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    out = options.out or Path(f"{options.script.stem}.petatron.yaml")
    raise_problems([*_option_problems(options), *_output_problems(out, options)])
    given = dict(word.split("=", 1) for word in options.set)
    left_out = [name for names in options.without for name in names.split(",") if name]
    script = read_script(options.script, given)
    if answers_prompts(script):
        return _show_inference(port_inference(script, left_out=left_out, world_size=options.world_size), options)
    run = port_script(script, left_out=left_out, world_size=options.world_size)
    print(f"{run.title}\n{run.summary}")
    _print_groups(run.groups())
    if _leaves_file(options, out):
        print(f"\n{out} is there already and stays as it is; --out FILE writes this one")
    else:
        write_atomic(out, run.yaml())
        print(f"\nwrote {out}")
    if options.run:
        return _run_toy(run, options.train_iters) or (_BLOCKED if run.blocks else 0)
    too_large = _plan(run, options.device_memory_gb)
    if run.blocks:
        print("\nsomething blocks: see above")
        return _BLOCKED
    print(f"\nstart it with:\n  {_command(run, out)}")
    return _BLOCKED if too_large else 0


def _print_groups(groups: Sequence[tuple[str, Sequence[str]]]) -> None:
    for heading, lines in groups:
        if lines:
            print("\n  ".join((f"\n{heading} ({len(lines)})", *lines)))


def _show_inference(run: PortedInference, options: argparse.Namespace) -> int:
    """Prints the command that answers prompts, or serves; there is no configuration to write, and nothing to train."""
    if options.run:
        rule, fix = "trains, and this script answers prompts", "Leave out --run and --toy, and start what is printed."
        raise ConfigError([Problem("--run", "", rule, fix)])
    print(run.script.title)
    _print_groups(run.groups())
    if run.blocks:
        print("\nsomething blocks: see above")
        return _BLOCKED
    print(f"\nstart it with:\n  {run.command}")
    return 0


def _option_problems(options: argparse.Namespace) -> Iterator[Problem]:
    for word in options.set:
        if not word.partition("=")[0] or "=" not in word:
            yield Problem("--set", word, "is not NAME=VALUE", "Write, for example, --set NUM_NODES=4.")
    for flag, value in (("--world-size", options.world_size), ("--train-iters", options.train_iters)):
        if value is not None and value < 1:
            yield Problem(flag, str(value), "must be at least 1", f"Give, for example, {flag} 8.")
    if options.device_memory_gb is not None and not 0 < options.device_memory_gb < float("inf"):
        rule = "is not a size above 0"
        yield Problem("--device-memory-gb", f"{options.device_memory_gb:g}", rule, "Write, for example, 80.")
    if options.run != options.toy:
        rule = "runs only a toy" if options.run else "is for --run"
        fix = "Add --toy; `petatron train --config FILE` starts the full size." if options.run else "Add --run."
        yield Problem("--run" if options.run else "--toy", "", rule, fix)


def _output_problems(out: Path, options: argparse.Namespace) -> list[Problem]:
    """A file that somebody edited, or that is none of ours, is replaced only if asked."""
    if wrong := writable_problems("--out", out):
        return wrong
    if not out.exists() or options.force or _leaves_file(options, out):
        return []
    try:
        unchanged = is_unchanged(out.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        unchanged = False
    rule = "exists, and was not written by `petatron port` or was edited since"
    return [] if unchanged else [Problem("--out", str(out), rule, "Give another name, or --force to replace it.")]


def _leaves_file(options: argparse.Namespace, out: Path) -> bool:
    """Whether the file of an earlier port stays: a trial replaces it only where that is asked."""
    return options.run and options.out is None and not options.force and out.exists()


def _plan(run: PortedRun, device_memory_gb: float | None) -> bool:
    """Prints the memory plan; returns whether the run does not fit the device that was named."""
    vocabulary = assumed_vocabulary(run)
    flags = ["--mock-data", *(["--vocab-size", str(vocabulary)] if vocabulary else [])]
    with tempfile.TemporaryDirectory(prefix="petatron-port-") as folder:
        file = Path(folder) / "plan.yaml"
        file.write_text(planned_yaml(run), encoding="utf-8")
        loaded, problems = resolve_config(
            flags, files=(file,), world_size=run.planned_world_size, require_training=False
        )
    print(f"\nMemory at {_ranks(run)}")
    if problems:
        print("  cannot be planned before the problems above are solved")
        return False
    if vocabulary:
        print(f"planned with a vocabulary of {vocabulary:,}, which is assumed: the tokenizer's files would say it")
    from petatron.cli.subcommands.plan_memory_report import report

    capacity = None if device_memory_gb is None else int(device_memory_gb * 1e9)
    sys.stdout.flush()
    return bool(report(without_problems(loaded, problems), capacity, None)) and capacity is not None


def _ranks(run: PortedRun) -> str:
    if run.world_size:
        return count_with_noun(run.world_size, "rank")
    fewest = count_with_noun(run.fewest_ranks, "rank")
    return f"{fewest}, the fewest of its layout (--world-size N says another number)"


def _command(run: PortedRun, out: Path) -> str:
    start = f"petatron train {' '.join(map(shell_quoted, ['--config', str(out), *run.typed_flags]))}"
    launch, size = run.launch, run.world_size
    nodes, per_node = launch.nodes or 1, launch.ranks_per_node or 1
    if size is None:
        return start
    if size != launch.world_size:
        nodes, per_node = (size // per_node, per_node) if per_node > 1 and size % per_node == 0 else (1, size)
    if launch.launcher in ("srun", "mpirun", "mpiexec"):
        return f"srun --nodes={nodes} --ntasks-per-node={per_node} {start}"
    if nodes == 1:
        return f"{start} --nproc-per-node {per_node}" if per_node > 1 else start
    return f"{start} --nproc-per-node {per_node} --nnodes {nodes} --node-rank $NODE_RANK --master-addr $MASTER_ADDR   (on every node)"


def _run_toy(run: PortedRun, iterations: int) -> int:
    from petatron.base.device import detect_device
    from petatron.cli.train import main as train

    here = max(_TOY_RANKS, os.cpu_count() or 1)
    if detect_device().kind == "cuda":
        import torch

        here = torch.cuda.device_count()
    raise_problems(toy_problems(run))
    if omitted := toy_omissions(run):
        print(f"\nthe toy is trained without {', '.join(dict.fromkeys(omitted))}")
    keeps_layout = run.world_size is not None and 1 < run.world_size <= here
    with tempfile.TemporaryDirectory(prefix="petatron-port-") as folder:
        file = Path(folder) / "toy.yaml"
        flags = ["--config", str(file), *toy_flags(run, iterations=iterations, keeps_layout=keeps_layout)]
        file.write_text(toy_yaml(run, keeps_layout=keeps_layout), encoding="utf-8")
        _, problems = resolve_config(flags)
        if problems and keeps_layout:
            why = f"does not fit a toy, which is trained in one process: {problems[0]}"
            print(f"\nthe layout of {run.world_size} ranks {why}")
            keeps_layout = False
            file.write_text(toy_yaml(run, keeps_layout=False), encoding="utf-8")
            flags = ["--config", str(file), *toy_flags(run, iterations=iterations, keeps_layout=False)]
        if "--lr" in flags:
            print(f"\nthe script sets no --lr: the toy has {flags[flags.index('--lr') + 1]}")
        print(f"\ntoy on {_ranks(run) if keeps_layout else '1 rank'}, {iterations} iterations of mock data", flush=True)
        try:
            return train(flags)
        except ConfigError:
            raise
        except PetatronError as error:
            print(f"petatron: {error}", file=sys.stderr)
            return _BLOCKED
