"""Two launchers that pass for two machines: ranks meet through the store behind sealed channels, and NCCL's communicators come of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from petatron.mesh.launch.shared_secret import SECRET_VARIABLE
from tests.load_deadline import scaled
from tests.nccl.test_runs import ENV, FLAGS, QUIET, losses, train

ADDRESS = "127.0.0.2"
"""Of this machine, and not one that the launcher takes for a machine's own."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("layout", ["--dp 4", "--tp 2 --sequence-parallel --pp 2"])
def test_two_launchers_train_as_one_does(tmp_path: Path, layout: str):
    words = f"{layout} --train-iters 6 --eval-iters 0 --save-interval 100"
    alone = train(words, tmp_path / "alone")
    port, env = str(free_port()), {**ENV, "HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    env.pop(SECRET_VARIABLE, None)
    together = f"{words} --nnodes 2 --nproc-per-node 2 --master-addr {ADDRESS} --master-port {port}"
    machines = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "petatron", "train", *FLAGS, *together.split()),
                *("--node-rank", str(node), "--save", str(tmp_path / "together")),
            ],
            env={**env, "PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        said = [machine.communicate(timeout=scaled(150)) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert losses(said[0][0]) == pytest.approx(losses(alone.stdout), rel=1e-5)
    assert not any(QUIET.search(err) for _, err in said), said
    assert not list((tmp_path / ".petatron" / "rendezvous").iterdir()), "the secret is gone"
