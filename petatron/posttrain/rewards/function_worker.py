"""A process that computes the rewards of one Python function: `python -m petatron.posttrain.rewards.function_worker FILE FUNCTION`.

It reads jobs from its input and writes results to its output, each a line of JSON. What the function prints goes to the error stream.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO


def load_function(file: str, name: str) -> Callable[[str, dict[str, Any]], Any]:
    """Returns a function of a file; raises `ValueError` if the file lacks it."""
    spec = importlib.util.spec_from_file_location("petatron_reward", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{file} has no function {name}")
    return function


def result_of(function: Callable[[str, dict[str, Any]], Any], job: dict[str, Any]) -> dict[str, Any]:
    """Returns the reward, or the error that the function raised."""
    try:
        reward = float(function(job["answer"], job["record"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"reward": reward} if math.isfinite(reward) else {"error": f"the reward is {reward}"}


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the run ends it, or the end of its input does
        signal.signal(number, signal.SIG_IGN)
    target, sys.stdout = sys.stdout, sys.stderr
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        function = load_function(*sys.argv[1:])
    except Exception as error:
        _write(target, {"error": f"{type(error).__name__}: {error}"})
        return
    _write(target, {"ready": True})
    for line in sys.stdin:
        _write(target, result_of(function, json.loads(line)))


def _end_with(parent: int) -> None:
    """Ends this process soon after the one that started it, which may have been killed while a function runs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _write(target: TextIO, value: dict[str, Any]) -> None:
    target.write(json.dumps(value) + "\n")
    target.flush()


if __name__ == "__main__":
    main()
