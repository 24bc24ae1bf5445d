"""A program of its own that ends without leaving its process groups."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from petatron.mesh.launch import process_group
from petatron.mesh.launch.local_launcher import run_ranks

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import atexit, os, pathlib
import torch.distributed as dist
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.process_group import start_process_group
# What is registered first runs last.
atexit.register(lambda: pathlib.Path(os.environ["RANK"]).write_text(f"{joined} {dist.is_initialized()} {os.environ['NCCL_SOCKET_MAGIC']}"))
start_process_group(read_environment())
joined = dist.is_initialized()
"""


def test_groups_are_left_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("NCCL_SOCKET_MAGIC", raising=False)
    monkeypatch.chdir(tmp_path)
    assert run_ranks([sys.executable, "-c", PROGRAM], nproc=2) == 0
    said = [(tmp_path / rank).read_text().split() for rank in ("0", "1")]
    assert [words[:2] for words in said] == [["True", "False"]] * 2
    assert said[0][2] == said[1][2] and re.fullmatch("0x[0-9a-f]{16}", said[0][2]), "a secret number of this launch"


@pytest.mark.parametrize("failed", [False, True])
def test_after_an_exception_they_are_left_as_they_are(failed: bool, monkeypatch: pytest.MonkeyPatch):
    stopped: list[bool] = []
    monkeypatch.setattr(process_group, "stop_process_group", lambda: stopped.append(True))
    monkeypatch.delattr(sys, "last_value", raising=False)
    if failed:
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    process_group._stop_after_success()
    assert bool(stopped) is not failed
