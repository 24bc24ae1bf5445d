"""The token that ends an answer, by the chat template: what a model learns to stop at, besides the end of a document.

A base model's tokenizer often names another end of text than its template writes after an answer (Qwen2.5: `<|endoftext|>`, and
`<|im_end|>`). A model that was trained on such conversations says so in its generation_config.json; else whoever serves it would not stop.
"""

from __future__ import annotations

import json
from copy import copy
from functools import partial

from petatron.data.conversations.answer_spans import AnswerFinder
from petatron.data.conversations.conversation_record import ASSISTANT, Conversation
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.conversation_template import conversation_template
from petatron.data.conversations.refused_conversation import RefusedConversation
from petatron.data.tokenizer import Tokenizer

_FILE = "generation_config.json"
_EXAMPLE = ("a", "b")


def end_of_turn_id(tokenizer: Tokenizer) -> int | None:
    """Returns the token that ends an answer; None where it is the end of a document, or no token of its own."""
    template = conversation_template(tokenizer)
    finder = AnswerFinder(template.of_date(ConversationSettings().today), {}, template.tokens, template.ends)
    messages = [{"role": role, "content": text} for role, text in zip(("user", ASSISTANT), _EXAMPLE)]
    try:
        rendered = finder.render(Conversation(messages, [1.0, 1.0]))
    except RefusedConversation:
        return None
    answer = rendered.text[rendered.answers[0].span[0] : rendered.answers[0].span[1]]
    end = finder.end_of_turn(answer)
    ids = [] if end is None else tokenizer.encode(end)
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.eod else None


def with_end_of_turn(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer whose files tell readers of the model to stop at the end of a turn too."""
    end = end_of_turn_id(tokenizer)
    if end is None:
        return tokenizer
    changed = copy(tokenizer)
    ids = [end] if tokenizer.eod is None else [tokenizer.eod, end]
    setattr(changed, "files", partial(_files_with_ends, tokenizer, ids))  # noqa: B010  of any class
    return changed


def _files_with_ends(tokenizer: Tokenizer, ids: list[int]) -> dict[str, bytes]:
    return {**tokenizer.files(), _FILE: (json.dumps({"eos_token_id": ids}, indent=2) + "\n").encode()}
