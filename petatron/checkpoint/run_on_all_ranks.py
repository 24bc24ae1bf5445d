"""Runs an action on every rank, so that all succeed or all fail.

The action runs locally, then one small all-reduce tells whether every rank succeeded; if any failed, all raise the same
CheckpointError, so a full disk on one machine is an error message and never a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import torch

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.step_list import DamagedCheckpointError
from petatron.mesh.collectives import recursive_doubling_max
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.mesh import Axis

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class LocalResult(Generic[Result]):
    """The outcome of an action on one rank: its result, or why it failed and whether a file is damaged."""

    result: Result | None
    error_text: str | None = None
    damaged: bool = False
    cause: Exception | None = None


class AllRanks:
    """All ranks of an axis. `default_failure` says what failed where an action does not."""

    def __init__(self, axis: Axis, *, default_failure: str) -> None:
        self._axis, self._default_failure = axis, default_failure

    def run(
        self, action: Callable[[], Result], failed_action: str = "", fix: str = "", axis: Axis | None = None
    ) -> Result:
        """Runs an action on every rank and returns this rank's result; one rank's failure is a CheckpointError on all."""
        attempt = self.run_locally(action, failed_action, fix)
        self.max_or_raise(attempt, [], axis)
        return attempt.result  # pyright: ignore[reportReturnType]

    def run_locally(self, action: Callable[[], Result], failed_action: str = "", fix: str = "") -> LocalResult[Result]:
        """Runs an action on this rank alone, without raising."""
        try:
            return LocalResult(action())
        except CheckpointError as error:
            return LocalResult(None, str(error), isinstance(error, DamagedCheckpointError), error)
        except Exception as error:
            failed_action = failed_action or self._default_failure
            text = ". ".join(filter(None, [f"{failed_action}: {type(error).__name__}: {error}", fix]))
            return LocalResult(None, text, False, error)

    def max_or_raise(
        self, local_result: LocalResult[Any], numbers: Sequence[int], axis: Axis | None = None
    ) -> list[int]:
        """Max-reduces each number over all ranks in one small exchange, or raises some rank's failure on every rank."""
        axis = axis or self._axis
        flags = torch.tensor([int(local_result.error_text is not None), *numbers])
        failed, *largest = recursive_doubling_max(flags, axis).tolist()
        if failed:
            self.raise_failure(local_result, axis)
        return largest

    def raise_failure(self, local_result: LocalResult[Any], axis: Axis) -> NoReturn:
        """Exchanges error texts, only now that some rank has failed, and raises."""
        outcomes = all_gather_json([local_result.error_text, local_result.damaged], axis)
        ranks: dict[str, list[int]] = {}  # each failure once, with the ranks it happened on
        for rank, (text, _) in enumerate(outcomes):
            if text is not None:
                ranks.setdefault(text, []).append(rank)
        damaged = all(damaged for text, damaged in outcomes if text is not None)
        kind = DamagedCheckpointError if damaged else CheckpointError
        lines = [f"[rank {', '.join(map(str, where))}] {text}" for text, where in ranks.items()]
        same_everywhere = [text for text, where in ranks.items() if len(where) == axis.size]
        raise kind("\n".join(same_everywhere or lines)) from local_result.cause
