"""Progress of a bench on stderr: often enough to see that it continues, seldom enough to cost nothing."""

from __future__ import annotations

import time

from petatron.base.log import get_logger

LOG_INTERVAL_S = 10.0
_log = get_logger(__name__)


class ProgressLog:
    """Logs a line only if there was none for a while."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, text: str) -> None:
        now = time.perf_counter()
        if now - self._last >= LOG_INTERVAL_S:
            self._last = now
            _log.info("%s", text)
