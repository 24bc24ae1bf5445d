"""The settings of the parallel layout: sizes of the mesh axes, pipeline schedule, data-parallel sharding, overlap of communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from petatron.config.schema.numeric_bounds import (
    BatchSize,
    BucketElements,
    LayerCount,
    Minutes,
    RankCount,
    SmallCount,
)
from petatron.config.schema.pipeline_schedules import PipelineScheduleName
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.config.schema.sections.moe import HAS_EXPERTS
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.config.schema.setting_metadata import RunSettings, UsedWhen, used_with
from petatron.config.schema.setting_types import FilePath

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
FSDP_STRATEGIES = ("optim_grads", "optim_grads_params")
MODEL_PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
"""The sizes that shard one model; above 1, ranks communicate inside a forward."""
MESH_SIZES = (*MODEL_PARALLEL_SIZES, "expert_tensor_parallel_size", "data_parallel_size", "world_size")
"""Every size of the mesh."""
MIN_BUCKET_SIZE = 40_000_000


def num_micro_batches(run: RunSettings) -> int | None:
    """Returns the micro-batches of a step on one data-parallel rank after any ramp; None while the sizes are a problem of their own."""
    size, dp, micro = run.train.global_batch_size, run.parallel.data_parallel_size, run.train.micro_batch_size
    return None if size is None or not dp or micro < 1 else size // (dp * micro)


def weights_are_replicated(run: RunSettings) -> bool:
    """Whether dense weights or experts have several replicas; True while the sizes are a problem of their own."""
    parallel = run.parallel
    dp, etp = parallel.data_parallel_size, parallel.expert_tensor_parallel_size
    if dp is None or etp is None:
        return True
    experts = parallel.expert_model_parallel_size * etp
    replicated_experts = run.moe.num_experts is not None and parallel.tensor_model_parallel_size != experts
    return dp * parallel.context_parallel_size != 1 or replicated_experts


_TENSOR_PARALLEL = UsedWhen(lambda run: run.parallel.tensor_model_parallel_size != 1, "the tensor-parallel size is 1")
_CONTEXT_PARALLEL = UsedWhen(lambda run: run.parallel.context_parallel_size != 1, "the context-parallel size is 1")
HAS_PIPELINE = UsedWhen(lambda run: run.parallel.pipeline_model_parallel_size != 1, "the pipeline-parallel size is 1")
HAS_REPLICAS = UsedWhen(weights_are_replicated, "no two ranks hold the same weights, as data-parallel ones do")
_NOT_FP8 = UsedWhen(
    lambda run: run.precision.fp8_format is None,
    "scales of FP8 are those of the whole gathered input, not of its chunks",
)
_OVERLAPS = UsedWhen(
    lambda run: run.parallel.tp_comm_overlap and _TENSOR_PARALLEL.holds(run), "it is for --tp-comm-overlap"
)
_ENCODER_STAGES = UsedWhen(
    lambda run: run.model.model_type in (ENCODER_DECODER_MODEL, VISION_LANGUAGE_MODEL),
    f"it is for --model-type {ENCODER_DECODER_MODEL} and {VISION_LANGUAGE_MODEL}",
)
_SCHEDULE, _STRATEGY = "parallel.pipeline_schedule", "parallel.data_parallel_sharding_strategy"
_INTERLEAVED = used_with(_SCHEDULE, value="interleaved", reason="it is for the interleaved schedule")
_SEVERAL = UsedWhen(
    lambda run: num_micro_batches(run) != 1, "a step has one micro-batch, and nothing to overlap it with"
)
_UNSHARDED = used_with(_STRATEGY, value="no_shard")
_SHARES = UsedWhen(lambda run: weights_are_replicated(run) or _UNSHARDED.holds(run), HAS_REPLICAS.reason)
_SHARDED = UsedWhen(lambda run: not _UNSHARDED.holds(run), "no optimizer state is sharded")
_BUCKETS = UsedWhen(
    lambda run: run.parallel.data_parallel_sharding_strategy not in FSDP_STRATEGIES, "fully_shard reduces the gradients"
)
_SHARDS = UsedWhen(_BUCKETS.holds, "fully_shard shares the optimizer state and gathers by itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawParallelConfig:
    """How the ranks share the work."""

    tensor_model_parallel_size: RankCount = 1
    """Ranks that split each layer's matrices (tp)."""
    sequence_parallel: Annotated[bool, _TENSOR_PARALLEL] = False
    """Split the activations between the matrices along the sequence over the tensor-parallel ranks; no effect at tp 1."""
    tp_comm_overlap: Annotated[bool, _TENSOR_PARALLEL, _NOT_FP8] = False
    """Overlap the all-gathers and reduce-scatters of the forward pass with the GEMMs of column- and row-parallel linears, chunk by
    chunk; needs `--sequence-parallel`. (Those of the backward pass overlap without it.) No effect at tp 1."""
    tp_comm_overlap_chunks: Annotated[SmallCount, _OVERLAPS] | None = None
    """Chunks of rows into which `--tp-comm-overlap` cuts a GEMM and its communication. More of them expose less communication,
    but GEMMs of few rows are slow. Derived: one per 2,048 tokens of a rank's micro-batch, from 2 to 4."""
    pipeline_model_parallel_size: RankCount = 1
    """Ranks that hold consecutive groups of layers (pp)."""
    num_layers_per_virtual_pipeline_stage: LayerCount | None = None
    """Layers per virtual stage; another way to say how many virtual stages a pipeline rank holds."""
    num_virtual_stages_per_pipeline_rank: LayerCount | None = None
    """Groups of layers each pipeline rank holds, spread over the model. Derived: from `--num-layers-per-virtual-pipeline-stage`
    or the layout string, 2 for the schedule zb-v, else 1."""
    pipeline_schedule: Annotated[PipelineScheduleName, HAS_PIPELINE] | None = None
    """Order of forward and backward passes in the pipeline; the zb ones split the backward pass to fill idle time.
    Derived: interleaved with virtual stages, else 1f1b."""
    microbatch_group_size_per_virtual_pipeline_stage: Annotated[BatchSize, _INTERLEAVED] | None = None
    """Micro-batches that pass one virtual stage before a rank turns to its next. Derived: the pipeline size."""
    encoder_pipeline_model_parallel_size: Annotated[RankCount, HAS_PIPELINE, _ENCODER_STAGES] = 0
    """T5: how many stages, of those of `--pipeline-model-parallel-size`, are the encoder's alone; its layers are spread over them evenly,
    and the decoder's over the others. 0: all layers are spread evenly. Megatron-LM counts them beside those stages."""
    decoder_first_pipeline_num_layers: LayerCount | None = None
    """Layers on the first pipeline rank; the other ranks share the rest evenly."""
    decoder_last_pipeline_num_layers: LayerCount | None = None
    """Layers on the last pipeline rank; the other ranks share the rest evenly."""
    account_for_embedding_in_pipeline_split: Annotated[bool, HAS_PIPELINE] = False
    """Count the embedding as one layer when the layers are split evenly, so that the first stage holds one layer less."""
    account_for_loss_in_pipeline_split: Annotated[bool, HAS_PIPELINE] = False
    """Count the output head and loss as one layer when the layers are split evenly, so that the last stage holds one less."""
    pipeline_model_parallel_layout: str | None = None
    """Every stage spelled out in model order: E is the embedding, t a layer, L the head and loss, and | ends a stage;
    t*3 and (tt|)*4 repeat, commas and blanks are free. `Et|(ttt|)*2tL` puts 8 layers on 4 stages. Stage i belongs to
    pipeline rank i modulo the pipeline size (zb-v: the second half runs backwards over the ranks)."""
    context_parallel_size: RankCount = 1
    """Ranks that split the sequence in attention too (cp)."""
    cp_comm_type: Annotated[Literal["p2p", "all_gather", "a2a", "a2a+p2p"], _CONTEXT_PARALLEL] = "p2p"
    """How context-parallel attention meets the other ranks' keys and values: passed around a ring, gathered at once,
    exchanged for a share of the heads (Ulysses), or heads within groups and a ring between them."""
    hierarchical_context_parallel_sizes: tuple[Annotated[RankCount, _CONTEXT_PARALLEL], ...] = ()
    """For a2a+p2p: ranks that exchange heads, and ranks in a ring; their product is cp. Derived: as many heads as divide."""
    expert_model_parallel_size: RankCount = 1
    """Ranks that share the experts of a layer (ep)."""
    expert_tensor_parallel_size: Annotated[RankCount, HAS_EXPERTS] | None = None
    """Ranks that split one expert's matrices (etp). Derived: the tensor-parallel size."""
    overlap_moe_expert_parallel_comm: Annotated[bool, _SEVERAL] = False
    """Run the forward pass of one micro-batch together with the backward pass of another, so that each computes while the
    other's expert all-to-all is in flight. More micro-batches are in memory at a time: 2 instead of 1 without a pipeline."""
    data_parallel_size: RankCount | None = None
    """Replicas that see different samples (dp). Derived: world size / (tp x pp x cp)."""
    world_size: RankCount | None = None
    """Number of ranks. Derived: from the launcher, or tp x pp x cp x dp."""
    use_distributed_optimizer: Annotated[bool, HAS_REPLICAS, _SHARDS] = False
    """Shard optimizer state over the data-parallel ranks (ZeRO-1)."""
    data_parallel_sharding_strategy: Annotated[ShardingStrategy, _SHARES] | None = None
    """What data-parallel ranks hold only a share of: nothing, optimizer state (the distributed optimizer, ZeRO-1), also
    gradients (ZeRO-2), also parameters (ZeRO-3); the last two are PyTorch's fully_shard (FSDP).
    Derived: optim with `--use-distributed-optimizer`, else no_shard."""
    num_distributed_optimizer_instances: Annotated[RankCount, _SHARDED] = 1
    """Copies of the sharded state: dp / this ranks share one copy (hybrid sharding)."""
    grad_reduce_in_bf16: bool = False
    """Send gradients between data-parallel ranks in bfloat16; by default they are reduced in fp32."""
    overlap_grad_reduce: Annotated[bool, HAS_REPLICAS, _BUCKETS] = True
    """Reduce gradient buckets while the backward pass still runs."""
    overlap_param_gather: Annotated[bool, HAS_REPLICAS, _SHARDS] = False
    """Gather updated parameters while the next forward pass runs; needs the distributed optimizer."""
    ddp_bucket_size: Annotated[BucketElements, HAS_REPLICAS, _BUCKETS] | None = None
    """Elements per gradient bucket. Derived: max(40 million, 1 million x dp x cp)."""
    use_tp_pp_dp_mapping: bool = False
    """Number the ranks with pipeline stages next to each other before replicas (tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp)."""
    distributed_backend: Literal["gloo", "nccl", "fake"] | None = None
    """Communication library. Derived: nccl on CUDA devices, else gloo; fake sends nothing and is for planning."""
    distributed_timeout_minutes: Annotated[Minutes, "above 0"] = 10.0
    """How long a collective may wait before the run is declared hung."""
    nccl_communicator_config_path: FilePath | None = None
    """YAML file with NCCL settings of communicators, in Megatron's form: `dp: {max_ctas: 16}`."""
    high_priority_stream_groups: tuple[str, ...] = ()
    """Groups whose communication runs on high-priority streams, such as tp or ep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(RawParallelConfig):
    """The resolved layout; by default that of one rank."""

    num_virtual_stages_per_pipeline_rank: LayerCount = 1
    pipeline_schedule: PipelineScheduleName = "1f1b"
    expert_tensor_parallel_size: RankCount = 1
    data_parallel_size: RankCount = 1
    world_size: RankCount = 1
    data_parallel_sharding_strategy: ShardingStrategy = "no_shard"
    ddp_bucket_size: BucketElements = MIN_BUCKET_SIZE
