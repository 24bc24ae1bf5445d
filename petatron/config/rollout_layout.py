"""The layout in which answers are drawn, where it is another than that of training.

By default answers are drawn by the weights that are trained, in place. Sizes of `--rollout-...-parallel-size`, and virtual stages, which
generation does not have, need a copy of the weights in another layout, and so do `--rollout-ranks`, which draw alone. The world size of a
run is that of its training.
"""

from __future__ import annotations

from dataclasses import replace

from petatron.config.schema.parallel import FSDP_STRATEGIES, RawParallelConfig
from petatron.config.schema.run import RawRunConfig, RunConfig

ROLLOUT_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
"""The sizes that `--rollout-` before them sets for drawing."""


def chosen_sizes(config: RawRunConfig) -> dict[str, int]:
    """Returns the sizes that were chosen for drawing, by their names in the training layout."""
    chosen = {name: getattr(config.rollout, f"rollout_{name}") for name in ROLLOUT_SIZES}
    return {name: size for name, size in chosen.items() if size is not None}


def draws_in_place(config: RawRunConfig) -> bool:
    """Whether answers are drawn by the weights that are trained, without a copy.

    Context-parallel ranks hold the same weights: for drawing they are data-parallel ones. Weights that FSDP shards are gathered for each
    step of decoding, unless a size is chosen.
    """
    parallel, chosen = config.parallel, chosen_sizes(config)
    if config.rollout.rollout_ranks or (parallel.num_virtual_stages_per_pipeline_rank or 1) > 1:
        return False
    sharded = parallel.data_parallel_sharding_strategy in FSDP_STRATEGIES
    return not chosen or (not sharded and all(getattr(parallel, name) == size for name, size in chosen.items()))


def drawing_config(config: RunConfig) -> RunConfig:
    """Returns the run with the layout in which answers are drawn, without anything that is for training alone.

    >>> from petatron.validate import load_config
    >>> flags = "--vocab-size 256 --tp 4 --pp 2 --rollout-tp 2 --rollout-pp 1"
    >>> run = load_config(flags.split(), preset="tiny-llama", require_training=False, world_size=16).config
    >>> drawing_config(run).parallel.tensor_model_parallel_size, drawing_config(run).parallel.data_parallel_size
    (2, 8)
    """
    parallel = _drawing_parallel(config)
    memory = replace(
        config.memory,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        recompute_memory_budget_gb=None,
        cpu_offloading_num_layers=0,
        fine_grained_activation_offloading=False,
        optimizer_cpu_offload=False,
        optimizer_nvme_offload=None,
    )
    train = replace(config.train, cuda_graphs="off")
    return replace(config, parallel=parallel, memory=memory, train=train)


def with_drawing_layout(config: RawRunConfig) -> RawRunConfig:
    """Returns the settings of a run in the layout of drawing, for the rules about layouts."""
    return replace(config, parallel=_drawing_parallel(config))


def _drawing_parallel(config: RawRunConfig) -> RawParallelConfig:
    parallel, sizes = config.parallel, chosen_sizes(config)
    tp = sizes.get("tensor_model_parallel_size", parallel.tensor_model_parallel_size)
    ranks = config.rollout.rollout_ranks
    pp = sizes.get("pipeline_model_parallel_size", 1 if ranks else parallel.pipeline_model_parallel_size)
    world_size = ranks or parallel.world_size or 1
    follows = parallel.expert_tensor_parallel_size == parallel.tensor_model_parallel_size
    stages = {}
    if pp != parallel.pipeline_model_parallel_size or (parallel.num_virtual_stages_per_pipeline_rank or 1) > 1:
        stages = {
            "pipeline_model_parallel_layout": None,
            "decoder_first_pipeline_num_layers": None,
            "decoder_last_pipeline_num_layers": None,
            "encoder_pipeline_model_parallel_size": 0,
        }
    return replace(
        parallel,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=sizes.get("expert_model_parallel_size", parallel.expert_model_parallel_size),
        expert_tensor_parallel_size=tp if follows else parallel.expert_tensor_parallel_size,
        context_parallel_size=1,
        hierarchical_context_parallel_sizes=(),
        world_size=world_size,
        data_parallel_size=max(1, world_size // max(1, tp * pp)),
        sequence_parallel=tp > 1 and (parallel.sequence_parallel or config.moe.num_experts is not None),
        tp_comm_overlap=False,
        tp_comm_overlap_chunks=None,
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=1,
        microbatch_group_size_per_virtual_pipeline_stage=None,
        pipeline_schedule="1f1b",
        overlap_moe_expert_parallel_comm=False,
        use_distributed_optimizer=False,
        data_parallel_sharding_strategy="no_shard",
        num_distributed_optimizer_instances=1,
        overlap_param_gather=False,
        **stages,
    )
