"""Times `petatron data preprocess` and the loop of Megatron's tool as their users start them: new processes, from a command to files."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError

LOOP = "petatron.bench.preprocessing.megatron_loop"


@dataclass(frozen=True, slots=True)
class PreprocessCase:
    """What both tokenize, with how many processes."""

    source: Path
    tokenizer_file: Path
    workers: int
    folder: Path


@dataclass(slots=True)
class AgainstMegatron:
    """Of every round: seconds from start to end, and tokens per second once tokens arrive, of Megatron's loop and of ours."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"megatron": [], "petatron": []})
    steady: dict[str, list[float]] = field(default_factory=lambda: {"megatron": [], "petatron": []})

    @property
    def wall_ratio(self) -> float:
        """How many times as long Megatron's loop takes: the median of the rounds."""
        return _median_ratio(self.seconds["megatron"], self.seconds["petatron"])

    @property
    def steady_ratio(self) -> float:
        """How many times as many tokens per second ours makes."""
        return _median_ratio(self.steady["petatron"], self.steady["megatron"])

    def measure_round(self, case: PreprocessCase) -> None:
        """Runs both once; `DataError` if their files differ. Our rate includes the start of the processes, Megatron's does not."""
        theirs, ours = case.folder / "megatron", case.folder / "petatron"
        sources = [str(case.source), str(case.tokenizer_file)]
        seconds, said = _run("-m", LOOP, *sources, str(theirs), str(case.workers))
        self.seconds["megatron"].append(seconds)
        self.steady["megatron"].append(json.loads(said)["steady_tokens_per_s"])
        flags = ["--input", sources[0], "--tokenizer-model", sources[1], "--output-prefix", str(ours), "--append-eod"]
        report = case.folder / "report.json"
        options = ["--overwrite", "--workers", str(case.workers), "--json", str(report)]
        seconds, _ = _run("-m", "petatron", "data", "preprocess", *flags, *options)
        self.seconds["petatron"].append(seconds)
        summary: dict[str, Any] = json.loads(report.read_text())
        self.steady["petatron"].append(summary["tokens"] / summary["seconds"])
        for end in ("bin", "idx"):
            if Path(f"{theirs}.{end}").read_bytes() != Path(f"{ours}_text_document.{end}").read_bytes():
                raise DataError(f"Megatron's loop and petatron wrote different .{end} files of {case.source}.")


def _median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(first / second for first, second in zip(numerators, denominators, strict=True))


def _run(*arguments: str) -> tuple[float, str]:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError(
            f"{' '.join(arguments[:4])} ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    return time.perf_counter() - started, done.stdout
