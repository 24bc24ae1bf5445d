"""Random encoder-decoders of transformers, with unusual values, and what they compute of padded pairs of texts."""

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

from petatron.kernels.attention.document_layout import Documents, KeySpans
from petatron.models.batch import Batch
from tests.hf.variant_zoo import VOCABULARY

SOURCE_LENGTH, LENGTH = 24, 16
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 40,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "initializer_factor": 0.1,
    "decoder_start_token_id": 0,
    "attn_implementation": "eager",
}
_ODD = {
    **_SIZES,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 13,
    "layer_norm_epsilon": 1e-3,
}


def _untied(model: Any) -> Any:
    """transformers ties the head of every new model, and leaves it as it is where a folder has another."""
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    return model


def _t5(**config: Any) -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**config))


ENCODER_DECODERS: Mapping[str, Callable[[], Any]] = {
    "t5": lambda: _t5(**_SIZES),
    "t5-odd": lambda: _t5(**_ODD, feed_forward_proj="gelu"),
    "flan-t5": lambda: _untied(_t5(**_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "flan-t5-odd": lambda: _untied(_t5(**_ODD, feed_forward_proj="gated-silu", tie_word_embeddings=False)),
    "t5-unscaled": lambda: _t5(**_SIZES, tie_word_embeddings=False),
    "mt5": lambda: _untied(
        transformers.MT5ForConditionalGeneration(transformers.MT5Config(**_ODD, feed_forward_proj="gated-gelu"))
    ),
}


@dataclass(frozen=True, slots=True)
class EncoderDecoderTruth:
    """The model, the batch as ours takes it, which of the decoder's positions are tokens, and what transformers computes in float32."""

    model: Any
    batch: Batch
    is_token: Tensor
    logits: Tensor
    loss: float
    grads: Mapping[str, Tensor]


def make_pairs(seed: int, vocabulary: int = VOCABULARY) -> tuple[Batch, Tensor, Tensor]:
    """Returns a batch of three pairs of texts of different lengths, and the masks of their tokens, of source and target."""
    rng = np.random.default_rng(seed)
    source_lengths, lengths = np.array([SOURCE_LENGTH, 7, SOURCE_LENGTH - 5]), np.array([LENGTH - 3, LENGTH, 5])
    is_source = np.arange(SOURCE_LENGTH) < source_lengths[:, None]
    is_token = np.arange(LENGTH) < lengths[:, None]
    source = np.where(is_source, rng.integers(6, vocabulary, (3, SOURCE_LENGTH)), 0)
    labels = np.where(is_token, rng.integers(6, vocabulary, (3, LENGTH)), 0)
    tokens = np.concatenate((np.zeros((3, 1), np.int64), labels[:, :-1]), axis=1)
    batch = Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(is_token.astype(np.float32)),
        documents=Documents.of_lengths(lengths, LENGTH),
        arrays={"encoder_tokens": torch.from_numpy(source)},
        source_documents=Documents.of_lengths(source_lengths, SOURCE_LENGTH),
        key_spans=KeySpans.of_lengths(torch.from_numpy(source_lengths), LENGTH),
    )
    return batch, torch.from_numpy(is_source), torch.from_numpy(is_token)


def with_random_weights(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.5 * (parameter.dim() == 1))
    return model.eval()


def inputs_of(batch: Batch, is_source: Tensor) -> dict[str, Tensor]:
    """What transformers takes."""
    return {
        "input_ids": batch["encoder_tokens"],
        "attention_mask": is_source.long(),
        "decoder_input_ids": batch.tokens,
        "labels": batch.labels.masked_fill(batch.loss_mask == 0, -100),
    }


@cache
def encoder_decoder_truth(name: str) -> EncoderDecoderTruth:
    torch.manual_seed(len(name))
    model = with_random_weights(ENCODER_DECODERS[name](), len(name))
    batch, is_source, is_token = make_pairs(7)
    output = model(**inputs_of(batch, is_source))
    output.loss.backward()
    grads = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    return EncoderDecoderTruth(model, batch, is_token, output.logits.detach(), output.loss.item(), grads)


def saved(name: str, folder: Path) -> Path:
    """Saves the model of transformers in a folder."""
    encoder_decoder_truth(name).model.save_pretrained(folder)
    return folder
