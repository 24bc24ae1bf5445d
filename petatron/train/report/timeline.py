"""Writes the measured timeline of one step: the actions of every rank of the first pipeline, as one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.mesh.object_collectives import gather_objects_to_first
from petatron.parallel.parallel_model import ParallelModel
from petatron.schedule.actions import COMPUTE_KINDS, TimedAction
from petatron.schedule.measured_timeline import timed_action_from_json, timed_action_to_json, write_measured

_log = get_logger(__name__)


def write_timeline(path: Path, model: ParallelModel, timed_actions: Sequence[TimedAction]) -> None:
    """Writes the timeline of the pipeline of rank 0; every rank calls it."""
    computed = [timed_action_to_json(t) for t in timed_actions if t.action.kind in COMPUTE_KINDS]
    found = gather_objects_to_first(computed, model.mesh.control)
    if found is not None:
        ranks = [[timed_action_from_json(record) for record in found[rank]] for rank in model.mesh.pp.ranks]
        start = min(t.start for rank in ranks for t in rank)
        from_zero = [[TimedAction(t.action, t.start - start, t.end - start) for t in rank] for rank in ranks]
        try:
            write_measured(path, model.plan.name, from_zero)
        except DataError as error:  # a picture is no reason to lose a run
            _log.warning("no timeline: %s", error)
        else:
            _log.info("wrote the measured timeline of one step to %s", path)
