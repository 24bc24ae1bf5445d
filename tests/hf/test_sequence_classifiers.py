"""Classifiers of transformers are read and written: their logits, and what else a folder may say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MegatronBertConfig,
    MegatronBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import petatron
from petatron.base.errors import ConfigError, TrainError
from petatron.data.labelled.labelled_text_dataset import pooling_weights
from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch
from petatron.models.hf import from_hf_config

_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 71,
}
_ENCODER = {**_SIZES, "max_position_embeddings": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LABELS = {"id2label": {0: "no", 1: "yes", 2: "perhaps"}, "label2id": {"no": 0, "yes": 1, "perhaps": 2}}
LENGTHS = np.array([9, 4, 12])


def classifier(name: str) -> Any:
    torch.manual_seed(5)
    made: dict[str, Any] = {
        "llama": lambda: LlamaForSequenceClassification(
            LlamaConfig(**_SIZES, **_LABELS, num_key_value_heads=2, max_position_embeddings=24, pad_token_id=0)
        ),
        "bert": lambda: BertForSequenceClassification(BertConfig(**_ENCODER, **_LABELS)),
        "megatron-bert": lambda: MegatronBertForSequenceClassification(MegatronBertConfig(**_ENCODER, **_LABELS)),
        "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**_ENCODER, **_LABELS, type_vocab_size=1)),
    }
    model = made[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def texts(pooling: str) -> tuple[Batch, Tensor]:
    """Padded texts on our side, and which of their tokens are no padding."""
    tokens = torch.randint(5, 71, (3, 12), generator=torch.Generator().manual_seed(1))
    is_token = torch.arange(12) < torch.from_numpy(LENGTHS)[:, None]
    tokens = torch.where(is_token, tokens, 0)
    weights = torch.from_numpy(pooling_weights(LENGTHS, 12, pooling))  # pyright: ignore[reportArgumentType]
    documents = Documents.of_lengths(LENGTHS, 12) if pooling == "first" else None
    return Batch(tokens, documents=documents, arrays={"pooling_weights": weights}), is_token


@pytest.mark.parametrize("name", ["llama", "bert", "megatron-bert", "roberta"])
def test_logits_equal_those_of_transformers_both_ways(name: str, tmp_path: Path):
    true = classifier(name)
    true.save_pretrained(tmp_path / "theirs")
    batch, is_token = texts("last" if name == "llama" else "first")
    tokens = batch.tokens.where(is_token, 1) if name == "roberta" else batch.tokens  # its padding has no position
    with torch.no_grad():
        logits = true(input_ids=tokens, attention_mask=is_token.long()).logits
    model = petatron.from_pretrained(tmp_path / "theirs")
    assert model.spec.config.label_names == ("no", "yes", "perhaps")
    [outputs] = model.forward([batch], collect=["label_logits"])
    torch.testing.assert_close(outputs["label_logits"], logits, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "ours")
    again, report = type(true).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert again.config.id2label == _LABELS["id2label"] and again.config.label2id == _LABELS["label2id"]
    for key, value in true.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_a_head_that_no_class_has_is_saved_in_our_names(tmp_path: Path):
    classifier("llama").save_pretrained(tmp_path / "theirs")
    model = petatron.from_pretrained(tmp_path / "theirs")
    spec: Any = model.spec
    for change in ({"pooling": "mean"}, {"num_labels": 0}, {"label_bias": True}):
        other = replace(spec.config, **change)
        with pytest.raises(ConfigError, match="which has no such head"):
            petatron.models.hf.to_hf_config(replace(spec, config=other))  # pyright: ignore[reportAttributeAccessIssue]


def test_a_classifier_says_that_it_is_trained_with_an_objective(tmp_path: Path):
    classifier("llama").save_pretrained(tmp_path)
    model = petatron.from_pretrained(tmp_path)
    with pytest.raises(TrainError, match="The model has no loss of its own"):
        model.train_step([texts("last")[0]])


@pytest.mark.parametrize("labels", [7, {"0": "a", "2": "b"}, {"0": 1}, {}])
def test_labels_that_are_not_numbered(labels: Any):
    config = json.loads(LlamaConfig(**_SIZES).to_json_string(use_diff=False))
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": labels}
    with pytest.raises(ConfigError, match=r"id2label .*does not number the labels from 0 on"):
        from_hf_config(config)


def test_labels_without_names_are_numbers():
    config = json.loads(LlamaConfig(**_SIZES, num_labels=4).to_json_string(use_diff=False))
    values, _ = from_hf_config({**config, "architectures": ["LlamaForSequenceClassification"]})
    assert (values["num_labels"], values["label_names"], values["pooling"]) == (4, (), "last")
