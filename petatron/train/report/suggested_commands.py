"""Suggests commands at the end of a run: resume, generate, export, plot, with the run's own paths.

A new subcommand gets a line in `suggested_commands`; subcommands that this installation lacks are left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from petatron.config import RunConfig
from petatron.mesh.launch.environment import SINGLE_PROCESS, RankEnvironment
from petatron.models.hf import matching_family
from petatron.models.registry import model_spec


def suggested_commands(
    run: RunConfig,
    *,
    subcommands: Collection[str],
    log_dir: Path,
    train_iters: int,
    complete: bool,
    saved: bool,
    environment: RankEnvironment = SINGLE_PROCESS,
) -> list[tuple[str, str]]:
    """Returns complete commands, each with its purpose. saved: there is a checkpoint. environment: of rank 0."""
    folder = run.checkpoint.save if saved else None
    resume: list[tuple[str, str]] = []
    commands: list[tuple[str, str]] = []
    if folder is not None:
        if "train" in subcommands:
            arguments = _resume_arguments(run, folder, log_dir, train_iters if complete else None)
            purpose = "train twice as long, from this checkpoint" if complete else "go on from this checkpoint"
            resume = [(_start_command(arguments, environment), purpose + _how_started(environment))]
        commands += _generation_commands(run, folder)
        commands.append((f"checkpoint verify {shlex.quote(folder)}", "check every byte of the checkpoint"))
        if matching_family(model_spec(run)) is not None:
            exported = str(Path(folder).with_name(f"{Path(folder).name}-huggingface"))
            command = f"checkpoint convert {shlex.quote(folder)} {shlex.quote(exported)} --to huggingface"
            commands.append((command, "export the model for transformers and others"))
    commands += [
        (f"plot {shlex.quote(str(log_dir))}", "draw its curves"),
        (f"report {shlex.quote(str(log_dir))}", "one HTML file to send to a colleague"),
    ]
    available = [(command, purpose) for command, purpose in commands if command.split()[0] in subcommands]
    return resume + [(f"petatron {command}", purpose) for command, purpose in available]


def _generation_commands(run: RunConfig, folder: str) -> list[tuple[str, str]]:
    """Returns commands that generate text, if the model is a decoder with a text tokenizer, or that measure one of whole texts."""
    kind = run.tokenizer.tokenizer_type
    if run.model.pooling is not None:
        files = run.data.valid_data_path or ("FILE",)
        command = f"eval {shlex.quote(folder)} --task labels --data {shlex.quote(files[-1])}"
        return [(command, "measure it on every line of a file")] if kind not in (None, "NullTokenizer") else []
    if run.model.model_type != "decoder" or kind is None or kind == "NullTokenizer":
        return []
    return [
        (f"generate {shlex.quote(folder)} --prompt 'Once upon a time'", "continue a text with the model"),
        (f"chat {shlex.quote(folder)}", "talk to it"),
        (f"serve {shlex.quote(folder)}", "answer clients of OpenAI's API, and a browser"),
    ]


def _resume_arguments(run: RunConfig, folder: str, log_dir: Path, train_iters: int | None) -> list[str]:
    """Returns arguments that resume from the saved settings; a complete run (`train_iters` given) trains twice as long."""
    started = ["posttrain", "--config"] if run.rollout.rollout_prompts else ["train"]
    arguments = [*started, str(log_dir / "config.yaml"), "--load", folder]
    if train_iters is not None and run.train.train_samples is not None:
        arguments += ["--train-samples", str(2 * run.train.train_samples), "--override-opt-param-scheduler"]
    elif train_iters is not None:
        arguments += ["--train-iters", str(2 * train_iters), "--override-opt-param-scheduler"]
    return arguments


def _start_command(arguments: Sequence[str], environment: RankEnvironment) -> str:
    """Returns the command line that starts as many ranks with the same launcher, on the machine of rank 0."""
    local, nodes = environment.local_world_size, _num_nodes(environment)
    sizes = [f"--nproc-per-node={local}"]
    if nodes > 1:
        address = [f"--master-addr={environment.master_addr}", f"--master-port={environment.master_port}"]
        sizes = [f"--nnodes={nodes}", "--node-rank=0", *sizes, *address]
    if environment.launcher == "torchrun":
        return shlex.join(["torchrun", *sizes, "-m", "petatron", *arguments])
    if environment.launcher == "slurm":
        return shlex.join(["srun", f"--nodes={nodes}", f"--ntasks-per-node={local}", "petatron", *arguments])
    return shlex.join(["petatron", *arguments, *(sizes if environment.world_size > 1 else [])])


def _how_started(environment: RankEnvironment) -> str:
    if environment.launcher == "slurm":
        return ", in an allocation like this one"
    how = ", started with torchrun as before" if environment.launcher == "torchrun" else ""
    return f"{how}, on every machine with its own --node-rank" if _num_nodes(environment) > 1 else how


def _num_nodes(environment: RankEnvironment) -> int:
    return max(1, environment.world_size // environment.local_world_size)
