"""What is learned of a conversation, for published templates and for small ones that are as difficult."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from petatron.data.conversations.conversation_record import read_record
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.conversation_template import conversation_template
from petatron.data.conversations.encode_conversation import ConversationEncoder, ConversationTokens
from petatron.data.conversations.end_of_turn import end_of_turn_id, with_end_of_turn
from petatron.data.conversations.refused_conversation import RefusedConversation
from petatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from tests.unit.data.conversations.chat_tokenizers import (
    CHATS,
    FAMILIES,
    PUBLISHED,
    answer,
    call,
    published,
    save_tokenizer,
    user,
)


def encoder_of(tokenizer: Tokenizer, **settings: Any) -> ConversationEncoder:
    return ConversationEncoder(tokenizer, conversation_template(tokenizer), ConversationSettings(**settings))


def encode(tokenizer: Tokenizer, record: Any, **settings: Any) -> ConversationTokens:
    encoder = encoder_of(tokenizer, **settings)
    return encoder.encode(read_record({"messages": record} if isinstance(record, list) else record, encoder.settings))


def learned(tokenizer: Tokenizer, record: Any, **settings: Any) -> list[str]:
    """The texts of what is learned, one for each stretch of tokens."""
    encoded = encode(tokenizer, record, **settings)
    parts: list[list[int]] = []
    before = 0.0
    for number, weight in zip(encoded.ids.tolist(), encoded.weights.tolist(), strict=True):
        if weight:
            parts = parts if before else [*parts, []]
            parts[-1].append(number)
        before = weight
    return [tokenizer.decode(part) for part in parts]


# TRL has a template for training of each of these, which marks the answers; where it writes the same text, masks have to be equal.
REFUSED = {("gemma", "reasoning"), ("gemma", "tools"), ("gemma3", "tools"), ("phi3", "tools"), ("phi3_5", "tools")}
OTHER_TEXT = {"qwen3"}
"""TRL's writes a thinking part into every answer; the published one into the last alone."""
OTHER_MASK = {"qwen2_5", "deepseekv3"}
"""TRL's masks have a part of the invitation too, which the model is given: the line break, and the assistant's token."""


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_masks_of_published_templates(tmp_path: Path, family: str, chat: str):
    theirs, ours = published(tmp_path, family)
    messages = CHATS[chat]
    if (family, chat) in REFUSED:
        with pytest.raises(RefusedConversation, match=r"refused by the chat template|is unclear: mark what"):
            encode(ours, messages)
        return
    encoded = encode(ours, messages)
    ids, mask = encoded.ids.tolist(), [int(weight) for weight in encoded.weights]
    if not (family == "deepseekv3" and chat == "tools"):  # which takes arguments as a text alone
        plain = theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert ids[: len(plain)] == plain and len(ids) - len(plain) == (family == "glm4moe")
    training = (PUBLISHED / f"{family}_training.jinja").read_text()
    marked = theirs.apply_chat_template(
        messages, chat_template=training, return_dict=True, return_assistant_tokens_mask=True
    )
    if family == "glm4moe":  # TRL's ends with <|user|>, where a conversation has no end
        assert ids[:-1] == marked["input_ids"][:-1] and mask == marked["assistant_masks"]
    elif family not in OTHER_TEXT:
        assert ids == marked["input_ids"]
        if family not in OTHER_MASK:
            assert mask == marked["assistant_masks"]


def test_reasoning_of_qwen3_is_where_its_template_writes_it(tmp_path: Path):
    _, tokenizer = published(tmp_path, "qwen3")
    parts = learned(tokenizer, CHATS["reasoning"])
    assert parts == ["how are you<|im_end|>\n", "<think>\nok\n</think>\n\ntoday<|im_end|>\n"]
    assert learned(tokenizer, CHATS["reasoning"], reasoning="drop")[1] == "<think>\n\n</think>\n\ntoday<|im_end|>\n"
    assert learned(tokenizer, CHATS["reasoning parts"], reasoning="last") == parts
    assert learned(tokenizer, CHATS["tools"]) == [
        '<tool_call>\n{"name": "get", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>\n',
        "it is fine<|im_end|>\n",
        "<think>\n\n</think>\n\nyou are welcome<|im_end|>\n",
    ]


def test_masks_of_qwen2_5_begin_where_a_served_model_does(tmp_path: Path):
    _, tokenizer = published(tmp_path, "qwen2_5")
    assert learned(tokenizer, CHATS["two turns"])[0] == "how are you<|im_end|>\n"


def test_the_default_system_message_is_not_learned(tmp_path: Path):
    _, tokenizer = published(tmp_path, "qwen2_5")
    encoded = encode(tokenizer, CHATS["two turns"])
    first = encoded.weights.tolist().index(1)
    assert "You are Qwen" in tokenizer.decode(encoded.ids[:first].tolist())


MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("chat", ["two turns", "reasoning", "white space", "the same twice"])
def test_marked_templates_have_the_masks_of_transformers(tmp_path: Path, chat: str):
    theirs = save_tokenizer(tmp_path, MARKED)
    marked = theirs.apply_chat_template(CHATS[chat], return_dict=True, return_assistant_tokens_mask=True)
    encoded = encode(HuggingFaceTokenizer(tmp_path), CHATS[chat])
    assert encoded.ids.tolist() == marked["input_ids"]
    assert encoded.weights.tolist() == marked["assistant_masks"]


