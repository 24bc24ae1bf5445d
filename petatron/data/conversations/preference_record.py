"""Reads a record as two answers to a prompt, of which one was chosen, or as an answer that is desirable or not.

    {"prompt": "...", "chosen": "...", "rejected": "..."}                texts, or lists of messages
    {"prompt": "...", "chosen": [...], "rejected": [...]}                whole conversations, as UltraFeedback has them
    {"chosen": "...", "rejected": "..."}                                 texts or conversations that begin with the prompt
    {"prompt": "...", "completion": "...", "label": true}                texts, or lists of messages

Where the prompt is not apart, it is what both begin with: of conversations the messages that are equal, of texts the characters, up to a
space that both have before their answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.terminal_escape import printable
from petatron.data.conversations.conversation_record import (
    ReadRecord,
    make_conversation,
    read_completion,
    read_messages,
)
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.refused_conversation import RefusedConversation

CHOSEN, REJECTED, LABEL = "chosen", "rejected", "label"


def read_preference(record: object, settings: ConversationSettings) -> tuple[ReadRecord, ReadRecord]:
    """Returns the chosen and the rejected answer, each after the prompt.

    >>> chosen, rejected = read_preference({"chosen": "Sky? Blue", "rejected": "Sky? Green"}, ConversationSettings())
    >>> chosen, rejected.completion
    (TextRecord(prompt='Sky?', completion=' Blue'), ' Green')
    """
    record = _object(record)
    answers = [_value(record, key) for key in (CHOSEN, REJECTED)]
    prompt = record.get(settings.prompt_key)
    if all(isinstance(answer, str) for answer in answers):
        if prompt is None:
            prompt = _shared_text(*answers)
            answers = [answer[len(prompt) :] for answer in answers]
        pair = [read_completion(prompt, answer, record, settings) for answer in answers]
    elif any(isinstance(answer, str) for answer in answers):
        raise RefusedConversation(
            "wrong form",
            f"has a text and a list in {CHOSEN!r} and {REJECTED!r}: write texts, or lists of messages, in both",
        )
    elif isinstance(prompt, list):
        pair = [read_completion(prompt, answer, record, settings) for answer in answers]
    else:
        chosen, rejected = (read_messages(answer, settings, key) for answer, key in zip(answers, (CHOSEN, REJECTED)))
        first = next((n for n, (x, y) in enumerate(zip(chosen, rejected)) if x != y), min(len(chosen), len(rejected)))
        pair = [make_conversation(messages, record, settings, first=first) for messages in (chosen, rejected)]
    if pair[0] == pair[1]:
        raise RefusedConversation(
            "nothing to learn", f"has the same answer in {CHOSEN!r} and {REJECTED!r}: leave it out"
        )
    return pair[0], pair[1]


def read_unpaired(record: object, settings: ConversationSettings) -> tuple[ReadRecord, bool]:
    """Returns an answer after its prompt, and whether it is desirable."""
    record = _object(record)
    prompt, completion, label = (_value(record, key) for key in (settings.prompt_key, settings.completion_key, LABEL))
    if isinstance(label, int) and label in (0, 1):
        return read_completion(prompt, completion, record, settings), bool(label)
    raise RefusedConversation("wrong form", f"has a {LABEL!r} that is neither true nor false: write one of them")


def _object(record: object) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        reason = f"is a JSON {type(record).__name__}, not an object: write an object with keys in each line"
        raise RefusedConversation("wrong form", reason)
    return record


def _value(record: Mapping[str, Any], key: str) -> Any:
    if record.get(key) is None:
        present = ", ".join(printable(str(name), max_chars=40) for name in sorted(record)[:8]) or "none"
        raise RefusedConversation("wrong form", f"has no {key!r} (keys here: {present}): add it")
    return record[key]


def _shared_text(chosen: str, rejected: str) -> str:
    length = next((n for n, (x, y) in enumerate(zip(chosen, rejected)) if x != y), min(len(chosen), len(rejected)))
    return chosen[: length - 1] if length and chosen[length - 1] == " " else chosen[:length]
