"""`petatron bench checkpoint`: each load has its own process, files are cold when it says so, and busy processes end with the bench."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from petatron.base.errors import CheckpointError, ConfigError, LaunchError
from petatron.bench import checkpoint as bench_checkpoint
from petatron.bench.checkpoint import _describe_cold, model_shapes
from petatron.bench.loading.keep_cpus_busy import BusyProcesses
from petatron.bench.loading.time_checkpoint_load import (
    COMPARED_LOADERS,
    LOADERS,
    LoadFiles,
    LoadMeasurement,
    cached_share,
    drop_from_page_cache,
    measure_load,
    read_into_page_cache,
)
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.cli.main import main
from petatron.mesh.mesh import ParallelMesh
from tests.load_deadline import wait_until

SAVES = {"save", "torch.save", "torch.save + fsync", "stall", "background"}
LOADS = {f"{loader} {state}" for loader in LOADERS for state in ("cold", "warm")}
PEERS = ("torch.load", "torch.load + copy", "torch.load + digest")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_bench_measures_both_sides_on_a_busy_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Two rounds have both orders, the second of those that are compared; every load of a round is a process of its own."""
    monkeypatch.setattr(bench_checkpoint, "_MIN_ROUNDS", 1)
    output = tmp_path / "numbers.json"
    words = ["--gigabytes", "0.01", "--folder", str(tmp_path), "--json", str(output), "--busy-processes", "2"]
    assert main(["bench", "checkpoint", *words, "--repeat", "2"]) == 0
    found = json.loads(output.read_text())
    assert found["seconds"].keys() == SAVES | LOADS
    compared = SAVES | {f"{loader} {state}" for loader in COMPARED_LOADERS for state in ("cold", "warm")}
    for name, times in found["seconds"].items():
        assert len(times) == (2 if name in compared else 1) and min(times) > 0, name
    assert found["cpu_seconds"].keys() == found["kernel_seconds"].keys() == LOADS
    assert found["stall_ratio"] > 0 and found["speed_ratio"]["load cold, against torch.load"] > 0
    assert 0 <= found["faster_rounds"]["load cold, against torch.load"] <= 2
    assert found["busy_processes"] == 2
    assert list(tmp_path.iterdir()) == [output], "nothing is left behind"
    printed = capsys.readouterr().out
    assert "speed: save" in printed and "busy processes" in printed and "2 in the session of the bench" in printed


def test_bench_measures_saving_alone(tmp_path: Path):
    output = tmp_path / "numbers.json"
    words = [
        "--gigabytes",
        "0.001",
        "--folder",
        str(tmp_path),
        "--json",
        str(output),
        "--only",
        "save",
        "--repeat",
        "5",
    ]
    assert main(["bench", "checkpoint", *words]) == 0
    seconds = json.loads(output.read_text())["seconds"]
    assert seconds.keys() == SAVES
    assert {len(times) for times in seconds.values()} == {6}, "an even number, so that both orders are as frequent"


def test_bench_measures_loading_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured = []

    def pretend(files: LoadFiles, loader: str, *, cold: bool, meanwhile: object) -> LoadMeasurement:
        assert files.theirs.is_file() and (files.checkpoints / f"step-{files.step:08d}").is_dir()
        measured.append((loader, cold))
        ours = loader == "load"
        return LoadMeasurement(1.0 if ours else 2.0, user_s=0.25, kernel_s=0.5, cached_share=0.0, extra_bytes=None)

    monkeypatch.setattr(bench_checkpoint, "measure_load", pretend)
    output = tmp_path / "numbers.json"
    words = [
        "--gigabytes",
        "0.001",
        "--folder",
        str(tmp_path),
        "--json",
        str(output),
        "--only",
        "load",
        "--repeat",
        "5",
    ]
    assert main(["bench", "checkpoint", *words]) == 0
    found = json.loads(output.read_text())
    assert found["seconds"].keys() == LOADS and found["extra_bytes"] == {}
    assert found["speed_ratio"] == {f"load {state}, against {name}": 2 for state in ("cold", "warm") for name in PEERS}
    assert found["faster_rounds"]["load warm, against torch.load"] == 6
    assert found["faster_rounds"]["load warm, against torch.load + digest"] == 4, "for information"
    assert set(found["cpu_seconds"]["load cold"]) == {0.75} and found["page_cache_dropped"]
    cold = [loader for loader, is_cold in measured if is_cold]
    assert cold[:8] == [*LOADERS, *LOADERS[::-1]] and cold[16:] == ["torch.load", "load", "load", "torch.load"]


