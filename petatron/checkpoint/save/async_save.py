"""Async save: stages a copy of the state in host memory, and one thread writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

_THREADS = 4


class StagingBuffer:
    """Host memory reused between saves; pinned where a device copies into it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies the tensors' current values. The copies are valid until the next call."""
        on_device = any(tensor.device.type == "cuda" for tensor in tensors.values())
        sizes = {name: tensor.numel() * tensor.dtype.itemsize for name, tensor in tensors.items()}
        starts, total = {}, 0
        for name, size in sizes.items():
            starts[name] = total
            total += -(-size // 64) * 64
        if self._buffer.numel() < total:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating more
            self._buffer = (
                torch.empty(total, dtype=torch.uint8, pin_memory=True)
                if on_device
                else torch.from_numpy(
                    np.empty(total, dtype=np.uint8)
                )  # in huge pages: several times as fast on first touch
            )
        copies = {
            name: self._buffer[starts[name] : starts[name] + sizes[name]].view(tensor.dtype).view(tensor.shape)
            for name, tensor in tensors.items()
        }
        if on_device:
            for name, tensor in tensors.items():
                copies[name].copy_(tensor.detach(), non_blocking=True)
            torch.cuda.current_stream().synchronize()
        else:
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint-copy") as pool:
                list(pool.map(lambda name: copies[name].copy_(tensors[name].detach()), tensors))
        return copies


class AsyncSaveThread:
    """Runs at most one task at a time, on its own thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        assert self._thread is None, "wait for the work before"

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint-save")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the task is done; raises its error, once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
