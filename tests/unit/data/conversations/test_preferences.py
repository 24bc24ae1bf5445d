"""Files of preferences: forms of records, and the segments of their batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import DataError
from petatron.data.batch_loader import LoaderOptions
from petatron.data.conversations.conversation_record import Conversation, TextRecord
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.preference_record import read_preference, read_unpaired
from petatron.data.conversations.preferences_kind import PairSource, PreferencesKind, UnpairedPreferencesKind
from petatron.data.conversations.refused_conversation import RefusedConversation
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.tokenizer import ByteTokenizer
from petatron.models.batch import SEGMENT_IDS, Batch
from petatron.models.decoder import POOLING_WEIGHTS
from petatron.models.preference_objectives import CHOSEN_MASK, DESIRABLE, PAIR_MASK
from tests.unit.data.conversations.chat_tokenizers import answer, user

SETTINGS = ConversationSettings()
TEXTS = {"prompt": "a", "chosen": "bc", "rejected": "d"}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def batch_of(kind: PreferencesKind, path: Path, seq_length: int, count: int = 1) -> Batch:
    request = DatasetRequest(split="train", num_samples=4, seq_length=seq_length, seed=1, tokenizer=ByteTokenizer())
    source = kind.open(str(path), request)
    dataset = source.dataset(range(source.num_units), request)
    samples: list[Any] = [dataset[index] for index in range(count)]
    return kind.collate(samples, LoaderOptions(micro_batch_size=count, seed=1))


def segments(batch: Batch) -> list[tuple[str, str]]:
    """What each segment predicts, and what of it is learned."""
    result = []
    for number in range(batch.num_segments or 0):
        inside = batch[SEGMENT_IDS] == number
        tokens = batch.tokens[inside].tolist() + batch.labels[inside].tolist()[-1:]
        learned = [x for x, m in zip(batch.labels[inside].tolist(), batch.loss_mask[inside].tolist()) if m]
        result.append(tuple("".join("$" if x == 256 else chr(x) for x in ids) for ids in (tokens, learned)))
    return result


FORMS = [
    {"prompt": [user("a")], "chosen": [answer("b")], "rejected": [answer("c")]},
    {"chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("c")]},
    {"prompt": "a", "chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("c")], "score_chosen": 8.5},
]


@pytest.mark.parametrize("record", FORMS)
def test_forms_of_conversations(record: Any):
    chosen, rejected = read_preference(record, SETTINGS)
    assert isinstance(chosen, Conversation) and isinstance(rejected, Conversation)
    assert chosen.messages == [user("a"), answer("b")] and rejected.messages == [user("a"), answer("c")]
    assert chosen.first == rejected.first == 1


def test_forms_of_texts():
    assert read_preference(TEXTS, SETTINGS) == (TextRecord("a", "bc"), TextRecord("a", "d"))
    shared = {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}
    chosen, rejected = read_preference(shared, SETTINGS)
    assert chosen == TextRecord("\n\nHuman: Hi\n\nAssistant:", " Yes") and rejected == TextRecord(
        "\n\nHuman: Hi\n\nAssistant:", " No"
    )
    record = {"prompt": "a", "completion": "b", "label": True}
    assert read_unpaired(record, SETTINGS) == (TextRecord("a", "b"), True)


WRONG = [
    ([], "is a JSON list, not an object"),
    ({"chosen": "a"}, "has no 'rejected'"),
    ({"prompt": "a", "chosen": "b", "rejected": [answer("c")]}, "has a text and a list in 'chosen' and 'rejected'"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "has the same answer in 'chosen' and 'rejected'"),
    ({"prompt": [user("a")], "chosen": [], "rejected": [answer("c")]}, "has no list of messages in 'completion'"),
]


@pytest.mark.parametrize(("record", "message"), WRONG)
def test_wrong_preferences_are_named(tmp_path: Path, record: Any, message: str):
    with pytest.raises(RefusedConversation, match=message):
        read_preference(record, SETTINGS)
    with pytest.raises(DataError, match=f"line 2: .*{message}"):
        batch_of(PreferencesKind(), write(tmp_path / "a.jsonl", TEXTS, record), 16)


def test_labels_are_true_or_false():
    with pytest.raises(RefusedConversation, match="has a 'label' that is neither true nor false"):
        read_unpaired({"prompt": "a", "completion": "b", "label": "good"}, SETTINGS)


def test_pairs_share_a_row(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", TEXTS, {"prompt": "ef", "chosen": "g", "rejected": "hi"})
    batch = batch_of(PreferencesKind(), path, 16)
    assert batch.tokens.shape == (1, 16) and batch.rows_per_sample == 1 and batch[PAIR_MASK].tolist() == [1, 1]
    pairs = [("abc$", "bc$"), ("ad$", "d$")], [("efg$", "g$"), ("efhi$", "hi$")]
    assert segments(batch) in ([*pairs[0], *pairs[1]], [*pairs[1], *pairs[0]])
    assert batch[CHOSEN_MASK].sum() == 5 and batch.loss_mask.sum() == 10
    single = batch_of(PreferencesKind(packed=False), path, 8, count=2)
    assert (
        single.tokens.shape == (4, 8)
        and single.rows_per_sample == 2
        and sorted(segments(single)) == sorted(segments(batch))
    )


def test_rows_for_a_head_have_whole_texts(tmp_path: Path):
    batch = batch_of(PreferencesKind(scores_rows=True), write(tmp_path / "a.jsonl", TEXTS), 4)
    assert batch.tokens.tolist() == [[97, 98, 99, 256], [97, 100, 256, 256]] and batch.rows_per_sample == 2
    assert batch[POOLING_WEIGHTS].tolist() == [[0, 0, 0, 1], [0, 0, 1, 0]]


def test_answers_without_a_pair_have_that_of_another_prompt_beside_them(tmp_path: Path):
    records = [{"prompt": letter, "completion": letter.upper(), "label": letter == "a"} for letter in "abc"]
    batch = batch_of(UnpairedPreferencesKind(), write(tmp_path / "a.jsonl", *records), 32)
    found = segments(batch)
    own, others = found[0::2], found[1::2]
    assert sorted(own) == [("aA$", "A$"), ("bB$", "B$"), ("cC$", "C$")]
    for (text, _), (other, learned) in zip(own, others):
        assert other[0] == text[0] and other[1:] == learned and learned[0] != text[1]
    assert sorted(learned for _, learned in others) == ["A$", "B$", "C$"]
    assert batch[DESIRABLE].tolist() == [float(text[0] == "a") for text, _ in own for _ in range(2)]


def test_long_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "a.jsonl", {"prompt": "ab", "chosen": "cdefgh", "rejected": "ij"}, TEXTS)
    batch = batch_of(PreferencesKind(), path, 10, count=2)
    assert ("abcdefg", "cdefg") in segments(batch) and ("abij$", "ij$") in segments(batch)
    assert "1 pair longer than a row of 10 tokens: 1 cut, 0 left out" in caplog.text
    batch = batch_of(PreferencesKind(long_samples="truncate-left", packed=False), path, 4, count=2)
    assert ("efgh$", "fgh$") in segments(batch), "the first token has nothing before it"
    assert len(segments(batch_of(PreferencesKind(long_samples="skip"), path, 10))) == 2
    with pytest.raises(
        DataError, match=r"a\.jsonl:1 has answers of 9 and 5 tokens, both in one row of --seq-length 10"
    ):
        batch_of(PreferencesKind(long_samples="fail"), path, 10)
    with pytest.raises(DataError, match="no pair of these fits a row"):
        batch_of(PreferencesKind(long_samples="skip"), path, 3)


def test_a_pair_knows_its_record(tmp_path: Path):
    request = DatasetRequest(split="train", num_samples=4, seq_length=16, seed=1, tokenizer=ByteTokenizer())
    source = PreferencesKind().open(str(write(tmp_path / "a.jsonl", TEXTS)), request)
    assert isinstance(source, PairSource) and source.longest == 7
    [document] = source.dataset(range(1), request).trace(3).documents
    assert str(document.source) == f"{tmp_path}/a.jsonl:1" and document.length == 7
    with pytest.raises(IndexError):
        source.dataset(range(1), request)[4]
