"""Reads prompts: a JSON object in each line, with `prompt`, a text or a list of messages, and whatever rewards read.

    {"prompt": "12 + 7 =", "answer": "19"}
    {"prompt": [{"role": "user", "content": "What is 12 + 7?"}], "answer": "19"}

Problems name the file and the line, and the first ones are reported together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.index_cache import fingerprint
from petatron.data.inputs.json_record import parse_record, repeated_keys
from petatron.data.inputs.line_blocks import numbered_lines
from petatron.data.prompt.prompt_encoder import PromptEncoder, check_messages

MAX_LINE_BYTES = 1 << 24
_MAX_PROBLEMS = 5
PROMPT_KEY = "prompt"


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids: as the model reads it. record: the whole line, which rewards read. text: as a reader sees it. messages: None of a plain text."""

    ids: tuple[int, ...]
    record: Mapping[str, Any]
    text: str
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts in the order of their files."""

    prompts: tuple[Prompt, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.prompts)


def read_prompt_files(
    paths: Sequence[str],
    encoder: PromptEncoder,
    *,
    chat: bool | None,
    max_ids: int,
    flag: str = "--rollout-prompts",
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptSet:
    """Returns the prompts of some files; raises `DataError` with the first problems.

    chat: whether texts become a user's message; None: they do not. max_ids: the longest prompt that leaves room for an answer.
    tools: those that the template tells the model of.
    """
    prompts: list[Prompt] = []
    problems: list[str] = []
    for name in paths:
        path = Path(name)
        with reading_untrusted(path, data_file_error):
            for number, line in numbered_lines(path, max_line_bytes=MAX_LINE_BYTES):
                try:
                    prompts.append(_read_prompt(parse_record(line), encoder, tools, chat=chat, max_ids=max_ids))
                except (ValueError, RecursionError, DataError) as error:
                    problems.append(f"{flag} {path}, line {number}: {error}")
                if len(problems) >= _MAX_PROBLEMS:
                    break
    if problems:
        raise DataError("\n".join(problems))
    if not prompts:
        raise DataError(
            f'{flag} {" ".join(paths)} has no prompts. Give lines such as {{"prompt": "12 + 7 =", "answer": "19"}}.'
        )
    return PromptSet(tuple(prompts), fingerprint({"kind": "prompts", "ids": [prompt.ids for prompt in prompts]}))


def _read_prompt(
    record: object, encoder: PromptEncoder, tools: Sequence[Mapping[str, Any]], *, chat: bool | None, max_ids: int
) -> Prompt:
    if not isinstance(record, dict):
        raise ValueError(
            f"a JSON {type(record).__name__}, not an object. Write an object with {PROMPT_KEY!r} in each line"
        )
    if twice := sorted(repeated_keys(record)):
        raise ValueError(f"the key {twice[0]!r} is there twice. Keep one")
    value = record.get(PROMPT_KEY)
    if isinstance(value, str) and value:
        messages = [{"role": "user", "content": value}] if chat else None
    elif isinstance(value, list):
        messages = check_messages(value)
    else:
        present = ", ".join(printable(str(name), max_chars=40) for name in sorted(record)[:8]) or "none"
        raise ValueError(f"no {PROMPT_KEY!r} with a text or a list of messages; its keys: {present}")
    ids = encoder.encode(str(value)) if messages is None else encoder.encode_messages(messages, tools=tools or None)
    if not ids:
        raise ValueError("the prompt has no tokens")
    if len(ids) > max_ids:
        raise ValueError(
            f"the prompt has {len(ids):,} tokens, and --seq-length leaves {max_ids:,} beside --max-answer-tokens. Use a longer "
            "--seq-length, shorter answers, or leave the line out"
        )
    text = str(value) if messages is None else json.dumps(messages, ensure_ascii=False)
    values = {str(key): content for key, content in record.items()}
    return Prompt(tuple(ids), values, text, None if messages is None else tuple(messages))
