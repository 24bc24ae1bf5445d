"""The settings of conversations (`--dataset-settings`): the keys of a record, what is learned, and what becomes of records that fail."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from petatron.base.errors import Problem

SETTINGS_FLAG = "--dataset-settings"
OnError = Literal["fail", "skip"]
TrainOn = Literal["answers", "last-answer", "all"]
Reasoning = Literal["keep", "last", "drop"]
LongConversations = Literal["truncate", "truncate-left", "skip", "fail"]
DEFAULT_DATE = "2024-07-26"
"""What templates that write today's date are given: the date that Llama 3's writes where it is told none."""
_TEMPLATE_NAMES = ("messages", "tools", "add_generation_prompt", "chat_template", "bos_token", "eos_token")


@dataclass(frozen=True, kw_only=True)
class ConversationSettings:
    """What a user may choose.

    messages_key, prompt_key, completion_key, text_key, tools_key      keys of a record; `conversations` stands for `messages` too
    role_key, content_key     keys of a message; `from` and `value` stand for them too
    train_on        answers: what the assistant says; last-answer: its last message; all: the prompts too
    reasoning       what the template gets: all reasoning parts, that of the last answer, or none
    long_samples    what becomes of a conversation of more tokens than --seq-length: its end is cut off, or its beginning, or it is left
                    out, or ends the run
    on_error        whether a record that is no conversation ends the run, or is counted and left out
    packed          a row has as many conversations as fit, which do not see one another
    template_values JSON object of what else the template reads, as {"enable_thinking": false}
    date            what templates that write today's date get, as 2026-01-31
    encode_workers  processes that encode a large file; 0: one for each core, 8 at most
    """

    messages_key: str = "messages"
    prompt_key: str = "prompt"
    completion_key: str = "completion"
    text_key: str = "text"
    tools_key: str = "tools"
    role_key: str = "role"
    content_key: str = "content"
    train_on: TrainOn = "answers"
    reasoning: Reasoning = "keep"
    long_samples: LongConversations = "truncate"
    on_error: OnError = "fail"
    packed: bool = True
    template_values: str = "{}"
    date: str = DEFAULT_DATE
    encode_workers: int = 0

    @property
    def values(self) -> dict[str, Any]:
        """What the template reads besides messages and tools."""
        return json.loads(self.template_values)

    @property
    def today(self) -> datetime:
        return datetime.fromisoformat(self.date)

    def setting_problems(self) -> list[Problem]:
        """Returns every problem of the settings."""
        problems: list[Problem] = []
        if (rule := self._values_problem()) is not None:
            fix = 'Write a JSON object, as {"enable_thinking": false}.'
            problems.append(Problem(SETTINGS_FLAG, f"template_values={self.template_values}", rule, fix))
        try:
            datetime.fromisoformat(self.date)
        except ValueError:
            problems.append(Problem(SETTINGS_FLAG, f"date={self.date}", "is no date", "Write it as 2026-01-31."))
        if self.encode_workers < 0:
            rule = "is below 0"
            problems.append(
                Problem(SETTINGS_FLAG, f"encode_workers={self.encode_workers}", rule, "Give a count, or 0.")
            )
        return problems

    def _values_problem(self) -> str | None:
        try:
            values = json.loads(self.template_values)
        except (ValueError, RecursionError):
            return "is no JSON"
        if not isinstance(values, dict):
            return "is no JSON object"
        taken = sorted(set(values) & set(_TEMPLATE_NAMES))
        return f"sets {', '.join(taken)}, which the conversation says" if taken else None
