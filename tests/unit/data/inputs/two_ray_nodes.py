"""A Ray cluster of two nodes of one core each on this machine, started as a user starts it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.load_deadline import scaled, wait_until

SECOND_NODE = "TEST_SECOND_RAY_NODE"
"""Environment variable of the processes of the second node."""
STARTED = "Ray runtime started"
MAX_STARTS = 3
AGENT_PORTS = (
    "--dashboard-agent-grpc-port",
    "--dashboard-agent-listen-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)


class TwoRayNodes:
    """`ray start`, twice; `stop` ends these nodes, and no others of this machine."""

    def __init__(self) -> None:
        (port,) = _free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # not pytest's: names of sockets are short
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        flags = f"--head --port={port} --include-dashboard=false --disable-usage-stats --temp-dir={self._folder}"
        try:
            self._start("head", flags.split(), {})
        except BaseException:
            self.stop()
            raise

    def start_second(self) -> None:
        """Starts the second node unless it is running."""
        node = self._nodes.get("second")
        if node is None or node.poll() is not None:
            self._start("second", [f"--address={self.address}"], {SECOND_NODE: "1"})

    def wait_for_loss(self) -> None:
        """Waits until the second node has ended, whose raylet was killed."""
        wait_until(lambda: self._nodes["second"].poll() is not None, "the end of a node without a raylet", 60)

    def stop(self) -> None:
        for node in reversed(self._nodes.values()):
            _stop_node(node)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, name: str, flags: list[str], variables: Mapping[str, str]) -> None:
        """Starts a node, again where Ray gives up: it allows a start 30 seconds, however busy the machine is."""
        log = self._folder / f"{name}.log"
        assert any(self._starts(name, log, flags, variables) for _ in range(MAX_STARTS)), log.read_text()

    def _starts(self, name: str, log: Path, flags: list[str], variables: Mapping[str, str]) -> bool:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1"]
        command += ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
        # A node waits fifteen seconds for its agents to choose ports, however busy the machine is.
        command += [f"{flag}={port}" for flag, port in zip(AGENT_PORTS, _free_ports(len(AGENT_PORTS)))]
        with log.open("wb") as output:
            node = subprocess.Popen(
                [*command, *flags],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._nodes[name] = node
        wait_until(lambda: STARTED in log.read_text() or node.poll() is not None, f"the {name} node", 120)
        if node.poll() is None:
            return True
        _stop_node(node)
        return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]


def _stop_node(node: subprocess.Popen[bytes]) -> None:
    node.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(scaled(30))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)  # its agents, where it left them
