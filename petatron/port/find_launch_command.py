"""Finds the command of a script that trains: its launcher with nodes and ranks, the training script, the flags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from petatron.port.shell_interpreter import ShellCommand
from petatron.port.shell_values import ShellText

TRAINING_SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "pretrain_gpt.py": (),
    "pretrain_mamba.py": ("--is-hybrid-model",),
    "pretrain_hybrid.py": ("--is-hybrid-model",),
    "pretrain_bert.py": ("--model-type", "bert"),
    "pretrain_t5.py": ("--model-type", "t5"),
    "pretrain_vlm.py": ("--model-type", "vlm"),
}
"""Megatron's training scripts whose models we have, with the flags that each implies."""
_OTHER_PROGRAMS: Mapping[str, str] = {
    "preprocess_data.py": "prepares data: use `petatron data preprocess`",
    "merge_datasets.py": "merges data: use `petatron data merge`",
    "text_generation_cli.py": "asks a server for text: use `petatron chat`",
    "convert.py": "converts checkpoints: use `petatron checkpoint convert`",
    "multimodal/train.py": "names encoders of its own: use `petatron train --from FOLDER`, or pretrain_vlm.py",
    "pretrain_ict.py": "trains retrievers, which are not in this version",
    "pretrain_retro.py": "trains RETRO, which is not in this version",
    "pretrain_vision_classify.py": "trains vision models, which are not in this version",
    "msdp/main.py": "prompts a model for dialogues and scores them, which is not in this version",
    "train_rl.py": "trains by reinforcement learning, which is not in this version",
}
"""Megatron's other programs, and what to use instead."""

INFERENCE_SCRIPTS: Mapping[str, Literal["generate", "serve"]] = {
    **dict.fromkeys(("gpt_static_inference.py", "gpt_dynamic_inference.py", "offline_inference.py"), "generate"),
    **dict.fromkeys(("gpt_dynamic_inference_with_coordinator.py", "generate_samples_gpt.py"), "generate"),
    **dict.fromkeys(("run_text_generation_server.py", "run_mamba_text_generation_server.py"), "serve"),
    **dict.fromkeys(("run_hybrid_text_generation_server.py", "run_dynamic_text_generation_server.py"), "serve"),
    "launch_inference_server.py": "serve",
}
"""Megatron's inference scripts, and our subcommand for each."""

_LAUNCHERS = ("torchrun", "srun", "sbatch", "mpirun", "mpiexec", "deepspeed", "python", "python3", "accelerate")
_SBATCH = re.compile(r"^#SBATCH\s+(.+)$", re.M)
_SHORT_FLAGS = {"-N": "nodes", "-n": "ntasks", "-np": "ntasks"}
_NODES, _RANKS_PER_NODE, _RANKS = ("nnodes", "nodes"), ("nproc-per-node", "ntasks-per-node"), ("ntasks",)
_GPUS_PER_NODE = ("gpus-per-node", "gres")


@dataclass(frozen=True, slots=True)
class TrainingLaunch:
    """How a training script is started. Counts are None if unknown; `unknown_counts` names the variables that would tell."""

    line: int
    launcher: str
    script: str
    flags: tuple[ShellText, ...]
    nodes: int | None = None
    ranks_per_node: int | None = None
    unknown_counts: tuple[str, ...] = ()

    @property
    def world_size(self) -> int | None:
        return None if self.nodes is None or self.ranks_per_node is None else self.nodes * self.ranks_per_node


def scheduler_variables(text: str) -> dict[str, str]:
    """Returns the variables that SLURM sets for the `#SBATCH` lines of a script.

    >>> scheduler_variables("#SBATCH --nodes=4\\n#SBATCH --ntasks-per-node 8")["SLURM_NTASKS"]
    '32'
    """
    counts, _ = _counts(
        [ShellText(word, 0) for match in _SBATCH.finditer(text) for word in match[1].partition("#")[0].split()]
    )
    nodes, per_node = _first(counts, _NODES), _first(counts, _RANKS_PER_NODE)
    gpus = _first(counts, _GPUS_PER_NODE)
    tasks = _first(counts, _RANKS) or (nodes * per_node if nodes and per_node else None)
    variables = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_GPUS_PER_NODE": gpus,
        "SLURM_GPUS_ON_NODE": gpus,
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def find_launches(commands: Sequence[ShellCommand], scheduler: Mapping[str, str]) -> list[TrainingLaunch]:
    """Returns the commands that start a Python script, those of known training scripts first."""
    launches = [launch for command in commands for launch in _launch(command, scheduler)]
    return sorted(launches, key=lambda launch: _rank(launch.script))


