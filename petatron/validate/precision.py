"""Rules about the number format of a run, and its loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.run import RawRunConfig


def check_precision(config: RawRunConfig) -> Iterator[Problem]:
    precision = config.precision
    chosen = [f"--{name}" for name in ("fp16", "bf16", "fp64") if getattr(precision, name)]
    if len(chosen) > 1:
        rule = f"cannot be combined with {' or '.join(chosen[1:])}"
        yield Problem(chosen[0], "", rule, "Keep one; none of them means fp32.")
    if precision.initial_loss_scale < precision.min_loss_scale:
        rule = f"is below --min-loss-scale {precision.min_loss_scale:g}"
        yield Problem("--initial-loss-scale", f"{precision.initial_loss_scale:g}", rule, "Start higher.")
