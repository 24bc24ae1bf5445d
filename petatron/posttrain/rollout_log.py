"""Writes every answer with its reward to the run folder, a file for each round of drawing, and removes the oldest beyond a bound."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from petatron.base.errors import TrainError
from petatron.base.safe_files import write_atomic
from petatron.posttrain.rollout import Rollout

ROLLOUTS_FOLDER = "rollouts"
_GIGABYTE = 1 << 30


class RolloutLog:
    """`rollouts/iteration-000012.jsonl`: an answer in each line, with the prompt's text."""

    def __init__(self, folder: Path, *, gigabytes: float) -> None:
        self._folder, self._max_bytes = folder / ROLLOUTS_FOLDER, int(gigabytes * _GIGABYTE)

    def write(self, iteration: int, rollouts: Sequence[Rollout], prompts: Sequence[str]) -> None:
        """Writes the answers that an iteration is the first to learn from; replaces those of a run that was killed before it was saved."""
        if not self._max_bytes:
            return
        lines = [
            json.dumps(_readable(rollout, prompt), ensure_ascii=False) + "\n"
            for rollout, prompt in zip(rollouts, prompts)
        ]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._folder / f"iteration-{iteration:06d}.jsonl", "".join(lines))
            self._remove_oldest()
        except OSError as error:
            raise TrainError(
                f"Cannot write answers to {self._folder}: {error.strerror}. Make room, choose another --log-dir, or write none with "
                "--rollout-log-gigabytes 0."
            ) from error

    def _remove_oldest(self) -> None:
        files = sorted(self._folder.glob("iteration-*.jsonl"))
        sizes = [file.stat().st_size for file in files]
        excess = sum(sizes) - self._max_bytes
        for file, size in zip(files[:-1], sizes):
            if excess <= 0:
                return
            file.unlink(missing_ok=True)
            excess -= size


def _readable(rollout: Rollout, prompt: str) -> Mapping[str, Any]:
    """Returns what a reader looks for first, then the rest."""
    values = rollout.to_json()
    first = {"reward": values.pop("reward"), "prompt_text": prompt, "text": values.pop("text")}
    return {**first, **values}