def script_problem(script: str) -> str | None:
    """Returns why the models of a script cannot be trained; None if they can, or if the script is not known."""
    path = PurePosixPath(script)
    return _OTHER_PROGRAMS.get(path.name) or _OTHER_PROGRAMS.get("/".join(path.parts[-2:]))


def implied_flags(script: str) -> tuple[str, ...]:
    """Returns the flags that the name of a training script stands for."""
    return TRAINING_SCRIPTS.get(PurePosixPath(script).name, ())


def _rank(script: str) -> int:
    name = PurePosixPath(script).name
    known = name in TRAINING_SCRIPTS or name in INFERENCE_SCRIPTS
    return 0 if known else 1 if name.startswith("pretrain_") else 3 if name in _OTHER_PROGRAMS else 2


def _launch(command: ShellCommand, scheduler: Mapping[str, str]) -> Iterator[TrainingLaunch]:
    texts = [argument.text for argument in command.arguments]
    names = [PurePosixPath(text).name for text in texts]
    at = next((index for index in range(len(texts)) if _script_at(texts, index)), None)
    if at is None:
        return
    before = command.arguments[:at]
    launchers = [name for name in names[:at] if name in _LAUNCHERS]
    if "torch.distributed.run" in texts[:at] or "torch.distributed.launch" in texts[:at]:
        launchers = [*launchers, "torchrun"]
    if not launchers and at > 0:
        return  # `cp pretrain_gpt.py ...`
    counts, unknown = _counts(before)
    counts = (
        {"nodes": int(scheduler["SLURM_NNODES"]), **counts}
        if "srun" in launchers and "SLURM_NNODES" in scheduler
        else counts
    )
    nodes, per_node = _first(counts, _NODES), _first(counts, _RANKS_PER_NODE)
    if "torchrun" in launchers:
        nodes = nodes or (None if {"nnodes"} & unknown.keys() else 1)
        per_node = per_node or (None if {"nproc-per-node"} & unknown.keys() else 1)
    elif {"srun", "mpirun", "mpiexec"} & set(launchers):
        total = _first(counts, _RANKS)
        if per_node is None and total is None and "SLURM_NTASKS_PER_NODE" in scheduler:
            per_node = int(scheduler["SLURM_NTASKS_PER_NODE"])
        nodes = nodes or (1 if total else None)
        per_node = per_node or (total // nodes if total and nodes and total % nodes == 0 else None)
    else:
        nodes, per_node = 1, 1
    missing = tuple(dict.fromkeys(name for names in unknown.values() for name in names))
    launcher = next(
        (name for name in reversed(launchers) if name in ("torchrun", "srun", "mpirun", "mpiexec", "deepspeed")),
        "python",
    )
    script = _script_at(texts, at)
    yield TrainingLaunch(command.line, launcher, script, command.arguments[at + 1 :], nodes, per_node, missing)


def _script_at(texts: Sequence[str], index: int) -> str:
    """Returns the Python script at a word, which may be a module after `-m`; empty if there is none."""
    text = texts[index]
    if text.endswith(".py"):
        return text
    is_module = index > 0 and texts[index - 1] == "-m" and not text.startswith("torch.distributed.")
    return text.replace(".", "/") + ".py" if is_module else ""


def _counts(arguments: Sequence[ShellText]) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Returns the counts in a launcher's flags, and the variables without a value that other counts need."""
    counts: dict[str, int] = {}
    unknown: dict[str, tuple[str, ...]] = {}
    names = {*_NODES, *_RANKS_PER_NODE, *_RANKS, *_GPUS_PER_NODE}
    for at, argument in enumerate(arguments):
        flag, equals, value = argument.text.partition("=")
        name = _SHORT_FLAGS.get(flag, flag.lstrip("-").replace("_", "-") if flag.startswith("--") else "")
        if name not in names:
            continue
        holder = argument if equals else arguments[at + 1] if at + 1 < len(arguments) else argument
        text = value if equals else holder.text
        if holder.missing:
            unknown[name] = holder.missing
        elif (number := re.search(r"(\d+)$", text.split(":")[0] if name in _NODES else text)) is not None:
            counts[name] = int(number[1])
    return counts, unknown


def _first(counts: Mapping[str, int], names: Sequence[str]) -> int | None:
    return next((counts[name] for name in names if counts.get(name)), None)
