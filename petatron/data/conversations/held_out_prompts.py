"""The prompts of some records, as `--sample-prompts` reads them: what the model is asked, without the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from petatron.data.conversations.conversation_files import conversation_files, parse_raw_record, read_raw_records
from petatron.data.conversations.conversation_record import ASSISTANT, Conversation, read_record
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.conversation_source import EncodedSource
from petatron.data.conversations.refused_conversation import RefusedConversation


def prompts_of_records(source: EncodedSource, records: Sequence[int], settings: ConversationSettings) -> list[str]:
    """Returns a line for each record with a prompt: an object with the messages before the last answer, or a text."""
    wanted = {(source.paths[int(source.files[record])], int(source.lines[record])) for record in records}
    return list(_prompts(source.name, wanted, settings)) if wanted else []


def _prompts(name: str, wanted: set[tuple[str, int]], settings: ConversationSettings) -> Iterator[str]:
    left = set(wanted)
    for file in conversation_files(name):
        for raw in read_raw_records(file):
            if (file.path, raw.line) in left:
                left.discard((file.path, raw.line))
                try:
                    record = read_record(parse_raw_record(raw), settings)
                except RefusedConversation:
                    continue
                if isinstance(record, Conversation):
                    yield from _chat_prompt(record)
                elif record.prompt and len(record.prompt.splitlines()) == 1:
                    yield record.prompt
            if not left:
                return


def _chat_prompt(conversation: Conversation) -> Iterator[str]:
    answers = [number for number, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
    if answers and answers[-1]:
        asked = replace(conversation, messages=conversation.messages[: answers[-1]])
        prompt = {"messages": asked.messages} | ({"tools": asked.tools} if asked.tools else {})
        yield json.dumps(prompt, ensure_ascii=False)
