"""Another user attacks ranks that run: of one machine, and of two launchers that pass for two machines.

The attacks that once worked: list the keys of torch's store and publish an address in the place of a rank; connect to gloo's port first
and send the number of a rank. Now nothing is learned, nobody's place is taken, and a run is either right or ends.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from petatron.mesh.launch.local_launcher import run_ranks
from petatron.mesh.launch.shared_secret import SECRET_VARIABLE
from tests.forked_python import run_forked
from tests.load_deadline import Deadline, wait_until
from tests.longform import diagonal
from tests.security.test_strangers import listening

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
HEADER_BYTES = 48
"""By which gloo announces what it would send."""
PROGRAM = """
import json, os, pathlib, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.rank_exit import run_rank_main
from petatron.mesh.launch.process_group import new_group, start_process_group
here = pathlib.Path(sys.argv[1])
def main():
    place = read_environment()
    start_process_group(place, timeout_minutes=0.5)
    groups = [new_group(name, (0, 1), backend="gloo", timeout=timedelta(seconds=30)) for name in "ab"]
    (here / f"joining-{place.rank}").write_text(str(os.getpid()))
    (here / f"joining-{place.rank}").rename(here / f"joined-{place.rank}")
    while not (here / "go").exists():
        time.sleep(0.02)
    totals = []
    for group in groups:
        for step in range(3):
            x = torch.full((4,), float(step + 10 * place.rank))
            dist.all_reduce(x, group=group)
            totals.append(x.tolist())
    (here / f"totals-{place.rank}").write_text(json.dumps(totals))
    while not (here / "end").exists():
        time.sleep(0.02)
    return 0
sys.exit(run_rank_main(main))
"""
TOTALS = [[float(2 * step + 10)] * 4 for step in range(3)] * 2
STORE_ATTACK = """
import json, os, sys
from datetime import timedelta
import torch.distributed as dist
os.setgid({nobody}); os.setuid({nobody})
learned = []
try:
    soon = timedelta(seconds=2)
    store = dist.TCPStore({host!r}, {port}, is_master=False, wait_for_workers=False, timeout=soon)
    store.set_timeout(soon)
    learned = store.list_keys()
    for key in learned:
        store.set(key, store.get(key)[:-1])
except Exception as error:
    sys.stderr.write(str(error)[:300])
print(json.dumps(learned))
"""
GLOO_ATTACK = """
import os, socket, struct, time
os.setgid({nobody}); os.setuid({nobody})
held, heard = [], 0
for port in {ports!r}:
    for number in {numbers!r}:
        one = socket.socket()
        one.connect(("127.0.0.1", port))
        if number is not None:
            one.sendall(struct.pack("=q", number))
        one.setblocking(False)
        held.append(one)
time.sleep(0.2)  # gloo has read the numbers
print("holds", len(held), flush=True)
ends = time.monotonic() + 3
while time.monotonic() < ends:
    for one in held:
        try:
            heard += len(one.recv(4096))
        except OSError:
            pass
    time.sleep(0.002)
print("heard", heard)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of two ranks with three groups each, which wait for `go` before they communicate."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    (tmp_path / "program.py").write_text(PROGRAM)
    yield tmp_path
    for name in ("go", "end"):
        (tmp_path / name).touch()


