"""A log record and a summary with sensible values, to be varied by each test."""

from __future__ import annotations

from typing import Any

from petatron.train.report.log_records import LogRecord


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


SUMMARY: dict[str, Any] = {
    "kind": "summary",
    "time": 1_787_392_800.0,
    "iteration": 150,
    "train_iters": 200,
    "outcome": "received SIGINT",
    "steps": 50,
    "tokens": 51_200,
    "consumed_tokens": 153_600,
    "duration_s": 3725.4,
    "training_s": 3600.0,
    "evaluation_s": 61.0,
    "saving_s": 4.25,
    "sampling_s": 0.0,
    "loss_name": "loss",
    "validation_set": None,
    "first_loss": 5.5,
    "last_loss": 4.25,
    "best_validation_loss": 4.5,
    "best_validation_iteration": 100,
    "test_loss": None,
    "tokens_per_second": 14_222.2,
    "mfu": 0.405,
    "checkpoint": "runs/a/step-00000150",
    "log_dir": "runs/a",
    "next_commands": [{"command": "petatron train runs/a/config.yaml", "purpose": "go on"}],
}
