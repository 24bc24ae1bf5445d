"""Valid settings that have no effect in combination: reported, so that no flag is ignored silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from petatron.config.checks.data_parallel import FSDP_STRATEGIES
from petatron.config.checks.layers.hybrid import MAMBA_SIZES
from petatron.config.checks.layers.linear_attention import LINEAR_SIZES, has_delta_layers
from petatron.config.checks.model import LATENT_WIDTHS
from petatron.config.checks.moe import router_cannot_learn
from petatron.config.optimizers import unused_optimizer_settings
from petatron.config.schema.fields import FieldInfo, FieldValue, fields_by_name, flatten_config
from petatron.config.schema.hybrid_pattern import ATTENTION, EXPERTS, MAMBA, MLP, branch_letters
from petatron.config.schema.model import GATED_ACTIVATIONS
from petatron.config.schema.run import RawRunConfig
from petatron.config.value_origins import ValueOrigin

_LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_HISTORY = ("fp8_amax_history_len", "fp8_amax_compute_algo")
_LAYERS_BF16 = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_ROTARY = ("rotary_base", "rotary_percent")
_LLAMA3 = ("rope_low_freq_factor", "rope_high_freq_factor")
_YARN = (
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int",
)
_ROPE_SCALING = ("rope_scaling_factor", "original_max_position_embeddings")
_LATENT_SIZES = "latent attention has head widths of its own"
_LOAD = (
    "no_load_optim",
    "no_load_rng",
    "load_fallback",
)  # what requires --load is a problem, see files.py
_SAVE = ("no_save_optim", "no_save_rng", "async_save", "save_total_limit")

_ATTENTION = (
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "window_size",
    "qk_layernorm",
    "attention_output_gate",
    "attention_dropout",
    "clip_qkv",
    "attention_in_multiplier",
    "key_multiplier",
    "attention_out_multiplier",
)
_MAMBA = ("mamba_norm_groups", "mamba_gated_norm", "ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier")
_CONTEXT = ("cp_comm_type", "hierarchical_context_parallel_sizes")
_PIPELINE = (
    "pipeline_schedule",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_BUCKETS = ("overlap_grad_reduce", "ddp_bucket_size")
_SHARDED = ("use_distributed_optimizer", "overlap_param_gather")
_NO_REPLICAS = "no two ranks hold the same weights, as data-parallel ones do"


_TRAINING_SECTIONS = ("optim", "schedule", "data", "log", "memory")
_TRAINING_SETTINGS = (
    "global_batch_size",
    "rampup_batch_size",
    "train_iters",
    "train_samples",
    "eval_interval",
    "eval_iters",
    "exit_interval",
    "exit_duration_in_mins",
    "exit_signal_grace_s",
    "check_for_nan_in_loss_and_grad",
    "save",
    "save_interval",
    "save_retain_interval",
    "finetune",
    *_LOAD,
    *_SAVE,
)


def training_flags(origins: Mapping[str, ValueOrigin]) -> list[str]:
    """Returns the flags that were typed and that only training reads, by name."""
    return sorted(
        info.flag
        for info in fields_by_name().values()
        if (info.section in _TRAINING_SECTIONS or info.name in _TRAINING_SETTINGS) and origins[info.path].kind == "flag"
    )


def unused_settings(config: RawRunConfig) -> frozenset[str]:
    """Returns the paths of the settings that have no effect in this config, whatever their values."""
    return frozenset(fields_by_name()[name].path for name, _ in _unused_settings(config))


def _unused_settings(config: RawRunConfig) -> Iterator[tuple[str, str]]:
    """Yields names with the reasons; a setting may have several."""
    yield from (*_unused(config), *_unused_parallel(config), *_unused_moe(config), *_unused_memory(config))


def unused_flag_notices(config: RawRunConfig, origins: Mapping[str, ValueOrigin]) -> Iterator[str]:
    """Yields one line for each value set in a flag or file that has no effect in this config."""
    values = flatten_config(config)
    for name, reason in _unused_settings(config):
        info = fields_by_name()[name]
        asked = origins[info.path].kind in ("flag", "file")
        if asked and values[info.path] != info.default:
            yield f"{_as_given(info, values[info.path], origins[info.path])} has no effect: {reason}"
    yield from _different_effect_notices(config, origins)
    if origins["memory.recompute_modules"].kind in ("flag", "file"):
        yield from _unused_recompute_modules(config)


def _as_given(info: FieldInfo, value: FieldValue, origin: ValueOrigin) -> str:
    """Returns a setting as its source spells it: nobody typed a flag for what a file says."""
    if origin.kind == "file":
        return f"{info.name} ({origin.detail})"
    return f"--no-{info.flag[2:]}" if value is False or (info.is_switch and value == info.off_value) else info.flag


def _different_effect_notices(config: RawRunConfig, origins: Mapping[str, ValueOrigin]) -> Iterator[str]:
    """Yields settings that have an effect, but not the one that their name suggests."""
    precision = config.precision
    if router_cannot_learn(config.moe):
        yield (
            "--moe-router-topk 1 with a softmax over the chosen expert alone: the loss has no gradient for the router, which stays "
            "as it is but for load balancing"
        )
    # On by default, so that only an explicit flag shows that someone expects an effect.
    asked = config.moe.moe_shared_expert_overlap and origins["moe.moe_shared_expert_overlap"].kind == "flag"
    if asked and config.moe.num_experts is not None and (why := _no_shared_expert_overlap_reason(config)) is not None:
        yield f"--moe-shared-expert-overlap has no effect: {why}"
    if precision.fp8_format == "hybrid" and precision.fp8_recipe == "blockwise":
        yield "--fp8-format hybrid is e4m3 with --fp8-recipe blockwise: hardware multiplies no blocks of e5m2"
    if precision.fp8_format is not None and not (precision.bf16 or precision.fp16 or precision.fp64):
        refused = origins["precision.bf16"].kind == "flag"  # --no-bf16, as in every run of `petatron verify`
        yield (
            f"--fp8-format {precision.fp8_format} is emulated, and slower than no FP8, in a run in fp32: hardware multiplies "
            f"eight-bit numbers for bfloat16 ones{'' if refused else '. Add --bf16'}"
        )


def _unused(config: RawRunConfig) -> Iterator[tuple[str, str]]:
    positions = config.model.position_embedding_type
    compiles = MAMBA in branch_letters(config.model.hybrid_layer_pattern) or has_delta_layers(config.model)
    compiles |= config.model.activation_func_clamp_value is not None or config.model.glu_linear_offset != 0.0
    if config.model.normalization == "RMSNorm" and config.model.activation in GATED_ACTIVATIONS and not compiles:
        yield "compile", "nothing of this model is compiled: on GPUs it has kernels of its own"
    if config.train.device == "cpu":
        yield "cuda_graphs", "the CPU computes"
    if not config.precision.fp16:
        yield from ((name, "it is for --fp16") for name in _LOSS_SCALE)
    yield from _unused_fp8(config)
    if positions not in ("rope", "yarn"):
        yield from ((name, f"positions are {positions}") for name in _ROTARY)
    if not config.model.use_rope_scaling:
        yield from ((name, "it is for --use-rope-scaling") for name in _LLAMA3)
    if positions != "yarn":
        yield from ((name, "it is for --position-embedding-type yarn") for name in _YARN)
        if not config.model.use_rope_scaling and config.model.longrope_short_factor is None:
            yield from ((name, "the rotary embedding is not scaled") for name in _ROPE_SCALING)
    if config.optim.decoupled_lr is None:
        yield "decoupled_min_lr", "there is no --decoupled-lr"
    reason = f"the optimizer is {config.optim.optimizer}"
    yield from ((name, reason) for name in unused_optimizer_settings(config.optim))
    yield from _unused_attention(config)
    yield from _unused_hybrid(config)
    if not config.model.mtp_num_layers:
        yield "mtp_loss_scaling_factor", "it is for --mtp-num-layers"
    if config.checkpoint.load is None:
        yield from ((name, "there is no --load") for name in _LOAD)
    if not config.checkpoint.use_checkpoint_args and config.checkpoint.pretrained_checkpoint is None:
        yield "use_tokenizer_model_from_checkpoint_args", "it is for --use-checkpoint-args and --from"
    if config.checkpoint.load is None and config.checkpoint.pretrained_checkpoint is None:
        yield "force_tokenizer", "there is no model to start from"
    if config.checkpoint.save is None:
        yield from ((name, "there is no --save") for name in _SAVE)
    if config.data.mock_data or config.data.train_data_path:
        yield "split", "there is no --data-path to split"
    if config.log.pipeline_timeline is None:
        yield "pipeline_timeline_step", "it is for --pipeline-timeline"
    if config.log.sample_prompts is None:
        yield from ((name, "it is for --sample-prompts") for name in ("sample_tokens", "sample_temperature"))
    if not config.log.profile:
        names = ("profile_step_start", "profile_step_end", "profile_ranks", "profile_dir")
        yield from ((name, "it is for --profile") for name in names)


def _unused_hybrid(config: RawRunConfig) -> Iterator[tuple[str, str]]:
    pattern = config.model.hybrid_layer_pattern
    branches = branch_letters(pattern)
    if MAMBA not in branches:
        yield from ((name, "no layer is Mamba-2") for name in (*MAMBA_SIZES, *_MAMBA))
    elif config.model.mamba_gated_norm == "none":
        yield "mamba_norm_groups", "--mamba-gated-norm none has no norm"
    if not has_delta_layers(config.model):
        yield from ((name, "no layer is a gated delta net") for name in LINEAR_SIZES)
    if pattern is None:
        return
    yield "moe_layer_freq", "--hybrid-layer-pattern says which layers have experts"
    if ATTENTION not in branches:
        yield from ((name, "no layer is attention") for name in _ATTENTION)
    if MLP not in pattern:
        yield "ffn_hidden_size", "no layer is an MLP"
    if MLP not in pattern and EXPERTS not in pattern:
        yield "mlp_multipliers", "no layer is an MLP"


def _unused_attention(config: RawRunConfig) -> Iterator[tuple[str, str]]:
    if config.model.normalization == "RMSNorm":
        yield "norm_bias", "an RMSNorm has no bias"
    if not config.model.multi_latent_attention:
        names = (*LATENT_WIDTHS, "latent_norm_epsilon")
        yield from ((name, "it is for --multi-latent-attention") for name in names)
        return
    if not config.model.qk_layernorm:
        yield "latent_norm_epsilon", "it is for --qk-layernorm"
    yield from ((name, _LATENT_SIZES) for name in ("kv_channels", "rotary_percent"))


def _unused_fp8(config: RawRunConfig) -> Iterator[tuple[str, str]]:
    precision = config.precision
    if precision.fp8_format is None:
        names = ("fp8_recipe", "fp8_param_gather", "fp8_output_head_backward", *_HISTORY, *_LAYERS_BF16)
        yield from ((name, "it is for --fp8-format") for name in names)
        return
    if not _weights_are_replicated(config):
        yield "fp8_param_gather", _NO_REPLICAS
    if precision.fp8_recipe != "delayed":
        yield from ((name, "it is for --fp8-recipe delayed") for name in _HISTORY)
    if not precision.first_last_layers_bf16:
        yield from ((name, "it is for --first-last-layers-bf16") for name in _LAYERS_BF16[1:])


def _unused_parallel(config: RawRunConfig) -> Iterator[tuple[str, str]]:
    parallel = config.parallel
    if parallel.tensor_model_parallel_size == 1:
        names = ("sequence_parallel", "tp_comm_overlap")
        yield from ((name, "the tensor-parallel size is 1") for name in names)
    if not parallel.tp_comm_overlap or parallel.tensor_model_parallel_size == 1:
        yield "tp_comm_overlap_chunks", "it is for --tp-comm-overlap"
    if parallel.context_parallel_size == 1:
        yield from ((name, "the context-parallel size is 1") for name in _CONTEXT)
    if parallel.pipeline_model_parallel_size == 1:
        yield from ((name, "the pipeline-parallel size is 1") for name in _PIPELINE)
    if parallel.num_virtual_stages_per_pipeline_rank == 1 or parallel.pipeline_schedule != "interleaved":
        yield "microbatch_group_size_per_virtual_pipeline_stage", "it is for the interleaved schedule"
    if _num_micro_batches(config) == 1:
        yield "overlap_moe_expert_parallel_comm", "a step has one micro-batch, and nothing to overlap it with"
    yield from _unused_data_parallel(config)


def _num_micro_batches(config: RawRunConfig) -> int | None:
    """Returns the micro-batches of a step on one data-parallel rank after any ramp; None while the sizes are a problem of their own."""
    size, dp, micro = config.train.global_batch_size, config.parallel.data_parallel_size, config.train.micro_batch_size
    return None if size is None or not dp or micro < 1 else size // (dp * micro)


def _unused_data_parallel(config: RawRunConfig) -> Iterator[tuple[str, str]]:
    """Flags of data parallelism: its ranks, and those of context parallelism, replicate the weights."""
    parallel = config.parallel
    strategy = parallel.data_parallel_sharding_strategy
    if not _weights_are_replicated(config):
        names = (*_BUCKETS, *_SHARDED, *(() if strategy == "no_shard" else ("data_parallel_sharding_strategy",)))
        yield from ((name, _NO_REPLICAS) for name in names)
    elif strategy == "no_shard":
        yield "num_distributed_optimizer_instances", "no optimizer state is sharded"
    elif strategy in FSDP_STRATEGIES:
        yield from ((name, "fully_shard reduces the gradients") for name in _BUCKETS)
        yield from ((name, "fully_shard shares the optimizer state and gathers by itself") for name in _SHARDED)


def _weights_are_replicated(config: RawRunConfig) -> bool:
    """Whether dense weights or experts have several replicas; True while the sizes are a problem of their own."""
    parallel = config.parallel
    dp, ep, etp = (
        parallel.data_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size,
    )
    if dp is None or etp is None:
        return True
    ranks = dp * parallel.context_parallel_size
    return ranks != 1 or (config.moe.num_experts is not None and parallel.tensor_model_parallel_size != ep * etp)


def _unused_moe(config: RawRunConfig) -> Iterator[tuple[str, str]]:
    moe = config.moe
    if moe.num_experts is None:
        names = (name for name, info in fields_by_name().items() if info.section == "moe" and name != "num_experts")
        yield from ((name, "the model has no experts") for name in (*names, "expert_tensor_parallel_size"))
        return
    if config.train.device == "cpu":
        yield "moe_grouped_gemm", "the CPU multiplies for one expert after the other"
    elif moe.moe_pad_expert_input_to_capacity:
        yield "moe_grouped_gemm", "inputs padded to capacity are one batched GEMM anyway"
    elif not config.precision.bf16:
        yield "moe_grouped_gemm", "the grouped kernel takes bfloat16 (--bf16)"
    elif config.precision.fp8_format is not None and not config.precision.first_last_layers_bf16:
        yield "moe_grouped_gemm", "experts in FP8 are one grouped GEMM anyway"
    if moe.moe_expert_capacity_factor is None:
        yield "moe_token_drop_policy", "no token is dropped without --moe-expert-capacity-factor"
    if moe.moe_router_group_topk is None:
        yield "moe_router_num_groups", "it is for --moe-router-group-topk"
        yield "moe_router_group_score_topk", "it is for --moe-router-group-topk"
    if moe.moe_shared_expert_intermediate_size is None:
        yield "moe_shared_expert_gate", "there is no shared expert"
    if (why := _no_shared_expert_overlap_reason(config)) is not None:
        yield "moe_shared_expert_overlap", why
    if not moe.moe_router_enable_expert_bias:
        yield "moe_router_bias_update_rate", "it is for --moe-router-enable-expert-bias"
    if moe.moe_router_load_balancing_type == "sinkhorn":
        yield "moe_router_score_function", "sinkhorn has scores of its own"
        yield "moe_router_pre_softmax", "sinkhorn has scores of its own"
    elif moe.moe_router_score_function != "softmax":
        yield "moe_router_pre_softmax", f"scores are {moe.moe_router_score_function}"
    if moe.moe_router_load_balancing_type == "none":
        yield "moe_aux_loss_coeff", "--moe-router-load-balancing-type is none"


def _no_shared_expert_overlap_reason(config: RawRunConfig) -> str | None:
    """Returns why no all-to-all overlaps with a shared expert, if so."""
    moe, parallel = config.moe, config.parallel
    if moe.moe_shared_expert_intermediate_size is None:
        return "there is no shared expert"
    if parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or 1) == 1:
        return "every rank holds all experts, and tokens stay where they are"
    if moe.moe_token_dispatcher_type != "alltoall":
        return f"it is for --moe-token-dispatcher-type alltoall, and that is {moe.moe_token_dispatcher_type}"
    return None


def _unused_memory(config: RawRunConfig) -> Iterator[tuple[str, str]]:
    if not config.memory.optimizer_cpu_offload and config.memory.optimizer_nvme_offload is None:
        yield "optimizer_offload_fraction", "it is for --optimizer-cpu-offload and --optimizer-nvme-offload"
    elif config.train.device == "cpu":
        yield "optimizer_cpu_offload", "the CPU computes, and its memory is the host's"
    if config.memory.recompute_granularity != "selective":
        yield "recompute_modules", "it is for --recompute-granularity selective"


def _unused_recompute_modules(config: RawRunConfig) -> Iterator[str]:
    """Yields modules to recompute that the model does not have, or of which nothing is saved anyway."""
    if config.memory.recompute_granularity != "selective":
        return
    pattern = config.model.hybrid_layer_pattern
    lacking = {"moe_act": "what an activation function makes is never kept"}
    if not _saves_norm_outputs(config):
        lacking["layernorm"] = "what a norm makes is not kept here"
    if config.moe.num_experts is None:
        lacking |= {"moe": "the model has no experts", "moe_act": "the model has no experts"}
    if config.moe.num_experts is None or config.moe.moe_shared_expert_intermediate_size is None:
        lacking["shared_experts"] = "there is no shared expert"
    if MAMBA not in branch_letters(pattern):
        lacking["mamba"] = "no layer is Mamba-2"
    if not has_delta_layers(config.model):
        lacking["delta"] = "no layer is a gated delta net"
    if pattern is not None and ATTENTION not in branch_letters(pattern):
        lacking |= dict.fromkeys(("attention", "core_attn"), "no layer is attention")
    for module in config.memory.recompute_modules:
        if module in lacking:
            yield f"--recompute-modules {module} has no effect: {lacking[module]}"


def _saves_norm_outputs(config: RawRunConfig) -> bool:
    """Whether norm outputs are saved for backward: by a router whose GEMM uses them directly."""
    precision, moe = config.precision, config.moe
    if moe.num_experts is None or moe.moe_input_jitter_eps:
        return False
    short = precision.bf16 or precision.fp16
    return moe.moe_router_dtype is None or precision.fp64 or (moe.moe_router_dtype == "fp32" and not short)
