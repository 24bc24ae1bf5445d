"""A file of prompts: JSON lines with a prompt (`prompt`, `text` or `messages`), perhaps an `id`, and options of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from petatron.base.errors import ConfigError, DataError
from petatron.data.inputs.line_blocks import read_line_blocks
from petatron.data.prompt.prompt_encoder import PromptEncoder, check_messages
from petatron.infer.batch.request_options import RequestOptions
from petatron.infer.check_request import ServedModel, check_request
from petatron.infer.constrained_decoding import ConstraintCompiler
from petatron.infer.sampling_params import MAX_SEED, SamplingParams

_PROMPT_FIELDS = ("prompt", "text", "messages")
_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line: its number, counted from 1, its own name, and one request for each answer."""

    number: int
    id: str | int | None
    prompt_ids: list[int]
    samples: tuple[SamplingParams, ...]


class PromptsFile:
    """Read twice: `check` reports every line that cannot be answered before anything runs, and `read` yields the requests.

    Line k draws with seed + k - 1, unless it names its own seed: equal prompts get different answers, and each can be repeated alone.
    """

    def __init__(self, path: Path, encoder: PromptEncoder, options: RequestOptions, model: ServedModel) -> None:
        self.path = path
        self._encoder = encoder
        self._options = options
        self._model = model
        self._constraints = ConstraintCompiler(model.tokenizer, vocab_size=model.vocab_size)

    def check(self) -> int:
        """Returns the number of prompts; `DataError` that names every wrong line."""
        problems: list[str] = []
        count = 0
        for number, content in self._lines():
            count += 1
            try:
                self._parse(number, content)
            except DataError as error:
                problems.append(f"{self.path}:{number}: {error}")
        if problems:
            more = f"\n... and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
            head = f"{len(problems)} of {count} prompts cannot be answered:\n" if len(problems) > 1 else ""
            raise DataError(head + "\n".join(problems[:_MAX_SHOWN]) + more)
        if count == 0:
            raise DataError(f'{self.path} has no prompts. Give one JSON object a line, such as {{"prompt": "Once"}}.')
        return count

    def read(self, *, done: frozenset[int] = frozenset()) -> Iterator[PromptLine]:
        """Yields the prompts, but those of lines that are done."""
        for number, content in self._lines():
            if number not in done:
                yield self._parse(number, content)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        for block in read_line_blocks(self.path):
            for offset, content in enumerate(block.data.split(b"\n")):
                if content.strip():
                    yield block.first_line + offset, content

    def _parse(self, number: int, content: bytes) -> PromptLine:
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"it is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise DataError('it is not an object such as {"prompt": "Once"}.')
        name = values.get("id")
        if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
            raise DataError("id is neither a text nor a whole number.")
        try:
            options = self._options.with_options(values)
        except ConfigError as error:
            raise DataError(" ".join(str(problem) for problem in error.problems)) from error
        if values.get("seed") is None:
            seed = (options.params.seed + number - 1) & MAX_SEED
            options = replace(options, params=replace(options.params, seed=seed))
        prompt_ids, options = self._encode(values, options)
        samples = options.samples(prompt_ids, max_length=self._model.max_length)
        check_request(prompt_ids, samples[0], self._model)
        if (constraint := samples[0].constraint) is not None:
            self._constraints.check(constraint)
        return PromptLine(number, name, prompt_ids, samples)

    def _encode(self, values: dict[str, Any], options: RequestOptions) -> tuple[list[int], RequestOptions]:
        given = [field for field in _PROMPT_FIELDS if field in values]
        if len(given) != 1:
            named = " and ".join(given) or "none of them"
            raise DataError(f"a prompt is one of {', '.join(_PROMPT_FIELDS)}; it has {named}.")
        value = values[given[0]]
        if given[0] == "messages":
            stops = (*options.params.stop_strings, *self._encoder.stop_strings)
            changed = replace(options, params=replace(options.params, stop_strings=stops))
            return self._encoder.encode_messages(check_messages(value)), changed
        if not isinstance(value, str):
            raise DataError(f"{given[0]} is not a text.")
        return self._encoder.encode(value), options
