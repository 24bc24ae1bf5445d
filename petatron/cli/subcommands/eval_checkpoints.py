"""Opens checkpoints one after the other, runs tasks on each, and reports: table, JSON, Megatron's lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from petatron.base.terminal_escape import raw_stream
from petatron.base.version import __version__
from petatron.cli.plot import write_result
from petatron.evaluate.comparison_table import result_table
from petatron.evaluate.score import max_scored_tokens
from petatron.evaluate.task import ContextLimits, TaskResult
from petatron.evaluate.task_list import LAMBADA, WIKITEXT103, TaskSettings, build_tasks
from petatron.mesh.mesh import ParallelMesh
from petatron.pretrained.open_model import from_pretrained
from petatron.serve.open_engine import ModelSettings

_LINE_INTERVAL_S = 30.0


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
    tokenizers = [each.required_tokenizer() for each in models]
    found: list[CheckpointResults] = []
    mesh: ParallelMesh | None = None
    for settings, tokenizer in zip(models, tokenizers, strict=True):
        checkpoint, seq_length = settings.checkpoint, settings.loaded.config.model.seq_length
        model = from_pretrained(settings.folder, mesh, flags=flags, weights=settings.weights)
        mesh, longest = model.mesh, max_scored_tokens(model)
        limits = ContextLimits(longest, min(seq_length, longest - 1))
        built = build_tasks(tasks, tokenizer, limits)
        results: dict[str, TaskResult] = {}
        for each, task in zip(tasks, built, strict=True):
            with _progress(f"{checkpoint} {each.label}" if shown else None) as on_progress:
                results[each.label] = task.run(model, batch_tokens=batch_tokens, on_progress=on_progress)
        found.append(CheckpointResults(checkpoint, settings.weights, tokenizer.name, results))
        del model  # before the next one is built
    return found


def report_results(
    found: Sequence[CheckpointResults], tasks: Sequence[TaskSettings], *, out: Path | None, megatron_lines: bool
) -> None:
    """Prints the table, and writes the JSON file."""
    notes = {
        f"note: {label}: {note}" for one in found for label, result in one.results.items() for note in result.notes
    }
    for note in sorted(notes):
        print(note, file=sys.stderr)
    if megatron_lines:
        for one in found:
            print("\n".join(megatron_line(settings, one.results[settings.label]) for settings in tasks))
    else:
        print(result_table({one.checkpoint: one.results for one in found}))
    if out is not None:
        content = {"petatron": __version__, "checkpoints": [_as_json(one, tasks) for one in found]}
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


def _as_json(one: CheckpointResults, tasks: Sequence[TaskSettings]) -> dict[str, object]:
    results = {
        settings.label: {
            "task": settings.task,
            "data": str(settings.data),
            "limit": settings.limit,
            "stride": settings.stride,
            "strict": settings.strict,
            "bos": settings.bos,
            "num_fewshot": settings.num_fewshot,
            "fewshot_data": None if settings.fewshot_data is None else str(settings.fewshot_data),
            "fewshot_seed": settings.fewshot_seed,
            **one.results[settings.label].as_json(),
        }
        for settings in tasks
    }
    weights = {} if one.weights is None else {"weights": one.weights}
    return {"checkpoint": one.checkpoint, **weights, "tokenizer": one.tokenizer, "results": results}


@contextmanager
def _progress(title: str | None) -> Iterator[Callable[[int, int], None] | None]:
    """Shows a bar on a terminal when rich is installed, else a line every half minute; nothing without a title."""
    if title is None:
        yield None
        return
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
        except ImportError:
            pass
        else:
            columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            with Progress(*columns, console=Console(file=raw_stream(sys.stderr)), transient=True) as bar:
                task = bar.add_task(title)
                yield lambda done, total: bar.update(task, completed=done, total=total)
            return
    started = last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LINE_INTERVAL_S:
            last = now
            print(f"{title}: {done:,} of {total:,} tokens, {done / (now - started):,.0f} tokens/s", file=sys.stderr)

    yield line
