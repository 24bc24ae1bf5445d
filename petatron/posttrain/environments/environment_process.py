"""The process of environments: `python -m petatron.posttrain.environments.environment_process SOCKET FILE [CLASS]`.

It imports the file once, and then forks a process for each episode: nothing that happens in one, no exception, crash or endless loop,
reaches another, and none has to import anything. It gets the socket of an episode through its own (`SOCKET`, a file descriptor).
Without a class, the functions of the file are tools.

Messages are lines of JSON:

    from an episode's process    {"pid": 41}
    to it                        {"reset": {...}, "seed": 7}     {"step": "the answer"}     {"close": true}
    from it                      {"observation": ..., "reward": 0.0, "done": false}, or {"error": "..."}

What user code prints goes to the error stream.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from petatron.posttrain.environments.environment import (
    Environment,
    EnvironmentProperties,
    TurnResult,
    read_observation,
    read_result,
)
from petatron.posttrain.environments.tool_environment import ToolEnvironment, tools_of_module

_PR_SET_PDEATHSIG = 1


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the run ends it, or the end of its socket does
        signal.signal(number, signal.SIG_IGN)
    sys.stdout = sys.stderr
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        make = load_environment(*sys.argv[2:])
        properties = properties_of(make)
        _send(control, {"ready": properties.to_json()})
    except Exception as error:
        _send(control, {"error": f"{type(error).__name__}: {error}"})
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes of episodes
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _become_episode()
            serve(socket.socket(fileno=descriptors[0]), make)
            sys.stderr.flush()
            os._exit(0)
        os.close(descriptors[0])


def load_environment(file: str, name: str = "", form: str = "") -> Callable[[], Environment]:
    """Returns what makes an environment: a class of a file, or tools without one, in a format of calls."""
    module = _load_module(file)
    if not name:
        tools = tools_of_module(module)
        return lambda: ToolEnvironment(tools, form)
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        raise ValueError(f"{file} has no class {name}")
    for method in ("reset", "step"):
        if not callable(getattr(kind, method, None)):
            raise ValueError(f"{name} of {file} has no method {method}")
    return kind


def properties_of(make: Callable[[], Environment]) -> EnvironmentProperties:
    """Returns tools and stop texts: of a class where it has them, else of an object."""
    holder = make if isinstance(make, type) else make()
    values = {name: getattr(holder, name, None) for name in ("tools", "stop")}
    return EnvironmentProperties.from_json(json.loads(json.dumps(values)))


def serve(connection: socket.socket, make: Callable[[], Environment]) -> None:
    """Answers the messages of one episode until its socket is closed."""
    _send(connection, {"pid": os.getpid()})
    environment: Environment | None = None
    with connection.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            job = json.loads(line)
            try:
                if "reset" in job:
                    _seed(job["seed"])
                    environment = make()
                    answer = observed(environment.reset(job["reset"]))
                elif "step" in job and environment is not None:
                    answer = stepped(read_result(environment.step(job["step"])))
                else:
                    close = getattr(environment, "close", None)
                    if callable(close):
                        close()
                    return
                text = json.dumps(answer)
            except Exception as error:
                text = json.dumps({"error": f"{type(error).__name__}: {error}"})
            connection.sendall(text.encode() + b"\n")


def observed(observation: object) -> dict[str, Any]:
    return {"observation": read_observation(observation)}


def stepped(result: TurnResult) -> dict[str, Any]:
    return {"observation": result.observation, "reward": result.reward, "done": result.done}


def _load_module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("petatron_environment", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def _become_episode() -> None:
    """Makes this a group of processes, which is ended as a whole, and with its parent where the system can."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _seed(seed: int) -> None:
    random.seed(seed)
    for name, limit, function in (("numpy", 1 << 32, "random.seed"), ("torch", 1 << 63, "manual_seed")):
        target: Any = sys.modules.get(name)
        if target is not None:
            for part in function.split("."):
                target = getattr(target, part)
            target(seed % limit)


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