MISTRAL = (
    "{{ bos_token }}{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == last %}[TOOLS] {{ tools | tojson }} [/TOOLS]{% endif %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
DISTILLED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>{{ m.content.split('</think>')[-1] }}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
UNENDING = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def test_tools_before_the_last_question(tmp_path: Path):
    save_tokenizer(tmp_path, MISTRAL, eos="</s>")
    record = {"messages": CHATS["two turns"], "tools": [call("get")]}
    parts = learned(HuggingFaceTokenizer(tmp_path), record)
    assert [part.lstrip() for part in parts] == ["how are you</s>", "the weather is fine today</s>"]


def test_an_invitation_that_answers_do_not_have(tmp_path: Path):
    save_tokenizer(tmp_path, DISTILLED, eos="<|end|>")
    chat = [user("hello"), answer("<think>hm</think>how are you"), user("fine"), answer("<b>today</b>")]
    assert learned(HuggingFaceTokenizer(tmp_path), chat) == ["how are you<|end|>", "<b>today</b><|end|>"]


def test_an_answer_without_an_end_gets_one(tmp_path: Path):
    save_tokenizer(tmp_path, UNENDING)
    parts = learned(HuggingFaceTokenizer(tmp_path), CHATS["two turns"])
    assert [part.lstrip() for part in parts] == ["how are you\n", "the weather is fine today\n<|im_end|>"]


def test_a_template_that_drops_an_answer_is_refused(tmp_path: Path):
    save_tokenizer(tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(RefusedConversation, match=r"has an answer, message 2, .*{% generation %}"):
        encode(HuggingFaceTokenizer(tmp_path), CHATS["two turns"])
    save_tokenizer(tmp_path, "{% generation %}{{ messages[1].content }}{% endgeneration %}")
    with pytest.raises(RefusedConversation, match="has 2 answers, and its template marks 1 of them"):
        encode(HuggingFaceTokenizer(tmp_path), CHATS["two turns"])


def test_what_is_learned_is_chosen(tmp_path: Path):
    _, tokenizer = published(tmp_path, "llama3")
    chat = CHATS["two turns"]
    assert learned(tokenizer, chat, train_on="last-answer") == ["the weather is fine today<|eot_id|>"]
    assert encode(tokenizer, chat, train_on="all").weights.all()
    chosen = [user("hello"), answer("how are you", train=False), user("fine"), answer("today", weight=0.5)]
    weights = encode(tokenizer, chosen).weights
    assert set(weights.tolist()) == {0, 0.5}
    assert learned(tokenizer, chosen) == ["today<|eot_id|>"]
    with pytest.raises(RefusedConversation, match="has nothing that is learned"):
        encode(tokenizer, [user("hello"), answer("how are you", weight=0)])


def test_prompts_with_completions_and_texts(tmp_path: Path):
    _, tokenizer = published(tmp_path, "llama3")
    assert learned(tokenizer, {"prompt": "how are", "completion": " you"}) == [" you<|eot_id|>"]
    assert learned(tokenizer, {"text": "how are you<|eot_id|>"}) == ["how are you<|eot_id|>"]
    record = {"prompt": CHATS["two turns"][:3], "completion": CHATS["two turns"][3:]}
    assert learned(tokenizer, record) == ["the weather is fine today<|eot_id|>"]
    assert encode(tokenizer, record).ids.tolist() == encode(tokenizer, CHATS["two turns"]).ids.tolist()


@pytest.mark.parametrize("chatml", [False, True])
def test_tokenizers_without_a_template_have_a_built_in_one(tmp_path: Path, chatml: bool):
    tokenizer: Tokenizer = ByteTokenizer()
    if chatml:
        save_tokenizer(tmp_path, None)
        tokenizer = HuggingFaceTokenizer(tmp_path)
    encoded = encode(tokenizer, CHATS["two turns"])
    if chatml:
        assert learned(tokenizer, CHATS["two turns"])[0] == "how are you<|im_end|>\n"
    else:
        assert encoded.ids[encoded.weights > 0].tolist() == [*b" how are you", 256, *b" the weather is fine today", 256]
        assert bytes(encoded.ids[:16].tolist()) == b"User: hello\nAssi"


def test_templates_get_values_and_a_date(tmp_path: Path):
    save_tokenizer(tmp_path, "{{ strftime_now('%Y') }} {{ mood }} " + MARKED)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    encoded = encode(tokenizer, CHATS["two turns"], template_values='{"mood": "good"}', date="2025-03-01")
    assert tokenizer.decode(encoded.ids[:12].tolist()).startswith("2025 good user")


@pytest.mark.parametrize(("family", "end"), [("qwen2_5", None), ("phi3", "<|end|>"), ("gemma3", "<end_of_turn>")])
def test_the_end_of_a_turn_is_a_stop_of_the_saved_model(tmp_path: Path, family: str, end: str | None):
    _, tokenizer = published(tmp_path, family)
    number = end_of_turn_id(tokenizer)
    assert number == (None if end is None else tokenizer.encode(end)[0])
    files = with_end_of_turn(tokenizer).files()
    if end is None:
        assert "generation_config.json" not in files, "it is the end of a document"
    else:
        assert json.loads(files["generation_config.json"]) == {"eos_token_id": [tokenizer.eod, number]}


def test_a_base_model_stops_where_its_template_ends_an_answer(tmp_path: Path):
    save_tokenizer(tmp_path, (PUBLISHED / "qwen2_5.jinja").read_text(), eos="<|endoftext|>")
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert end_of_turn_id(tokenizer) == tokenizer.encode("<|im_end|>")[0] != tokenizer.eod
    assert end_of_turn_id(ByteTokenizer()) is None
    save_tokenizer(tmp_path, "{{ raise_exception('no') }}")
    assert end_of_turn_id(HuggingFaceTokenizer(tmp_path)) is None
