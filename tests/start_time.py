"""`python -m tests.start_time BEFORE`: how long a run of one step takes, with another version of the package and with this one.

    mkdir -p .carry/before && git archive COMMIT petatron | tar x -C .carry/before
    python -m tests.start_time .carry/before --ranks 8 --repeats 5

Ranks are started on CPU with gloo, by one launcher and by two launchers that meet as two machines do. The versions take turns, and medians
are compared: a ratio above 1 says that this version is faster. Run it on a machine with a core for every rank that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NOW = Path(__file__).resolve().parents[1]
ADDRESS = "127.0.0.2"
"""Several launchers of one machine do not meet at the default address."""
TRAIN = (
    "tiny-llama --mock-data --num-layers 1 --seq-length 32 --lr 1e-3 --train-iters 1 --eval-iters 0 --device cpu --live off "
    "--distributed-backend gloo --micro-batch-size 1"
)


def measure(tree: Path, *, ranks: int, launchers: int) -> float:
    """Returns the seconds from the start of the launchers to the end of the last one."""
    with tempfile.TemporaryDirectory() as home, socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port = probe.getsockname()[1]
        probe.close()
        env = {name: value for name, value in os.environ.items() if not name.startswith("PETATRON_")}
        env |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HOME": home, "GLOO_SOCKET_IFNAME": "lo"}
        words = [*TRAIN.split(), "--dp", str(ranks), "--global-batch-size", str(ranks)]
        words += ["--nproc-per-node", str(ranks // launchers)]
        if launchers > 1:
            words += ["--nnodes", str(launchers), "--master-addr", ADDRESS, "--master-port", str(port)]
        commands = [
            [sys.executable, "-m", "petatron", "train", *words, *(["--node-rank", str(node)] if launchers > 1 else [])]
            for node in range(launchers)
        ]
        started_s = time.perf_counter()
        runs = [
            subprocess.Popen(command, env=env, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command in commands
        ]
        said = [run.communicate()[0] for run in runs]
        took_s = time.perf_counter() - started_s
    if any(run.returncode for run in runs):
        raise SystemExit(f"{tree}: {said[0][-2000:]}")
    return took_s


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.start_time", description=__doc__)
    parser.add_argument("before", type=Path, help="a folder with the package `petatron` of another version")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    trees = {"before": options.before.resolve(), "now": NOW}
    for launchers in (1, 2):
        seconds: dict[str, list[float]] = {name: [] for name in trees}
        for tree in trees.values():  # bytecode and files are in caches from here on
            measure(tree, ranks=options.ranks, launchers=launchers)
        for number in range(options.repeats):
            for name in sorted(trees, reverse=bool(number % 2)):
                seconds[name].append(measure(trees[name], ranks=options.ranks, launchers=launchers))
        before, now = (statistics.median(seconds[name]) for name in trees)
        print(
            f"{options.ranks} ranks, {launchers} launcher(s): before {before:.2f} s {_rounded(seconds['before'])}, "
            f"now {now:.2f} s {_rounded(seconds['now'])}, ratio before/now {before / now:.3f}",
            flush=True,
        )
    return 0


def _rounded(seconds: list[float]) -> str:
    return f"({', '.join(f'{value:.2f}' for value in seconds)})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
