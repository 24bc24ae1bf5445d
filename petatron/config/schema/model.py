"""The part of the schema that says what is trained: the shape of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from petatron.config.schema.layer_variants import LayerVariants
from petatron.config.schema.numeric_bounds import (
    ExpertCount,
    Factor,
    Fraction,
    LayerCount,
    RotaryBase,
    SequenceLength,
    SignedFactor,
    VocabularySize,
    Width,
)

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu")
PositionEmbeddingType = Literal["learned_absolute", "rope", "yarn", "alibi", "none"]
ActivationName = Literal[
    "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu", "swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu"
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RawModelConfig(LayerVariants):
    """The shape of a decoder."""

    model_type: str = "decoder"
    """Which registered model is built; `decoder` is that of the GPT and LLaMA families, dense or with experts."""
    num_layers: LayerCount = 0
    """Number of transformer layers."""
    hidden_size: Width = 0
    """Width of the residual stream."""
    ffn_hidden_size: Width | None = None
    """Width inside the MLP. Derived: 4 x hidden; for gated activations 8/3 x hidden rounded down to a multiple of 64."""
    num_attention_heads: Width = 0
    """Number of query heads."""
    group_query_attention: bool = False
    """Share key/value heads between groups of query heads; `--num-query-groups` says how many groups."""
    num_query_groups: Width | None = None
    """Number of key/value heads. Derived: 1 with `--group-query-attention` (multi-query), else the number of heads."""
    kv_channels: Width | None = None
    """Width of one head. Derived: hidden size / heads."""
    seq_length: SequenceLength = 0
    """Tokens per training sample."""
    max_position_embeddings: SequenceLength | None = None
    """Longest position the model is built for. Derived: the sequence length."""
    position_embedding_type: PositionEmbeddingType = "learned_absolute"
    """How positions enter: a learned table, rotary embedding, rotary with YaRN scaling, biases of scores (ALiBi), or not at all."""
    rotary_base: RotaryBase = 10000.0
    """Base of the rotary frequencies (theta)."""
    rotary_percent: Fraction = 1.0
    """Fraction of each head that is rotated."""
    use_rope_scaling: bool = False
    """Llama-3 frequency scaling for contexts longer than the one first trained on."""
    rope_scaling_factor: Factor = 8.0
    """Context extension factor of Llama-3 or YaRN scaling."""
    rope_low_freq_factor: Factor = 1.0
    """Llama-3 scaling: wavelengths longer than original context / this are fully scaled."""
    rope_high_freq_factor: Factor = 4.0
    """Llama-3 scaling: wavelengths shorter than original context / this are left alone."""
    original_max_position_embeddings: SequenceLength = 8192
    """Context length before extension, for Llama-3 and YaRN scaling."""
    yarn_beta_fast: Factor = 32.0
    """YaRN: rotations over the original context above which a frequency is kept."""
    yarn_beta_slow: Factor = 1.0
    """YaRN: rotations over the original context below which a frequency is interpolated."""
    yarn_mscale: SignedFactor = 1.0
    """YaRN: scale of the attention temperature correction; below 0 for a temperature below 1."""
    yarn_mscale_all_dim: Factor = 0.0
    """YaRN: second scale of the temperature correction (DeepSeek); 0 leaves it out."""
    yarn_correction_range_round_to_int: bool = True
    """YaRN: the ramp between kept and interpolated frequencies begins and ends at a pair; off: between two of them (gpt-oss)."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Which normalisation stands before attention, before the MLP and at the end."""
    norm_epsilon: Factor = 1e-5
    """Added to the variance inside normalisation."""
    apply_layernorm_1p: bool = False
    """Keep the weights of norms as an offset from one (Gemma), so that they start at zero."""
    scale_embeddings: bool = False
    """Multiply embeddings by the square root of the hidden size (Gemma)."""
    activation: ActivationName = "gelu"
    """MLP activation; the names with glu are gated and use three matrices."""
    add_bias_linear: bool = True
    """Biases on the linear layers (`--disable-bias-linear` turns them off)."""
    add_qkv_bias: bool = False
    """Bias on the query/key/value projection even when the others have none (Qwen2)."""
    qk_layernorm: bool = False
    """Normalise each query and key head (Qwen3); with `--multi-latent-attention` the latents (DeepSeek)."""
    window_size: SequenceLength | None = None
    """Sliding-window attention: how many tokens, itself included, a token sees (127,0 in Megatron is 128). Unset means all."""
    multi_latent_attention: bool = False
    """Multi-head latent attention (DeepSeek): keys and values come from one narrow latent vector per token."""
    q_lora_rank: Width | None = None
    """Latent attention: width of the latent that queries come from; unset means that they come from the hidden state."""
    kv_lora_rank: Width = 32
    """Latent attention: width of the latent that keys and values come from."""
    qk_head_dim: Width = 128
    """Latent attention: width of the part of a query or key head without position."""
    qk_pos_emb_head_dim: Width = 64
    """Latent attention: width of the rotary part of a query or key head; all heads share that of the keys."""
    v_head_dim: Width = 128
    """Latent attention: width of a value head."""
    is_hybrid_model: bool = False
    """A model whose layers are given one by one, by letters or ratios of kinds. Derived: on with a pattern or a ratio of them."""
    hybrid_layer_pattern: str | None = None
    """The layers of a hybrid model, one letter each: M Mamba-2, G gated delta net, * attention, - MLP, E experts, P
    attention and Mamba-2 in parallel. Derived: from ratios."""
    hybrid_attention_ratio: Fraction = 0.0
    """Hybrid models without a pattern: the share of layers that are attention."""
    hybrid_mlp_ratio: Fraction = 0.0
    """Hybrid models without a pattern: the share of layers that are MLPs; what remains is Mamba-2."""
    mamba_state_dim: Width = 128
    """Mamba-2: width of the state of each channel."""
    mamba_head_dim: Width = 64
    """Mamba-2: width of a head."""
    mamba_num_groups: Width = 8
    """Mamba-2: groups of heads that share the inputs and outputs of their states (B and C)."""
    mamba_num_heads: Width | None = None
    """Mamba-2: number of heads. Derived: 2 x hidden size / head width."""
    mamba_norm_groups: Width | None = None
    """Mamba-2: groups of channels that the gated norm normalises, `--mamba-num-groups` or 1. Derived: the former."""
    mamba_chunk_size: SequenceLength = 128
    """Mamba-2: tokens of a chunk of the scan; of speed and memory only."""
    linear_chunk_size: SequenceLength = 64
    """Gated delta net: tokens of a chunk of the delta rule; of speed and memory only."""
    mtp_num_layers: LayerCount | None = None
    """Multi-token prediction (DeepSeek-V3): layers after the last one, each of which predicts one token further ahead; unset or 0: none."""
    mtp_loss_scaling_factor: Factor = 0.1
    """Weight of the mean of their losses, beside that of the next token."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output head weights of its own; by default it shares the token embedding."""
    hidden_dropout: Fraction = 0.1
    """Dropout on the embedding and on each residual branch. Modern language models use 0."""
    attention_dropout: Fraction = 0.1
    """Dropout on attention weights. Modern language models use 0."""
    init_method_std: Factor = 0.02
    """Standard deviation of initial weights; projections into the residual stream get it divided by sqrt(2 x layers)."""
    embedding_init_method_std: Factor | None = None
    """Standard deviation of the initial embeddings. Derived: `--init-method-std`."""
    vocab_size: VocabularySize | None = None
    """Number of token ids. Derived: from the tokenizer."""
    make_vocab_size_divisible_by: VocabularySize = 128
    """The vocabulary is padded in memory to a multiple of this x tensor-parallel size; checkpoints never hold the padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(RawModelConfig):
    """The resolved settings of a model. `vocab_size` may still be the tokenizer's, see `known_vocab_size`."""

    ffn_hidden_size: Width = 0
    num_query_groups: Width = 0
    kv_channels: Width = 0
    max_position_embeddings: SequenceLength = 0
    embedding_init_method_std: Factor = 0.0
    mamba_num_heads: Width = 0
    mamba_norm_groups: Width = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts."""

    num_experts: ExpertCount | None = None
    """Number of routed experts per MoE layer; unset means a dense model."""
    moe_layer_freq: str = "1"
    """Which layers are MoE: N means layers 0, N, 2N, ...; or one 0 or 1 per layer, as in ([0]*1+[1]*23)."""
    moe_ffn_hidden_size: Width | None = None
    """Width inside one expert. Derived: the MLP width."""
    moe_shared_expert_intermediate_size: Width | None = None
    """Width of the shared expert that every token passes; unset means none."""
    moe_router_topk: ExpertCount = 2
    """Experts each token is sent to."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] = (
        "aux_loss"
    )
    """How the load of the experts is kept even."""
    moe_aux_loss_coeff: Factor = 0.0
    """Weight of the balancing loss."""
    moe_z_loss_coeff: Factor | None = None
    """Weight of the router z-loss; unset means none."""
    moe_grouped_gemm: bool = True
    """Run all local experts in one grouped GEMM where there is one; off: one expert after the other."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    """How tokens reach their experts."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What turns router logits into scores."""
    moe_router_pre_softmax: bool = False
    """Apply the softmax before choosing the top k."""
    moe_router_enable_expert_bias: bool = False
    """Balance with a learned-by-rule bias per expert instead of a loss (DeepSeek-V3)."""
    moe_router_linear_bias: bool = False
    """A bias of the router's linear layer, which is trained as its weight is (gpt-oss)."""
    moe_apply_probs_on_input: bool = False
    """Multiply an expert's input by the router's weight instead of its output; for one expert per token (Llama 4)."""
    moe_router_bias_update_rate: Factor = 1e-3
    """Step of that bias."""
    moe_router_num_groups: ExpertCount | None = None
    """Groups of experts for group-limited routing."""
    moe_router_group_topk: ExpertCount | None = None
    """Groups each token may use."""
    moe_router_group_score_topk: ExpertCount | None = None
    """Best experts of a group whose scores are summed to rank it; unset: `--moe-router-topk` / `--moe-router-group-topk`."""
    moe_router_topk_scaling_factor: Factor | None = None
    """Factor on the chosen scores."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router; unset means that of the model."""
    moe_expert_capacity_factor: Factor | None = None
    """Tokens an expert takes, as a factor of an even share; unset means no token is dropped."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens are dropped when an expert is full: those with the lowest scores, or the last in the batch."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad what each expert gets to its capacity, so that shapes never change; needs a capacity factor."""
    moe_router_force_load_balancing: bool = False
    """Route at random instead of by the router, for measuring speed; such a model learns nothing useful."""
    moe_input_jitter_eps: Fraction | None = None
    """Multiply the router's input by noise between 1 - eps and 1 + eps while training; unset means none."""
    moe_shared_expert_gate: bool = False
    """Scale the shared expert's output by a learned sigmoid gate per token (Qwen2-MoE)."""
    moe_shared_expert_overlap: bool = True
    """Compute the shared expert while the all-to-all of tokens is in flight, forward and backward; off: after it."""
    moe_latent_size: Width | None = None
    """Width that tokens are projected to before the routed experts and back from after them; unset means the hidden size."""
