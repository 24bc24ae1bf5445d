"""The one typed schema behind flags, YAML, presets, Python and the reference page.

Every section is a frozen dataclass of plain values; the string under a field is its documentation and its help text.
A field's name is Megatron's flag with underscores (`num_layers` is `--num-layers`), and names are unique over all
sections, so a flag needs no prefix. A default is written here, or in `schema_run.py` for what a run does, and nowhere
else. `None` means "derived": `derive.py` fills it and records why. What values may be together is `check.py`'s business.
Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from petatron.config.schema_run import (
    CheckpointConfig,
    DataConfig,
    FilePath,
    LaunchConfig,
    LogConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainConfig,
)

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu")
PositionType = Literal["learned_absolute", "rope", "yarn", "none"]
Activation = Literal[
    "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu", "swiglu", "geglu", "geglu_tanh", "reglu"
]
RecomputeModule = Literal["core_attn", "attention", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder."""

    num_layers: int = 0
    """Number of transformer layers."""
    hidden_size: int = 0
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width inside the MLP. Derived: 4 x hidden; for gated activations 8/3 x hidden rounded down to a multiple of 64."""
    num_attention_heads: int = 0
    """Number of query heads."""
    group_query_attention: bool = False
    """Share key/value heads between groups of query heads; `--num-query-groups` says how many groups."""
    num_query_groups: int | None = None
    """Number of key/value heads. Derived: 1 with `--group-query-attention` (multi-query), else the number of heads."""
    kv_channels: int | None = None
    """Width of one head. Derived: hidden size / heads."""
    seq_length: int = 0
    """Tokens per training sample."""
    max_position_embeddings: int | None = None
    """Longest position the model is built for. Derived: the sequence length."""
    position_embedding_type: PositionType = "learned_absolute"
    """How positions enter: a learned table, rotary embedding, rotary with YaRN scaling, or not at all."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = 1.0
    """Fraction of each head that is rotated."""
    use_rope_scaling: bool = False
    """Llama-3 frequency scaling for contexts longer than the one first trained on."""
    rope_scaling_factor: float = 8.0
    """Context extension factor of Llama-3 or YaRN scaling."""
    rope_low_freq_factor: float = 1.0
    """Llama-3 scaling: wavelengths longer than original context / this are fully scaled."""
    rope_high_freq_factor: float = 4.0
    """Llama-3 scaling: wavelengths shorter than original context / this are left alone."""
    original_max_position_embeddings: int = 8192
    """Context length before extension, for Llama-3 and YaRN scaling."""
    yarn_beta_fast: float = 32.0
    """YaRN: rotations over the original context above which a frequency is kept."""
    yarn_beta_slow: float = 1.0
    """YaRN: rotations over the original context below which a frequency is interpolated."""
    yarn_mscale: float = 1.0
    """YaRN: scale of the attention temperature correction."""
    yarn_mscale_all_dim: float = 0.0
    """YaRN: second scale of the temperature correction (DeepSeek); 0 leaves it out."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Which normalisation stands before attention, before the MLP and at the end."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside normalisation."""
    apply_layernorm_1p: bool = False
    """Keep the weights of norms as an offset from one (Gemma), so that they start at zero."""
    scale_embeddings: bool = False
    """Multiply embeddings by the square root of the hidden size (Gemma)."""
    activation: Activation = "gelu"
    """MLP activation; the names with glu are gated and use three matrices."""
    add_bias_linear: bool = True
    """Biases on the linear layers (`--disable-bias-linear` turns them off)."""
    add_qkv_bias: bool = False
    """Bias on the query/key/value projection even when the others have none (Qwen2)."""
    qk_layernorm: bool = False
    """Normalise each query and key head (Qwen3)."""
    window_size: int | None = None
    """Sliding-window attention: how many tokens, itself included, a token sees. Unset means all."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output head weights of its own; by default it shares the token embedding."""
    hidden_dropout: float = 0.1
    """Dropout on the embedding and on each residual branch. Modern language models use 0."""
    attention_dropout: float = 0.1
    """Dropout on attention weights. Modern language models use 0."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; projections into the residual stream get it divided by sqrt(2 x layers)."""
    embedding_init_method_std: float | None = None
    """Standard deviation of the initial embeddings. Derived: `--init-method-std`."""
    vocab_size: int | None = None
    """Number of token ids. Derived: from the tokenizer."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded in memory to a multiple of this x tensor-parallel size; checkpoints never hold the padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts."""

    num_experts: int | None = None
    """Number of routed experts per MoE layer; unset means a dense model."""
    moe_layer_freq: str = "1"
    """Which layers are MoE: N means layers 0, N, 2N, ...; or one 0 or 1 per layer, as in ([0]*1+[1]*23)."""
    moe_ffn_hidden_size: int | None = None
    """Width inside one expert. Derived: the MLP width."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of the shared expert that every token passes; unset means none."""
    moe_router_topk: int = 2
    """Experts each token is sent to."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] = (
        "aux_loss"
    )
    """How the load of the experts is kept even."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the balancing loss."""
    moe_z_loss_coeff: float | None = None
    """Weight of the router z-loss; unset means none."""
    moe_grouped_gemm: bool = True
    """Run all local experts in one grouped matrix product where there is one; off: one expert after the other."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    """How tokens reach their experts."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What turns router logits into scores."""
    moe_router_pre_softmax: bool = False
    """Apply the softmax before choosing the top k."""
    moe_router_enable_expert_bias: bool = False
    """Balance with a learned-by-rule bias per expert instead of a loss (DeepSeek-V3)."""
    moe_router_bias_update_rate: float = 1e-3
    """Step of that bias."""
    moe_router_num_groups: int | None = None
    """Groups of experts for group-limited routing."""
    moe_router_group_topk: int | None = None
    """Groups each token may use."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor on the chosen scores."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router; unset means that of the model."""
    moe_expert_capacity_factor: float | None = None
    """Tokens an expert takes, as a factor of an even share; unset means no token is dropped."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens are dropped when an expert is full: those with the lowest scores, or the last in the batch."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad what each expert gets to its capacity, so that shapes never change; needs a capacity factor."""
    moe_router_force_load_balancing: bool = False
    """Route at random instead of by the router, for measuring speed; such a model learns nothing useful."""
    moe_input_jitter_eps: float | None = None
    """Multiply the router's input by noise between 1 - eps and 1 + eps while training; unset means none."""
    moe_shared_expert_gate: bool = False
    """Scale the shared expert's output by a learned sigmoid gate per token (Qwen2-MoE)."""
    moe_shared_expert_overlap: bool = True
    """Compute the shared expert while the all-to-all of tokens is in flight, forward and backward; off: after it."""
    moe_latent_size: int | None = None
    """Width that tokens are projected to before the routed experts and back from after them; unset means the hidden size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-latent attention and multi-token prediction (DeepSeek)."""

    multi_latent_attention: bool = False
    """Compress keys and values into a latent vector."""
    q_lora_rank: int | None = None
    """Rank of the query compression; unset means none."""
    kv_lora_rank: int = 32
    """Rank of the key/value compression."""
    qk_head_dim: int = 128
    """Width of the part of a query/key head without position."""
    qk_pos_emb_head_dim: int = 64
    """Width of the rotated part of a query/key head."""
    v_head_dim: int = 128
    """Width of a value head."""
    mtp_num_layers: int | None = None
    """Extra layers that predict further tokens ahead; unset means none."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of their loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the ranks share the work."""

    tensor_model_parallel_size: int = 1
    """Ranks that split each layer's matrices (tp)."""
    sequence_parallel: bool = False
    """Split the activations between the matrices along the sequence over the tensor-parallel ranks; no effect at tp 1."""
    tp_comm_overlap: bool = False
    """Overlap the all-gathers and reduce-scatters of the forward pass with the GEMMs of column- and row-parallel linears, chunk by
    chunk; needs `--sequence-parallel`. (Those of the backward pass overlap without it.) No effect at tp 1."""
    tp_comm_overlap_chunks: int | None = None
    """Chunks of rows into which `--tp-comm-overlap` cuts a GEMM and its communication. More of them expose less communication,
    but GEMMs of few rows are slow. Derived: one per 2,048 tokens of a rank's micro-batch, from 2 to 4."""
    pipeline_model_parallel_size: int = 1
    """Ranks that hold consecutive groups of layers (pp)."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per virtual stage; another way to say how many virtual stages a pipeline rank holds."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Groups of layers each pipeline rank holds, spread over the model. Derived: from `--num-layers-per-virtual-pipeline-stage`
    or the layout string, 2 for the schedule zb-v, else 1."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] | None = None
    """Order of forward and backward passes in the pipeline; the zb ones split the backward pass to fill idle time.
    Derived: interleaved with virtual stages, else 1f1b."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Micro-batches that pass one virtual stage before a rank turns to its next. Derived: the pipeline size."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers on the first pipeline rank; the other ranks share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers on the last pipeline rank; the other ranks share the rest evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when the layers are split evenly, so that the first stage holds one layer less."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output head and loss as one layer when the layers are split evenly, so that the last stage holds one less."""
    pipeline_model_parallel_layout: str | None = None
    """Every stage spelled out in model order: E is the embedding, t a layer, L the head and loss, and | ends a stage;
    t*3 and (tt|)*4 repeat, commas and blanks are free. `Et|(ttt|)*2tL` puts 8 layers on 4 stages. Stage i belongs to
    pipeline rank i modulo the pipeline size (zb-v: the second half runs backwards over the ranks)."""
    context_parallel_size: int = 1
    """Ranks that split the sequence in attention too (cp)."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = "p2p"
    """How context-parallel attention meets the other ranks' keys and values: passed around a ring, gathered at once,
    exchanged for a share of the heads (Ulysses), or heads within groups and a ring between them."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    """For a2a+p2p: ranks that exchange heads, and ranks in a ring; their product is cp. Derived: as many heads as divide."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer (ep)."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that split one expert's matrices (etp). Derived: the tensor-parallel size."""
    overlap_moe_expert_parallel_comm: bool = False
    """Run the forward pass of one micro-batch together with the backward pass of another, so that each computes while the
    other's expert all-to-all is in flight. More micro-batches are in memory at a time: 2 instead of 1 without a pipeline."""
    data_parallel_size: int | None = None
    """Replicas that see different samples (dp). Derived: world size / (tp x pp x cp)."""
    world_size: int | None = None
    """Number of ranks. Derived: from the launcher, or tp x pp x cp x dp."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over the data-parallel ranks (ZeRO-1)."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None = None
    """What data-parallel ranks hold only a share of: nothing, optimizer state (the distributed optimizer, ZeRO-1), also
    gradients (ZeRO-2), also parameters (ZeRO-3); the last two are PyTorch's fully_shard (FSDP).
    Derived: optim with `--use-distributed-optimizer`, else no_shard."""
    num_distributed_optimizer_instances: int = 1
    """Copies of the sharded state: dp / this ranks share one copy (hybrid sharding)."""
    grad_reduce_in_bf16: bool = False
    """Send gradients between data-parallel ranks in bfloat16; by default they are reduced in fp32."""
    overlap_grad_reduce: bool = True
    """Reduce gradient buckets while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass runs; needs the distributed optimizer."""
    ddp_bucket_size: int | None = None
    """Elements per gradient bucket. Derived: max(40 million, 1 million x dp)."""
    distributed_backend: Literal["gloo", "nccl", "fake"] | None = None
    """Communication library. Derived: nccl on CUDA devices, else gloo; fake sends nothing and is for planning."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective may wait before the run is declared hung."""
    nccl_communicator_config_path: FilePath | None = None
    """YAML file with NCCL settings of communicators, in Megatron's form: `dp: {max_ctas: 16}`."""
    high_priority_stream_groups: tuple[str, ...] = ()
    """Groups whose communication runs on high-priority streams, such as tp or ep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    fp16: bool = False
    """Compute in float16 with loss scaling."""
    bf16: bool = False
    """Compute in bfloat16."""
    fp64: bool = False
    """Compute and keep everything in float64; for proofs on small models."""
    loss_scale: float | None = None
    """Constant loss scale for fp16; unset means dynamic."""
    initial_loss_scale: float = 2.0**32
    """First dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Smallest dynamic loss scale."""
    loss_scale_window: int = 1000
    """Clean steps after which the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Overflowing steps before the dynamic loss scale halves."""
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Run matrix products in FP8; hybrid uses e5m2 for gradients."""
    fp8_recipe: Literal["delayed", "tensorwise", "rowwise", "blockwise"] = "tensorwise"
    """How the scales of `--fp8-format` are chosen: by tensor, by tensor from past steps, by row, or by block of 128."""
    fp8_amax_history_len: int = 1
    """Steps whose largest magnitudes the delayed recipe remembers."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Which of the remembered magnitudes the delayed recipe goes by: the last, or the largest."""
    fp8_param_gather: bool = False
    """Gather weights that are multiplied in FP8 over data-parallel ranks in FP8, half the bytes; no FP8 product changes."""
    first_last_layers_bf16: bool = False
    """Keep some of the first and last layers out of FP8."""
    num_layers_at_start_in_bf16: int = 1
    """How many of the first, with `--first-last-layers-bf16`."""
    num_layers_at_end_in_bf16: int = 1
    """How many of the last, with `--first-last-layers-bf16`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Trading time for memory."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, or chosen modules."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full recompute: in units of N layers, or for the first N layers."""
    recompute_num_layers: int | None = None
    """The N of `--recompute-method`."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    """With selective recompute: which modules."""
    recompute_memory_budget_gb: float | None = None
    """Activation memory per rank in GB; what to recompute is chosen to fit it."""
    cpu_offloading_num_layers: int = 0
    """Layers of every pipeline stage, evenly spread, whose activations wait in host memory for the backward pass."""
    optimizer_cpu_offload: bool = False
    """Keep master weights and moments in host memory; they visit the device for every update, and no number changes.
    Where weights are their own master weights (FSDP, and runs without --bf16 or --fp16), moments alone."""
    optimizer_nvme_offload: FilePath | None = None
    """Folder on a fast disk for the same, made if need be in a folder that exists. What is there ends with the run;
    checkpoints are what lasts."""
    optimizer_offload_fraction: float = 1.0
    """How much of the optimizer state is offloaded; the rest stays on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The update rule."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is AdamW (decoupled weight decay); sgd is SGD with momentum."""
    lr: float | None = None
    """Peak learning rate; required to train."""
    weight_decay: float = 0.01
    """Weight decay, decoupled in adam and added to the gradient in sgd; never on biases and other one-dimensional parameters."""
    start_weight_decay: float | None = None
    """First value of a weight-decay schedule."""
    end_weight_decay: float | None = None
    """Last value of a weight-decay schedule."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay moves from start to end."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the square root of the second moment."""
    sgd_momentum: float = 0.9
    """Momentum of sgd."""
    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the first moment of adam; bf16 is rounded up or down at random, which is right on average."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the second moment of adam; bf16 is rounded like the first."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are accumulated; bf16 takes half the memory and loses small contributions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a run is made of.

    >>> RunConfig(model=ModelConfig(num_layers=2)).model.num_layers
    2
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    latent: LatentAttentionConfig = field(default_factory=LatentAttentionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
