"""Files of conversations: their formats, forms and faults; rows, cuts, packing, caches and processes that encode."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petatron.base.errors import ConfigError, DataError
from petatron.config.schema.data import DataConfig, TokenizerConfig
from petatron.data.batch_loader import LoaderOptions
from petatron.data.build_datasets import chosen_kind
from petatron.data.conversations import conversation_source
from petatron.data.conversations.conversation_record import TextRecord, read_record
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.conversations_kind import ConversationsKind, ConversationSource
from petatron.data.conversations.encoded_records import encode_files
from petatron.data.conversations.refused_conversation import RefusedConversation
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.tokenizer import ByteTokenizer
from petatron.models.batch import Batch
from petatron.validate import load_config
from tests.unit.data.conversations.chat_tokenizers import answer, call, user

CHAT = {"messages": [user("hi"), answer("yo")]}
SETTINGS = ConversationSettings()


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    return path


def request(seq_length: int = 32, **more: Any) -> DatasetRequest:
    return DatasetRequest(
        split="train", num_samples=8, seq_length=seq_length, seed=1, tokenizer=ByteTokenizer(), **more
    )


def open_source(path: Path, seq_length: int = 32, **settings: Any) -> ConversationSource:
    source = ConversationsKind(**settings).open(str(path), request(seq_length))
    assert isinstance(source, ConversationSource)
    return source


def texts(source: ConversationSource, seq_length: int = 64) -> list[bytes]:
    units = range(source.num_units)
    dataset = source.dataset(units, request(seq_length))
    rows = [dataset[index] for index in range(source.samples_per_epoch(units, request(seq_length)))]
    return sorted(bytes(row["ids"][(row["begins"] >= 0) & (row["ids"] < 256)].tolist()) for row in rows)


FORMS: list[tuple[Any, Any]] = [
    (CHAT, CHAT["messages"]),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, CHAT["messages"]),
    ({"conversations": CHAT["messages"]}, CHAT["messages"]),
    ({"system": "be", "conversations": CHAT["messages"]}, [{"role": "system", "content": "be"}, *CHAT["messages"]]),
    ({"messages": json.dumps(CHAT["messages"])}, CHAT["messages"]),
    ({"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}, CHAT["messages"]),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": None}, {**answer("b"), "name": None}]},
        [user("a"), answer("b")],
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": x} for x in "ab"]}, answer("c")]},
        [user("ab"), answer("c")],
    ),
    ({"messages": [user("a"), answer("b", reasoning="r")]}, None),
    ({"messages": [user("a"), {"role": "assistant", "content": None, "tool_calls": [call("f", x=1)]}]}, None),
]


@pytest.mark.parametrize(("record", "messages"), FORMS)
def test_forms_of_records(record: Any, messages: Any):
    conversation = read_record(record, SETTINGS)
    assert not isinstance(conversation, TextRecord)
    if messages is not None:
        assert conversation.messages == messages
    elif "tool_calls" in record["messages"][1]:
        assert conversation.messages[1] == answer("", tool_calls=[call("f", x=1)])
    else:
        assert conversation.messages[1]["reasoning_content"] == conversation.messages[1]["thinking"] == "r"


def test_arguments_of_tool_calls_are_objects():
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    conversation = read_record({"messages": [user("a"), answer("", tool_calls=calls)]}, SETTINGS)
    assert not isinstance(conversation, TextRecord) and conversation.messages[1]["tool_calls"] == [call("f", x=1)]
    told = {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}
    conversation = read_record({"conversations": [{"from": "human", "value": "a"}, told]}, SETTINGS)
    assert not isinstance(conversation, TextRecord) and conversation.messages[1]["tool_calls"] == [call("f", x=1)]


WRONG: list[tuple[Any, str]] = [
    ([1], "is a JSON list, not an object"),
    ({"text": 3}, r"has neither 'messages', nor .* \(keys here: text\): add one, or name its key"),
    ({"messages": []}, "has no list of messages in 'messages'"),
    ({"messages": "[{"}, "has a text in 'messages' that is no JSON"),
    ({"messages": ["a"]}, "has no object as message 1 of 'messages'"),
    ({"messages": [{"content": "a"}]}, "has no 'role' in message 1"),
    ({"messages": [{"role": "user"}]}, "has no text as 'content' of message 1"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "--dataset-type image-text for images"),
    ({"messages": [user("a"), answer("b", train=1)]}, "'train' in message 2, which is neither true nor false"),
    ({"messages": [user("a"), answer("b", weight=-1)]}, "'weight' in message 2, which is no number from 0 on"),
    ({"messages": [user("a"), answer("", tool_calls="f")]}, "no list of objects as tool_calls of message 2"),
    ({"messages": [user("a"), answer("", tool_calls=[{"function": {}}])]}, "a tool call without a name in message 2"),
    ({"conversations": [{"from": "function_call", "value": "[]"}]}, "no JSON object as function call in message 1"),
    ({"messages": CHAT["messages"], "tools": {"a": 1}}, "has no list of objects in 'tools'"),
    ({"prompt": "a", "completion": [answer("b")]}, "has a text and a list in 'prompt' and 'completion'"),
    ({"prompt": "a", "completion": " "}, "has an empty 'completion'"),
]


@pytest.mark.parametrize(("record", "message"), WRONG)
def test_wrong_records_are_named(tmp_path: Path, record: Any, message: str):
    with pytest.raises(RefusedConversation, match=message):
        read_record(record, SETTINGS)
    with pytest.raises(DataError, match=f"line 2: .*{message}"):
        open_source(write(tmp_path / "a.jsonl", CHAT, record))


def test_lines_that_are_no_records_are_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"(?s)line 1: is no JSON.*line 2: has the key 'text' twice.*on_error=skip"):
        open_source(write(tmp_path / "a.jsonl", "{\n", '{"text": "a", "text": "b"}\n'))
    with pytest.raises(DataError, match="has no conversations"):
        open_source(write(tmp_path / "b.jsonl", "\n"))
    with pytest.raises(DataError, match="not valid Unicode"):
        open_source(write(tmp_path / "c.jsonl", '{"text": "\\ud800"}\n'))
    with pytest.raises(DataError, match="does not exist"):
        open_source(tmp_path / "d.jsonl")
    with pytest.raises(DataError, match=r"e\.json"):
        open_source(write(tmp_path / "e.json", "[{"))


def test_the_first_refused_records_are_told_together(tmp_path: Path):
    with pytest.raises(DataError, match=r"(?s)line 1:.*line 5:") as error:
        open_source(write(tmp_path / "a.jsonl", *({"x": number} for number in range(9))))
    assert "line 6" not in str(error.value)


def test_formats_of_files(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    lines = "".join(json.dumps(record) + "\n" for record in (CHAT, {"text": "a"}))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "b.json").write_text(json.dumps([CHAT, {"text": "a"}], indent=1))
    rows = [{"messages": CHAT["messages"], "text": None}, {"messages": None, "text": "a"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    wanted = texts(open_source(write(tmp_path / "d.jsonl", lines), packed=False))
    assert wanted == [b"User: hi\nAssistant: yo\n", b"a"]
    for name in ("a.json.gz", "b.json", "c.parquet"):
        assert texts(open_source(tmp_path / name, packed=False)) == wanted


def test_files_are_named_by_a_glob(tmp_path: Path):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", {"text": name})
    source = open_source(tmp_path / "*.jsonl", packed=False)
    assert texts(source) == [b"a", b"b"]
    dataset = source.dataset(range(2), request())
    places = {str(document.source) for index in range(2) for document in dataset.trace(index).documents}
    assert places == {f"{tmp_path}/{name}.jsonl:1" for name in "ab"}


def batch_of(source: ConversationSource, seq_length: int, count: int) -> Batch:
    dataset = source.dataset(range(source.num_units), request(seq_length))
    samples: list[Any] = [dataset[index] for index in range(count)]
    return ConversationsKind().collate(samples, LoaderOptions(micro_batch_size=count, seed=1))


def test_rows_have_several_conversations_that_do_not_see_one_another(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", {"text": "abc"}, {"prompt": "de", "completion": "f"}, {"text": "ghijklm"})
    batch = batch_of(open_source(path), 12, 2)
    [(row, begin)] = np.argwhere(batch.tokens.numpy() == ord("g")).tolist()
    span, other = slice(begin, begin + 8), 8 if begin == 0 else 0
    assert batch.tokens[row, span].tolist() == [*b"ghijklm", 256]
    assert batch.loss_mask[row, span].tolist() == [1] * 7 + [0]
    assert batch.positions is not None and batch.positions[row, span].tolist() == [*range(8)]
    assert batch.positions[row, other : other + 4].tolist() == [*range(4)]
    assert batch.documents is not None and batch.documents.starts_BS[row, span].tolist() == [begin] * 8
    assert batch.documents.starts_BS[1 - row].tolist() == [0] * 4 + [4] * 8, "padding is apart"
    assert open_source(path).samples_per_epoch(range(3), request(12)) == 2
    single = open_source(path, packed=False)
    assert single.samples_per_epoch(range(3), request(12)) == 3


def test_padding_is_in_no_conversation(tmp_path: Path):
    batch = batch_of(open_source(write(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "c"})), 6, 1)
    assert batch.tokens[0].tolist() == [97, 98, 99, 256, 256, 256] and batch.loss_mask[0].tolist() == [0, 1, 1, 0, 0, 0]
    assert batch.labels[0, :3].tolist() == [98, 99, 256]
    assert batch.documents is not None and batch.documents.starts_BS[0].tolist() == [0, 0, 0, 0, 4, 4]


def test_weights_are_there_where_some_are_neither_0_nor_1(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", {"messages": [user("a"), answer("b", weight=0.5)]})
    batch = batch_of(open_source(path), 32, 1)
    assert set(batch["loss_weights"].unique().tolist()) == {0.0, 0.5} and set(batch.loss_mask.unique().tolist()) == {
        0.0,
        1.0,
    }
    assert "loss_weights" not in batch_of(open_source(write(tmp_path / "b.jsonl", CHAT)), 32, 1)


def test_long_conversations(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "a.jsonl", {"text": "abcdef"}, {"prompt": "ghijkl", "completion": "m"}, {"text": "no"})
    assert texts(open_source(path, 4, packed=False), 4) == [b"abcd", b"no"]
    assert (
        "2 conversations longer than the 4 tokens of --seq-length: 1 cut at the end, 1 left out, since nothing"
        in caplog.text
    )
    assert texts(open_source(path, 4, packed=False, long_samples="truncate-left"), 4) == [b"def", b"klm", b"no"]
    assert texts(open_source(path, 4, packed=False, long_samples="skip"), 4) == [b"no"]
    with pytest.raises(
        DataError, match=r"a\.jsonl:1 has 7 tokens, more than --seq-length 4 \(2 records of 3\).*truncate or skip"
    ):
        texts(open_source(path, 4, long_samples="fail"), 4)
    with pytest.raises(DataError, match="no record of these makes a sample"):
        texts(open_source(write(tmp_path / "b.jsonl", {"prompt": "ghijkl", "completion": "m"}), 4), 4)


def test_refused_records_are_counted_and_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "a.jsonl", {"text": "a"}, {"x": 1}, {"messages": [user("a")]})
    kind = ConversationsKind(on_error="skip", data=DataConfig(data_cache_path=str(tmp_path / "cache")))
    for _ in range(2):
        assert kind.open(str(path), request()).num_units == 1
        assert "2 records of 3 left out" in caplog.text and "all are listed in" in caplog.text
        caplog.clear()
    [left_out] = (tmp_path / "cache").glob("*-left-out.jsonl")
    assert [json.loads(line)["line"] for line in left_out.read_text().splitlines()] == [2, 3]


def test_encoded_conversations_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        return encode_files(*arguments, **more)

    monkeypatch.setattr(conversation_source, "encode_files", counted)
    path, data = write(tmp_path / "a.jsonl", CHAT), DataConfig(data_cache_path=str(tmp_path / "cache"))

    def count(**settings: Any) -> int:
        calls.clear()
        ConversationsKind(data=data, **settings).open(str(path), request())
        return len(calls)

    assert [count(), count(), count(packed=False)] == [1, 0, 0]
    assert [count(train_on="all"), count(train_on="all")] == [1, 0]
    write(path, CHAT, CHAT)
    assert count() == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_encode_the_same(tmp_path: Path, workers: int):
    path = write(tmp_path / "a.jsonl", *({"text": f"text {number}"} for number in range(600)), {"x": 1})
    kind = ConversationsKind(
        tokenizer=TokenizerConfig(tokenizer_type="ByteTokenizer"), encode_workers=workers, on_error="skip"
    )
    encoded, _ = kind.open_encoded(str(path), request())
    assert encoded.lines.tolist() == [*range(1, 601)]
    ids, weights = encoded.rows.row(599)
    assert bytes(ids[:-1].tolist()) == b"text 599" and ids[-1] == 256 and weights.all()


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr("petatron.data.conversations.encoded_records._PROGRESS_S", 0.0)
    caplog.set_level(logging.INFO)
    open_source(write(tmp_path / "a.jsonl", CHAT))
    assert "1 records encoded, 100 %" in caplog.text and "all 1 records are encoded" in caplog.text


def test_wrong_settings_are_told_together():
    kind = ConversationsKind(date="y", template_values="[", encode_workers=-1)
    wheres = [problem.value for problem in kind.setting_problems()]
    assert wheres == ["template_values=[", "date=y", "encode_workers=-1"]
    [problem] = ConversationsKind(template_values='{"tools": 1}').setting_problems()
    assert "sets tools, which the conversation says" in str(problem)
    flags = "--mock-data --lr 1 --train-iters 1 --dataset-type conversations --dataset-settings train_on=x on_error=y"
    with pytest.raises(ConfigError, match=r"train_on=x is no choice(.|\n)*on_error=y is no choice"):
        chosen_kind(load_config(flags.split(), preset="tiny-llama").config)


def test_a_source_needs_a_tokenizer(tmp_path: Path):
    without = DatasetRequest(split="train", num_samples=1, seq_length=4, seed=1)
    with pytest.raises(DataError, match="need a tokenizer"):
        ConversationsKind().open(str(write(tmp_path / "a.jsonl", CHAT)), without)


def test_samples_are_in_another_order_in_each_epoch(tmp_path: Path):
    source = open_source(write(tmp_path / "a.jsonl", *({"text": letter * 9} for letter in "abcd")), 10)
    dataset = source.dataset(range(4), request(10))
    firsts = [int(dataset[index]["ids"][0]) for index in range(8)]
    assert sorted(firsts[:4]) == sorted(firsts[4:]) == [*b"abcd"] and firsts[:4] != firsts[4:]
    with pytest.raises(IndexError):
        dataset[8]
    assert np.unique(firsts).size == 4
