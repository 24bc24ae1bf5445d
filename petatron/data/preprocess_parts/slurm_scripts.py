"""Scripts for Slurm: an array of jobs that tokenize the parts, and a job that joins them. Both run the command that has written them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.safe_files import write_atomic

MAX_TASKS = 1000
"""Slurm's default limit of an array is 1001; a task tokenizes several parts where there are more."""


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
    folder: Path, command: Sequence[str], *, num_parts: int, workers: int, working_folder: Path
) -> SlurmScripts:
    """Writes both scripts into the folder of the parts.

    command: the words that `--part` or `--join` follow. workers: processes, and cores, of each task.
    """
    folder = folder.absolute()
    if "\n" in f"{folder}{working_folder}":
        raise DataError(f"{folder} has a line break in its name, which a script for Slurm cannot have. Rename it.")
    tasks = min(num_parts, MAX_TASKS)
    pattern = str(folder).replace("%", "%%")
    run = f"cd {shlex.quote(str(working_folder))} || exit 1\nexec {shlex.join(command)}"
    # A task whose machine fails is put into the queue again; it skips the parts that are finished. The join removes the folder.
    array = f"""\
#!/bin/bash
#SBATCH --job-name=petatron-parts
#SBATCH --array=0-{tasks - 1}
#SBATCH --cpus-per-task={workers}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={shlex.quote(f"{pattern}/slurm-%A_%a.out")}
{run} --part $(seq "$SLURM_ARRAY_TASK_ID" {tasks} {num_parts - 1})
"""
    join = f"""\
#!/bin/bash
#SBATCH --job-name=petatron-join
#SBATCH --output={shlex.quote(f"{pattern}-%j.out")}
{run} --join
"""
    scripts = SlurmScripts(folder / "array.sbatch", folder / "join.sbatch")
    try:
        write_atomic(scripts.array, array)
        write_atomic(scripts.join, join)
    except OSError as error:
        raise DataError(
            f"Cannot write to {folder}: {error.strerror or error}. Choose another output prefix."
        ) from error
    return scripts
