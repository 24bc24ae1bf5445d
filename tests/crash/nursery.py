"""A process that has everything imported and forks a child for each life that a test wants to end.

Starting Python with torch takes seconds, a fork takes milliseconds: so a crash costs little more than the training that comes
before it. The nursery trains once itself, on one thread, so that what is set up on first use is inherited too; it has no
threads of its own when it forks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.crash.training import tiny_run, train
from tests.dist import PRELOADED

_LIFE_S = 60.0


@dataclass(frozen=True, slots=True)
class Death:
    """How a child ended: killed, or with an answer. `error` is a traceback of its own."""

    killed: bool
    answer: Any = None
    error: str = ""

    def lived(self) -> Any:
        """The answer of a child that was to live."""
        assert not self.killed and not self.error, self.error or "the child was killed"
        return self.answer


@dataclass(frozen=True, slots=True)
class _Order:
    """What the nursery is asked for: a function per rank, all of them killed after a while if need be."""

    tasks: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]
    kill_after_s: float | None


class Nursery:
    """`run(fn, *args)` calls a module-level function in a fresh child and says how that ended."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()

    def run(self, fn: Callable[..., Any], *args: Any, kill_after_s: float | None = None) -> Death:
        return self.run_ranks([(fn, args)], kill_after_s=kill_after_s)[0]

    def run_ranks(
        self, tasks: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *, kill_after_s: float | None = None
    ) -> list[Death]:
        """A child per task; several form a process group. When one dies the others are killed, as a launcher does."""
        self._connection.send_bytes(pickle.dumps(_Order(tasks, kill_after_s)))
        assert self._connection.poll(2 * _LIFE_S + (kill_after_s or 0.0)), "the nursery does not answer"
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        self._process.kill()


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        train(tiny_run(f"--train-iters 2 --save {folder} --async-save"))
        train(tiny_run(f"--train-iters 3 --save {folder} --load {folder} --bf16"))
    while True:
        try:
            order: _Order = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as folder:
            children = [_fork(order, rank, Path(folder)) for rank in range(len(order.tasks))]
            in_time = _watch(children, order.kill_after_s)
            deaths = [_death(Path(folder) / str(rank)) for rank in range(len(order.tasks))]
            if not in_time:
                deaths = [Death(killed=False, error=f"some rank still ran after {_LIFE_S} s")] * len(deaths)
        connection.send_bytes(pickle.dumps(deaths))


def _fork(order: _Order, rank: int, folder: Path) -> int:
    """The child writes its answer into a file; one that was killed has written none."""
    pid = os.fork()
    if pid:
        return pid
    fn, args = order.tasks[rank]
    try:
        if len(order.tasks) > 1:
            store = dist.FileStore(str(folder / "store"), len(order.tasks))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=len(order.tasks))
        answer = Death(killed=False, answer=fn(*args))
    except BaseException:
        answer = Death(killed=False, error=traceback.format_exc())
    (folder / f"{rank}.part").write_bytes(pickle.dumps(answer))
    (folder / f"{rank}.part").rename(folder / str(rank))
    os._exit(0)


def _watch(children: Sequence[int], kill_after_s: float | None) -> bool:
    """Until all have ended; a child that is killed takes the others with it. Whether nobody had to be stopped unasked."""
    began = time.monotonic()
    limit_s = _LIFE_S if kill_after_s is None else kill_after_s
    left = set(children)
    in_time = True
    while left:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                if os.WIFSIGNALED(status):
                    _kill(left)
        if left and time.monotonic() - began > limit_s:
            _kill(left)
            in_time = kill_after_s is not None
        if left:
            time.sleep(0.001)
    return in_time


def _kill(children: set[int]) -> None:
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _death(path: Path) -> Death:
    return pickle.loads(path.read_bytes()) if path.exists() else Death(killed=True)
