"""`--profile`: a Chrome trace of some iterations, written by the selected ranks.

The profiler runs only between `--profile-step-start` and `--profile-step-end`, so other iterations cost nothing. It waits
for the device at both ends: work queued by an earlier iteration is not in the trace, and the last iteration is complete.
A run that ends or fails in between writes what was traced so far.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from petatron.base.errors import ConfigError, Problem
from petatron.base.log import get_logger
from petatron.base.safe_files import make_folder
from petatron.config.schema.run import RunConfig

_log = get_logger(__name__)


def profile_directory(run: RunConfig) -> Path:
    """Returns the folder of traces: the same on every rank, so no part of it may depend on the time."""
    log = run.log
    if log.profile_dir is not None:
        return Path(log.profile_dir)
    return Path(log.tensorboard_dir or log.log_dir or run.checkpoint.save or "runs") / "profile"


class StepProfiler:
    """Traces the selected iterations of one rank; does nothing on the others, and nothing without `--profile`.

    Used as a context around the loop, with `begin` and `end` called around every iteration.
    """

    def __init__(
        self, run: RunConfig, *, rank: int, iterations: int, device: torch.device, log_event: Callable[[str], None]
    ) -> None:
        """`log_event` is called on rank 0 with where traces will go and where its own was written; `iterations` is the run's length."""
        log = run.log
        self._enabled = log.profile and rank in log.profile_ranks
        self._options = {"record_shapes": log.record_shapes, "with_stack": log.pytorch_profiler_collect_callstack}
        self._plan_unlogged = log.profile and rank == 0
        self._ranks = ", ".join(str(rank) for rank in log.profile_ranks)
        self._first_iteration, self._stop_iteration = log.profile_step_start, min(log.profile_step_end, iterations + 1)
        self._rank, self._device, self._log_event = rank, device, log_event
        self._folder = profile_directory(run)
        self._profiler: profile | None = None
        self._last_iteration = 0
        if self._enabled:
            _make_profile_dir(self._folder, given=log.profile_dir is not None)

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._stop_and_export()

    def begin(self, iteration: int) -> None:
        """Called before an iteration; a resumed run may begin between first and stop."""
        if self._plan_unlogged:
            self._plan_unlogged = False
            self._log_event(self._describe_plan(iteration))
        is_selected = self._first_iteration <= iteration < self._stop_iteration
        if not self._enabled or self._profiler is not None or not is_selected:
            return
        self._synchronize()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
        profiler = profile(activities=activities, **self._options)
        profiler.start()
        self._profiler, self._first_iteration, self._last_iteration = profiler, iteration, iteration

    def end(self, iteration: int) -> None:
        """Called after an iteration."""
        self._last_iteration = iteration
        if iteration >= self._stop_iteration - 1:
            self._stop_and_export()

    def _describe_plan(self, iteration: int) -> str:
        """Describes what a run at this iteration will trace."""
        first, last = max(self._first_iteration, iteration), self._stop_iteration - 1
        if iteration > last:
            return f"nothing will be traced: the run is at iteration {iteration}, and --profile-step-end is {self._stop_iteration}"
        if first > last:
            return f"nothing will be traced: --profile-step-start is {first}, and the run ends with iteration {last}"
        which = _iteration_range_text(first, last)
        whose = f"rank {self._ranks}" if "," not in self._ranks else f"ranks {self._ranks}"
        return f"--profile: will trace {which} on {whose} into {self._folder}"

    def _stop_and_export(self) -> None:
        running, self._profiler = self._profiler, None
        if running is None:
            return
        self._enabled = False
        try:
            self._synchronize()
        finally:  # a profiler that is left running spoils every later one of this process
            running.stop()
        path = self._folder / f"iterations-{self._first_iteration}-{self._last_iteration}-rank-{self._rank}.json.gz"
        try:
            with tempfile.TemporaryDirectory(dir=self._folder) as tmp_folder:
                tmp_path = Path(tmp_folder) / path.name
                running.export_chrome_trace(str(tmp_path))
                tmp_path.replace(path)
        except OSError as error:
            # Only rank 0 has writers for events; errors of other ranks are logged.
            warn = self._log_event if self._rank == 0 else _log.error
            warn(f"WARNING: the trace could not be written to {path}: {error.strerror or error}")
        else:
            self._log_event(
                f"wrote the trace of {_iteration_range_text(self._first_iteration, self._last_iteration)} to {path}"
            )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _iteration_range_text(first: int, last: int) -> str:
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def _make_profile_dir(folder: Path, *, given: bool) -> None:
    """A folder that the user names may be a link; inside a run's own folder, a link may have come from others."""
    try:
        folder.mkdir(parents=True, exist_ok=True) if given else make_folder(folder)
    except OSError as error:
        rule = f"cannot be made: {error.strerror or error}"
        raise ConfigError(
            [Problem("--profile-dir", str(folder), rule, "Give a folder that can be written.")]
        ) from error
