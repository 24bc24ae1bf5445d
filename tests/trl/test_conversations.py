"""Token ids, masks, losses and gradients of conversations are those of TRL's `SFTTrainer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import petatron
from petatron.data.conversations.conversation_settings import LongConversations
from petatron.data.conversations.conversations_kind import ConversationsKind, make_conversation_batch
from petatron.data.conversations.preferences_kind import PreferencesKind
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.tokenizer import HuggingFaceTokenizer
from petatron.mesh.mesh import ParallelMesh
from tests.parity.harness import tiny_run
from tests.trl.tiny import check_gradients, gradients, open_transformers, save_model
from tests.unit.data.conversations.chat_tokenizers import CHATS, FAMILIES, PUBLISHED, answer, save_tokenizer, user

pytestmark = pytest.mark.trl
ROOM, SEQ_LENGTH = "--vocab-size 384", 64
MESSAGES = [{"messages": CHATS[name]} for name in ("two turns", "the same twice")]
SHORT = {"prompt": [user("a")], "completion": [answer("b c")]}
COMPLETIONS = [{"prompt": CHATS["two turns"][:3], "completion": CHATS["two turns"][3:]}, SHORT]
TEXTS = [{"prompt": "how are", "completion": " you"}, {"prompt": "the weather", "completion": " is fine"}]
CASES = {
    "llama3": ("llama3", MESSAGES, {"assistant_only_loss": True}),
    "phi3": ("phi3", MESSAGES, {"assistant_only_loss": True}),
    "gemma3": ("gemma3", MESSAGES, {"assistant_only_loss": True}),
    "qwen3 completions": ("qwen3", COMPLETIONS, {}),
    "llama3 completions": ("llama3", COMPLETIONS, {"completion_only_loss": True}),
    "texts with prompts": ("llama3", TEXTS, {}),
    "texts": ("llama3", [{"text": "how are you"}, {"text": "the weather is fine<|eot_id|>"}], {}),
    "cut": ("llama3", MESSAGES, {"assistant_only_loss": True, "max_length": 24}),
    "cut at the beginning": (
        "llama3",
        MESSAGES,
        {"assistant_only_loss": True, "max_length": 24, "truncation_mode": "keep_end"},
    ),
}


def trainer_of(folder: Path, model: Any, tokenizer: Any, records: list[dict[str, Any]], **options: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=8, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        shuffle_dataset=False, **{"max_length": SEQ_LENGTH, **options},
    )  # fmt: skip
    return SFTTrainer(model=model, args=config, train_dataset=Dataset.from_list(records), processing_class=tokenizer)


@pytest.mark.parametrize("case", CASES)
def test_batches_losses_and_gradients(tmp_path: Path, case: str):
    family, records, options = CASES[case]
    bos, eos = FAMILIES[family]
    theirs = save_tokenizer(tmp_path / "tokenizer", (PUBLISHED / f"{family}.jinja").read_text(), bos=bos, eos=eos)
    model = open_transformers(save_model(tmp_path / "model", seed=1, flags=ROOM))
    trainer = trainer_of(tmp_path, model, theirs, records, **options)

    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    length = options.get("max_length", SEQ_LENGTH)
    cut: LongConversations = "truncate-left" if options.get("truncation_mode") == "keep_end" else "truncate"
    single, packed = ConversationsKind(long_samples=cut, packed=False), ConversationsKind(long_samples=cut)
    ours = sorted(ids_and_labels(row) for row in all_rows(single, tmp_path, length))
    assert ours == sorted((list(row["input_ids"]), [int(x) for x in row["labels"]]) for row in trainer.train_dataset)

    batch = make_conversation_batch(all_rows(packed, tmp_path, length))
    flags = f"--pretrained-checkpoint {tmp_path / 'model'} {ROOM} --seq-length {length} --micro-batch-size 8 --max-position-embeddings 64"
    mine = petatron.build_model(tiny_run(flags, dtype="float64"), ParallelMesh.single())
    loss = float(mine.train_step([batch]))
    inputs = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    expected = trainer.compute_loss(model, inputs)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    check_gradients(gradients(mine), model)


def ids_and_labels(sample: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The ids of a row without its padding, and TRL's labels of them."""
    kept = sample["begins"] >= 0
    ids, weights = sample["ids"][kept].tolist(), sample["weights"][kept].tolist()
    return ids, [number if weight else -100 for number, weight in zip(ids, weights)]


def all_rows(kind: ConversationsKind, folder: Path, length: int) -> list[Any]:
    tokenizer = HuggingFaceTokenizer(folder / "tokenizer")
    request = DatasetRequest(split="train", num_samples=8, seq_length=length, seed=1, tokenizer=tokenizer)
    source = kind.open(str(folder / "records.jsonl"), request)
    units = range(source.num_units)
    dataset = source.dataset(units, request)
    return [dataset[index] for index in range(source.samples_per_epoch(units, request))]


PREFERENCES = {
    "conversations": {"prompt": [user("how are")], "chosen": [answer("you")], "rejected": [answer("fine")]},
    "whole conversations": {"chosen": CHATS["two turns"], "rejected": [*CHATS["two turns"][:3], answer("no")]},
    "texts": {"prompt": "how are", "chosen": " you", "rejected": " fine"},
    "texts with their prompt": {"chosen": "how are you", "rejected": "how are fine"},
}


@pytest.mark.parametrize("form", PREFERENCES)
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_preferences(tmp_path: Path, family: str, form: str):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    bos, eos = FAMILIES[family]
    theirs = save_tokenizer(tmp_path / "tokenizer", (PUBLISHED / f"{family}.jinja").read_text(), bos=bos, eos=eos)
    model = open_transformers(save_model(tmp_path / "model", seed=1, flags=ROOM))
    args = DPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, max_length=SEQ_LENGTH)
    trainer = DPOTrainer(
        model, args=args, processing_class=theirs, train_dataset=Dataset.from_list([PREFERENCES[form]])
    )
    row = trainer.train_dataset[0]

    (tmp_path / "records.jsonl").write_text(json.dumps(PREFERENCES[form]) + "\n")
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer")
    request = DatasetRequest(split="train", num_samples=1, seq_length=256, seed=1, tokenizer=tokenizer)
    sample = PreferencesKind().open(str(tmp_path / "records.jsonl"), request).dataset(range(1), request)[0]
    assert not isinstance(sample, np.ndarray)
    wanted = [[*row["prompt_ids"], *row[f"{side}_ids"]] for side in ("chosen", "rejected")]
    assert sample["ids"].tolist() == wanted[0] + wanted[1]
    prompt = len(row["prompt_ids"])
    assert sample["learned"].tolist() == [number >= prompt for ids in wanted for number in range(len(ids))]
