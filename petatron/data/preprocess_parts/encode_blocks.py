"""Encodes blocks in this process or in several, and gives them back in order.

A worker receives one bytes object and returns a few flat arrays, so that communication costs little compared with tokenizing. Only a
few blocks per worker are in flight: memory does not grow with the input.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process

from petatron.base.errors import DataError
from petatron.data.inputs.line_blocks import LineBlock
from petatron.data.preprocess_parts.encoded_block import EncodedBlock
from petatron.data.preprocess_parts.part_blocks import PartBlock

BLOCKS_PER_WORKER = 4
Encode = Callable[[LineBlock], EncodedBlock]


def encode_blocks(
    encode: Encode, blocks: Iterable[PartBlock], *, workers: int
) -> Generator[tuple[PartBlock, EncodedBlock | None], None, None]:
    """Yields blocks and their encodings in input order; the end of a part has none."""
    if workers == 1:
        for source in blocks:
            yield source, None if source.block is None else encode(source.block)
        return
    # spawn: the tokenizer library has threads, and a forked copy of a process with threads may hang.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), init_worker)
    waiting: deque[tuple[PartBlock, Future[EncodedBlock] | None]] = deque()
    failure: DataError | None = None

    def next_result() -> tuple[PartBlock, EncodedBlock | None]:
        source, future = waiting.popleft()
        return source, None if future is None else future.result()

    try:
        try:
            for source in blocks:
                waiting.append((source, None if source.block is None else pool.submit(encode, source.block)))
                if len(waiting) >= BLOCKS_PER_WORKER * workers:
                    yield next_result()
        except DataError as error:  # what was read before may have a problem of its own, which comes first
            failure = error
        while waiting:
            yield next_result()
        if failure is not None:
            raise failure
    except BrokenProcessPool as error:
        raise dead_worker_error() from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def dead_worker_error() -> DataError:
    return DataError(
        "A worker process died while tokenizing; the system may have run out of memory. Try fewer --workers."
    )


def init_worker() -> None:
    """Makes a fresh process a worker that uses one core and leaves Ctrl-C to its parent."""
    limit_library_threads()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A worker whose parent is killed would wait for blocks for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def limit_library_threads() -> None:
    """Keeps the tokenizer library to one thread, in a process that is a worker.

    It would start a thread per core in each worker, and takes this setting from the environment only.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
