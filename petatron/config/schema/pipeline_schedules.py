"""The pipeline schedules and their properties; `schedule/` orders their actions."""

from __future__ import annotations

from typing import Literal, get_args

PipelineScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
SCHEDULES: tuple[PipelineScheduleName, ...] = get_args(PipelineScheduleName)
ONE_STAGE_PER_RANK = ("gpipe", "1f1b", "zb-h1")
SPLIT_BACKWARD_SCHEDULES = ("zb-h1", "zb-v")
"""Schedules that compute weight gradients separately from, and later than, input gradients (zero bubble)."""
OVERLAP_SCHEDULES = ("1f1b", "interleaved")
"""Schedules whose steady state alternates forwards and backwards, so that two of them can be combined."""
