"""Hooks about memory: Python's garbage, unused memory of the device, and the history of allocations."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from petatron.base.log import get_logger
from petatron.train.hooks.step_hook import StepHook
from petatron.train.report.log_records import MetricRecord, StepMetrics, event_record

_log = get_logger(__name__)
MAX_HISTORY_ENTRIES = 100_000


class GarbageCollection(StepHook):
    """`--manual-gc`: all ranks collect garbage at once, every `interval` iterations; one that collects alone makes the others wait."""

    def __init__(self, interval: int, *, collects_around_evaluation: bool) -> None:
        self._interval, self._around_evaluation = interval, collects_around_evaluation
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def after_step(self, metrics: StepMetrics) -> None:
        if self._interval and metrics.iteration % self._interval == 0:
            gc.collect()

    def around_evaluation(self) -> None:
        if self._around_evaluation:
            gc.collect()

    def close(self) -> None:
        if self._was_enabled:
            gc.enable()


class UnusedMemory(StepHook):
    """`--empty-unused-memory-level`: returns cached blocks to the device before the update, and with level 2 also after it."""

    def __init__(self, level: int) -> None:
        self._level = level

    def before_update(self, iteration: int) -> None:
        torch.cuda.empty_cache()

    def after_step(self, metrics: StepMetrics) -> None:
        if self._level == 2:
            torch.cuda.empty_cache()


class MemoryHistory(StepHook):
    """`--record-memory-history`: PyTorch's record of allocations, written at every log point."""

    def __init__(self, path: Path) -> None:
        self._path = path
        torch.cuda.memory._record_memory_history(max_entries=MAX_HISTORY_ENTRIES)

    def records(self, iteration: int) -> Iterator[MetricRecord]:
        try:
            torch.cuda.memory._dump_snapshot(str(self._path))
        except OSError as error:  # a picture is no reason to lose a run
            _log.warning("no memory snapshot: %s", error)
            return
        yield event_record(f"wrote the memory history to {self._path}", iteration=iteration, detail=True)

    def close(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)
