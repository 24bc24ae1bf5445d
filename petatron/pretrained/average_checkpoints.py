"""Averages the weights of a run's last checkpoints (`petatron checkpoint convert --average-last`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files import step_list
from petatron.checkpoint.tensor_chunk import ROUTER_PREFIX, Chunk
from petatron.pretrained.model_reader import ModelReader


def last_steps(folder: Path, count: int, *, before: int | None = None) -> list[int]:
    """Returns the last steps of a folder of checkpoints, up to step `before`; raises if there are fewer."""
    steps = sorted(step for step in step_list.list_steps(folder) if before is None or step <= before)
    if len(steps) < count or (before is not None and before not in steps):
        have = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(
            f"{folder} has not {count} steps to average{f' up to {before}' if before is not None else ''}; it has: {have}. Give the "
            "folder that --save wrote to, and a smaller --average-last; --save-interval and --save-total-limit decide which steps are kept."
        )
    return steps[-count:]


def average_checkpoints(sources: Sequence[ModelReader]) -> ModelReader:
    """Returns a reader of the mean of several models' weights (stochastic weight averaging, Izmailov et al. 2018).

    Weights are read on demand, from master weights if there are any, and averaged in float64; this needs two boxes of memory besides the
    filled one. Settings, expert biases and other files are those of the last model.
    """
    last = sources[-1]
    for source in sources:
        if source.spec != last.spec or source.shapes != last.shapes:
            raise CheckpointError(
                f"{source.path} and {last.path} are of different models, which have no mean. Average steps of one run."
            )

    def fill(chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.key.startswith(ROUTER_PREFIX):
                last.fill([chunk])
                continue
            values = torch.empty(chunk.tensor.shape, dtype=torch.float64)
            total = torch.zeros_like(values)
            for source in sources:
                source.fill([replace(chunk, tensor=values)])
                total += values
            chunk.tensor.copy_(total.div_(len(sources)))

    return replace(last, fill=fill, open_training=None)  # no optimizer state belongs to the mean
