"""The loss curves that earlier starts of a run have left in `metrics.jsonl`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from petatron.history.metrics_file import read_metrics


@dataclass(frozen=True, slots=True)
class RunHistory:
    """Points (iteration, loss) by iteration; test losses are none of them."""

    train: list[tuple[int, float]] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)


def read_history(path: Path, *, up_to_iteration: int, every_point: bool = True) -> RunHistory:
    """Reads the curves up to an iteration; they are empty if there is no such file, or none that can be read.

    every_point: without, the curve of validation is complete and that of training is not, which is much faster.

    >>> read_history(Path("/none/metrics.jsonl"), up_to_iteration=5)
    RunHistory(train=[], valid=[])
    """
    try:
        metrics = read_metrics(path, every_point=every_point)
    except OSError:
        return RunHistory()
    train = zip(metrics.columns["iteration"].tolist(), metrics.columns["lm_loss"].tolist())
    valid = ((evaluation.iteration, evaluation.loss) for evaluation in metrics.split_evaluations("valid"))
    return RunHistory(
        *(
            [(int(at), loss) for at, loss in points if at <= up_to_iteration and math.isfinite(loss)]
            for points in (train, valid)
        )
    )
