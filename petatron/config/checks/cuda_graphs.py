"""What cannot be combined with `--cuda-graphs`: the one list of it.

A CUDA graph replays the kernels of one step with the launch parameters and addresses of that step. Inside it there is no
communication, no device-to-host synchronisation, and no host state that changes from step to step. What is before or after a
step's forward and backward is unrestricted: gradient reduction, the optimizer and its offload, evaluation, saving.

Here are the rules that a config can break. Anything else that cannot be captured fails at capture (`parallel/pipeline/cuda_graph.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.checks.data_parallel import FSDP_STRATEGIES
from petatron.config.checks.parallel_sizes import MODEL_PARALLEL_SIZES
from petatron.config.schema.fields import flag_name
from petatron.config.schema.run import RawRunConfig

CUDA_GRAPHS_FLAG = "--cuda-graphs"
_GROUPED_MULTIPLE = 8  # elements of bfloat16 in the 16 bytes that the grouped kernel copies at a time
_MAX_HEAD_DIM = 256  # of FlashAttention


def check_cuda_graphs(config: RawRunConfig) -> Iterator[Problem]:
    if not config.train.cuda_graphs or config.train.device == "cpu":  # there it has no effect
        return
    for found, why, fix in (
        *_communication(config),
        *_precision(config),
        *_experts(config),
        *_memory(config),
        *_attention(config),
        *_timeline(config),
    ):
        yield Problem(CUDA_GRAPHS_FLAG, "", f"cannot record a step with {found}: {why}", fix)


def uses_random_numbers(config: RawRunConfig) -> bool:
    """Whether a training step draws random numbers."""
    experts = config.moe.num_experts is not None
    noisy = bool(config.moe.moe_input_jitter_eps) or config.moe.moe_router_force_load_balancing
    return config.model.hidden_dropout > 0.0 or config.model.attention_dropout > 0.0 or (experts and noisy)


CaptureProblem = tuple[str, str, str]
"""What the step has, why that cannot be captured, and what to do."""


def _communication(config: RawRunConfig) -> Iterator[CaptureProblem]:
    parallel = config.parallel
    split_experts = config.moe.num_experts is not None and parallel.tensor_model_parallel_size == 1
    for name in (*MODEL_PARALLEL_SIZES, *(("expert_tensor_parallel_size",) if split_experts else ())):
        size = getattr(parallel, name)
        if size is not None and size > 1:
            fix = "Use data parallelism alone, or leave one of them out."
            yield f"{flag_name(name)} {size}", "ranks communicate inside it", fix
    if parallel.data_parallel_size == 1:
        return
    strategy = parallel.data_parallel_sharding_strategy
    if strategy in FSDP_STRATEGIES:
        fix = "Use the strategy optim with --no-overlap-grad-reduce, or leave one of them out."
        yield f"--data-parallel-sharding-strategy {strategy}", "weights are gathered inside it", fix
    elif parallel.overlap_grad_reduce:
        fix = "Add --no-overlap-grad-reduce, which reduces them after it, or leave --cuda-graphs out."
        yield "--overlap-grad-reduce", "gradients would be reduced inside it", fix
    if parallel.overlap_param_gather:
        yield "--overlap-param-gather", "weights are waited for inside it", "Leave one of them out."
    if config.moe.num_experts is not None and config.moe.moe_router_load_balancing_type == "global_aux_loss":
        fix = "Use aux_loss or seq_aux_loss, or leave --cuda-graphs out."
        yield "--moe-router-load-balancing-type global_aux_loss", "routers communicate inside it", fix


def _precision(config: RawRunConfig) -> Iterator[CaptureProblem]:
    precision = config.precision
    if precision.fp8_format is not None and precision.fp8_recipe == "delayed":
        why = "the host counts on in the histories of scales"
        yield "--fp8-recipe delayed", why, "Use tensorwise, rowwise or blockwise, or leave --cuda-graphs out."


def _experts(config: RawRunConfig) -> Iterator[CaptureProblem]:
    moe, precision = config.moe, config.precision
    if moe.num_experts is None:
        return
    if moe.moe_router_load_balancing_type == "sinkhorn":
        fix = "Balance in another way, or leave --cuda-graphs out."
        yield "--moe-router-load-balancing-type sinkhorn", "the host looks when the load is even enough", fix
    if moe.moe_pad_expert_input_to_capacity:
        return
    why = "the host must know how many rows each expert has"
    fp8 = precision.fp8_format is not None and not precision.first_last_layers_bf16
    if not precision.bf16:
        fix = "Add --bf16, or --moe-pad-expert-input-to-capacity with --moe-expert-capacity-factor."
        yield "experts in another precision than bf16", why, fix
    elif not moe.moe_grouped_gemm and not fp8:
        yield "--no-moe-grouped-gemm", why, "Leave one of them out."
    for name, width in (
        ("moe_latent_size" if moe.moe_latent_size else "hidden_size", moe.moe_latent_size or config.model.hidden_size),
        ("moe_ffn_hidden_size", moe.moe_ffn_hidden_size),
    ):
        if precision.bf16 and width is not None and width % _GROUPED_MULTIPLE:
            fix = f"Use a multiple of {_GROUPED_MULTIPLE}, which one kernel can multiply for all experts."
            yield f"{flag_name(name)} {width}", why, fix


def _memory(config: RawRunConfig) -> Iterator[CaptureProblem]:
    memory = config.memory
    if memory.cpu_offloading_num_layers > 0:
        why = "activations leave for memory that the host hands out"
        yield f"--cpu-offloading-num-layers {memory.cpu_offloading_num_layers}", why, "Leave one of them out."
    recomputes = memory.recompute_granularity is not None or memory.recompute_memory_budget_gb is not None
    if recomputes and uses_random_numbers(config):
        why = "the host would set random states back inside it"
        yield "recompute and random numbers", why, "Use --hidden-dropout 0 --attention-dropout 0, or recompute nothing."


def _attention(config: RawRunConfig) -> Iterator[CaptureProblem]:
    model, window = config.model, config.model.window_size
    if config.data.reset_attention_mask:
        why = "where documents lie differs from step to step, and the host plans with it"
        yield "--reset-attention-mask", why, "Leave one of them out."
    why = "without FlashAttention the host makes the mask"
    if model.attn_logit_softcapping is not None:
        yield f"--attn-logit-softcapping {model.attn_logit_softcapping:g}", why, "Leave one of them out."
    if model.softmax_type != "vanilla":
        yield f"--softmax-type {model.softmax_type}", why, "Leave one of them out."
    if model.attention_chunk_size is not None and model.attention_chunk_size < model.seq_length:
        why = "the host keeps the boundaries of chunks, and may forget them"
        yield f"--attention-chunk-size {model.attention_chunk_size}", why, "Leave one of them out."
    if window is None or window >= model.seq_length:
        return
    if not (config.precision.bf16 or config.precision.fp16):
        yield f"--window-size {window} in this precision", why, "Add --bf16 or --fp16, or leave --cuda-graphs out."
    elif model.kv_channels is not None and (model.kv_channels % 8 or model.kv_channels > _MAX_HEAD_DIM):
        fix = f"Use heads of a multiple of 8 up to {_MAX_HEAD_DIM}, or leave --cuda-graphs out."
        yield f"--window-size {window} and heads of width {model.kv_channels}", why, fix


def _timeline(config: RawRunConfig) -> Iterator[CaptureProblem]:
    if config.log.pipeline_timeline is not None:
        why = "its parts are timed one by one, by the host"
        yield f"--pipeline-timeline {config.log.pipeline_timeline}", why, "Leave one of them out."
