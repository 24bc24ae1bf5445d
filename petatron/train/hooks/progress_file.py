"""`--log-progress`: progress.txt beside the checkpoints, a line for each start and each checkpoint, in Megatron's fields."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

from petatron.base.errors import TrainError
from petatron.base.safe_files import reopen_file
from petatron.train.hooks.step_hook import StepHook
from petatron.train.state.run_metadata import TrainProgress

PROGRESS_FILE = "progress.txt"


class ProgressFile(StepHook):
    """Appends to the file; only rank 0 has one."""

    def __init__(self, folder: Path, progress: TrainProgress, *, num_devices: int, flops_per_token: float) -> None:
        self._path, self._progress = folder / PROGRESS_FILE, progress
        self._num_devices, self._flops_per_token = num_devices, flops_per_token
        self._first_tokens, self._started_s = progress.consumed_tokens, time.monotonic()
        self._append("Starting job", f"Iteration: {progress.iteration}")

    def after_save(self, iteration: int) -> None:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        flops = (self._progress.consumed_tokens - self._first_tokens) * self._flops_per_token
        self._append(
            "Saved checkpoint",
            f"Iteration: {iteration}",
            f"Job throughput: {flops / elapsed_s / self._num_devices / 1e12:.1f} TFLOP/s/GPU",
            f"Floating-point operations: {self._progress.consumed_tokens * self._flops_per_token:.2e}",
            f"Tokens (in billions): {self._progress.consumed_tokens / 1e9:.2f}",
        )

    def _append(self, *fields: str) -> None:
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        line = "\t".join((now, f"# GPUs: {self._num_devices}", *fields)) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = reopen_file(self._path, os.O_APPEND)
        except OSError as error:
            raise TrainError(f"Cannot write {self._path}: {error.strerror}. Leave --log-progress out.") from error
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
