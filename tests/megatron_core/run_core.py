"""Starts `core_on_cpu.py` on as many processes as its layout has ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WHEEL = Path(os.environ.get("MEGATRON_CORE") or ROOT / ".venv" / "megatron-core")
"""The folder into which `make megatron-core` unpacks the published wheel."""
TIMEOUT_S = 300


def run_core(*jobs: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Runs jobs of one layout (see `Job`) one after another in a folder, and returns what each printed."""
    job = json.dumps(jobs, default=str)
    ranks = jobs[0].get("tp", 1) * jobs[0].get("pp", 1) * jobs[0].get("ep", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "MEGATRON_CORE": str(WHEEL), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process would compile the wheel again
    with tempfile.TemporaryDirectory() as scratch:
        logs = [
            Path(scratch) / str(rank) for rank in range(ranks)
        ]  # not pipes, which Megatron's own workers would hold open
        processes = []
        for rank, log in enumerate(logs):
            words = [sys.executable, "-m", "tests.megatron_core.core_on_cpu", job]
            rank_environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as file:
                started = subprocess.Popen(
                    words, cwd=folder, env=rank_environment, stdout=file, stderr=file, start_new_session=True
                )
                processes.append(started)
        try:
            codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):  # the rank and the workers that it leaves behind
                    os.killpg(process.pid, signal.SIGKILL)
        texts = [log.read_text() for log in logs]
    failed = [text[-3000:] for code, text in zip(codes, texts) if code]
    assert not failed, "\n----\n".join(failed)
    return [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
