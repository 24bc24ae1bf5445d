"""Shared by all tests: the rank pool, single-threaded torch so that ranks and tests do not fight over two cores, Triton on a CPU."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.dist import RankPool, preload_for_every_fork
from tests.forked_python import ForkedPython, forked_context
from tests.longform import mark_diagonals
from tests.quick_disk import skip_flushes
from tests.triton_interpreter import remap_once

if not torch.cuda.is_available():
    # Triton kernels run in its CPU interpreter here, which has to be asked for before anything imports triton: also before the
    # conftest.py of a folder does.
    os.environ["TRITON_INTERPRET"] = "1"


FOLDERS_OF_MARKERS = {"gpu": "gpu", "nccl": "nccl", "megatron_core": "megatron"}
"""Folders of `tests` whose tests all have a marker."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A folder that `-m 'not gpu and ...'` leaves out need not be imported."""
    marker = FOLDERS_OF_MARKERS.get(collection_path.name) if collection_path.parent == Path(__file__).parent else None
    left_out = marker is not None and f"not {marker}" in config.getoption("-m").split(" and ")
    return True if left_out else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_diagonals(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules that collection imports stay to the end: no garbage collection of a test need look through them, as it would for
    half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _no_search_through_what_stays() -> Iterator[None]:
    """Imports and caches of a module's tests stay to the end too."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a command starts here fork with torch loaded, which takes them seconds less; all else of the launcher is its own."""
    processes = SimpleNamespace(Popen=ForkedPython, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr("petatron.mesh.launch.local_launcher.subprocess", processes)


@pytest.fixture(scope="module")
def forked_engines() -> Iterator[None]:
    """An engine that a server starts as a process of its own forks with torch loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("petatron.serve.engine_process.get_context", forked_context)
        yield


@pytest.fixture(autouse=True, scope="session")
def _forks_import_nothing() -> None:
    preload_for_every_fork()


@pytest.fixture(autouse=True, scope="session")
def _interrupts_are_heard() -> None:
    """A shell has its background jobs ignore interrupts, and so would every process that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> None:
    """Where some test module has imported Triton."""
    if "TRITON_INTERPRET" in os.environ and "triton" in sys.modules:
        remap_once(importlib.import_module("triton.runtime.interpreter"))


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> None:
    skip_flushes()


@pytest.fixture(autouse=True, scope="session")
def _torch_logs_to_the_root() -> None:
    """Pytest adds its handlers to every logger that does not propagate, six times a test: torch has forty of them."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time() -> None:
    """Without a GPU `torch.manual_seed` has other devices wait for seeds, each with the stack of its caller: a millisecond a test."""
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)


@pytest.fixture(autouse=True)
def _no_left_over_log_handlers() -> Iterator[None]:
    """A subcommand run inside a test sends the log to that test's captured stderr, which is closed when the test ends."""
    yield
    logging.getLogger("petatron").handlers.clear()
