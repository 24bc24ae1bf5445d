"""Bytes of state: the formulas against the buffers that ranks of real layouts hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

import petatron
from petatron.config import RunConfig
from petatron.config.pipeline_stages import PipelineStage, pipeline_stages
from petatron.config.schema.optimizer import BUILT_IN_RULES
from petatron.config.schema.sections.vocabulary import padded_rows
from petatron.estimate.flops import parameter_count
from petatron.estimate.state_bytes import StateBytes, local_element_counts, state_bytes
from petatron.models.registry import model_spec
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.schedule.pipeline_plan import pipeline_plan
from petatron.sharding.flat_buffer import FlatParamGroup
from tests.longform import diagonal
from tests.meta_device_rank import fake_rank

BASE = "--mock-data --lr 1e-3 --train-iters 1 --num-layers 4 --vocab-size 1000 --make-vocab-size-divisible-by 8"
EXPERTS = "--num-experts 8 --moe-layer-freq 2 --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 64"


def run_of(flags: str, world_size: int = 1) -> RunConfig:
    return petatron.load("tiny-llama", f"{BASE} {flags}".split(), world_size=world_size).config


def held(model: ParallelModel) -> tuple[int, int]:
    """Elements of all buffers, and of what this rank updates, padding of buckets to equal parts included."""
    groups = [group for group in model.param_groups if isinstance(group, FlatParamGroup)]
    owned = sum(stretch.length for group in groups for stretch in group.flat_shards)
    return sum(group.flat_weights.numel() for group in groups), owned


def here(run: RunConfig, pipeline_rank: int) -> list[PipelineStage]:
    plan, every = pipeline_plan(run), pipeline_stages(run)
    return [stage for number, stage in enumerate(every) if plan.rank_of(number) == pipeline_rank]


@diagonal(2)
@pytest.mark.parametrize(
    ("flags", "world_size", "ranks"),
    [
        ("", 1, {0: 0}),
        ("--untie-embeddings-and-output-weights", 1, {0: 0}),
        ("--dp 4 --use-distributed-optimizer", 4, {1: 0}),
        ("--tp 4 --sequence-parallel --num-query-groups 2", 4, {0: 0, 3: 0}),
        ("--pp 2 --global-batch-size 4", 2, {0: 0, 1: 1}),
        ("--pp 2 --pipeline-schedule zb-v --global-batch-size 4", 2, {0: 0, 1: 1}),
        (f"{EXPERTS} --dp 4 --ep 2 --use-distributed-optimizer", 4, {0: 0}),
        (f"{EXPERTS} --tp 2 --dp 2 --ep 2 --expert-tensor-parallel-size 1 --sequence-parallel", 4, {3: 0}),
    ],
)
def test_elements_are_those_of_the_buffers(flags: str, world_size: int, ranks: dict[int, int]):
    run = run_of(f"{flags} --bf16", world_size)
    for rank, pipeline_rank in ranks.items():
        with fake_rank(run, rank) as model:
            total, owned = held(model)
        found = state_bytes(run, here(run, pipeline_rank))
        elements = local_element_counts(run, here(run, pipeline_rank))
        assert elements.dense + elements.experts == pytest.approx(total, rel=2e-3)
        assert found.weights == pytest.approx(2 * total, rel=2e-3)
        assert found.gradients == pytest.approx(4 * total, rel=2e-3)
        assert found.master_weights == pytest.approx(4 * owned, rel=2e-3)
        assert found.moments == pytest.approx(8 * owned, rel=2e-3)


def test_elements_of_one_rank_are_the_models_parameters():
    run = run_of("--make-vocab-size-divisible-by 1")
    elements = local_element_counts(run)
    assert (elements.dense, elements.experts) == (parameter_count(model_spec(run)), 0)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--bf16", (2, 4, 4, 8)),
        ("--fp16", (2, 4, 4, 8)),
        ("", (4, 4, 0, 8)),
        ("--fp64", (8, 8, 0, 16)),
        ("--bf16 --exp-avg-dtype bf16", (2, 4, 4, 6)),
        ("--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16", (2, 2, 4, 4)),
        ("--bf16 --optimizer sgd", (2, 4, 4, 4)),
        ("--bf16 --optimizer sgd --sgd-momentum 0", (2, 4, 4, 0)),
    ],
)
def test_bytes_of_an_element(flags: str, wanted: tuple[int, ...]):
    run = run_of(flags)
    n = local_element_counts(run).dense
    found = state_bytes(run)
    assert (found.weights, found.gradients, found.master_weights, found.moments) == tuple(width * n for width in wanted)
    assert found.total == sum(wanted) * n and found.optimizer == (wanted[2] + wanted[3]) * n


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--optimizer muon --bf16", 1),
        ("--optimizer muon --bf16 --exp-avg-dtype bf16", 1),
        (f"{EXPERTS} --optimizer muon --bf16", 1),
        (f"{EXPERTS} --optimizer muon --tp 2 --dp 2 --ep 2 --bf16", 4),
        (f"{EXPERTS} --optimizer muon --dp 4 --ep 2 --use-distributed-optimizer --bf16 --ddp-bucket-size 1", 4),
    ],
)
def test_muon_has_one_moment_in_matrices_and_two_elsewhere(flags: str, world_size: int):
    run = run_of(flags, world_size)
    with fake_rank(run, 0) as model:
        groups = [group for group in model.param_groups if isinstance(group, FlatParamGroup)]
        width = {"muon": 4, "adam": 6 if "exp-avg" in flags else 8}
        held = sum(width[group.spec.rule] * stretch.length for group in groups for stretch in group.flat_shards)
    exact = world_size == 1 or "distributed" not in flags
    assert state_bytes(run, here(run, 0)).moments == (held if exact else pytest.approx(held, rel=2e-2))
    assert {group.spec.rule for group in groups} == {"muon", "adam"}


@diagonal(2)
@pytest.mark.parametrize("optimizer", BUILT_IN_RULES)
@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--tp 4 --sequence-parallel --num-query-groups 2 --bf16", 4),
        (f"{EXPERTS} --tp 2 --dp 2 --ep 2 --bf16", 4),
        (f"{EXPERTS} --tp 2 --expert-tensor-parallel-size 2", 2),
        ("--num-layers 8 --dp 2 --use-distributed-optimizer --bf16", 2),
    ],
)
def test_state_of_every_optimizer_is_what_a_rank_allocates(optimizer: str, flags: str, world_size: int):
    """Ranks that shard state divide it about evenly: bytes are those of the rank with the average."""
    run = run_of(f"{flags} --optimizer {optimizer}", world_size)
    shards = world_size if "distributed" in flags else 1
    allocated = 0
    for rank in range(shards):
        with fake_rank(run, rank) as model:
            built = MixedPrecisionOptimizer(run.optim, model.param_groups, model.mesh)
            allocated += sum(view.nbytes for _, _, _, view in built.moments())
    wanted = allocated / shards
    assert state_bytes(run, here(run, 0)).moments == (wanted if shards == 1 else pytest.approx(wanted, rel=2e-2))


def test_weights_that_travel_in_eight_bits_lie_apart_where_they_are_owned():
    sizes = "--hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4"
    flags = f"{sizes} --dp 4 --use-distributed-optimizer --bf16 --fp8-hybrid"
    found = {}
    for way in ("", "--fp8-param-gather"):
        run = run_of(f"{flags} {way}", 4)
        with fake_rank(run, 1) as model:
            groups = [group for group in model.param_groups if isinstance(group, FlatParamGroup)]
            total = sum(group.flat_weights.numel() for group in groups)
            own = {weight.untyped_storage()._cdata: weight.nbytes for group in groups for weight in group.weights()}
            whole = {group.flat_weights.untyped_storage()._cdata for group in groups}
        found[way] = (state_bytes(run).weights, sum(size for place, size in own.items() if place not in whole))
        assert total == pytest.approx(local_element_counts(run).dense, rel=2e-3)
    (plain, none), (predicted, apart) = found.values()
    assert none == 0 and predicted - plain == pytest.approx(apart, rel=5e-3)


def test_what_is_offloaded_is_not_on_the_device():
    run = run_of("--bf16")
    n = local_element_counts(run).dense
    memory = replace(run.memory, optimizer_cpu_offload=True, optimizer_offload_fraction=0.75)
    found = state_bytes(replace(run, memory=memory))
    assert (found.weights, found.gradients) == (2 * n, 4 * n)
    assert (found.master_weights, found.moments) == (n, 2 * n)


@pytest.mark.parametrize(
    ("strategy", "gathered"), [("optim_grads", "all"), ("optim_grads_params", "two layers and the ends")]
)
def test_fully_sharded(strategy: str, gathered: str):
    sharded = f"--bf16 --dp 4 --data-parallel-sharding-strategy {strategy} --num-layers 8"
    run = run_of(sharded, 4)
    elements = local_element_counts(run)
    n = elements.dense
    weights = n if gathered == "all" else 2 * elements.largest_layer + elements.embedding_and_head
    assert elements.embedding_and_head + 8 * elements.largest_layer == n
    assert run.model.vocab_size is not None
    rows = padded_rows(run.model.vocab_size, run.model.make_vocab_size_divisible_by, 1)
    assert elements.head == elements.embedding_and_head - run.model.hidden_size * rows
    for flags, on_the_wire in (("", 4), ("--grad-reduce-in-bf16", 2)):
        whole = 2 * elements.head + (2 + on_the_wire) * elements.largest_layer
        found = state_bytes(run_of(f"{sharded} {flags}", 4))
        assert found == StateBytes(weights=2 * weights, gradients=n + whole, master_weights=n, moments=2 * n)
