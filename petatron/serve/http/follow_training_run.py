"""Follows a training run: the server reloads the newest valid step of the run that it began with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from petatron.base.errors import CheckpointError, PetatronError
from petatron.base.log import get_logger
from petatron.base.untrusted_files import reading_untrusted
from petatron.checkpoint.files.step_folder import MANIFEST_FILE, damaged_error, read_manifest_head
from petatron.checkpoint.files.step_list import list_steps
from petatron.checkpoint.inspect.run_metadata_check import other_run_problems
from petatron.checkpoint.inspect.summarize_checkpoint import run_metadata
from petatron.checkpoint.inspect.verify_checkpoint import verify_checkpoint
from petatron.serve.engine_thread import ServedEngine
from petatron.serve.http.server_state import ServerState
from petatron.serve.served_model_properties import ModelCard

DEFAULT_INTERVAL_S = 5.0
_log = get_logger(__name__)


class ReloadableEngine(ServedEngine, Protocol):
    """An engine that loads another step of its run."""

    @property
    def step_number(self) -> int | None: ...
    def reload(self, step: Path) -> ServedEngine: ...


def follow_run(
    folder: Path,
    engine: ReloadableEngine,
    describe: Callable[[], ModelCard],
    *,
    interval_s: float = DEFAULT_INTERVAL_S,
) -> Callable[[ServerState], AsyncIterator[None]]:
    """Returns the background task for `build_app`. describe: returns the engine's model card after a reload."""

    async def watch(state: ServerState) -> None:
        rejected: set[int] = set()
        properties = await asyncio.to_thread(step_properties, folder, engine.step_number)
        while state.thread.state in ("serving", "swapping"):
            await asyncio.sleep(interval_s)
            try:
                await _swap_to_newest(state, rejected, properties)
            except (PetatronError, OSError) as error:
                _log.warning("%s cannot be followed now: %s", folder, error)

    async def _swap_to_newest(state: ServerState, rejected: set[int], properties: Mapping[str, Any]) -> None:
        newest = await asyncio.to_thread(
            newest_sound_step, folder, after=engine.step_number or 0, rejected=rejected, served_properties=properties
        )
        if newest is None:
            return
        step, path = newest
        await state.thread.swap(lambda: engine.reload(path))
        if engine.step_number != step:
            rejected.add(step)
            return
        state.replace_model(describe())
        state.metrics.swaps.inc()
        _log.info("serving step %d of %s", step, folder)

    async def background(state: ServerState) -> AsyncIterator[None]:
        task = asyncio.create_task(watch(state))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return background


def newest_sound_step(
    folder: Path, *, after: int, rejected: set[int], served_properties: Mapping[str, Any] | None = None
) -> tuple[int, Path] | None:
    """Returns the newest valid step after one, or None.

    served_properties: of the served step; steps of another model or run are rejected. rejected: steps that were refused and reported
    already.
    """
    for step, path in sorted(list_steps(folder).items(), reverse=True):
        if step <= after or step in rejected:
            continue
        problem = _problem(path, served_properties or {})
        if problem is None:
            return step, path
        rejected.add(step)
        _log.warning("step %d of %s is not served: %s", step, folder, problem)
    return None


def step_properties(folder: Path, step: int | None) -> Mapping[str, Any]:
    """Returns what a step's manifest says of its run; empty if it cannot be read."""
    path = list_steps(folder).get(step) if step is not None else None
    try:
        return {} if path is None else run_metadata(read_manifest_head(path))
    except CheckpointError:
        return {}


def _problem(path: Path, served_properties: Mapping[str, Any]) -> str | None:
    report = verify_checkpoint(path)
    if not report.is_valid:
        return report.findings[0].text
    try:
        properties = run_metadata(read_manifest_head(path))
        with reading_untrusted(path / MANIFEST_FILE, damaged_error):
            other_run = next(other_run_problems(properties, served_properties), None)
    except CheckpointError as error:
        return str(error)
    return None if other_run is None else f"{path / MANIFEST_FILE} {other_run}"
