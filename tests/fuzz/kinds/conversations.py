"""Files of conversations and of preferences: JSON lines, plain and gzip, and a JSON array.

No digest covers plain text. The checksum of gzip covers what it holds against flipped bits, not against someone who adds to it.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from petatron.data.conversations.conversation_settings import OnError
from petatron.data.conversations.conversations_kind import ConversationsKind
from petatron.data.conversations.preferences_kind import PreferencesKind
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.tokenizer import ByteTokenizer
from tests.fuzz.kind import Files, Kind

_CALL = {"type": "function", "function": {"name": "get", "arguments": '{"city": "Bern"}'}}
_CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Wörld \u2028", "weight": 0.5}]},
    {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be"}]},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL], "train": False},
            {"role": "tool", "content": "fine"},
            {"role": "assistant", "content": "<think>hm</think>fine", "reasoning_content": None},
        ],
        "tools": [_CALL],
    },
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "c"},
    {"prompt": "2 + 2 =", "completion": " 4"},
    {"text": "x" * 80, "meta": {"n": [1, 2.5, None]}},
]
_PAIRS: list[dict[str, Any]] = [
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {
        "chosen": [*_CHATS[0]["messages"]],
        "rejected": [_CHATS[0]["messages"][0], {"role": "assistant", "content": "no"}],
    },
]
_PLAIN, _GZIP, _ARRAY, _PREFERENCES = "chats.jsonl", "chats.jsonl.gz", "chats.json", "pairs.jsonl"
_SEQ_LENGTH = 64


def make(name: str) -> Kind:
    lines, pairs = ("".join(f"{json.dumps(record)}\n" for record in records).encode() for records in (_CHATS, _PAIRS))
    inner = {_PLAIN: lines, _GZIP: lines, _ARRAY: json.dumps(_CHATS).encode(), _PREFERENCES: pairs}
    ways: tuple[OnError, ...] = ("fail", "skip")
    return Kind(
        name,
        _seal(inner),
        doors={f"{file} {how}": _door(file, how) for file in inner for how in ways},
        formats={".jsonl": "jsonl", ".json": "json", ".gz": "gzip"},
        inner=inner,
        reads={f"{file} {how}": (file,) for file in inner for how in ways},
        streams=(".jsonl", ".gz", ".json"),
        seal=_seal,
    )


def _seal(inner: Files) -> Files:
    return inner | {_GZIP: gzip.compress(inner[_GZIP], mtime=0)}


def _door(file: str, how: OnError) -> Any:
    def door(folder: Path, scratch: Path) -> Any:
        kind = (PreferencesKind if file == _PREFERENCES else ConversationsKind)(on_error=how, packed=False)
        request = DatasetRequest(
            split="train", num_samples=1 << 20, seq_length=_SEQ_LENGTH, seed=1, tokenizer=ByteTokenizer()
        )
        source = kind.open(str(folder / file), request)
        units = range(source.num_units)
        dataset = source.dataset(units, request)
        samples: list[Any] = [dataset[index] for index in range(source.samples_per_epoch(units, request))]
        return sorted(tuple(sample["ids"].tolist()) for sample in samples)

    return door
