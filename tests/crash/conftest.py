"""One nursery for all crash tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.nursery import Nursery
from tests.quick_disk import flush_again, skip_flushes


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _flush_to_the_disk(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where a process is killed; power cuts and failing operations are those of a simulated disk."""
    if request.path.name not in ("test_power.py", "test_failures.py"):
        flush_again()
    yield
    skip_flushes()
