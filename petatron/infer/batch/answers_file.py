"""Answers a file of prompts into a file that grows line by line and can be continued: one JSON line for each prompt, in the order in which
they end, and in the order of the prompts once all have.

Beside it, `NAME.settings.json` says what decides the answers. A run that was killed goes on where it stopped, with the same settings only;
a line that was cut off is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.base.safe_files import open_atomic, reopen_file, write_atomic
from petatron.base.untrusted_files import read_limited_json
from petatron.infer.batch.prompts_file import PromptLine
from petatron.infer.engine import Engine
from petatron.infer.engine_outputs import Completion

_WAITING_SHARE = 2
"""Requests that are submitted, for each that can run: enough to keep the engine full, whatever the length of the file."""
_MAX_SETTINGS_BYTES = 1 << 24


class AnswersFile:
    """Opened to append; `done` has the numbers of the lines that are answered."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Continues a file of the same settings, or begins one; `DataError` for a file of others."""
        self.path = path
        self._settings_path = path.with_name(f"{path.name}.settings.json")
        wanted = json.loads(json.dumps(settings))
        self.done: frozenset[int] = frozenset()
        try:
            if path.exists() and path.stat().st_size > 0:
                self._check_settings(wanted)
            else:
                write_atomic(self._settings_path, json.dumps(wanted, indent=1) + "\n")
            self._file = os.fdopen(reopen_file(path, os.O_RDWR), "r+b")
            self._read_done()
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror or error}. Choose another --out.") from error

    def add(self, line: PromptLine, answers: Sequence[Completion]) -> None:
        """Writes the answers to one prompt."""
        record: dict[str, Any] = {"line": line.number}
        if line.id is not None:
            record["id"] = line.id
        record["prompt_tokens"] = len(line.prompt_ids)
        texts = [answer_record(answer) for answer in answers]
        record |= texts[0] if len(texts) == 1 else {"answers": texts}
        self._file.write(json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n")
        self._file.flush()

    def sort(self) -> None:
        """Puts the answers in the order of their lines: another file takes the place of this one. Nothing may be added after it."""
        self._file.seek(0)
        begin, places = 0, []
        for content in self._file:
            number = _answered_line(content)
            assert number is not None, "every whole line is an answer"
            places.append((number, begin, len(content)))
            begin += len(content)
        if places == sorted(places):
            return
        with open_atomic(self.path) as sorted_file:
            for _, start, size in sorted(places):
                self._file.seek(start)
                sorted_file.write(self._file.read(size))

    def close(self) -> None:
        self._file.close()

    def _read_done(self) -> None:
        """Reads which lines are answered, and cuts off what comes after the last whole one."""
        done: set[int] = set()
        end = 0
        for content in self._file:
            number = _answered_line(content)
            if number is None and content.endswith(b"\n"):
                raise DataError(f"{self.path} has a line that is no answer, after byte {end}. Choose another --out.")
            if number is None:
                break
            done.add(number)
            end += len(content)
        self._file.seek(end)
        self._file.truncate()
        self.done = frozenset(done)

    def _check_settings(self, wanted: dict[str, Any]) -> None:
        if not self._settings_path.exists():
            raise DataError(
                f"{self.path} exists, and is no file of answers: {self._settings_path.name} is not beside it. Choose another --out."
            )
        try:
            before = read_limited_json(self._settings_path, _MAX_SETTINGS_BYTES)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self._settings_path} is not JSON: {error}. Remove it and {self.path}.") from error
        before = before if isinstance(before, dict) else {}
        changed = [
            f"{name}: {_shown(before.get(name))} then, {_shown(wanted.get(name))} now"
            for name in sorted({*before, *wanted})
            if before.get(name) != wanted.get(name)
        ]
        if changed:
            raise DataError(
                f"{self.path} was begun with other settings ({'; '.join(changed)}). Use the same to go on, or choose another --out."
            )


def answer_record(answer: Completion) -> dict[str, Any]:
    """Returns an answer as JSON."""
    counts = {"finish_reason": answer.finish_reason, "new_tokens": len(answer.ids)}
    record: dict[str, Any] = {"text": answer.text, **counts}
    if answer.logprobs:
        record["logprobs"] = [entry._asdict() for entry in answer.logprobs]
    return record


def _answered_line(content: bytes) -> int | None:
    if not content.endswith(b"\n"):
        return None
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        return None
    number = record.get("line") if isinstance(record, dict) else None
    return number if type(number) is int else None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
