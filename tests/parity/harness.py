"""Train a tiny model in a layout on the rank pool, and compare it with one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist

from petatron.config import RunConfig
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.validate import load_config
from petatron.verify.compare_traces import Tolerances, TraceComparison, compare_traces
from petatron.verify.record_trace import StepTrace, record_steps
from tests.dist import RankPool
from tests.nccl_rules.order_check import order_problems

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 131 --mock-data "
    "--make-vocab-size-divisible-by 8 --position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 48 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --num-workers 0 "
    "--train-iters 20 --lr 5e-3 --lr-warmup-iters 2 --lr-decay-style cosine --min-lr 1e-4 --weight-decay 0.1 "
    "--global-batch-size 8 --micro-batch-size 2 --init-method-std 0.1 --ddp-bucket-size 3000 --eval-iters 0"
)
# Tighter than what `petatron verify` asks of models of any size.
BOUNDS = {
    "float32": Tolerances(loss=1e-5, gradient=1e-4, parameter=1e-4),
    "float64": Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-7),
}


def tiny_run(flags: str = "", *, world_size: int = 1, dtype: str = "float32") -> RunConfig:
    # In float64 a departure is either rounding or a bug, and a few steps tell which.
    few = ["--fp64", "--train-iters", "2", "--lr-warmup-iters", "1"] if dtype == "float64" else []
    argv = [*TINY.split(), *few, *flags.split()]
    return load_config(argv, world_size=world_size).config


def train(run: RunConfig) -> list[StepTrace]:
    """Runs on one rank of the pool (or in this process): every step of the run."""
    return train_recorded(run)[0]


def train_recorded(run: RunConfig) -> tuple[list[StepTrace], list[CommEvent]]:
    """The same, and all communication up to the end of the second step, which has what only later steps have."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = ParallelMesh(Layout.from_config(run.parallel), rank)
    traces: list[StepTrace] = []
    events: list[CommEvent] = []
    for trace in record_steps(run, mesh):
        traces.append(trace)
        if len(traces) == 2:
            events = mesh.record.events()
            assert len(events) == mesh.record.count, "the record is too short for two steps"
    return traces, events


def check_order(records: list[list[CommEvent]]) -> None:
    """Assert that ranks communicated in an order in which NCCL cannot hang; gloo, which tests run over, may not notice."""
    assert all(records) or len(records) == 1, "nothing was recorded"
    findings = order_problems(records)
    assert not findings, "\n".join(findings)


def layout_run(layout: str, model: str, *, world_size: int, dtype: str) -> RunConfig:
    """A run in a layout with two micro-batches, which accumulate, where it says nothing of them: a pipeline takes four.

    Balancing losses of experts are per micro-batch, so those have the micro-batches of the one-process run.
    """
    run = tiny_run(f"{model} {layout}", world_size=world_size, dtype=dtype)
    sizes = run.parallel
    free = "--micro-batch-size" not in model + layout and "--num-experts" not in model
    if free and sizes.data_parallel_size == sizes.pipeline_model_parallel_size == 1:
        return tiny_run(f"{model} {layout} --micro-batch-size 4", world_size=world_size, dtype=dtype)
    return run


def with_batch(model: str, layout: str, *, world_size: int, dtype: str) -> str:
    """The model's flags, with two micro-batches for experts on ranks that share their tokens, where nothing is said of batches."""
    if "--num-experts" not in model or "batch-size" in model + layout:
        return model
    sizes = tiny_run(f"{model} {layout}", world_size=world_size, dtype=dtype).parallel
    alone = sizes.data_parallel_size == sizes.pipeline_model_parallel_size == 1
    return f"{model} --global-batch-size 4" if alone else model


def check_traces(
    ranks: RankPool,
    run: RunConfig,
    alone: list[StepTrace],
    bounds: Tolerances,
    *,
    train_rank: Callable[[RunConfig], tuple[list[StepTrace], list[CommEvent]]] = train_recorded,
) -> TraceComparison:
    """Assert that ranks train a run like one process did; `train_rank` is of a module that ranks have to import."""
    world_size = run.parallel.world_size
    found = [train_rank(run)] if world_size == 1 else ranks.run(train_rank, world_size, run)
    traces, records = map(list, zip(*found))
    check_order(records)
    verdict = compare_traces([alone], traces, bounds)
    assert len(verdict.steps) == run.train.train_iters
    assert verdict.agrees, verdict.first_departure
    return verdict


def check_part_of_model(model: str, other: str) -> None:
    """Assert that what two models differ in is trained."""
    bounds = Tolerances(loss=1e-6, gradient=1e-6, parameter=1e-6)
    assert not compare_traces([reference(model, "float64")], [reference(other, "float64")], bounds).agrees


@cache
def reference(flags: str, dtype: str) -> list[StepTrace]:
    """One process; in float64 with all sequences in one micro-batch, where no loss is per micro-batch: layouts accumulate."""
    free = dtype == "float64" and "--num-experts" not in flags and "batch-size" not in flags
    return train(tiny_run(f"{flags} --micro-batch-size 8" if free else flags, dtype=dtype))


def check_layout(
    ranks: RankPool, layout: str, model: str = "", *, world_size: int, dtype: str = "float64"
) -> TraceComparison:
    """Assert that a layout trains the same model as one process with one micro-batch size for all."""
    model = with_batch(model, layout, world_size=world_size, dtype=dtype)
    run = layout_run(layout, model, world_size=world_size, dtype=dtype)
    return check_traces(ranks, run, reference(model, dtype), BOUNDS[dtype])
