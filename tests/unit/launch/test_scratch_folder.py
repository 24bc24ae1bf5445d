"""Temporary folders of killed launchers are removed by the next run, and nobody else's are touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from petatron.mesh.launch import scratch_folder as module
from petatron.mesh.launch.scratch_folder import RANKS_PREFIX, remove_abandoned_folders, scratch_folder
from tests.load_deadline import wait_until

_LAUNCHER = """
import sys
from petatron.mesh.launch.local_launcher import run_ranks
code = "import os, time; open(os.environ['STARTED'], 'w').close(); time.sleep(float(os.environ['SLEEP']))"
sys.exit(run_ranks([sys.executable, "-c", code], nproc=1))
"""


def _launch(folder: Path, *, sleep_s: float) -> subprocess.Popen[bytes]:
    started = folder.parent / "started"
    started.unlink(missing_ok=True)
    words = {"TMPDIR": str(folder), "STARTED": str(started), "SLEEP": str(sleep_s)}
    process = subprocess.Popen([sys.executable, "-c", _LAUNCHER], env=os.environ | words)
    wait_until(started.exists, "the launcher", seconds=60)
    return process


def test_the_next_run_removes_what_a_killed_one_left(tmp_path: Path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    killed = _launch(folder, sleep_s=60)
    (left,) = folder.iterdir()
    (left / "store").touch()
    running = _launch(folder, sleep_s=0.0)
    assert running.wait() == 0
    assert list(folder.iterdir()) == [left], "a folder whose launcher lives stays"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert list(folder.iterdir()) == [left]
    assert _launch(folder, sleep_s=0.0).wait() == 0
    assert list(folder.iterdir()) == []


def test_only_own_private_folders_are_removed(tmp_path: Path, monkeypatch):
    target = tmp_path / "precious"
    target.mkdir(mode=0o700)
    (target / "file").touch()
    (tmp_path / f"{RANKS_PREFIX}link").symlink_to(target)
    (tmp_path / f"{RANKS_PREFIX}file").write_text("not a folder")
    public = tmp_path / f"{RANKS_PREFIX}public"
    public.mkdir()
    public.chmod(0o755)
    (public / "store").touch()
    fresh = tmp_path / f"{RANKS_PREFIX}fresh"
    fresh.mkdir(mode=0o700)
    dead = tmp_path / f"{RANKS_PREFIX}dead"
    dead.mkdir(mode=0o700)
    (dead / "rank-0.json").touch()
    (dead / "outside").symlink_to(target)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
        assert remove_abandoned_folders(tmp_path) == [], "another user's"
    assert remove_abandoned_folders(tmp_path) == [dead]
    assert (target / "file").exists() and public.exists() and fresh.exists()
    os.utime(fresh, (0, 0))
    assert remove_abandoned_folders(tmp_path) == [fresh]


def test_a_folder_is_held_until_the_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    with scratch_folder(RANKS_PREFIX) as folder:
        (folder / "store").touch()
        assert remove_abandoned_folders(tmp_path) == [] and folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []
