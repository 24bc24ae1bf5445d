"""The forms of records, and those that say too little or too much."""

from __future__ import annotations

from typing import Any

import pytest

from petatron.data.image_text.image_text_record import ImageTextRecord, Visual, parse_line, parse_record
from petatron.data.image_text.record_error import RecordError


def names(record: ImageTextRecord) -> list[str]:
    return [visual.names[0] for visual in record.visuals]


def refused(record: dict[str, Any], **options: Any) -> str:
    with pytest.raises(RecordError) as caught:
        parse_record(record, **options)
    return caught.value.kind


def test_texts():
    record = parse_record({"images": ["b", "a"], "text": "x <image> y <image>"})
    assert (names(record), record.text, record.tags_added) == (["b", "a"], "x <image> y <image>", False)
    assert parse_record({"text": "alone"}) == ImageTextRecord((), text="alone")
    assert parse_record({"image": "a", "caption": "c"}).text == "<image>c"
    assert parse_record({"images": [], "text": "t"}).visuals == ()
    assert parse_record({"image": None, "text": "t"}).visuals == ()


def test_images_without_tags_are_put_in_front():
    record = parse_record({"images": ["a", "b"], "text": "t"})
    assert record.text == "<image><image>t" and record.tags_added
    messages = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]
    record = parse_record({"image": "a", "conversations": messages})
    assert record.messages is not None and record.tags_added
    assert [message["content"] for message in record.messages] == ["s", "<image>\nq", "r"]


def test_tags_without_images_and_the_reverse():
    assert refused({"text": "<image> a"}) == "tag without image"
    assert refused({"image": "a", "text": "<image><image>"}) == "tag without image"
    assert refused({"image": "a", "text": "<video>"}) == "tag without image"
    assert refused({"images": ["a", "b"], "text": "<image> a"}) == "image without tag"
    assert refused({"image": "a", "conversations": [{"from": "gpt", "value": "a"}]}) == "image without tag"


def test_llava_conversations():
    messages = [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "r"}]
    record = parse_record({"image": "a", "conversations": messages})
    assert record.messages == ({"role": "user", "content": "<image>\nq"}, {"role": "assistant", "content": "r"})
    assert names(record) == ["a"] and not record.tags_added


def test_openai_messages():
    content = [
        {"type": "text", "text": "see "},
        {"type": "image", "image": "a"},
        {"type": "image_url", "image_url": {"url": "b"}},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": "r"}]}]
    record = parse_record({"messages": messages, "images": ["c"]})
    assert record.messages is not None and record.messages[0]["content"] == "see <image><image><image>?"
    assert names(record) == ["a", "b", "c"]
    # Those that come with the record take the places of all that it names.
    assert names(parse_record({"messages": messages}, images=["x", "y", "z"])) == ["x", "y", "z"]


def test_videos():
    record = parse_record({"video": ["0", "1"], "text": "<video> t"})
    assert record.visuals == (Visual("video", ("0", "1")),) and record.text == "<image> t"
    record = parse_record({"videos": ["folder", ["0", "1"]], "image": "a", "text": "<video><image><video>"})
    assert record.visuals == (Visual("video", ("folder",)), Visual("image", ("a",)), Visual("video", ("0", "1")))
    assert record.visuals[2].title == "0 and 1 more frames" and record.visuals[1].title == "a"
    part = {"type": "video", "video": ["0", "1"]}
    messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "r"}]
    assert parse_record({"messages": messages}).visuals == (Visual("video", ("0", "1")),)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({}, "no text"),
        ({"image": "a"}, "no text"),
        ({"text": 3}, "no text"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "no text"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "  "}]}, "no text"),
        ({"image": 3, "text": "a"}, "wrong form"),
        ({"images": ["a", 3], "text": "a"}, "wrong form"),
        ({"video": [[]], "text": "a"}, "wrong form"),
        ({"images": {"a": 1}, "text": "a"}, "wrong form"),
        ({"conversations": []}, "wrong form"),
        ({"conversations": "a"}, "wrong form"),
        ({"conversations": [3]}, "wrong form"),
        ({"conversations": [{"from": "dog", "value": "q"}]}, "wrong form"),
        ({"messages": [{"role": "tool", "content": "q"}]}, "wrong form"),
        ({"messages": [{"role": "user", "content": 3}]}, "wrong form"),
        ({"messages": [{"role": "user", "content": [3]}]}, "wrong form"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "wrong form"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": 3}]}]}, "wrong form"),
    ],
)
def test_other_forms(record: dict[str, Any], kind: str):
    assert refused(record) == kind


@pytest.mark.parametrize(
    ("line", "kind"), [(b"{", "no json"), (b"[" * 100_000, "no json"), (b"\xff", "no json"), (b"[]", "wrong form")]
)
def test_lines(line: bytes, kind: str):
    with pytest.raises(RecordError) as caught:
        parse_line(line)
    assert caught.value.kind == kind
    assert parse_line(b'{"text": "a"}') == {"text": "a"}
