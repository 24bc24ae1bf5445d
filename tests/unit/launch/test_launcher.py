"""One failing rank ends the run within seconds, with one report. The children are tiny and know nothing of torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from petatron.base.errors import LaunchError
from petatron.mesh.launch.local_launcher import run_ranks
from tests.load_deadline import scaled, wait_until, within
from tests.longform import diagonal

ROOT = Path(__file__).resolve().parents[3]


def child(body: str) -> list[str]:
    """A rank whose main is `body`, run under the guard as every rank is."""
    head = (
        "import os, signal, sys, time\n"
        "from petatron.base.errors import DataError\n"
        "from petatron.mesh.launch.rank_exit import run_rank_main\n"
        "rank = int(os.environ['RANK'])\n"
        "def main():\n"
    )
    code = head + textwrap.indent(textwrap.dedent(body), "    ") + "\n    return 0\nsys.exit(run_rank_main(main))\n"
    return [sys.executable, "-c", code]


@pytest.fixture(autouse=True)
def _hang_ups_are_ignored() -> Iterator[None]:
    """As under nohup, which every process inherits: a test whose subject is a signal restores it where it starts one."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def start_launcher(
    tmp_path: Path, command: list[str], *, ignored: tuple[str, ...] = (), **options: object
) -> subprocess.Popen[str]:
    """The launcher as a process of its own, to send it signals; it heeds all but those it is told to ignore."""
    arguments = "".join(f", {name}={value!r}" for name, value in options.items())
    heeded = [name for name in ("SIGHUP", "SIGTERM", "SIGINT") if name not in ignored]
    code = (
        "import signal, sys\n"
        f"for name in {heeded}: signal.signal(signal.Signals[name], signal.SIG_DFL)\n"
        f"for name in {list(ignored)}: signal.signal(signal.Signals[name], signal.SIG_IGN)\n"
        "from petatron.mesh.launch.local_launcher import run_ranks\n"
        f"sys.exit(run_ranks({command!r}{arguments}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(paths: list[Path], timeout_s: float = 20.0) -> None:
    wait_until(lambda: all(path.exists() for path in paths), f"all of {', '.join(map(str, paths))}", seconds=timeout_s)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_all_ranks_run_with_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETATRON_SECRET", "0123456789abcdef")
    body = f"""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PETATRON_SECRET")
    open(f"{tmp_path}/{{rank}}", "w").write(" ".join(os.environ[name] for name in names))
    """
    code = run_ranks(child(body), nproc=2, nnodes=2, node_rank=1, master_addr="10.1.1.1", master_port=29500)
    assert code == 0
    assert (tmp_path / "2").read_text() == "2 0 4 2 0123456789abcdef"
    assert (tmp_path / "3").read_text() == "3 1 4 2 0123456789abcdef"


def test_other_machines_are_told_of_a_rank_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []
    monkeypatch.setenv("PETATRON_SECRET", "0123456789abcdef")
    monkeypatch.setattr(
        "petatron.mesh.launch.rendezvous.notify_peers", lambda place, text: told.append((place.rank, text))
    )
    body = "os.kill(os.getpid(), signal.SIGKILL) if rank == 3 else time.sleep(30)"
    code = run_ranks(
        child(body), nproc=2, nnodes=2, node_rank=1, master_addr="10.1.1.1", master_port=29500, grace_s=0.1
    )
    assert code == 128 + signal.SIGKILL and told == [(3, "It was ended by SIGKILL.")]


def test_a_failing_rank_stops_the_others_and_is_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    body = """
    if rank == 1:
        raise ValueError("the number was " + "odd")
    time.sleep(60)
    """
    with within(15, "ending the other ranks"):
        code = run_ranks(child(body), nproc=4, grace_s=0.3)
    err = capfd.readouterr().err
    assert code == 1
    assert err.count("Traceback (most recent call last)") == 1
    assert err.count("ValueError: the number was odd") == 1
    assert "Rank 1 of 4 failed first" in err
    assert "3 stopped" in err


def test_an_error_for_people_comes_without_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """Every rank found the same fault in the input: it is said once, and no rank is blamed."""
    code = run_ranks(child("raise DataError('corpus.idx is cut short; build it again')"), nproc=2, grace_s=5)
    assert code == 1
    assert capfd.readouterr().err == "corpus.idx is cut short; build it again\n"


def test_broken_connections_are_not_the_cause(capfd: pytest.CaptureFixture[str]) -> None:
    # Rank 0 notices its peer's death before rank 1 gets round to its report, and ends first.
    body = """
    if rank == 0:
        raise RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    time.sleep(0.5)
    raise KeyError("the real cause")
    """
    run_ranks(child(body), nproc=2, grace_s=5)
    err = capfd.readouterr().err
    assert "Rank 1 of 2 failed first" in err
    assert "the real cause" in err
    assert "gloo" not in err


def test_a_killed_rank_beats_the_echoes_and_gives_128_plus_signal(capfd: pytest.CaptureFixture[str]) -> None:
    body = """
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    raise RuntimeError("/gloo/ Connection closed by peer")
    """
    code = run_ranks(child(body), nproc=2, grace_s=5)
    err = capfd.readouterr().err
    assert code == 128 + signal.SIGKILL
    assert "Rank 1 of 2 failed first: it was ended by SIGKILL. The kernel does that when memory runs out." in err


def test_a_plain_exit_code_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks([sys.executable, "-S", "-c", "raise SystemExit(7)"], nproc=1) == 7
    assert "with exit code 7 and no report" in capfd.readouterr().err


def test_a_rank_deaf_to_sigterm_is_killed(tmp_path: Path) -> None:
    body = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{tmp_path}/{{rank}}", "w").write(str(os.getpid()))
    while not os.path.exists("{tmp_path}/0"):
        time.sleep(0.01)
    if rank == 1:
        raise ValueError
    time.sleep(60)
    """
    assert run_ranks(child(body), nproc=2, grace_s=0.1) == 1
    assert not alive(int((tmp_path / "0").read_text()))


SAVE_ON_SIGNAL = """
seen = []
signal.signal(signal.{name}, lambda *_: seen.append(1))
open(f"{folder}/up{{rank}}", "w").close()
while not seen:
    time.sleep(0.02)
time.sleep(0.5)
open(f"{folder}/saved{{rank}}", "w").write(str(len(seen)))
"""


@diagonal(3)
@pytest.mark.parametrize(("sent", "got"), [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGHUP", "SIGTERM")])
def test_a_signal_is_passed_on_once_and_ranks_end_cleanly(tmp_path: Path, sent: str, got: str) -> None:
    # The grace is shorter than the save: it must not apply to ranks that end because they were asked to.
    body = SAVE_ON_SIGNAL.format(name=got, folder=tmp_path)
    launcher = start_launcher(tmp_path, child(body), nproc=2, grace_s=0.0)
    wait_for([tmp_path / "up0", tmp_path / "up1"])
    launcher.send_signal(signal.Signals[sent])
    output, _ = launcher.communicate(timeout=scaled(20))
    assert launcher.returncode == 0, output
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == ["1", "1"]


def test_a_signal_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    body = SAVE_ON_SIGNAL.format(name="SIGTERM", folder=tmp_path)
    launcher = start_launcher(tmp_path, child(body), nproc=1, ignored=("SIGHUP",))
    wait_for([tmp_path / "up0"])
    launcher.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(0.5)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=scaled(20))
    assert launcher.returncode == 0, output


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    body = f"""
    signal.signal(signal.SIGINT, lambda *_: open(f"{tmp_path}/got{{rank}}", "w").close())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{tmp_path}/up{{rank}}", "w").close()
    while True:
        time.sleep(0.05)
    """
    launcher = start_launcher(tmp_path, child(body), nproc=2)
    wait_for([tmp_path / "up0", tmp_path / "up1"])
    launcher.send_signal(signal.SIGINT)
    wait_for([tmp_path / "got0", tmp_path / "got1"])
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=scaled(20))
    assert launcher.returncode == 130, "as of one rank, and as shells say it, however the ranks were ended"
    assert "Stopped by SIGINT" in output
    assert "failed first" not in output


def test_an_interactive_rank_reads_the_input_and_has_every_interrupt_to_itself(tmp_path: Path) -> None:
    body = f"""
    noted = []
    signal.signal(signal.SIGINT, lambda *_: (noted.append(1), open(f"{tmp_path}/got{{rank}}-{{len(noted)}}", "w").close()))
    open(f"{tmp_path}/up{{rank}}", "w").close()
    text = sys.stdin.readline()
    if rank == 0:
        assert text == "typed\\n" and len(noted) == 3, (text, noted)
        open("{tmp_path}/over", "w").close()
    while not os.path.exists("{tmp_path}/over"):
        time.sleep(0.02)
    assert rank == 0 or (text == "" and not noted)
    """
    launcher = start_launcher(tmp_path, child(body), nproc=2, interactive=True)
    wait_for([tmp_path / "up0", tmp_path / "up1"])
    for number in (1, 2, 3):
        launcher.send_signal(signal.SIGINT)
        wait_for([tmp_path / f"got0-{number}"])
    output, _ = launcher.communicate("typed\n", timeout=scaled(20))
    assert launcher.returncode == 0, output


@diagonal(3)
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_before_any_handler_is_not_a_failure_report(tmp_path: Path, name: str, code: int) -> None:
    body = f'open(f"{tmp_path}/up{{rank}}", "w").close()\ntime.sleep(60)'
    launcher = start_launcher(tmp_path, child(body), nproc=2)
    wait_for([tmp_path / "up0", tmp_path / "up1"])
    launcher.send_signal(signal.Signals[name])
    output, _ = launcher.communicate(timeout=scaled(20))
    assert launcher.returncode == code
    assert output.strip() == f"Stopped by {name} before the run could end by itself."


def test_a_second_sigterm_ends_ranks_that_heed_none(tmp_path: Path) -> None:
    """Two within a moment are one: a scheduler signals the launcher and its ranks."""
    body = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{tmp_path}/up{{rank}}", "w").close()
    time.sleep(60)
    """
    launcher = start_launcher(tmp_path, child(body), nproc=2)
    wait_for([tmp_path / "up0", tmp_path / "up1"])
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    launcher.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(2.5)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=scaled(20))
    assert launcher.returncode == 128 + signal.SIGTERM
    assert output.strip() == "Stopped by SIGTERM before the run could end by itself."


