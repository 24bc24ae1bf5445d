"""Scripts for Slurm: an array of jobs that do the parts, and a job that joins them. Both run the command that has written them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.safe_files import write_atomic

MAX_TASKS = 1000
"""Slurm's own limit of an array is 1001 where nobody has raised it; a task does several parts where there are more."""


@dataclass(frozen=True, slots=True)
class SlurmScripts:
    array: Path
    join: Path

    @property
    def submit(self) -> str:
        """The command that submits both."""
        array, join = shlex.quote(str(self.array)), shlex.quote(str(self.join))
        return f"sbatch --dependency=afterok:$(sbatch --parsable {array}) {join}"


def write_slurm_scripts(
    folder: Path, command: Sequence[str], *, parts: Sequence[int], workers: int, working_folder: Path
) -> SlurmScripts:
    """Writes both scripts into the folder of the parts.

    command: the words that `--part` or `--join` follow. parts: those to do. workers: processes, and cores, of each task.
    """
    if "\n" in str(folder) + str(working_folder):
        raise DataError(f"{folder} has a line break in its name, which a script for Slurm cannot have. Rename it.")
    tasks = max(min(len(parts), MAX_TASKS), 1)
    words = shlex.join([*command, "--workers", str(workers)])
    numbers = " ".join(map(str, parts))
    scripts = SlurmScripts(folder.absolute() / "array.sbatch", folder.absolute() / "join.sbatch")
    array = f"""\
#SBATCH --job-name=petatron-parts
#SBATCH --array=0-{tasks - 1}
#SBATCH --cpus-per-task={workers}
#SBATCH --output={shlex.quote(str(folder.absolute() / "slurm-%A_%a.out"))}
cd {shlex.quote(str(working_folder))} || exit 1
parts=({numbers})
mine=()
for ((place = SLURM_ARRAY_TASK_ID; place < ${{#parts[@]}}; place += {tasks})); do mine+=("${{parts[place]}}"); done
[ ${{#mine[@]}} -eq 0 ] || exec {words} --part "${{mine[@]}}"
"""
    join = f"""\
#SBATCH --job-name=petatron-join
#SBATCH --output={shlex.quote(str(folder.absolute() / "slurm-join-%j.out"))}
cd {shlex.quote(str(working_folder))} || exit 1
exec {words} --join
"""
    try:
        for path, script in ((scripts.array, array), (scripts.join, join)):
            write_atomic(path, f"#!/bin/bash\n{script}")
    except OSError as error:
        raise DataError(
            f"Cannot write to {folder}: {error.strerror or error}. Choose another output prefix."
        ) from error
    return scripts
