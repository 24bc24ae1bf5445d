"""`code[:KEY]`: runs the last block of Python of an answer against the tests of its prompt's line; the share of tests that pass.

    {"prompt": "...", "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}
    {"prompt": "...", "tests": [{"input": "1 2\\n", "output": "3\\n"}]}
    {"prompt": "...", "tests": "def check(f): ...\\ncheck(add)"}

A text is code that follows the answer's; it passes if nothing is raised. An object is an input and what the program has to write, but for
space at the ends of lines and of the text. Each test is a run of its own in a sandbox (`code_sandbox.py`). An answer without a block has 0.

A test that is code runs in the process of the answer, which can therefore cheat, by changing what `==` does for instance; ending the
process early is no success. What a program writes is compared outside of it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from petatron.base.errors import ConfigError, Problem
from petatron.posttrain.rewards.code_sandbox import CodeSandbox, SandboxLimits, SandboxUnavailable
from petatron.posttrain.rewards.function_pool import RewardFailure

TESTS_KEY = "tests"
_BLOCK = re.compile(r"^[ \t]*```(?:python3?|py)?[ \t]*\r?\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL | re.IGNORECASE)
_MAX_CHARS = 1_000_000
_HARNESS = """\
import sys
_source, _test = {source!r}, {test!r}
_names = {{"__name__": "__main__"}}
exec(compile(_source, "answer.py", "exec"), _names)
exec(compile(_test, "test.py", "exec"), _names)
sys.stdout.flush()
sys.__stdout__.write({mark!r})
"""


class CodeRewards:
    """key: of the tests in a prompt's line. workers: runs at a time. timeout_s: for all tests of an answer; later ones fail."""

    def __init__(self, key: str, limits: SandboxLimits, *, workers: int, timeout_s: float) -> None:
        self._key, self._timeout_s = key, timeout_s
        self._sandbox = CodeSandbox(limits)
        self._threads = ThreadPoolExecutor(workers, "petatron-rewards")

    def rewards(self, jobs: Sequence[Mapping[str, Any]]) -> list[float | RewardFailure]:
        """Returns the share of tests that each answer passes, in their order."""
        return list(self._threads.map(self._reward, jobs))

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        self._sandbox.close()

    def _reward(self, job: Mapping[str, Any]) -> float | RewardFailure:
        try:
            tests = read_tests(job["record"], self._key)
            code = last_code_block(job["answer"])
            if code is None:
                return 0.0
            end = time.monotonic() + self._timeout_s
            passed = sum(self._passes(code, test, end) for test in tests)
        except (ValueError, SandboxUnavailable) as error:
            return RewardFailure(str(error))
        return passed / len(tests)

    def _passes(self, code: str, test: str | Mapping[str, str], end: float) -> bool:
        seconds = end - time.monotonic()
        if seconds <= 0:
            return False
        if isinstance(test, str):
            mark = secrets.token_hex(16)
            outcome = self._sandbox.run(_HARNESS.format(source=code, test=test, mark=mark), seconds=seconds)
            return outcome.status == 0 and outcome.stdout.endswith(mark)
        outcome = self._sandbox.run(code, stdin=test["input"], seconds=seconds)
        return outcome.status == 0 and _lines(outcome.stdout) == _lines(test["output"])


def check_sandbox(limits: SandboxLimits) -> None:
    """Runs an empty program; raises `ConfigError` where programs cannot be isolated."""
    sandbox = CodeSandbox(limits)
    try:
        outcome = sandbox.run("print(1)")
        why = "" if outcome.stdout == "1\n" else outcome.stderr.strip()[-300:] or "a program did not run in time"
    except SandboxUnavailable as error:
        why = str(error)
    finally:
        sandbox.close()
    if why:
        rule = f"runs code of a model, and the system does not let it be isolated: {why}"
        fix = (
            "Allow namespaces (of a container: unprivileged user namespaces, or CAP_SYS_ADMIN), give --rewards of a server that runs "
            "code elsewhere, or run it beside your files and network with --code-without-isolation."
        )
        raise ConfigError([Problem("--rewards", "code", rule, fix)])


def last_code_block(answer: str) -> str | None:
    """Returns the last block of Python, also one without a language; None without one.

    >>> last_code_block("so\\n```python\\nx = 1\\n```\\nor\\n```\\nx = 2\\n```\\n")
    'x = 2\\n'
    """
    blocks = _BLOCK.findall(answer[-_MAX_CHARS:])
    return blocks[-1] if blocks else None


def read_tests(record: Mapping[str, Any], key: str) -> list[str | Mapping[str, str]]:
    """Returns the tests of a prompt's line; raises `ValueError` if they are none.

    >>> read_tests({"tests": "assert f() == 1"}, "tests")
    ['assert f() == 1']
    >>> read_tests({"tests": [7]}, "tests")
    Traceback (most recent call last):
    ValueError: 'tests' of the prompt's line has a test that is neither code nor an object with "input" and "output"
    """
    value = record.get(key)
    tests: Any = [value] if isinstance(value, str) else value
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"the line of the prompt has no {key!r} with tests")
    for test in tests:
        if isinstance(test, str):
            continue
        if not isinstance(test, Mapping) or not all(isinstance(test.get(name), str) for name in ("input", "output")):
            raise ValueError(
                f'{key!r} of the prompt\'s line has a test that is neither code nor an object with "input" and "output"'
            )
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
