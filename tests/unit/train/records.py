"""A log record with sensible values, to be varied by each test."""

from __future__ import annotations

from typing import Any

from petatron.train.report.metrics import LogRecord


def log_record(**changes: Any) -> LogRecord:
    values: dict[str, Any] = {
        "time": 1_787_392_800.123456,
        "iteration": 100,
        "train_iters": 1000,
        "consumed_samples": 25_600,
        "consumed_tokens": 52_428_800,
        "elapsed_ms_per_iteration": 512.34,
        "tokens_per_second": 1_023_000.0,
        "tokens_per_second_per_device": 127_875.0,
        "tflops_per_device": 401.24,
        "mfu": 0.405,
        "lr": 1.5e-4,
        "global_batch_size": 256,
        "lm_loss": 6.123456,
        "loss_scale": 1.0,
        "grad_norm": 1.2344,
        "params_norm": None,
        "num_zeros": None,
        "skipped": 0,
        "nan": 0,
        "memory_bytes": 61_230_000_000,
        "eta_s": 461.0,
    }
    return LogRecord(**(values | changes))
