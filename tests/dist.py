"""A pool of ranks that lives for the whole test run, over gloo or (`RankPool(nccl=8)`) on GPUs over NCCL.

`pool.run(fn, 4, *args)` calls `fn(*args)` on four ranks, inside a fresh process group, and returns the four results. The
function must be importable (module level). A failing rank's traceback is the test's failure; a hang is a failure within
seconds, with every rank's stack and last communication. Ranks fork from a server that has torch loaded, so that a new one costs no import.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from petatron.mesh.comm_record import CommRecord
from petatron.mesh.launch.nccl_options import env_variables
from tests.load_deadline import Deadline
from tests.quick_disk import skip_flushes

_GRACE_S = 4.0
_POLL_S = 1.0
PRELOADED = [
    "torch",
    "torch._dynamo",
    "petatron.train.training_loop",
    "petatron.parallel.data.fsdp",
    "petatron.verify.record_trace",
    "pytest",
    "hypothesis.strategies",
    "tests.parity.harness",
]
"""What ranks import for most tests; the server imports it once, and they fork with it."""


def preload_for_every_fork() -> None:
    """Has the fork server import `PRELOADED` whoever starts it. A session has one server: were `bench checkpoint` the first to ask for
    a process, with the few modules of its own, every rank and command after it would import all of this again."""
    preload = multiprocessing.forkserver.set_forkserver_preload

    def with_ours(names: list[str]) -> None:
        preload([*PRELOADED, *(name for name in names if name not in PRELOADED)])

    multiprocessing.forkserver.set_forkserver_preload = with_ours


class RankFailure(AssertionError):
    """A function failed or hung on some rank of the pool."""


def schedule_as_batch() -> None:
    """Has no thread of this process preempt one that runs when it wakes, where the system knows of it.

    Gloo's thread of a connection only tries to take its lock: woken by a message while another thread of the process holds it, it polls
    in a loop until that one runs again, for which it needs the core. Ranks on few cores so use a quarter less CPU time.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a container may not allow it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _serve(rank: int, connection: Connection, port: int, stack_file: str, nccl: int) -> None:
    """A rank's life: take a task, run it in its own process group, answer."""
    torch.set_num_threads(1)
    skip_flushes()
    if nccl:
        _use_a_gpu(rank, nccl)
    else:
        schedule_as_batch()
    threading.Thread(target=_tell_last_operations, args=(Path(stack_file),), daemon=True).start()
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as `mesh/launch/nccl_options.py` has it for a rank
    gc.freeze()  # what is imported stays, and need not be looked through after every task
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        while True:
            try:
                task, world_size, payload = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                fn, args = pickle.loads(payload)
                if world_size > 1:
                    prefix = dist.PrefixStore(f"task{task}", store)
                    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size)
                    dist.barrier()  # a rank with nothing to do must not be gone before the others have connected
                answer = (True, fn(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            connection.send_bytes(pickle.dumps(answer))
            answer = fn = args = None
            if dist.is_initialized():
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
            # A model and its mesh are full of cycles, and every group that they hold keeps threads of its own.
            gc.collect()
            gc.freeze()  # modules that the task imported, and caches


def _use_a_gpu(rank: int, nccl: int) -> None:
    """Ranks of a pool of `nccl` spread over the GPUs, and share them where there are fewer."""
    devices = torch.cuda.device_count()
    wanted = env_variables(nccl=True, ranks_per_device=-(-nccl // devices), rank=rank)
    os.environ.update({variable.name: variable.value for variable in wanted})
    os.environ["NCCL_BUFFSIZE"] = str(1 << 18)  # so that no message of a MB fits into NCCL's buffers
    torch.cuda.set_device(rank % devices)


def _tell_last_operations(stack_file: Path) -> None:
    """When asked for, write what every rank's record of communication ends with; the main thread may be stuck."""
    ask, answer = stack_file.with_suffix(".ask"), stack_file.with_suffix(".record")
    while not ask.exists():
        time.sleep(0.5)
    records = [thing for thing in gc.get_objects() if isinstance(thing, CommRecord)]
    answer.write_text("\n".join(str(event) for record in records for event in record.events()[-6:]))


class RankPool:
    """Ranks started on demand and kept until `close`."""

    def __init__(self, *, nccl: int = 0) -> None:
        """`nccl`: how many ranks may be asked for, all on GPUs, with NCCL between them; 0 is gloo on the CPU."""
        self._nccl = nccl
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[tuple[Any, Connection, Path]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        self._task = 0

    def _grow(self, count: int) -> None:
        while len(self._ranks) < count:
            rank = len(self._ranks)
            ours, theirs = self._context.Pipe()
            stack_file = self._folder / f"stack-{rank}-{self._task}"
            process = self._context.Process(
                target=_serve, args=(rank, theirs, self._store.port, str(stack_file), self._nccl), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours, stack_file))

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0) -> list[Any]:
        """Results of `fn(*args)` on ranks 0..world_size-1; inside, `torch.distributed` is initialized."""
        self._grow(world_size)
        self._task += 1
        payload = pickle.dumps((fn, args))
        chosen = self._ranks[:world_size]
        for _, connection, _ in chosen:
            connection.send_bytes(pickle.dumps((self._task, world_size, payload)))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = Deadline(timeout_s)
        first_failure: int | None = None
        while len(answers) < world_size:
            waiting = {chosen[rank][1]: rank for rank in range(world_size) if rank not in answers}
            ready = wait(list(waiting), timeout=_POLL_S)
            if deadline.is_over and not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, f"rank {rank} died")
                if not answers[rank][0] and first_failure is None:
                    first_failure, deadline = rank, min(deadline, Deadline(_GRACE_S), key=Deadline.left_s)
        if first_failure is not None:
            if len(answers) < world_size or any("died" in str(a[1])[:20] for a in answers.values() if not a[0]):
                self.close()
            raise RankFailure(f"rank {first_failure} of {world_size} failed first:\n{answers[first_failure][1]}")
        if len(answers) < world_size:
            raise RankFailure(self._hang_report(world_size, answers, timeout_s))
        return [answers[rank][1] for rank in range(world_size)]

    def _hang_report(self, world_size: int, answers: dict[int, Any], timeout_s: float) -> str:
        stuck = [rank for rank in range(world_size) if rank not in answers]
        for rank in stuck:
            self._ranks[rank][2].with_suffix(".ask").touch()
            os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
        time.sleep(1.5)
        stacks = [
            f"--- rank {rank}\n{file.read_text()}\nlast operations:\n{_text(file.with_suffix('.record'))}"
            for rank, file in ((rank, self._ranks[rank][2]) for rank in stuck)
        ]
        self.close()
        return f"ranks {stuck} of {world_size} still run after {timeout_s:.0f} s\n" + "\n".join(stacks)

    def close(self) -> None:
        """Stop every rank; the next run starts fresh ones."""
        for process, connection, _ in self._ranks:
            connection.close()
            process.kill()
        for process, _, _ in self._ranks:
            process.join()
        self._ranks.clear()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else "(none told)"
