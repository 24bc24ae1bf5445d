"""Bytes of a rank's persistent state: weights, gradients, master weights and moments.

With n elements on this rank (its shards over tensor-, pipeline- and expert-parallel ranks, vocabulary padding included), a
bytes per element of the run's precision, w = max(a, 4), and s ranks that shard state:

    sharding            weights              gradients    master weights             moments
    no_shard            a n                  g n          4 n, if a < 4              m n
    optim               a n                  g n          4 n / s, if a < 4          m n / s
    optim_grads         a n, gathered        w n / s      w n / s, the weights       m n / s
    optim_grads_params  a (two layers and    w n / s      w n / s, the weights       m n / s
                        the ends), gathered

Fully sharded gradients exist whole before they are reduce-scattered: in addition to the table, a bytes for each of the head, whose
gradient is held until backward is over, and a + r for each of one layer, r being the bytes they are reduced in (w, or 2 with
`--grad-reduce-in-bf16`).

g follows `--main-grads-dtype`, 4 by default and w in float64. m is what the update rule of a parameter declares (`UpdateRuleSpec.state`):
AdamW has 8 bytes by default. State of whole matrices is divided over the ranks that shard state, matrix by matrix, and each
tensor-parallel rank has all of it; sums over rows and columns are on every rank that has them. Experts are sharded over other ranks
than dense parameters, so both are counted separately. Of offloaded optimizer state, a fraction of master weights and moments is not on
the device. A copy of the weights that a rank updates (their average) is w n / s, on the device. Padding of buckets to equal shards is left
out.

A table of which each rank has other rows (a recommender's items) is not sharded any further: it has a, 4 if a < 4, and m bytes for each of
its elements here, and w for a gradient if the loss computes with all rows; else the gradients of the rows that a step touches are left out.

Frozen parameters have weights alone, a bytes for each of n; fully sharded ones a / s in addition to those gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from petatron.config.optimizer_registry import rule_spec
from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.fields import all_fields
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.config.schema.run import RunConfig
from petatron.config.schema.setting_types import WeightsCopy
from petatron.kernels.block_quantization import BLOCK as QUANTIZED_BLOCK
from petatron.kernels.block_quantization import CODE_BYTES as QUANTIZED_BYTES
from petatron.layers.ops.fp8_weight import is_cast_for_each_use
from petatron.layers.spec.param_spec import ParamSpec
from petatron.mesh.rank_layout import Layout
from petatron.models.frozen_params import NOTHING_FROZEN, FrozenParams, frozen_params, without_names
from petatron.models.model_spec import ModelSpec
from petatron.models.optimizer_groups import matrix_or_vector_shape, optimizer_group
from petatron.models.registry import model_spec
from petatron.schedule.pipeline_plan import num_micro_batches
from petatron.sharding.logical_matrices import split_into_matrices
from petatron.sharding.shard_spec import ModelParallelCoordinate, compute_placement

_DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_GATHERED_LAYERS = 2  # fully sharded: the one that runs, and the next, which is being gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """The persistent state of one rank, on its device."""

    weights: int
    gradients: int
    master_weights: int
    moments: int
    copies: int = 0
    """Copies of the weights that the rank updates, such as their average."""

    @property
    def optimizer(self) -> int:
        return self.master_weights + self.moments + self.copies

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class ElementCounts:
    """The elements of a rank, of its largest layer, of its embedding and head, and of the head.

    rows: of tables of which each rank has other rows, which are not in `dense`; row_gradients: of those whose gradient is whole.
    """

    dense: int
    experts: int
    largest_layer: int
    embedding_and_head: int
    head: int
    rows: int = 0
    row_gradients: int = 0


@dataclass(frozen=True, slots=True)
class RuleStateBytes:
    """Bytes of the update rules' state if nothing were sharded over data-parallel ranks: of dense parameters, of experts, and what every
    such rank has, sharded or not.
    """

    dense: int = 0
    experts: int = 0
    replicated: int = 0

    def plus(self, other: RuleStateBytes, times: int = 1) -> RuleStateBytes:
        return RuleStateBytes(
            self.dense + times * other.dense,
            self.experts + times * other.experts,
            self.replicated + times * other.replicated,
        )


def state_bytes(run: RunConfig, local_stages: Sequence[PipelineStage] | None = None) -> StateBytes:
    """Returns the bytes of a rank with these stages of a resolved config; without any, the whole model's."""
    elements = local_element_counts(run, local_stages)
    trained = local_element_counts(run, local_stages, trained=True)
    rule_state = local_rule_state(run, local_stages)
    layout = Layout.from_config(run.parallel)
    strategy = run.parallel.data_parallel_sharding_strategy
    sharded = strategy in ("optim", "optim_grads", "optim_grads_params")
    ranks = (layout.dp_shard * layout.cp, layout.edp_shard) if sharded else (1, 1)
    local = elements.dense + elements.experts
    owned = -(-trained.dense // ranks[0]) + -(-trained.experts // ranks[1])
    num_trained = trained.dense + trained.experts
    weight = element_bytes(run)
    main = max(weight, 4)
    moments = -(-rule_state.dense // ranks[0]) + -(-rule_state.experts // ranks[1]) + rule_state.replicated
    offloads = run.memory.optimizer_cpu_offload or run.memory.optimizer_nvme_offload is not None
    row_masters = 4 * trained.rows if weight < 4 else 0
    on_device = 1.0 - run.memory.optimizer_offload_fraction if offloads else 1.0
    if strategy in ("optim_grads", "optim_grads_params") and layout.world_size > 1:
        gathered = local
        if strategy == "optim_grads_params":
            gathered = min(local, _GATHERED_LAYERS * elements.largest_layer + elements.embedding_and_head)
        reduce = 2 if run.parallel.grad_reduce_in_bf16 else main
        unsharded = weight * trained.head + (weight + reduce) * trained.largest_layer
        frozen = -(-(elements.dense - trained.dense) // ranks[0]) + -(-(elements.experts - trained.experts) // ranks[1])
        return StateBytes(
            weights=weight * (gathered + frozen + elements.rows),
            gradients=main * (owned + trained.row_gradients) + unsharded,
            master_weights=main * owned + row_masters,
            moments=int(moments * on_device),
            copies=_num_copies(run) * main * (owned + trained.rows),
        )
    return StateBytes(
        weights=weight * (local + elements.rows)
        + _fp8_copy_bytes(run, elements, trained, num_shards=ranks[0])
        - _quantized_saving(run, elements, trained),
        gradients=(_DTYPE_BYTES[run.optim.main_grads_dtype] if main == 4 else main) * num_trained
        + main * trained.row_gradients,
        master_weights=int(4 * owned * on_device) + row_masters if weight < 4 else 0,
        moments=int(moments * on_device),
        copies=_num_copies(run) * main * (owned + trained.rows),
    )


def _num_copies(run: RunConfig) -> int:
    """Returns how many settings of the run make a rank keep a copy of the weights that it updates."""
    copying = (info for info in all_fields() if WeightsCopy in info.marks)
    return sum(getattr(getattr(run, info.section), info.name) not in (None, False) for info in copying)


def _quantized_saving(run: RunConfig, elements: ElementCounts, trained: ElementCounts) -> int:
    """Returns the bytes by which quantized frozen weights of layers are smaller; norms and routers are counted among them."""
    form = run.model.adapter_base_format
    if form is None or run.model.adapter is None:
        return 0
    frozen = elements.dense - elements.embedding_and_head - (trained.dense - trained.embedding_and_head)
    frozen += elements.experts - trained.experts
    return int(frozen * (element_bytes(run) * (1 - 1 / QUANTIZED_BLOCK) - QUANTIZED_BYTES[form]))


def _fp8_copy_bytes(run: RunConfig, elements: ElementCounts, trained: ElementCounts, *, num_shards: int) -> int:
    """Returns the bytes of FP8 weights of layers, in both orientations, a byte each; embedding and head are not quantized.

    One large micro-batch casts dense weights for each use, and keeps none (`layers/ops/fp8_weight.py`). Where weights are all-gathered
    in FP8, a rank's owned range is separate from the weights it computes with; not so for experts.
    """
    if run.precision.fp8_format is None:
        return 0
    rows = run.train.micro_batch_size * run.model.seq_length // run.parallel.context_parallel_size
    cast_for_each_use = is_cast_for_each_use(micro_batches=num_micro_batches(run), num_rows=rows)
    dense = 0 if cast_for_each_use else elements.dense - elements.embedding_and_head
    copies = 2 * (dense + elements.experts)
    if run.precision.fp8_param_gather and num_shards > 1:
        copies += element_bytes(run) * -(-(trained.dense - trained.embedding_and_head) // num_shards)
    return copies


def element_bytes(run: RunConfig) -> int:
    """Returns the bytes of a weight in the precision of the run."""
    precision = run.precision
    return 8 if precision.fp64 else 2 if precision.bf16 or precision.fp16 else 4


def local_element_counts(
    run: RunConfig, local_stages: Sequence[PipelineStage] | None = None, *, trained: bool = False
) -> ElementCounts:
    """Returns the element counts of a rank with these stages; without any, the whole model's. `trained`: without frozen parameters."""
    return _stage_element_counts(*_merged_stage(run, local_stages), frozen_params(run) if trained else NOTHING_FROZEN)


def local_rule_state(run: RunConfig, local_stages: Sequence[PipelineStage] | None = None) -> RuleStateBytes:
    """Returns the state of the update rules on a rank with these stages; without any, the whole model's."""
    stage = _merged_stage(run, local_stages)
    return _stage_rule_state(*stage, frozen_params(run), run.optim, max(element_bytes(run), 4))


def _merged_stage(
    run: RunConfig, local_stages: Sequence[PipelineStage] | None
) -> tuple[ModelSpec, PipelineStage, ModelParallelCoordinate]:
    """Returns a rank's stages as one, so that a tied head is the embedding where one rank has both."""
    spec = model_spec(run)
    local_stages = local_stages or [spec.whole_model]
    layers = tuple(layer for stage in local_stages for layer in stage.layer_indices)
    has_embedding, has_loss = (any(ends) for ends in zip(*((s.has_embedding, s.has_loss) for s in local_stages)))
    merged = PipelineStage(layers, has_embedding, has_loss)
    layout = Layout.from_config(run.parallel)
    return (
        spec,
        merged,
        ModelParallelCoordinate(
            tp_size=layout.tp, ep_size=layout.ep, etp_size=layout.etp, data_size=layout.dp * layout.cp
        ),
    )


@lru_cache(maxsize=256)
def _stage_element_counts(
    spec: ModelSpec, stage: PipelineStage, coordinate: ModelParallelCoordinate, frozen: FrozenParams
) -> ElementCounts:
    outer = _count_elements(frozen.trained(spec.outer_params(stage)), coordinate)
    (dense, experts), largest = outer[:2], 0
    for (layer, names, _), number in frozen.count_layers(spec, stage).items():
        in_layer = _count_elements(without_names(layer.params(), names), coordinate)
        dense, experts = dense + number * in_layer[0], experts + number * in_layer[1]
        largest = max(largest, sum(in_layer))
    last = PipelineStage((), has_embedding=False, has_loss=True)
    of_head = frozen.trained(spec.outer_params(last)) if stage.has_loss else {}
    head = _count_elements(of_head, coordinate)
    gemms = {name: param for name, param in of_head.items() if param.is_gemm}
    row_gradients = _count_elements(gemms, coordinate)[2]
    return ElementCounts(dense, experts, largest, sum(outer[:2]), sum(head[:2]), outer[2], row_gradients)


@lru_cache(maxsize=256)
def _stage_rule_state(
    spec: ModelSpec,
    stage: PipelineStage,
    coordinate: ModelParallelCoordinate,
    frozen: FrozenParams,
    optim: OptimizerConfig,
    main_bytes: int,
) -> RuleStateBytes:
    total = _params_rule_state(frozen.trained(spec.outer_params(stage)), coordinate, optim, main_bytes)
    for (layer, names, _), number in frozen.count_layers(spec, stage).items():
        trained = without_names(layer.params(), names)
        total = total.plus(_params_rule_state(trained, coordinate, optim, main_bytes), number)
    return total


def _params_rule_state(
    params: Mapping[str, ParamSpec], coordinate: ModelParallelCoordinate, optim: OptimizerConfig, main_bytes: int
) -> RuleStateBytes:
    """Returns the bytes of the state that the rules of these parameters declare."""
    total = RuleStateBytes()
    for name, param in params.items():
        group = optimizer_group(optim, name, param)
        rule = rule_spec(optim, group.rule)
        placement = compute_placement(name, param.shape, param.shard, coordinate)
        sharded = replicated = 0
        for state in rule.state(matrix_or_vector_shape(param)):
            width = state.element_bytes(main_bytes)
            if state.shape == "element":
                sharded += width * math.prod(placement.shape)
            elif rule.unit == "tensor":
                # Of rows or columns, for each matrix of a stack.
                shapes = [shard.shape for shard in placement.tensor_shards]
                replicated += width * sum(math.prod((*s[:-2], *state.dims(*s[-2:]))) for s in shapes)
            else:
                matrices = split_into_matrices(placement, group.unit)
                sharded += width * sum(math.prod(state.dims(*matrix.shape)) for matrix in matrices)
        if placement.row_sharded:
            sharded, replicated = 0, replicated + sharded
        dense, experts = (0, sharded) if placement.expert else (sharded, 0)
        total = total.plus(RuleStateBytes(dense, experts, replicated))
    return total


def count_parameters(params: Mapping[str, ParamSpec], coordinate: ModelParallelCoordinate) -> int:
    """Returns the elements of all parameters on one rank."""
    return sum(_count_elements(params, coordinate))


def _count_elements(params: Mapping[str, ParamSpec], coordinate: ModelParallelCoordinate) -> tuple[int, int, int]:
    """Returns the elements of dense parameters, of experts, and of tables with other rows on each rank, on one rank."""
    counts = [0, 0, 0]
    for name, param in params.items():
        placement = compute_placement(name, param.shape, param.shard, coordinate)
        counts[2 if placement.row_sharded else int(placement.expert)] += math.prod(placement.shape)
    return counts[0], counts[1], counts[2]
