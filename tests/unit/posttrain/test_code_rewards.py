"""Code of a model runs without network, environment, files and processes of the machine, and within its limits."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from petatron.base.errors import ConfigError
from petatron.posttrain.rewards import code_sandbox
from petatron.posttrain.rewards.code_rewards import CodeRewards, check_sandbox
from petatron.posttrain.rewards.code_sandbox import CodeSandbox, SandboxLimits, SandboxUnavailable
from petatron.posttrain.rewards.reward_spec import parse_rewards
from petatron.posttrain.rewards.reward_sum import RewardSum
from petatron.posttrain.run_posttraining import RolloutSource
from petatron.train.check_and_open_run import check_start
from tests.unit.posttrain.rollouts import load, write_prompts


def can_isolate() -> bool:
    try:
        check_sandbox(SandboxLimits())
    except ConfigError:
        return False
    return True


CAN_ISOLATE = can_isolate()
needs_isolation = pytest.mark.skipif(not CAN_ISOLATE, reason="the system refuses namespaces")
HERE = SandboxLimits(seconds=2.0, isolated=CAN_ISOLATE)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[CodeSandbox]:
    sandbox = CodeSandbox(HERE)
    yield sandbox
    sandbox.close()


ESCAPES = {
    "import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)": "OSError",
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}', timeout=1)": "URLError",
    "import os; os.kill({pid}, 0)": "ProcessLookupError",
    "import os; os.kill(os.getppid(), 9)": "PermissionError",
    "open('/proc/{pid}/environ').read()": "FileNotFoundError",
    "import os; print(os.environ['SECRET'])": "KeyError",
    "open({secret!r}).read()": "FileNotFoundError",
    "open('/etc/passwd').read()": "FileNotFoundError",
    "open('/usr/planted', 'w')": "OSError",
    "open('/planted', 'w')": "PermissionError",
    "import os; os.chroot('/tmp')": "PermissionError",
    "import os; os.setuid(0)": "PermissionError",
    "import ctypes, os; print(ctypes.CDLL(None).unshare(0x10000000)); raise OSError('refused')": "-1",
    "import ctypes; print(ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None)); raise OSError('refused')": "-1",
}


@needs_isolation
@pytest.mark.parametrize("program", ESCAPES)
def test_nothing_of_the_machine_can_be_reached(
    sandbox: CodeSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    monkeypatch.setenv("SECRET", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = program.format(port=server.getsockname()[1], pid=os.getpid(), secret=str(secret))
        outcome = sandbox.run(text)
    assert (
        outcome.status == 1 and ESCAPES[program] in outcome.stdout + outcome.stderr and "secret\n" not in outcome.stdout
    )


LIMITED = {
    "x = 'a' * (4 << 30)": "MemoryError",
    "open('big', 'wb').write(b'x' * (100 << 20))": "File too large",
    "import os\ntry:\n  for n in range(9): open(f'b{n}', 'wb').write(b'x' * (10 << 20))\n"
    "except OSError as error:\n  os.remove('b0'); raise SystemExit(error.strerror)": "No space left",
    "import os\nwhile True: os.fork()": "Resource temporarily unavailable",
    "files = [open('/dev/null') for _ in range(1000)]": "Too many open files",
}


@needs_isolation
@pytest.mark.parametrize("program", LIMITED)
def test_resources_are_limited(sandbox: CodeSandbox, program: str):
    began = time.monotonic()
    outcome = sandbox.run(program)
    assert outcome.status == 1 and LIMITED[program] in outcome.stderr and time.monotonic() - began < 5


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\ntime.sleep(60)",
    ],
)
def test_a_program_that_does_not_end_is_ended(sandbox: CodeSandbox, program: str):
    began = time.monotonic()
    assert sandbox.run(program, seconds=0.3).status is None and time.monotonic() - began < 3


@needs_isolation
def test_processes_end_with_their_program(sandbox: CodeSandbox):
    """Also those that left its group."""
    sleep = f"{60 + os.getpid() / 1e7:.7f}"
    program = f"import os, time\nif os.fork() == 0:\n  os.setsid()\n  os.execv('/usr/bin/sleep', ['sleep', '{sleep}'])\ntime.sleep(0.2)"
    assert sandbox.run(program).status == 0
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(sleep.encode() in command for command in running)


def test_a_flood_of_output_is_cut(sandbox: CodeSandbox):
    outcome = sandbox.run("while True: print('x' * 10000)")
    assert outcome.status != 0 and len(outcome.stdout) <= 1 << 20


def test_programs_are_independent(sandbox: CodeSandbox):
    assert sandbox.run("open('left', 'w').write('x'); print(input())", stdin="a\n").stdout == "a\n"
    assert sandbox.run("import os; print(os.path.exists('left'))").stdout == "False\n"
    assert sandbox.run("import numpy; print(numpy.arange(3).sum())").stdout == "3\n"


def rewards_of(answers: list[str], tests: object) -> list[object]:
    rewards = CodeRewards("tests", HERE, workers=2, timeout_s=20.0)
    results = rewards.rewards([{"answer": answer, "record": {"tests": tests}} for answer in answers])
    rewards.close()
    return list(results)


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


def test_the_share_of_tests_that_pass_is_the_reward():
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
    right, half = "def add(a, b):\n    return a + b", "def add(a, b):\n    return 3"
    answers = [
        block(right),
        block(half),
        right,
        block("x ="),
        block("import os; os._exit(0)"),
        block("raise SystemExit(0)"),
    ]
    assert rewards_of(answers, tests) == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert rewards_of([block(half) + block(right)], "\n".join(tests)) == [1.0], "the last block counts"


def test_outputs_are_compared():
    cases = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}]
    assert rewards_of([block("print(sum(map(int, input().split())), ' ')"), block("print(3)")], cases) == [1.0, 0.5]


@pytest.mark.parametrize("tests", [None, [], [7], [{"input": "x"}]])
def test_a_line_without_tests_costs_its_answers(tests: object):
    [result] = rewards_of([block("x = 1")], tests)
    assert "tests" in str(result)


def test_all_tests_of_an_answer_have_a_time_limit():
    rewards = CodeRewards("tests", HERE, workers=1, timeout_s=0.5)
    began = time.monotonic()
    assert rewards.rewards([{"answer": block("while True: pass"), "record": {"tests": ["1"] * 20}}]) == [0.0]
    rewards.close()
    assert time.monotonic() - began < 3


def test_code_is_a_reward_among_others():
    rewards = RewardSum(parse_rewards(["0.5*code:cases", "contains:word"]), workers=1, timeout_s=9.0, sandbox=HERE)
    [answer] = rewards.of([(block("print('so')"), {"cases": [{"input": "", "output": "so"}], "word": "Here"})])
    rewards.close()
    assert answer.reward == 1.5


def test_a_machine_that_cannot_isolate_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    launcher = tmp_path / "launcher.py"
    launcher.write_text('print(\'{"error": "Operation not permitted (namespaces)"}\')')
    monkeypatch.setattr(code_sandbox, "_LAUNCHER", launcher)
    with pytest.raises(
        ConfigError, match=r"does not let it be isolated: Operation not permitted.*--code-without-isolation"
    ):
        check_sandbox(SandboxLimits())
    rewards = CodeRewards("tests", SandboxLimits(), workers=1, timeout_s=9.0)
    assert "Operation not permitted" in str(rewards.rewards([{"answer": block("1"), "record": {"tests": "1"}}])[0])
    rewards.close()
    launcher.write_text("import sys; sys.exit('no')")
    sandbox = CodeSandbox(SandboxLimits())
    with pytest.raises(SandboxUnavailable, match="its launcher ended: no"):
        sandbox.run("1")
    sandbox.close()


def test_without_isolation_limits_hold(monkeypatch: pytest.MonkeyPatch):
    sandbox = CodeSandbox(SandboxLimits(seconds=2.0, isolated=False))
    assert "MemoryError" in sandbox.run("x = 'a' * (4 << 30)").stderr
    monkeypatch.setenv("SECRET", "secret")
    assert sandbox.run("import os; print(os.environ.get('SECRET'), input())", stdin="x").stdout == "None x\n"
    sandbox.close()


def test_settings_of_code_are_of_its_reward_alone(tmp_path: Path):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    flags = f"--rollout-prompts {prompts} --code-timeout-s 3"
    assert any("--code-timeout-s" in str(notice) for notice in load(flags).notices)
    loaded = load(
        f"{flags} --rewards 2*code --code-memory-gigabytes 0.5{'' if CAN_ISOLATE else ' --code-without-isolation'}"
    )
    assert not any("--code" in str(notice) for notice in loaded.notices)
    RolloutSource(check_start(loaded))
