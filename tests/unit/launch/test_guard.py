"""What a failing rank leaves behind, in the format that torchrun reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from petatron.base.errors import DataError, LaunchError
from petatron.mesh.launch.environment import ERROR_FILE
from petatron.mesh.launch.rank_exit import is_echo, run_rank_main

ROOT = Path(__file__).resolve().parents[3]


def run_child(body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # The atexit hook stands for a process group whose destruction would wait for peers that are gone.
    code = (
        "import atexit, sys\n"
        "from petatron.base.errors import ConfigError, DataError\n"
        "from petatron.mesh.launch.rank_exit import run_rank_main\n"
        "atexit.register(lambda: print('destructors ran'))\n"
        f"def main():\n    {body}\n    return 0\n"
        "sys.exit(run_rank_main(main))\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", ERROR_FILE)}
    env |= {"PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def details(path: Path) -> dict:
    return json.loads(path.read_text())["message"]["extraInfo"]


def test_alone_codes_pass_through() -> None:
    assert run_rank_main(lambda: 0, env={}) == 0
    assert run_rank_main(lambda: 3, env={"WORLD_SIZE": "1"}) == 3


def test_success_with_peers_ends_at_once() -> None:
    # A communication thread that needs the interpreter while it goes down would abort a run that is complete.
    done = run_child("print('all of it', end='')", WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "all of it", "")


def test_alone_the_exception_goes_on() -> None:
    def fail() -> int:
        raise DataError("no")

    def leave() -> int:
        raise SystemExit(4)

    with pytest.raises(DataError):
        run_rank_main(fail, env={})
    with pytest.raises(SystemExit):
        run_rank_main(leave, env={"WORLD_SIZE": "1"})


def test_a_problem_of_the_configuration_has_a_code_of_its_own(tmp_path: Path) -> None:
    for variables in ({ERROR_FILE: str(tmp_path / "error.json")}, {"WORLD_SIZE": "2"}):
        assert run_child("raise ConfigError([])", **variables).returncode == 2


def test_a_failure_is_written_for_torchrun_and_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    done = run_child("print('half a line', end=''); raise ValueError('bad value')", **{ERROR_FILE: str(path)})
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "half a line"  # flushed, and no destructor ran
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert failure.timestamp > 1_000_000_000
    assert failure.message["message"] == "ValueError: bad value"  # type: ignore[index]
    assert "Traceback" in details(path)["py_callstack"]
    assert details(path)["echo"] is False


def test_errors_for_people_are_written_without_stack(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    run_child("raise DataError('build the index again')", **{ERROR_FILE: str(path)})
    assert details(path)["py_callstack"] == "build the index again"


def test_with_peers_and_no_error_file_it_speaks_and_ends_at_once() -> None:
    done = run_child("raise ValueError('bad value')", WORLD_SIZE="2", RANK="1")
    assert done.returncode == 1
    assert "rank 1 failed: Traceback" in done.stderr
    assert done.stderr.count("ValueError: bad value") == 1
    assert "destructors ran" not in done.stdout


def test_an_unwritable_error_file_does_not_swallow_the_error(tmp_path: Path) -> None:
    done = run_child("raise ValueError('bad value')", WORLD_SIZE="2", **{ERROR_FILE: str(tmp_path / "no" / "x.json")})
    assert done.returncode == 1
    assert "ValueError: bad value" in done.stderr


@pytest.mark.parametrize(
    ("body", "code"), [("sys.exit(5)", 5), ("sys.exit('word')", 1), ("raise KeyboardInterrupt", 130)]
)
def test_leaving_early_with_peers_runs_no_destructors(body: str, code: int) -> None:
    done = run_child(body, WORLD_SIZE="2")
    assert done.returncode == code
    assert "destructors ran" not in done.stdout
    assert ("word" in done.stderr) == ("word" in body)


def test_echoes_are_dated_later(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    run_child("raise RuntimeError('x/gloo/pair.cc Connection closed by peer')", **{ERROR_FILE: str(path)})
    found = details(path)
    assert found["echo"] is True
    assert int(found["timestamp"]) >= int(found["time"]) + 2


def test_what_counts_as_an_echo() -> None:
    assert not is_echo(ValueError("Connection closed by peer"))
    assert not is_echo(RuntimeError("shape mismatch"))
    joined = LaunchError("could not join")
    assert not is_echo(joined)
    joined.__cause__ = RuntimeError("Connection reset by peer")
    assert is_echo(joined)
