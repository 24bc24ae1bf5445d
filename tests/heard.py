"""What a logger says, whatever tests before have done to those above it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard(name: str, *, level: int = logging.INFO) -> Iterator[list[str]]:
    """Messages of a level and above, one by one as they come."""
    logger, messages, handler = logging.getLogger(name), list[str](), logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