def test_bench_refuses_what_cannot_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "checkpoint", "--gigabytes", "0", "--busy-processes", "-1"]) == 2
    assert "--busy-processes -1 is below 0" in capsys.readouterr().err
    assert main(["bench", "checkpoint", "--busy-processes", "1000000"]) == 2
    assert (
        "--busy-processes 1000000 would take all processes of the machine. Use at most 1024." in capsys.readouterr().err
    )
    assert main(["bench", "checkpoint", "--busy-own-sessions"]) == 2
    assert "--busy-own-sessions has no effect without --busy-processes" in capsys.readouterr().err
    assert main(["bench", "checkpoint", "--gigabytes", "1e6", "--folder", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"--gigabytes 1e+06 needs 4000000.0 GB in {tmp_path}, which has" in told and "another --folder." in told
    assert list(tmp_path.iterdir()) == []


def test_all_that_cannot_work_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    none = tmp_path / "none"
    words = f"--gigabytes -1 --repeat 0 --busy-processes 0 --busy-own-sessions --folder {none} --json {none}/found.json"
    assert main(["bench", "checkpoint", *words.split()]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "5 problems in this configuration:",
        f"  --json {none}/found.json is in a folder that does not exist. Make the folder first.",
        "  --gigabytes -1.0 must be positive and finite. Use more than 0, or leave it out.",
        "  --repeat 0 is below 1. Use 1 or more.",
        "  --busy-own-sessions has no effect without --busy-processes. Give --busy-processes a number of processes.",
        f"  --folder {none} cannot be written: No such file or directory. Give a folder that is there and writable.",
    ]


@pytest.mark.parametrize("weights", [10_000, 70_000_000, 2_000_000_000])
def test_the_model_of_the_bench_has_the_size_asked_for(weights: int):
    total = sum(rows * columns for rows, columns in model_shapes(weights).values())
    assert total < 2_500_000 if weights == 10_000 else 0.7 * weights < total <= weights


def _files(folder: Path) -> LoadFiles:
    tensor = torch.arange(3000.0)
    theirs = folder / "theirs.pt"
    torch.save({"model/weight": tensor}, theirs)
    manager = CheckpointManager(folder / "ours", ParallelMesh.single().world)
    manager.save(1, [Chunk("model/weight", (3000,), (0,), tensor)], metadata={}, same_layout_key="one")
    return LoadFiles(folder / "ours", 1, theirs, [("model/weight", (3000,), tensor.dtype)])


def test_only_the_load_itself_is_on_a_busy_machine(tmp_path: Path):
    entered = []

    @contextmanager
    def meanwhile():
        entered.append(time.perf_counter())
        yield
        entered.append(time.perf_counter())

    found = measure_load(_files(tmp_path), "load", cold=False, meanwhile=meanwhile)
    assert 0 < found.seconds < entered[1] - entered[0]
    assert found.cached_share is None or found.cached_share > 0.9


def test_a_load_that_fails_is_an_error(tmp_path: Path):
    files = _files(tmp_path)
    state = next((tmp_path / "ours").rglob("*.safetensors"))
    state.write_bytes(state.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match=r"load failed: .*its digest differs"):
        measure_load(files, "load", cold=True)
    files.theirs.write_bytes(b"nothing of torch's")
    with pytest.raises(CheckpointError, match=r"measures torch\.load ended with exit code 1\."):
        measure_load(files, "torch.load", cold=False)
    files.theirs.unlink()
    with pytest.raises(CheckpointError, match=r"measures torch\.load ended with exit code 1\."):
        measure_load(files, "torch.load", cold=False)


def test_files_are_dropped_from_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, empty = tmp_path / "file", tmp_path / "empty"
    path.write_bytes(bytes(1 << 20))
    empty.touch()
    with path.open("rb") as file:
        os.fsync(file.fileno())
    read_into_page_cache([path, empty])
    if cached_share([path]) is None or drop_from_page_cache([path, empty]) != 0:
        pytest.skip("this file system is in memory, or the system does not tell")
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        file.read(mmap.PAGESIZE)
    assert cached_share([path]) == mmap.PAGESIZE / (1 << 20)
    # A system that reclaims memory ahead of need may take a few pages at any moment.
    read_into_page_cache([path])
    assert (cached_share([path, empty]) or 0) > 0.9
    assert cached_share([empty]) == 0
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)
    assert (drop_from_page_cache([path]) or 0) > 0.9, "it looks, and does not trust"
    monkeypatch.delattr(os, "posix_fadvise")
    assert drop_from_page_cache([path]) is None


def test_a_file_that_cannot_be_mapped_has_no_known_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_bytes(b"1")

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert cached_share([tmp_path / "file"]) is None


def test_the_table_says_whether_files_were_cold():
    assert "cannot drop them, or does not tell" in _describe_cold(None)
    assert "at most 0.20% of them was there" in _describe_cold(0.002)
    assert _describe_cold(0.5).startswith("not cold: 50% of the files stayed")


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _state(pid: int) -> str:
    """The letter of a process's state; that of one that is gone is X."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _ended(pid: int) -> bool:
    return _state(pid) in "ZX"


@on_linux
@pytest.mark.parametrize("own_sessions", [False, True])
def test_busy_processes_compute_only_while_told_to(own_sessions: bool):
    with BusyProcesses(1, own_sessions=own_sessions) as busy:
        (process,) = busy._processes
        assert (os.getsid(process.pid) == process.pid) is own_sessions
        with busy.running():
            before = _cpu_ticks(process.pid)
            wait_until(lambda: _cpu_ticks(process.pid) > before, "CPU time", seconds=20)
        # It may take a moment until it sees the pause; then it waits for its input and takes no time.
        wait_until(lambda: _state(process.pid) == "S", "the pause", seconds=20)
        paused = _cpu_ticks(process.pid)
        time.sleep(0.1)
        assert _cpu_ticks(process.pid) == paused
        with busy.running():
            wait_until(lambda: _cpu_ticks(process.pid) > paused, "CPU time after the pause", seconds=20)
    assert process.returncode == -signal.SIGKILL


@on_linux
@pytest.mark.parametrize("state", ["running", "paused"])
@pytest.mark.parametrize("own_sessions", [False, True])
def test_busy_processes_end_with_their_parent(state: str, own_sessions: bool):
    program = f"""
import time
from petatron.bench.loading.keep_cpus_busy import BusyProcesses
busy = BusyProcesses(2, own_sessions={own_sessions})
running = busy.running()
if {state == "running"}:
    running.__enter__()
print(*(process.pid for process in busy._processes), flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and not any(map(_ended, pids))
    parent.kill()  # so that nothing of it can run
    parent.communicate()
    wait_until(lambda: all(map(_ended, pids)), "the end of the busy processes", seconds=20)


def test_a_busy_process_that_ends_is_noticed():
    with BusyProcesses(2, own_sessions=False) as busy:
        with busy.running():
            pass
        busy._processes[1].kill()
        busy._processes[1].wait()
        with (
            pytest.raises(LaunchError, match="One of --busy-processes ended during the measurement, with exit code -9"),
            busy.running(),
        ):
            pass


def test_too_many_busy_processes_are_refused_and_the_others_stopped(monkeypatch: pytest.MonkeyPatch):
    started = []
    start = BusyProcesses._start

    def limited(busy: BusyProcesses) -> subprocess.Popen[bytes]:
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(start(busy))
        return started[-1]

    monkeypatch.setattr(BusyProcesses, "_start", limited)
    with pytest.raises(
        ConfigError,
        match=r"--busy-processes 3 is more than can be started here: Resource .* unavailable after 2. Use fewer.",
    ):
        BusyProcesses(3, own_sessions=False)
    assert [process.returncode for process in started] == [-9, -9]
