"""Rules about `--cuda-graphs`: every setting whose steps cannot be captured, in one list.

A CUDA graph replays the kernels of one step, NCCL's included, with the launch parameters and addresses of that step. Inside it there is
no device-to-host synchronization, no communication by the host, and no host state that changes from step to step. Whatever runs before or
after forward and backward is unrestricted: the optimizer and its offload, saving, gradient reduction without overlap. With
`--cuda-graphs on` each reason is an error; with `auto` it is why nothing is captured. A config must not be valid on one machine only, so
`--device auto` is checked as CUDA. With `--device cpu` the flag has no effect.

These are the reasons that a config shows. Anything else fails at capture (`parallel/pipeline/cuda_graph.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.fields import flag_name
from petatron.config.schema.objective_and_dataset_names import NEXT_TOKEN
from petatron.config.schema.parallel import FSDP_STRATEGIES, MODEL_PARALLEL_SIZES
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.config.schema.sections.recommender import RECOMMENDER_MODEL
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.kernels.size_limits import (
    FLASH_HEAD_MULTIPLE,
    FLASH_MAX_HEAD_DIM,
    GROUPED_WIDTH_MULTIPLE,
    MIN_PADDED_DOCUMENT,
    flash_supports_heads,
    grouped_gemm_supports,
    interval_kernel_supports_heads,
)
from petatron.models.uses_random_numbers import uses_random_numbers
from petatron.validate.activation_offload import offload_flag
from petatron.validate.moe import MOE_OVERLAP_FLAG

CUDA_GRAPHS_FLAG = "--cuda-graphs"
CaptureProblem = tuple[str, str, str]
"""The part of the step that cannot be captured, why, and a fix."""


def check_cuda_graphs(config: RawRunConfig) -> Iterator[Problem]:
    if config.train.cuda_graphs != "on" or config.train.device == "cpu":  # there it has no effect
        return
    elsewhere = " With --device cpu nothing is captured." if config.train.device == "auto" else ""
    for part, why, fix in capture_problems(config):
        yield Problem(CUDA_GRAPHS_FLAG, "", f"cannot capture a step with {part}: {why}", f"{fix}{elsewhere}")


def capture_problems(config: RawRunConfig) -> list[CaptureProblem]:
    """Returns all reasons why the steps of a run cannot be captured."""
    rules = (_communication, _experts, _memory, _attention, _item_lookups, _host_code)
    return [problem for rule in rules for problem in rule(config)]


def _host_code(config: RawRunConfig) -> Iterator[CaptureProblem]:
    if config.model.model_type == VISION_LANGUAGE_MODEL:
        why = "batches have more or fewer patches"
        yield f"--model-type {VISION_LANGUAGE_MODEL}", why, "Leave --cuda-graphs out."
    if config.log.pipeline_timeline is not None:
        why = "its parts are timed one by one, by the host"
        yield f"--pipeline-timeline {config.log.pipeline_timeline}", why, "Leave one of them out."
    if config.train.exact_rollouts:
        why = "its attention is planned by the host, from the documents of each batch"
        yield "--exact-rollouts", why, "Leave one of them out."
    if config.train.objective not in (None, NEXT_TOKEN):
        why = "its code may look at values on the host, and other models run before each step"
        yield f"--objective {config.train.objective}", why, "Leave one of them out."


def _communication(config: RawRunConfig) -> Iterator[CaptureProblem]:
    parallel = config.parallel
    strategy = parallel.data_parallel_sharding_strategy
    if parallel.data_parallel_size != 1 and strategy in FSDP_STRATEGIES:
        fix = "Use the strategy optim, or leave one of them out."
        yield f"--data-parallel-sharding-strategy {strategy}", "fully_shard frees and gathers weights by hooks", fix
    if parallel.overlap_moe_expert_parallel_comm:
        yield MOE_OVERLAP_FLAG, "two threads launch its kernels in turns", "Leave one of them out."
    if parallel.distributed_backend == "gloo":
        yield from _host_communication(config)


def _host_communication(config: RawRunConfig) -> Iterator[CaptureProblem]:
    """Yields communication by gloo, which sends from the host, inside a step."""
    parallel, experts = config.parallel, config.moe.num_experts is not None
    why, fix = "gloo communicates inside it, on the host", "Use --distributed-backend nccl, or leave --cuda-graphs out."
    split_experts = experts and parallel.tensor_model_parallel_size == 1
    for name in (*MODEL_PARALLEL_SIZES, *(("expert_tensor_parallel_size",) if split_experts else ())):
        size = getattr(parallel, name)
        if size is not None and size > 1:
            yield f"{flag_name(name)} {size}", why, fix
    if parallel.data_parallel_size == 1 or parallel.data_parallel_sharding_strategy in FSDP_STRATEGIES:
        return
    if parallel.overlap_grad_reduce:
        yield "--overlap-grad-reduce", why, "Add --no-overlap-grad-reduce, which reduces gradients after it."
    if experts and config.moe.moe_router_load_balancing_type == "global_aux_loss":
        yield "--moe-router-load-balancing-type global_aux_loss", why, fix


def _item_lookups(config: RawRunConfig) -> Iterator[CaptureProblem]:
    if config.model.model_type == RECOMMENDER_MODEL:
        why = "the host must know how many rows ranks ask each other for"
        yield "a table of items", why, "Leave --cuda-graphs out."


def _experts(config: RawRunConfig) -> Iterator[CaptureProblem]:
    moe, precision = config.moe, config.precision
    if moe.num_experts is None:
        return
    if moe.moe_router_load_balancing_type == "sinkhorn":
        fix = "Balance in another way, or leave --cuda-graphs out."
        yield "--moe-router-load-balancing-type sinkhorn", "the host looks when the load is even enough", fix
    if moe.moe_pad_expert_input_to_capacity:
        return
    yield from _dispatch(config)
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
        if precision.bf16 and width is not None and not grouped_gemm_supports(width):
            fix = f"Use a multiple of {GROUPED_WIDTH_MULTIPLE}, which one kernel can multiply for all experts."
            yield f"{flag_name(name)} {width}", why, fix


def _dispatch(config: RawRunConfig) -> Iterator[CaptureProblem]:
    """Yields a problem for expert parallelism without padding to capacity, whose shapes depend on the routing."""
    parallel, dispatcher = config.parallel, config.moe.moe_token_dispatcher_type
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or 1
    why = "the host must know how many rows a rank gets"
    fix = "Add --moe-pad-expert-input-to-capacity with --moe-expert-capacity-factor, or leave --cuda-graphs out."
    if dispatcher == "alltoall" and ep * etp > 1:
        yield f"--moe-token-dispatcher-type alltoall over {ep * etp} ranks", why, fix
    elif ep > 1 and config.moe.moe_expert_capacity_factor is None:
        yield f"--expert-model-parallel-size {ep} without --moe-expert-capacity-factor", why, fix


def _memory(config: RawRunConfig) -> Iterator[CaptureProblem]:
    memory = config.memory
    if memory.offloads_activations:
        why = "activations leave for memory that the host hands out"
        yield " ".join(offload_flag(memory)).strip(), why, "Leave one of them out."
    recomputes = memory.recompute_granularity is not None or memory.recompute_memory_budget_gb is not None
    if recomputes and uses_random_numbers(config):
        why = "the host would set random states back inside it"
        yield "recompute and random numbers", why, "Use --hidden-dropout 0 --attention-dropout 0, or recompute nothing."


def _attention(config: RawRunConfig) -> Iterator[CaptureProblem]:
    model, window = config.model, config.model.window_size
    yield from _documents(config)
    yield from _key_intervals(config)
    why = "without FlashAttention the host makes the mask"
    if model.attn_logit_softcapping is not None:
        yield f"--attn-logit-softcapping {model.attn_logit_softcapping:g}", why, "Leave one of them out."
    if model.softmax_type != "vanilla":
        yield f"--softmax-type {model.softmax_type}", why, "Leave one of them out."
    if model.attention_chunk_size is not None and model.attention_chunk_size < model.seq_length:
        why = "the host keeps the boundaries of chunks, and may forget them"
        yield f"--attention-chunk-size {model.attention_chunk_size}", why, "Leave one of them out."
    yield from _context(config)
    if window is None or window >= model.seq_length:
        return
    if not (config.precision.bf16 or config.precision.fp16):
        yield f"--window-size {window} in this precision", why, "Add --bf16 or --fp16, or leave --cuda-graphs out."
    elif model.kv_channels is not None and not flash_supports_heads(model.kv_channels):
        fix = (
            f"Use heads of a multiple of {FLASH_HEAD_MULTIPLE} up to {FLASH_MAX_HEAD_DIM}, or leave --cuda-graphs out."
        )
        yield f"--window-size {window} and heads of width {model.kv_channels}", why, fix


def _key_intervals(config: RawRunConfig) -> Iterator[CaptureProblem]:
    """Yields problems of encoder-decoders, whose texts end where the device knows: only one kernel does not ask the host."""
    model = config.model
    if model.model_type != ENCODER_DECODER_MODEL:
        return
    if model.kv_channels is not None and not interval_kernel_supports_heads(model.kv_channels):
        why = "without a kernel of key intervals the host makes the mask"
        fix = "Use heads of 16, 32, 64 or 128 channels, or leave --cuda-graphs out."
        yield f"--model-type {ENCODER_DECODER_MODEL} and heads of width {model.kv_channels}", why, fix
    longest = model.decoder_seq_length
    if longest is not None and longest >= MIN_PADDED_DOCUMENT > model.seq_length:
        why = f"attention of texts of {MIN_PADDED_DOCUMENT} tokens or more is planned from their lengths, by the host"
        yield f"--decoder-seq-length {longest}", why, "Leave one of them out."


def _documents(config: RawRunConfig) -> Iterator[CaptureProblem]:
    """Yields problems of attention within packed documents; the varlen kernel of short documents can be captured."""
    model = config.model
    if not config.data.separates_documents:
        return
    separating = (
        "--reset-attention-mask" if config.data.reset_attention_mask else f"--dataset-type {config.data.dataset_type}"
    )
    fix = "Leave one of them out."
    if model.seq_length >= MIN_PADDED_DOCUMENT:
        why = (
            f"attention of documents of {MIN_PADDED_DOCUMENT} tokens or more is planned from their lengths, by the host"
        )
        yield f"{separating} and --seq-length {model.seq_length}", why, fix
    if config.parallel.world_size not in (None, 1):
        why = "what they capture would depend on their documents"
        yield f"{separating} and {config.parallel.world_size} ranks", why, fix
    if model.attention_dropout > 0.0:
        why = "how many random numbers are drawn depends on the number of documents"
        yield f"{separating} and --attention-dropout {model.attention_dropout:g}", why, fix
    if config.train.deterministic_mode:
        why = "in which order gradients are added depends on the number of documents"
        yield f"{separating} and --deterministic-mode", why, fix
    why = "without FlashAttention the host makes the mask"
    if not (config.precision.bf16 or config.precision.fp16):
        yield f"{separating} in this precision", why, "Add --bf16 or --fp16, or leave one of them out."
    elif model.kv_channels is not None and not flash_supports_heads(model.kv_channels):
        yield f"{separating} and heads of width {model.kv_channels}", why, fix


def _context(config: RawRunConfig) -> Iterator[CaptureProblem]:
    """Yields problems of context-parallel attention."""
    parallel, model = config.parallel, config.model
    if parallel.context_parallel_size == 1 or parallel.cp_comm_type == "a2a":
        return
    attention = f"--context-parallel-size {parallel.context_parallel_size} --cp-comm-type {parallel.cp_comm_type}"
    if model.attention_dropout > 0.0:
        fix = "Use --attention-dropout 0 or --cp-comm-type a2a, or leave --cuda-graphs out."
        yield f"{attention} and --attention-dropout {model.attention_dropout:g}", "the host draws its seeds", fix
    if model.window_size is not None and model.window_size < model.seq_length:
        fix = "Use --cp-comm-type a2a, or leave --cuda-graphs out."
        yield f"{attention} and --window-size {model.window_size}", "the host makes the mask", fix
