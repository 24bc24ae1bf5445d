"""Bytes of a rank's persistent state: weights, gradients, master weights and moments.

With n elements on this rank (its shards over tensor-, pipeline- and expert-parallel ranks, vocabulary padding included), a
bytes per element of the run's precision, w = max(a, 4), and s ranks that shard state:

    sharding            weights              gradients    master weights             moments (adam)
    no_shard            a n                  g n          4 n, if a < 4              (m + v) n
    optim               a n                  g n          4 n / s, if a < 4          (m + v) n / s
    optim_grads         a n, gathered        w n / s      w n / s, the weights       (m + v) n / s
    optim_grads_params  a (two layers and    w n / s      w n / s, the weights       (m + v) n / s
                        the ends), gathered

Fully sharded gradients exist whole before they are reduce-scattered: in addition to the table, a bytes for each of the head, whose
gradient is held until backward is over, and a + r for each of one layer, r being the bytes they are reduced in (w, or 2 with
`--grad-reduce-in-bf16`).

g, m and v follow `--main-grads-dtype`, `--exp-avg-dtype` and `--exp-avg-sq-dtype`, 4 by default and w in float64. Muon has one moment
of w bytes for each element of the layers' matrices, and adam's for all others. Experts are sharded over other ranks than dense
parameters, so both are counted separately. Of offloaded optimizer state, a fraction of master weights and moments is not on the
device. Padding of buckets to equal shards is left out.

Frozen parameters have weights alone, a bytes for each of n; fully sharded ones a / s in addition to those gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.run import RunConfig
from petatron.layers.ops.fp8_weight import is_cast_for_each_use
from petatron.layers.spec.param_spec import ParamSpec
from petatron.mesh.rank_layout import Layout
from petatron.models.frozen_params import NOTHING_FROZEN, FrozenParams, frozen_params, without_names
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec
from petatron.schedule.pipeline_plan import num_micro_batches
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

    @property
    def optimizer(self) -> int:
        return self.master_weights + self.moments

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class ElementCounts:
    """The elements of a rank, of its largest layer, of its embedding and head, and of the head.

    `dense_matrices` and `expert_matrices` are those of the matrices that Muon updates.
    """

    dense: int
    experts: int
    dense_matrices: int
    expert_matrices: int
    largest_layer: int
    embedding_and_head: int
    head: int


def state_bytes(run: RunConfig, local_stages: Sequence[PipelineStage] | None = None) -> StateBytes:
    """Returns the bytes of a rank with these stages of a resolved config; without any, the whole model's."""
    elements = local_element_counts(run, local_stages)
    trained = local_element_counts(run, local_stages, trained=True)
    layout = Layout.from_config(run.parallel)
    strategy = run.parallel.data_parallel_sharding_strategy
    sharded = strategy in ("optim", "optim_grads", "optim_grads_params")
    ranks = (layout.dp_shard * layout.cp, layout.edp_shard) if sharded else (1, 1)
    local = elements.dense + elements.experts
    owned = -(-trained.dense // ranks[0]) + -(-trained.experts // ranks[1])
    num_trained = trained.dense + trained.experts
    weight = element_bytes(run)
    main = max(weight, 4)
    matrices = -(-trained.dense_matrices // ranks[0]) + -(-trained.expert_matrices // ranks[1])
    moments = moment_bytes(run, elements=owned, in_matrices=matrices)
    offloads = run.memory.optimizer_cpu_offload or run.memory.optimizer_nvme_offload is not None
    on_device = 1.0 - run.memory.optimizer_offload_fraction if offloads else 1.0
    if strategy in ("optim_grads", "optim_grads_params") and layout.world_size > 1:
        gathered = local
        if strategy == "optim_grads_params":
            gathered = min(local, _GATHERED_LAYERS * elements.largest_layer + elements.embedding_and_head)
        reduce = 2 if run.parallel.grad_reduce_in_bf16 else main
        unsharded = weight * trained.head + (weight + reduce) * trained.largest_layer
        frozen = -(-(elements.dense - trained.dense) // ranks[0]) + -(-(elements.experts - trained.experts) // ranks[1])
        return StateBytes(
            weights=weight * (gathered + frozen),
            gradients=main * owned + unsharded,
            master_weights=main * owned,
            moments=int(moments * on_device),
        )
    return StateBytes(
        weights=weight * local + _fp8_copy_bytes(run, elements, trained, num_shards=ranks[0]),
        gradients=_DTYPE_BYTES[run.optim.main_grads_dtype] * num_trained if main == 4 else main * num_trained,
        master_weights=int(4 * owned * on_device) if weight < 4 else 0,
        moments=int(moments * on_device),
    )


def _fp8_copy_bytes(run: RunConfig, elements: ElementCounts, trained: ElementCounts, *, num_shards: int) -> int:
    """Returns the bytes of FP8 weights of layers, in both orientations, a byte each; embedding and head are not quantised.

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


def moment_bytes(run: RunConfig, *, elements: int, in_matrices: int) -> int:
    """Returns the bytes of all moments of `elements` elements, `in_matrices` of which Muon would update."""
    wide = max(element_bytes(run), 4)
    if run.optim.optimizer == "sgd":
        return wide * elements if run.optim.sgd_momentum else 0
    kinds = (run.optim.exp_avg_dtype, run.optim.exp_avg_sq_dtype)
    by_adam = sum(wide if name == "fp32" else _DTYPE_BYTES[name] for name in kinds)
    by_muon = in_matrices if run.optim.optimizer == "muon" else 0
    return by_adam * (elements - by_muon) + wide * by_muon


def local_element_counts(
    run: RunConfig, local_stages: Sequence[PipelineStage] | None = None, *, trained: bool = False
) -> ElementCounts:
    """Returns the element counts of a rank with these stages; without any, the whole model's. `trained`: without frozen parameters."""
    spec, frozen = model_spec(run), frozen_params(run)
    local_stages = local_stages or [spec.whole]
    # Merged, so that a tied head is the embedding where one rank has both.
    layers = tuple(layer for stage in local_stages for layer in stage.layer_indices)
    merged = PipelineStage(
        layers, any(stage.has_embedding for stage in local_stages), any(stage.has_loss for stage in local_stages)
    )
    layout = Layout.from_config(run.parallel)
    coordinate = ModelParallelCoordinate(tp_size=layout.tp, ep_size=layout.ep, etp_size=layout.etp)
    return _stage_element_counts(spec, merged, coordinate, frozen if trained else NOTHING_FROZEN)


@lru_cache(maxsize=256)
def _stage_element_counts(
    spec: ModelSpec, stage: PipelineStage, coordinate: ModelParallelCoordinate, frozen: FrozenParams
) -> ElementCounts:
    outer = _count_elements(frozen.trained(spec.outer_params(stage)), coordinate)
    counts, largest = list(outer), 0
    for (layer, names, _), number in frozen.count_layers(spec, stage).items():
        one = _count_elements(without_names(layer.params(), names), coordinate)
        counts = [count + number * more for count, more in zip(counts, one)]
        largest = max(largest, one[0] + one[1])
    last = PipelineStage((), has_embedding=False, has_loss=True)
    head = _count_elements(frozen.trained(spec.outer_params(last)), coordinate) if stage.has_loss else (0, 0)
    return ElementCounts(counts[0], counts[1], counts[2], counts[3], largest, outer[0] + outer[1], head[0] + head[1])


def count_parameters(params: Mapping[str, ParamSpec], coordinate: ModelParallelCoordinate) -> int:
    """Returns the elements of all parameters on one rank."""
    return sum(_count_elements(params, coordinate)[:2])


def _count_elements(params: Mapping[str, ParamSpec], coordinate: ModelParallelCoordinate) -> tuple[int, int, int, int]:
    """Returns the elements of dense parameters and of experts on one rank, then of the hidden matrices among both."""
    counts = [0, 0, 0, 0]
    for name, param in params.items():
        placement = compute_placement(name, param.shape, param.shard, coordinate)
        size = math.prod(placement.shape)
        counts[placement.expert] += size
        counts[2 + placement.expert] += size if param.role == "hidden_matrix" else 0
    return counts[0], counts[1], counts[2], counts[3]
