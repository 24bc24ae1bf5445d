"""Checks the model folder (`model/`) of a step whose weights were loaded from the fp32 master weights.

A run with master weights reads these and casts the model's from them, so no load would notice damage in the 16-bit copy, which
generation, evaluation and transformers read. The copy is 2 bytes of a parameter beside 12 of the state, and the ranks share its files.
Training does not need it: damage there is a warning.
"""

from __future__ import annotations

from pathlib import Path

from petatron.base.log import get_logger
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.manifest import RankTable
from petatron.checkpoint.inspect.verify_checkpoint import file_problem
from petatron.checkpoint.run_on_all_ranks import AllRanks
from petatron.checkpoint.tensor_chunk import MASTER_PREFIX
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.mesh import Axis

_PREFIX = f"{step_folder.MODEL_FOLDER}/"
_log = get_logger(__name__)


def warn_of_damaged_model_folder(step: Path, control: Axis) -> None:
    """Warns, on rank 0, of every file of `model/` that is not what was saved. All ranks call it, after a load.

    A checkpoint without master weights was loaded from `model/`, which checks it.
    """
    ranks = AllRanks(control, default_failure=f"the tables of {step} could not be read")
    attempt = ranks.run_locally(lambda: _own_tables(step, control))
    tables = attempt.result or []
    stored = any(key.startswith(MASTER_PREFIX) for table in tables for key, _ in table.entries)
    [any_stored] = ranks.max_or_raise(attempt, [int(stored)])
    if not any_stored:
        return
    files = {
        step / name: stored for table in tables for name, stored in table.files.items() if name.startswith(_PREFIX)
    }
    checked = {path: file_problem(path, stored) for path, stored in files.items()}
    problems = [f"{path} {problem}" for path, problem in checked.items() if problem is not None]
    gathered = [problem for of_rank in all_gather_json(problems, control) for problem in of_rank]
    for problem in gathered if control.rank == 0 else ():
        _log.warning(
            "%s. Training goes on from the master weights in %s, which are sound; what it saves is whole. "
            "Restore this file from a copy before anything reads the model of this step",
            problem,
            step / step_folder.STATE_FOLDER,
        )


def _own_tables(step: Path, control: Axis) -> list[RankTable]:
    head = step_folder.read_manifest_head(step)
    if not head.tables:  # version 2 of the format
        table = RankTable(head.files, tuple(head.tensors.items()), head.local)
        return [table] if control.rank == 0 else []
    return [step_folder.read_table(step, table) for table in head.tables[control.rank :: control.size]]