class Launchers:
    """Launchers in threads, with ranks that import nothing."""

    def __init__(self, folder: Path, *, nnodes: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.codes = folder, dict[int, int]()
        command = [sys.executable, str(folder / "program.py"), str(folder)]

        def launch(node: int) -> None:
            machines = {"nnodes": 2, "node_rank": node, "master_addr": "127.0.0.2", "master_port": self.port}
            self.codes[node] = run_ranks(command, nproc=2 // nnodes, **(machines if nnodes > 1 else {}))

        self.threads = [threading.Thread(target=launch, args=(node,)) for node in range(nnodes)]
        for thread in self.threads:
            thread.start()

    def wait_for(self, *names: str) -> None:
        deadline = Deadline(60)
        while not all((self.folder / name).exists() for name in names):
            assert not deadline.is_over and any(thread.is_alive() for thread in self.threads), names
            time.sleep(0.02)

    def end(self) -> list[int]:
        (self.folder / "end").touch()
        for thread in self.threads:
            thread.join()
        return [self.codes[node] for node in sorted(self.codes)]

    def totals(self) -> list[list[list[float]]]:
        return [json.loads((self.folder / f"totals-{rank}").read_text()) for rank in range(2)]


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@needs_root
@needs_linux
@pytest.mark.usefixtures("forked_ranks")
def test_a_stranger_reads_and_writes_nothing_of_two_machines(program: Path) -> None:
    """After admission, when addresses of gloo are in the store: torch's listed them, and took others in their place."""
    run = Launchers(program, nnodes=2)
    run.wait_for("joined-0", "joined-1")
    assert not list((program / ".petatron" / "rendezvous").iterdir()), "the secret is gone"
    code = STORE_ATTACK.format(nobody=NOBODY, host="127.0.0.2", port=run.port)
    stranger = run_forked([sys.executable, "-c", code], cwd=ROOT)
    assert json.loads(stranger.stdout) == [], stranger.stderr
    (program / "go").touch()
    run.wait_for("totals-0", "totals-1")
    assert run.end() == [0, 0] and run.totals() == [TOTALS, TOTALS]


@diagonal(2)
@needs_root
@needs_linux
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_stranger_at_gloos_port_is_cut_off(program: Path, nnodes: int, capfd: pytest.CaptureFixture[str]) -> None:
    """It sends the numbers of both ranks to all listeners before they speak: it gets headers at most, and the run ends with the reason."""
    run = Launchers(program, nnodes=nnodes)
    run.wait_for("joined-0", "joined-1")
    with gloo_attack(run, [0, 1]) as stranger:
        (program / "go").touch()
        codes = run.end()
        heard = int(stranger.communicate()[0].split()[-1])
    said = capfd.readouterr().err
    assert heard <= 6 * HEADER_BYTES, "a rank spoke with a stranger"
    assert any(codes) and "is no rank of this run connected to gloo's port" in said, (codes, said)
    assert not (program / "totals-0").exists() and not (program / "totals-1").exists()


@needs_root
@needs_linux
@pytest.mark.usefixtures("forked_ranks")
def test_whoever_only_scans_ports_disturbs_nobody(program: Path) -> None:
    run = Launchers(program, nnodes=2)
    run.wait_for("joined-0", "joined-1")
    with gloo_attack(run, [None, 1 << 40]) as stranger:
        (program / "go").touch()
        run.wait_for("totals-0", "totals-1")
        codes = run.end()
        stranger.communicate()
    assert codes == [0, 0] and run.totals() == [TOTALS, TOTALS]


GROUP_PROGRAM = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
from petatron.mesh.launch.environment import interface_variables, read_environment, set_default_variables
from petatron.mesh.launch.rank_exit import run_rank_main
from petatron.mesh.launch.rendezvous import Rendezvous
here = pathlib.Path(sys.argv[1])
def main():
    place = read_environment()
    set_default_variables(interface_variables(place))
    meeting = Rendezvous(place)
    if place.rank:
        (here / f"joined-{place.rank}").write_text(str(os.getpid()))
        while not (here / "go").exists():
            time.sleep(0.02)
    else:
        (here / "joined-0").write_text(str(os.getpid()))
    with meeting.process_group("case", 2, timeout_minutes=0.2):
        x = torch.full((4,), float(place.rank))
        dist.all_reduce(x)
        (here / f"totals-{place.rank}").write_text("[]")
    return 0
sys.exit(run_rank_main(main))
"""


@needs_root
@needs_linux
@pytest.mark.usefixtures("forked_ranks")
def test_a_stranger_at_a_group_beside_the_default_one_is_cut_off(
    program: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The groups of `petatron verify`: rank 0 listens while rank 1 is not there yet, and a stranger says to be it."""
    (program / "program.py").write_text(GROUP_PROGRAM)
    run = Launchers(program, nnodes=1)
    run.wait_for("joined-0", "joined-1")
    first = int((program / "joined-0").read_text())
    wait_until(lambda: bool(listening([first])), "gloo's listener", seconds=30)
    ports = [port for _, port in listening([first])]
    code = GLOO_ATTACK.format(nobody=NOBODY, ports=ports, numbers=[0, 1])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline().startswith("holds")
        (program / "go").touch()
        run.end()
    assert "is no rank of this run connected to gloo's port" in capfd.readouterr().err


def gloo_attack(run: Launchers, numbers: list[int | None]) -> subprocess.Popen[str]:
    """Another user connects to all ports of gloo, and sends each of the numbers; /proc/net/tcp would tell it the ports."""
    ports = [port for _, port in listening([int((run.folder / f"joined-{rank}").read_text()) for rank in range(2)])]
    assert len(ports) == 2 * 3, "each rank listens for three groups"
    code = GLOO_ATTACK.format(nobody=NOBODY, ports=ports, numbers=numbers)
    stranger = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert stranger.stdout is not None and stranger.stdout.readline() == f"holds {len(ports) * len(numbers)}\n"
    return stranger
