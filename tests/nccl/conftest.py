"""Tests over NCCL: a pool of eight ranks on the GPUs that are there, slices of the suite, and a report of what passed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.dist import RankPool
from tests.load_deadline import scaled

RANKS = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="run only the K-th of N parts of the NCCL tests")
    parser.addoption(
        "--nccl-json", metavar="FILE", type=Path, help="write which NCCL tests passed, and how long each took"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    own = [item for item in items if item.path.is_relative_to(here)]
    for item in own:
        item.add_marker(pytest.mark.nccl)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    chosen = config.getoption("--slice")
    if chosen:
        part, _, parts = chosen.partition("/")
        kept = set(own[int(part) - 1 :: int(parts)])
        config.hook.pytest_deselected(items=[item for item in own if item not in kept])
        items[:] = [item for item in items if item not in own or item in kept]


@pytest.fixture(autouse=True, scope="session")
def multi_process_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """NVIDIA's MPS, where it is installed, lets kernels of several processes run side by side: half the time."""
    daemon = shutil.which("nvidia-cuda-mps-control")
    if daemon is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ or torch.cuda.device_count() >= RANKS:
        yield
        return
    folder = str(tmp_path_factory.mktemp("mps"))
    os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    subprocess.run([daemon, "-d"], check=False)
    yield
    subprocess.run([daemon], input="quit\n", text=True, check=False, timeout=scaled(30))


@pytest.fixture(scope="session")
def gpu_ranks(multi_process_service: None) -> Iterator[RankPool]:
    pool = RankPool(nccl=RANKS)
    yield pool
    pool.close()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:
        _REPORTED.append({"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)})


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--nccl-json")
    if path is None:
        return
    facts = {
        "at": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "ranks": RANKS,
        "slice": session.config.getoption("--slice"),
        "results": _REPORTED,
    }
    path.write_text(json.dumps(facts, indent=1))


_REPORTED: list[dict[str, object]] = []
