"""Random encoders of transformers, with unusual values, and what they compute of padded samples with masked tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch
from tests.hf.variant_zoo import VOCABULARY

LENGTH = 16
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "initializer_range": 0.4,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_PLAIN = {**_SIZES, **_NO_DROPOUT, "max_position_embeddings": 29, "attn_implementation": "eager"}
_MODERN = {
    **_SIZES,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 3),
}
ENCODERS: Mapping[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertForPreTraining(transformers.BertConfig(**_PLAIN)),
    "bert-odd": lambda: transformers.BertForPreTraining(
        transformers.BertConfig(**{**_PLAIN, "hidden_act": "gelu_new", "type_vocab_size": 5, "layer_norm_eps": 1e-3})
    ),
    "megatron-bert": lambda: transformers.MegatronBertForPreTraining(
        transformers.MegatronBertConfig(**{**_PLAIN, "hidden_act": "relu"})
    ),
    "roberta": lambda: transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(**{**_PLAIN, "pad_token_id": 4, "hidden_act": "silu", "type_vocab_size": 1})
    ),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**{**_MODERN, "local_attention": 6})
    ),
    "modernbert-odd": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **_MODERN,
            local_attention=4,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            hidden_activation="silu",
            classifier_activation="relu",
            norm_bias=True,
            attention_bias=True,
            mlp_bias=True,
            classifier_bias=True,
            decoder_bias=False,
            tie_word_embeddings=False,
            norm_eps=1e-3,
        )
    ),
}


@dataclass(frozen=True, slots=True)
class EncoderTruth:
    """The model, the batch as ours takes it, which of its positions are tokens, and what transformers computes in float32;
    `order_logits` of some models."""

    model: Any
    batch: Batch
    is_token: Tensor
    logits: Tensor
    order_logits: Tensor | None
    loss: float
    grads: Mapping[str, Tensor]


def make_batch(seed: int, *, has_types: bool, has_order: bool) -> tuple[Batch, Tensor]:
    """Returns a batch of three samples of different lengths, and the mask of their tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.array([LENGTH, LENGTH - 3, 5])
    tokens = rng.integers(6, VOCABULARY, (3, LENGTH))
    is_token = np.arange(LENGTH) < lengths[:, None]
    tokens = np.where(is_token, tokens, 4)
    masked = is_token & (rng.random(tokens.shape) < 0.3)
    arrays = {"token_types": torch.from_numpy((np.arange(LENGTH) >= lengths[:, None] // 2).astype(np.int64))}
    order = {"sentence_order": torch.tensor([1, 0, 1])}
    batch = Batch(
        torch.from_numpy(np.where(masked, 5, tokens)),
        torch.from_numpy(tokens),
        torch.from_numpy(masked.astype(np.float32)),
        documents=Documents.of_lengths(lengths, LENGTH),
        arrays=(arrays if has_types else {}) | (order if has_order else {}),
        sequence_dims={"sentence_order": None},
    )
    return batch, torch.from_numpy(is_token)


@cache
def encoder_truth(name: str) -> EncoderTruth:
    torch.manual_seed(len(name))
    model = ENCODERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and norms too
    has_order = "bert" in name.split("-") and hasattr(model, "cls")
    has_types = getattr(model.config, "type_vocab_size", 0) > 1
    batch, is_token = make_batch(7, has_types=has_types, has_order=has_order)
    inputs = {"input_ids": batch.tokens, "attention_mask": is_token.long()}
    inputs |= {"token_type_ids": batch["token_types"]} if has_types else {}
    if (
        name == "roberta"
    ):  # it counts positions by tokens that are not the padding id, which this batch has inside of samples too
        first = model.config.pad_token_id + 1
        inputs["position_ids"] = torch.arange(first, first + LENGTH).expand(3, -1)
    inputs["labels"] = batch.labels.masked_fill(batch.loss_mask == 0, -100)
    inputs |= {"next_sentence_label": batch["sentence_order"]} if has_order else {}
    output = model.eval()(**inputs)
    output.loss.backward()
    grads = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    logits = output.prediction_logits if has_order else output.logits
    order = output.seq_relationship_logits.detach() if has_order else None
    return EncoderTruth(model, batch, is_token, logits.detach(), order, output.loss.item(), grads)


def saved(name: str, folder: Path) -> Path:
    """Saves the model of transformers in a folder."""
    encoder_truth(name).model.save_pretrained(folder)
    return folder