def test_a_rank_that_the_kernel_kills_while_it_saves_is_a_failure(tmp_path: Path) -> None:
    """One signal does not kill: a rank that died of SIGKILL has not saved because something went wrong."""
    body = f"""
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    open(f"{tmp_path}/up{{rank}}", "w").close()
    while True:
        time.sleep(0.05)
    """
    launcher = start_launcher(tmp_path, child(body), nproc=2)
    wait_for([tmp_path / "up0", tmp_path / "up1"])
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=scaled(20))
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "failed first: it was ended by SIGKILL. The kernel does that when memory runs out." in output


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is a Linux feature")
def test_ranks_die_with_a_killed_launcher(tmp_path: Path) -> None:
    body = f"""
    open(f"{tmp_path}/tmp{{rank}}", "w").write(str(os.getpid()))
    os.rename(f"{tmp_path}/tmp{{rank}}", f"{tmp_path}/up{{rank}}")
    time.sleep(60)
    """
    launcher = start_launcher(tmp_path, child(body), nproc=2)
    wait_for([tmp_path / "up0", tmp_path / "up1"])
    pids = [int((tmp_path / f"up{rank}").read_text()) for rank in range(2)]
    assert all(alive(pid) for pid in pids)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(alive(pid) for pid in pids), "the death of all ranks", seconds=5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nproc": 0}, "--nproc-per-node 0 starts no rank"),
        ({"nproc": 1, "nnodes": 2, "node_rank": 2, "master_port": 1}, "--node-rank 2 is not below --nnodes 2"),
        ({"nproc": 1, "nnodes": 2}, "needs --master-port"),
        ({"nproc": 1, "nnodes": 2, "master_port": 29500}, "needs --master-addr"),
    ],
)
def test_impossible_launches(options: dict[str, int], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        run_ranks(["true"], **options)  # type: ignore[arg-type]


def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(LaunchError, match="Cannot start rank 0 with '/no/such/program'"):
        run_ranks(["/no/such/program"], nproc=2)


def test_the_launcher_does_not_load_torch() -> None:
    code = "import sys, petatron.mesh.launch.local_launcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


HUNG = """
from petatron.mesh.diagnose.failure_report import CommunicationError, report_request_path
from petatron.mesh.launch.environment import error_file
from petatron.mesh.launch.rank_exit import write_error_file

def report(state, started, at=None):
    ranks = [0, 1, 2]
    where = dict(op="all_reduce", axis="dp", ranks=ranks, caller="gradients.py:88 send", number=started, for_s=2.0)
    return dict(rank=rank, state=state, at=at, before=[], counts=dict(dp=[ranks, started]), **where)
"""


def test_a_hang_names_the_rank_that_did_not_arrive(capfd: pytest.CaptureFixture[str]) -> None:
    """It wrote its place because the launcher asked when the first of the others gave up."""
    body = (
        HUNG
        + """
if rank == 1:
    while not report_request_path(error_file()).exists():
        time.sleep(0.02)
    write_error_file(error_file(), message="", text="", echo=True, report=report("idle", 6, at="step.py:9 load"))
    time.sleep(60)
time.sleep(0.2 * rank)
raise CommunicationError(report("failed", 7), "timed out") from RuntimeError("/gloo/ timed out")
"""
    )
    assert run_ranks(child(body), nproc=3, grace_s=2) == 1
    err = capfd.readouterr().err
    assert "Rank 0 of 3 gave up first:\n\nRank 0 waited 2.0 s in all_reduce over dp (ranks 0-2)" in err
    assert (
        "Rank 1 did not arrive at all_reduce over dp (ranks 0-2): 6 collectives started there, 7 by ranks 0, 2." in err
    )
    assert "Rank 2 was waiting in all_reduce over dp (ranks 0-2) at gradients.py:88 send, operation 7" in err
    assert "Rank 1 was in no communication since all_reduce" in err and "is at step.py:9 load" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "outcome"), [("SIGKILL", "failed"), ("SIGABRT", "gave up")])
def test_a_report_of_waiting_does_not_hide_how_a_rank_died(
    capfd: pytest.CaptureFixture[str], number: str, outcome: str
) -> None:
    """NCCL's watchdog aborts a rank that waits; whatever else kills one is the cause."""
    body = (
        HUNG
        + f"""
if rank == 1:
    write_error_file(error_file(), message="", text="waited", echo=True, report=report("waiting", 7))
    os.kill(os.getpid(), signal.{number})
time.sleep(1)
raise CommunicationError(report("failed", 7), "timed out") from RuntimeError("/gloo/ timed out")
"""
    )
    code = run_ranks(child(body), nproc=2, grace_s=3)
    err = capfd.readouterr().err
    assert f"Rank 1 of 2 {outcome} first: it was ended by {number}" in err
    assert ("\nwaited\n" in err) == (number == "SIGABRT")
    assert code == 128 + signal.Signals[number]
