"""The scripts of `examples/`, and the command that each would start: launchers are replaced by one that writes down its arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAINING = {
    path: ROOT / "examples" / path
    for path in (
        "gpt3/train_gpt3_175b_distributed.sh",
        "llama/train_llama3_8b_fp8.sh",
        "llama/train_llama_70b.sh",
        "mixtral/train_mixtral_8x7b_distributed.sh",
        "mamba/train.sh",
        "mamba/train_hybrid.sh",
        "deepseek/train_deepseek_v3.sh",
        "deepseek/train_deepseek_v2_lite.sh",
        "bert/train_bert_340m_distributed.sh",
        "t5/train_t5_220m_distributed.sh",
    )
}
_RECORDER = '#!/bin/bash\nprintf "%s\\0" "$0" "$@" > "$RECORDED"\n'


def example_environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a user who installed the package and sets some variables of a script."""
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "OMP_NUM_THREADS") if name in os.environ}
    return {**kept, "PYTHON": sys.executable, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **variables}


def started_command(
    script: Path, folder: Path, stubs: Mapping[str, str] | None = None, /, **variables: str
) -> list[str]:
    """Runs a script with recorders in place of torchrun and srun; returns the command that it starts at last."""
    tools, record = folder / "tools", folder / "recorded"
    tools.mkdir(exist_ok=True)
    for name, text in {"torchrun": _RECORDER, "srun": _RECORDER, **(stubs or {})}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = example_environment(RECORDED=str(record), **variables)
    environment["PATH"] = f"{tools}:{environment['PATH']}"
    subprocess.run(["bash", str(script)], cwd=folder, env=environment, check=True, timeout=60)
    launcher, *arguments = record.read_text().split("\0")[:-1]
    return [Path(launcher).name, *arguments]


def training_flags(command: list[str]) -> list[str]:
    """Returns what comes after the entry point."""
    entry = next(index for index, argument in enumerate(command) if Path(argument).name.startswith("pretrain_"))
    return command[entry + 1 :]


def launched_ranks(command: list[str]) -> int:
    """Returns nodes x ranks of a torchrun command."""
    return int(command[command.index("--nnodes") + 1]) * int(command[command.index("--nproc_per_node") + 1])


def head_memory_gb(script: Path) -> str:
    """Returns the prediction at the head of a script."""
    match = re.search(r"^# Predicted memory: ([\d.]+) GB per GPU\.", script.read_text(), re.MULTILINE)
    assert match is not None, f"{script} says no predicted memory"
    return match[1]
