"""Keeps a server at the newest sound step of the training run that it began with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from petatron.base.errors import PetatronError
from petatron.base.log import get_logger
from petatron.serve.engine_protocol import ServedEngine
from petatron.serve.http.server_state import ServerState
from petatron.serve.model_card import ModelCard
from petatron.serve.newest_step import newest_sound_step, step_properties

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
    """Returns what `build_app` runs beside the server. describe: the card of the engine, after a reload."""

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
