"""Opens checkpoints one after the other, runs tasks on each, and reports: table, JSON, Megatron's lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from petatron.base.version import __version__
from petatron.cli.plot import write_result
from petatron.cli.subcommands.stderr_progress import StderrProgress, progress_bar
from petatron.evaluate.comparison_table import result_table
from petatron.evaluate.eval_task import ContextLimits, TaskResult
from petatron.evaluate.score_sequences import max_scored_tokens
from petatron.evaluate.task_list import LAMBADA, WIKITEXT103, TaskSettings, build_tasks
from petatron.mesh.mesh import ParallelMesh
from petatron.pretrained.from_pretrained import from_pretrained
from petatron.serve.open_engine import ModelSettings


@dataclass(frozen=True, slots=True)
class CheckpointResults:
    """One checkpoint's results by the label of the task."""

    checkpoint: str
    weights: str | None
    tokenizer: str
    results: Mapping[str, TaskResult]


def evaluate_checkpoints(
    models: Sequence[ModelSettings],
    flags: Sequence[str],
    tasks: Sequence[TaskSettings],
    *,
    batch_tokens: int | None,
    shown: bool,
) -> list[CheckpointResults]:
    """Runs the tasks on every checkpoint; every rank calls it. `shown` is whether this rank reports progress."""
    tokenizers = [settings.required_tokenizer() for settings in models]
    evaluated: list[CheckpointResults] = []
    mesh: ParallelMesh | None = None
    for settings, tokenizer in zip(models, tokenizers, strict=True):
        checkpoint, seq_length = settings.checkpoint, settings.loaded.config.model.seq_length
        model = from_pretrained(settings.folder, mesh, flags=flags, weights=settings.weights)
        mesh, longest = model.mesh, max_scored_tokens(model)
        built = build_tasks(tasks, tokenizer, ContextLimits(longest, min(seq_length, longest - 1)))
        results: dict[str, TaskResult] = {}
        for label, task in zip((settings.label for settings in tasks), built, strict=True):
            with _progress(f"{checkpoint} {label}" if shown else None) as on_progress:
                results[label] = task.run(model, batch_tokens=batch_tokens, on_progress=on_progress)
        evaluated.append(CheckpointResults(checkpoint, settings.weights, tokenizer.name, results))
        del model  # before the next one is built
    return evaluated


def report_results(
    evaluated: Sequence[CheckpointResults], tasks: Sequence[TaskSettings], *, out: Path | None, megatron_lines: bool
) -> None:
    """Prints the table, and writes the JSON file."""
    labelled = [item for checkpoint in evaluated for item in checkpoint.results.items()]
    for note in sorted({f"note: {label}: {note}" for label, result in labelled for note in result.notes}):
        print(note, file=sys.stderr)
    if megatron_lines:
        for checkpoint in evaluated:
            print("\n".join(megatron_line(settings, checkpoint.results[settings.label]) for settings in tasks))
    else:
        print(result_table({checkpoint.checkpoint: checkpoint.results for checkpoint in evaluated}))
    if out is not None:
        content = {"petatron": __version__, "checkpoints": [_as_json(checkpoint, tasks) for checkpoint in evaluated]}
        write_result(out, json.dumps(content, indent=1) + "\n")


def megatron_line(settings: TaskSettings, result: TaskResult) -> str:
    """Returns the line that Megatron-LM prints at the end of a task."""
    values = result.values()
    if settings.task == WIKITEXT103:
        fields = {
            "avg loss": f"{values['loss']:.4E}",
            "ppl": f"{values['perplexity']:.4E}",
            "adjusted ppl": f"{values['adjusted_perplexity']:.4E}",
            "token ratio": f"{values['token_ratio']}",
        }
    elif settings.task == LAMBADA:
        fields = {
            "number correct": f"{result.counts['correct']:.4E}",
            "total examples": f"{result.counts['examples']:.4E}",
            "avg accuracy": f"{values['accuracy']:.4E}",
        }
    else:
        fields = {name: f"{value:.4E}" for name, value in values.items()}
    line = f" validation results on {settings.task.upper()} | "
    line += "".join(f"{name}: {value} | " for name, value in fields.items())
    frame = "-" * (len(line) + 1)
    return f"{frame}\n{line}\n{frame}"


def _as_json(checkpoint: CheckpointResults, tasks: Sequence[TaskSettings]) -> dict[str, object]:
    results: dict[str, dict[str, object]] = {}
    for settings in tasks:
        values = {name: value for name, value in asdict(settings).items() if name not in ("name", "every")}
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        results[settings.label] = plain | checkpoint.results[settings.label].as_json()
    weights = {} if checkpoint.weights is None else {"weights": checkpoint.weights}
    return {"checkpoint": checkpoint.checkpoint, **weights, "tokenizer": checkpoint.tokenizer, "results": results}


@contextmanager
def _progress(title: str | None) -> Iterator[Callable[[int, int], None] | None]:
    """Shows a bar on a terminal when rich is installed, else a line every half minute; nothing without a title."""
    if title is None:
        yield None
        return
    started_s = time.monotonic()

    def describe(done: int, total: int) -> str:
        return f"{title}: {done:,} of {total:,} tokens, {done / (time.monotonic() - started_s):,.0f} tokens/s"

    with progress_bar(title, transient=True) as update, StderrProgress(describe, plain_s=30.0) as line:
        yield line if update is None else lambda done, total: update(completed=done, total=total)
