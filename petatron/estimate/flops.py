"""FLOPs and parameters of a decoder.

A GEMM of T tokens with an m x n weight is 2Tmn operations, and backward does twice that, so each weight of a GEMM costs 6 per
token. Attention multiplies activations with each other: queries with keys and weights with values, 2 x 2 operations per head
channel and (query, key) pair, again times 3. With L layers, hidden size h, q = heads x head dim, k = kv heads x head dim, MLP width
f, g = 3 matrices if the MLP is gated and else 2,
padded vocabulary V and sequence length s, a step over T tokens costs

    6 T (L (h (q + 2k) + q h + g h f) + h V)  +  12 L q (T / s) pairs(s)

An MoE layer does, in place of the MLP's g h f, the router's h E for E experts, and for each of the K experts of a token g h e of
width e, plus g h u for a shared expert of width u. With a latent width l the experts' matrices are g l e, and the projections into
the latent space and out of it cost 2 h l. Experts that a token is not routed to cost nothing, so a step costs that of a dense model
of the *active* parameters.

The two conventions differ in pairs(s). `causal` (Megatron's, and ours) counts s^2 / 2, what a causal model needs;
`full` counts s^2, as papers that quote higher utilisation do. A sliding window of w tokens leaves w s - w^2 / 2 of the
causal pairs. Norms, activations, softmax, the embedding lookup and recompute are not counted: these are model FLOPs, the work
the model needs, not the work of a particular run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petatron.config.schema.model import GATED_ACTIVATIONS, ModelConfig, MoEConfig
from petatron.sharding.shard_spec import padded_rows


@dataclass(frozen=True, slots=True)
class _ModelDims:
    """The dimensions of a derived model config."""

    num_layers: int
    hidden_size: int
    q_dim: int
    kv_dim: int
    head_dim: int
    ffn_hidden_size: int
    num_mlp_matrices: int
    vocab_size: int
    num_positions: int


def _model_dims(model: ModelConfig) -> _ModelDims:
    head = model.kv_channels
    groups = model.num_query_groups
    assert head is not None and groups is not None, "the config must be derived first"
    assert model.ffn_hidden_size is not None and model.vocab_size is not None, "the config must be derived first"
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    assert positions is not None, "the config must be derived first"
    return _ModelDims(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        q_dim=model.num_attention_heads * head,
        kv_dim=groups * head,
        head_dim=head,
        ffn_hidden_size=model.ffn_hidden_size,
        num_mlp_matrices=3 if model.activation in GATED_ACTIVATIONS else 2,
        vocab_size=model.vocab_size,
        num_positions=positions,
    )


def flops_formula(*, causal: bool = True, experts: bool = False) -> str:
    """Returns the formula behind the reported TFLOP/s and MFU, for people."""
    pairs = "s^2/2" if causal else "s^2"
    if not experts:
        return f"6 T (L (h (q + 2k) + q h + g h f) + h V) + 12 L q (T/s) {pairs}"
    layers = "L (h (q + 2k) + q h) + dense layers g h f + MoE layers (h E + K g h e + g h u)"
    return f"6 T ({layers} + h V) + 12 L q (T/s) {pairs}"


def padded_vocab_size(model: ModelConfig, *, tp_size: int = 1) -> int:
    """Returns the rows of the embedding in memory; padding rows multiply like the others."""
    assert model.vocab_size is not None, "the config must be derived first"
    return padded_rows(model.vocab_size, model.make_vocab_size_divisible_by, tp_size)


def model_flops_per_token(
    model: ModelConfig,
    moe: MoEConfig | None = None,
    *,
    moe_layer_mask: Sequence[bool] = (),
    tp_size: int = 1,
    causal: bool = True,
) -> float:
    """Returns forward and backward FLOPs per token of a full training sequence; `moe_layer_mask` says which layers are MoE layers."""
    shape = _model_dims(model)
    vocabulary = padded_vocab_size(model, tp_size=tp_size)
    attention = shape.hidden_size * (shape.q_dim + 2 * shape.kv_dim) + shape.q_dim * shape.hidden_size
    num_moe = sum(moe_layer_mask)
    mlp = (shape.num_layers - num_moe) * shape.num_mlp_matrices * shape.hidden_size * shape.ffn_hidden_size
    if num_moe:
        mlp += num_moe * _moe_parameters(model, _require_moe(moe), active=True, biases=False)
    gemm_flops = 6 * (shape.num_layers * attention + mlp + shape.hidden_size * vocabulary)
    pairs = _attention_pairs(model.seq_length, window=model.window_size, causal=causal)
    return gemm_flops + 12 * shape.num_layers * shape.q_dim * pairs / model.seq_length


def _attention_pairs(length: int, *, window: int | None, causal: bool) -> float:
    """Returns the (query, key) pairs of one sequence."""
    if not causal:
        return float(length * length)
    visible = min(window or length, length)
    return visible * length - visible * visible / 2


def parameter_count(
    model: ModelConfig, moe: MoEConfig | None = None, *, moe_layer_mask: Sequence[bool] = (), active: bool = False
) -> int:
    """Returns the trainable parameters of the decoder, without vocabulary padding; with `active` only those one token uses."""
    shape = _model_dims(model)
    norm = 2 if model.normalization == "LayerNorm" else 1  # weight and bias, or weight alone
    bias = int(model.add_bias_linear)
    qkv = shape.q_dim + 2 * shape.kv_dim
    attention = shape.hidden_size * qkv + qkv * int(model.add_bias_linear or model.add_qkv_bias)
    attention += shape.q_dim * shape.hidden_size + bias * shape.hidden_size
    attention += 2 * norm * shape.head_dim * int(model.qk_layernorm)
    layers = shape.num_layers * (attention + 2 * norm * shape.hidden_size)
    num_moe = sum(moe_layer_mask)
    layers += (shape.num_layers - num_moe) * _mlp_parameters(shape, shape.hidden_size, shape.ffn_hidden_size, bias)
    if num_moe:
        layers += num_moe * _moe_parameters(model, _require_moe(moe), active=active, biases=True)
    embeddings = shape.hidden_size * (shape.vocab_size + shape.num_positions)
    head = shape.hidden_size * shape.vocab_size if model.untie_embeddings_and_output_weights else 0
    return layers + embeddings + norm * shape.hidden_size + head


def _mlp_parameters(dims: _ModelDims, hidden_size: int, ffn_hidden_size: int, bias: int) -> int:
    return dims.num_mlp_matrices * hidden_size * ffn_hidden_size + bias * (
        (dims.num_mlp_matrices - 1) * ffn_hidden_size + hidden_size
    )


def _moe_parameters(model: ModelConfig, moe: MoEConfig, *, active: bool, biases: bool) -> int:
    """Returns the parameters of an MoE layer: all of them, or those one token uses."""
    shape = _model_dims(model)
    assert moe.num_experts is not None and moe.moe_ffn_hidden_size is not None, "the config must be derived first"
    bias = int(model.add_bias_linear and biases)
    outer = moe.moe_latent_size or shape.hidden_size
    total = shape.hidden_size * moe.num_experts
    num_used = moe.moe_router_topk if active else moe.num_experts
    total += num_used * _mlp_parameters(shape, outer, moe.moe_ffn_hidden_size, bias)
    if moe.moe_latent_size is not None:
        total += 2 * shape.hidden_size * outer + bias * (shape.hidden_size + outer)
    if moe.moe_shared_expert_intermediate_size:
        total += _mlp_parameters(shape, shape.hidden_size, moe.moe_shared_expert_intermediate_size, bias)
        total += shape.hidden_size * int(moe.moe_shared_expert_gate)
    return total


def _require_moe(moe: MoEConfig | None) -> MoEConfig:
    assert moe is not None, "layers with experts need their config"
    return moe
