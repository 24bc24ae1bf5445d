"""Texts of single tokens, and chat templates of strangers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from petatron.base.errors import DataError
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.prompt.chat_template import ChatTemplate, tokenizer_chat_template
from petatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, NullTokenizer
from petatron.serve.http.openai_requests import PromptFields
from petatron.serve.http.request_to_engine import encode_prompts
from petatron.serve.serve_options import ServeLimits
from petatron.serve.served_model_properties import ModelCard
from petatron.serve.token_texts import TokenTexts
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import live_server

USER = [{"role": "user", "content": "hi"}]


def test_bytes_of_tokens_join_to_the_text(tmp_path: Path):
    text = "déjà vu €5 naïve"
    bpe = train_bpe([text] * 3, 270, tmp_path / "tokenizer.json")
    for tokenizer in (ByteTokenizer(), bpe):
        texts, ids = TokenTexts(tokenizer), tokenizer.encode(text)
        assert b"".join(texts.bytes_of(token) for token in ids).decode() == text
        before = 0
        for token, offset in zip(ids, texts.offsets(ids), strict=True):  # the character that its first byte belongs to
            assert len(text[:offset].encode()) <= before < len(text[: offset + 1].encode())
            before += len(texts.bytes_of(token))
    assert TokenTexts(bpe).text_of(0) == "<|endoftext|>" and TokenTexts(ByteTokenizer()).text_of(0xE2) == "bytes:\\xe2"
    assert TokenTexts(NullTokenizer(10)).text_of(7) == "7" and TokenTexts(None).text_of(7) == "token_id:7"
    assert TokenTexts(None).decode([1]) == ""


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_streamed_texts_are_the_bytes_of_whole_objects(route: str):
    """Events are put together around their text: quotes, controls and other scripts are escaped as in the whole object."""
    letters = iter('a"\\\n\u2028é\x00\x7f东""🙂')
    engine = FakeEngine()
    engine._new_text = lambda request, hold: next(letters, "")  # type: ignore[method-assign]
    name = 'the "" model'
    body = {"max_tokens": 14, "temperature": 0, "stream": True}
    body |= {"prompt": "a"} if route == "completions" else {"messages": USER}
    card = ModelCard.of_engine(engine, name=name, created_s=1)
    with live_server(engine, card=card) as server, server.client() as http:
        raw = http.post(f"/v1/{route}", json=body).content.decode()
    *events, last, end = raw.split("\n\n")
    assert last == "data: [DONE]" and end == ""
    contents = [json.loads(event.removeprefix("data: ")) for event in events]
    whole = [f"data: {json.dumps(one, ensure_ascii=False, separators=(',', ':'))}" for one in contents]
    assert events == whole and {one["model"] for one in contents} == {name}
    choices = [one["choices"][0] for one in contents]
    texts = [one["text"] if route == "completions" else one["delta"].get("content", "") for one in choices]
    assert "".join(texts) == 'a"\\\n\u2028é\x00\x7f东""🙂'


def test_a_text_gets_the_ids_that_its_tokenizer_puts_before_one(tmp_path: Path):
    file = tmp_path / "tokenizer.json"
    train_bpe(["hi there"], 270, file)
    content = json.loads(file.read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    file.write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizer(file)
    card = ModelCard.of_engine(FakeEngine(tokenizer=tokenizer), name="m", created_s=1)
    body = PromptFields()
    found = asyncio.run(encode_prompts(["hi", [5, 6]], body, card, ServeLimits(), param="prompt"))  # type: ignore[arg-type]
    assert [list(each.ids) for each in found] == [[0, *tokenizer.encode("hi")], [5, 6]], "ids are taken as they are"


def test_sentencepiece_tokens_have_their_spaces_and_bytes(tmp_path: Path):
    fast = FastTokenizer(models.BPE({"\u2581a": 0, "b": 1, "<0xE2>": 2}, [], byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts(HuggingFaceTokenizer(tmp_path))
    assert [texts.bytes_of(token) for token in range(3)] == [b" a", b"b", b"\xe2"]


def _with_config(folder: Path, **settings: object) -> HuggingFaceTokenizer:
    for name, content in ByteTokenizer().files().items():
        (folder / name).write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", **settings}))
    return HuggingFaceTokenizer(folder)


def test_templates_are_found_where_tokenizers_keep_them(tmp_path: Path):
    assert tokenizer_chat_template(ByteTokenizer()) is None and tokenizer_chat_template(None) is None
    plain = tokenizer_chat_template(_with_config(tmp_path, chat_template="{{ messages[0].content }}{{ eos_token }}"))
    assert plain is not None and plain.render(USER) == "hi<|endoftext|>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    both = tokenizer_chat_template(_with_config(tmp_path, chat_template=named))
    assert (
        both is not None
        and both.render(USER) == "plain"
        and both.render(USER, tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'
    )
    (tmp_path / "chat_template.jinja").write_text("{% if not add_generation_prompt %}no{% endif %}{{ thinking }}")
    own = tokenizer_chat_template(HuggingFaceTokenizer(tmp_path))
    assert own is not None and own.render(USER, add_generation_prompt=False, values={"thinking": 1}) == "no1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception('no') }}",
        "{{ range(10**9) | list }}",
        "{% include '/etc/passwd' %}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str):
    with pytest.raises(DataError, match="chat template"):
        ChatTemplate(source).render(USER)


def test_a_template_that_cannot_be_read():
    with pytest.raises(DataError, match="--chat-template"):
        ChatTemplate("{% for %}")
    with pytest.raises(DataError, match="characters"):
        ChatTemplate("a" * (1 << 20) + "b")
    with pytest.raises(DataError, match="may not set eos_token"):
        ChatTemplate("x").render(USER, values={"eos_token": "y"})
