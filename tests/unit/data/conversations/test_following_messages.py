"""What follows an answer is what the template writes there, for published templates; the answer's ids stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from petatron.data.conversations.following_messages import FollowingMessages
from petatron.data.tokenizer import ByteTokenizer
from tests.unit.data.conversations.chat_tokenizers import FAMILIES, answer, call, published, user

TOOLS = [
    {
        "type": "function",
        "function": {"name": "get", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]
DIALOGUES = {
    "a question": [[user("hello"), answer("how are you")], [user("fine, you?")]],
    "two tools": [
        [user("weather?"), answer("", tool_calls=[call("get", city="Bern")])],
        [{"role": "tool", "content": "fine"}, {"role": "tool", "content": "7"}],
    ],
}
NO_TOOLS = {"gemma", "gemma3", "phi3", "phi3_5"}


@pytest.mark.parametrize("dialogue", DIALOGUES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_is_what_transformers_renders(tmp_path: Path, family: str, dialogue: str):
    tools: list[Any] | None = TOOLS if dialogue == "two tools" else None
    if tools and family in NO_TOOLS:
        pytest.skip("its template has no tools")
    theirs, tokenizer = published(tmp_path, family)
    before, messages = DIALOGUES[dialogue]
    if tools and family == "deepseekv3":  # its template wants arguments as a text
        before = [
            before[0],
            answer("", tool_calls=[{"type": "function", "function": {"name": "get", "arguments": "{}"}}]),
        ]
    following = FollowingMessages(tokenizer, tools=tools)
    complete = theirs.apply_chat_template([*before, *messages], tools=tools, add_generation_prompt=True, tokenize=False)
    assert isinstance(complete, str) and complete.endswith(following.text(messages))
    ids = tokenizer.encode(complete)
    tail = following.encode([], messages)
    assert ids[-len(tail) :] == tail
    end = tail[0]
    assert following.encode([5, end], messages) == tail[1:], "an answer that ended has the end of its turn"
    assert following.encode([5, 6], messages) == tail, "one that was cut off gets it"


def test_a_text_template_invites_again():
    following = FollowingMessages(ByteTokenizer())
    assert following.text([user("and then?")]).endswith("User: and then?\nAssistant:")
