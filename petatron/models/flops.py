"""How much arithmetic a dense decoder does, and how many parameters it has.

A matrix product of T tokens with an m x n weight is 2Tmn operations, and the backward pass does twice that, so each
weight that multiplies costs 6 per token. Attention multiplies activations with each other: queries with keys and
weights with values, 2 x 2 operations per head channel and (query, key) pair, again times 3. With L layers, hidden size
h, q = heads x head width, k = key/value heads x head width, MLP width f, g = 3 matrices if the MLP is gated and else 2,
padded vocabulary V and sequence length s, a step over T tokens costs

    6 T (L (h (q + 2k) + q h + g h f) + h V)  +  12 L q (T / s) pairs(s)

The two conventions differ in pairs(s). `causal` (Megatron's, and ours) counts s^2 / 2, what a causal model needs;
`full` counts s^2, as papers that quote higher utilisation do. A sliding window of w tokens leaves w s - w^2 / 2 of the
causal pairs. Norms, activations, softmax, the embedding lookup and recomputation are not counted: these are model
FLOPs, the work the model needs, not the work a run happens to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from petatron.config.schema import GATED_ACTIVATIONS, ModelConfig
from petatron.mesh.spec import padded


@dataclass(frozen=True, slots=True)
class _Shape:
    """The numbers of a model once everything derived is filled in."""

    layers: int
    hidden: int
    queries: int
    keys: int
    head: int
    ffn: int
    matrices: int
    vocabulary: int
    positions: int


def _shape(model: ModelConfig) -> _Shape:
    head = model.kv_channels
    groups = model.num_query_groups
    assert head is not None and groups is not None, "the config must be derived first"
    assert model.ffn_hidden_size is not None and model.vocab_size is not None, "the config must be derived first"
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    assert positions is not None, "the config must be derived first"
    return _Shape(
        layers=model.num_layers,
        hidden=model.hidden_size,
        queries=model.num_attention_heads * head,
        keys=groups * head,
        head=head,
        ffn=model.ffn_hidden_size,
        matrices=3 if model.activation in GATED_ACTIVATIONS else 2,
        vocabulary=model.vocab_size,
        positions=positions,
    )


def formula(*, causal: bool = True) -> str:
    """The formula behind the reported TFLOP/s and MFU, for people."""
    pairs = "s^2/2" if causal else "s^2"
    return f"6 T (L (h (q + 2k) + q h + g h f) + h V) + 12 L q (T/s) {pairs}"


def padded_vocabulary(model: ModelConfig, *, tensor_parallel: int = 1) -> int:
    """Rows of the embedding in memory; the extra ones multiply like the others."""
    assert model.vocab_size is not None, "the config must be derived first"
    return padded(model.vocab_size, model.make_vocab_size_divisible_by, tensor_parallel)


def model_flops_per_token(model: ModelConfig, *, tensor_parallel: int = 1, causal: bool = True) -> float:
    """Forward and backward FLOPs per token of a full training sequence."""
    shape = _shape(model)
    vocabulary = padded_vocabulary(model, tensor_parallel=tensor_parallel)
    attention = shape.hidden * (shape.queries + 2 * shape.keys) + shape.queries * shape.hidden
    mlp = shape.matrices * shape.hidden * shape.ffn
    products = 6 * (shape.layers * (attention + mlp) + shape.hidden * vocabulary)
    pairs = _pairs(model.seq_length, window=model.window_size, causal=causal)
    return products + 12 * shape.layers * shape.queries * pairs / model.seq_length


def _pairs(length: int, *, window: int | None, causal: bool) -> float:
    """(query, key) pairs of one sequence."""
    if not causal:
        return float(length * length)
    seen = min(window or length, length)
    return seen * length - seen * seen / 2


def parameter_count(model: ModelConfig) -> int:
    """Trainable parameters of the dense decoder, without vocabulary padding."""
    shape = _shape(model)
    norm = 2 if model.normalization == "LayerNorm" else 1  # weight and bias, or weight alone
    bias = int(model.add_bias_linear)
    qkv = shape.queries + 2 * shape.keys
    attention = shape.hidden * qkv + qkv * int(model.add_bias_linear or model.add_qkv_bias)
    attention += shape.queries * shape.hidden + bias * shape.hidden
    attention += 2 * norm * shape.head * int(model.qk_layernorm)
    mlp = shape.matrices * shape.hidden * shape.ffn + bias * ((shape.matrices - 1) * shape.ffn + shape.hidden)
    layer = attention + mlp + 2 * norm * shape.hidden
    embeddings = shape.hidden * (shape.vocabulary + shape.positions)
    head = shape.hidden * shape.vocabulary if model.untie_embeddings_and_output_weights else 0
    return shape.layers * layer + embeddings + norm * shape.hidden + head
