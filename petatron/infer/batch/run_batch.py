"""Answers a file of prompts: keeps the engine full, and writes each answer as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from petatron.infer.batch.answers_file import AnswersFile
from petatron.infer.batch.prompts_file import PromptLine
from petatron.infer.engine import Engine

_WAITING_SHARE = 2
"""Requests that are submitted, for each that can run: enough to keep the engine full, whatever the length of the file."""


@dataclass(slots=True)
class BatchProgress:
    """Counts of this run: answered prompts, and new tokens."""

    prompts: int = 0
    tokens: int = 0


def run_batch(
    engine: Engine,
    lines: Iterator[PromptLine],
    answers: AnswersFile,
    progress: BatchProgress,
    *,
    on_progress: Callable[[BatchProgress], None] = lambda progress: None,
) -> None:
    """Answers all lines and counts them in `progress`; at rank 0."""
    most = _WAITING_SHARE * engine.options.max_sequences * engine.num_replicas
    open_lines: dict[int, tuple[PromptLine, list[int]]] = {}  # by each of its requests
    unfinished: dict[int, int] = {}  # by the number of the line
    following = next(lines, None)
    while following is not None or open_lines:
        while following is not None and len(open_lines) < most:
            requests = [engine.submit(following.prompt_ids, params) for params in following.samples]
            open_lines |= dict.fromkeys(requests, (following, requests))
            unfinished[following.number] = len(requests)
            following = next(lines, None)
        for event in engine.step():
            progress.tokens += event.token is not None
            if event.finish_reason is None:
                continue
            line, requests = open_lines[event.request]
            unfinished[line.number] -= 1
            if unfinished[line.number] == 0:
                answers.add(line, [engine.take(request) for request in requests])
                del unfinished[line.number]
                for request in requests:
                    del open_lines[request]
                progress.prompts += 1
        on_progress(progress)
