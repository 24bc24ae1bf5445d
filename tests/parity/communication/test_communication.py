"""What travels between ranks is what theory says, event by event.

With s tokens per sequence, b sequences per micro-batch, h hidden, every tensor-parallel exchange of an activation moves
s x b x h elements. One micro-batch through L layers:

    without sequence parallelism          forward                 backward
      embedding                           all-reduce
      each layer                          2 all-reduce            2 all-reduce
      head                                                        all-reduce
    with sequence parallelism
      embedding                           reduce-scatter          all-gather
      each layer                          2 gather + 2 scatter    4 gather + 2 scatter
      head                                all-gather              reduce-scatter
    Two of the four gather what the layer's first products see once more, for their weights' gradients; in eight bits they
    have kept it. What is recomputed gathers it in its second run instead.
    loss, in both: a maximum of s x b, then sums of 2 x s x b, in float32

and once per step: gradients of replicated norms over tp under sequence parallelism, every gradient element once over
data parallel, the token count and the loss, and the square of the gradient norm.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist

from petatron.config import RunConfig
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.sharding.flat_buffer import FlatParamGroup
from petatron.train.build_run import build_loader, build_model, build_optimizer
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import tiny_run

S, H, VOCABULARY, FFN = 16, 32, 131, 48
Key = tuple[str, str, int, int]
"""axis, operation, elements, bytes"""


@dataclass(frozen=True)
class StepEvents:
    """The events of the second step, and how many parameters this rank holds (padding included)."""

    forward_and_backward: list[CommEvent]
    update: list[CommEvent]
    parameters: int
    padded: int
    """Elements of the gradient buffers, which shared buckets are padded in."""

    @property
    def all(self) -> list[CommEvent]:
        return self.forward_and_backward + self.update

    def activations(self, elements: int) -> Counter[tuple[str, str]]:
        """Exchanges of this size by direction: a backward one is asked for by `.backward()`, not by a layer."""
        found = [event for event in self.forward_and_backward if event.axis == "tp" and event.elements == elements]
        return Counter(("backward" if "executor.py" in event.caller else "forward", event.op) for event in found)

    @property
    def counts(self) -> Counter[Key]:
        return Counter((event.axis, event.op, event.elements, event.bytes) for event in self.forward_and_backward)


def second_step(run: RunConfig) -> StepEvents:
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    model = build_model(run, mesh)
    optimizer = build_optimizer(run, model)
    batches = iter(build_loader(run, mesh))
    model.train_step(next(batches))
    optimizer.step()
    before = mesh.record.count
    model.train_step(next(batches))
    done = mesh.record.count
    optimizer.step()
    events = mesh.record.events(since=before)
    return StepEvents(
        [event for event in events if event.sequence_number <= done],
        [event for event in events if event.sequence_number > done],
        sum(parameter.numel() for stage in model.stages.values() for parameter in stage.parameters()),
        sum(group.buckets[-1].end for group in model.param_groups if isinstance(group, FlatParamGroup)),
    )


def all_step_events(ranks: RankPool, layout: str, *, world_size: int, model: str = "") -> list[StepEvents]:
    run = tiny_run(f"--train-iters 2 --lr-warmup-iters 0 {model} {layout}", world_size=world_size)
    return ranks.run(second_step, world_size, run)


@cache
def step_events(ranks: RankPool, layout: str, *, world_size: int, model: str = "") -> StepEvents:
    first, *others = all_step_events(ranks, layout, world_size=world_size, model=model)
    for other in others:
        ours, theirs = ([(e.axis, e.op, e.elements) for e in x.forward_and_backward] for x in (first, other))
        assert ours == theirs, "every rank must communicate in the same order"
    return first


def exchanges(op: str, times: int, elements: int, *, axis: str = "tp", itemsize: int = 4) -> Counter[Key]:
    return Counter({(axis, op, elements, elements * itemsize): times})


def loss_exchanges(b: int, micro_batches: int) -> Counter[Key]:
    return exchanges("all_reduce", micro_batches, S * b) + exchanges("all_reduce", micro_batches, 2 * S * b)


@pytest.mark.parametrize(("b", "micro_batches"), [(2, 2), later(4, 1)])
@pytest.mark.parametrize("sequence", [False, True])
def test_one_more_layer(ranks: RankPool, b: int, micro_batches: int, sequence: bool):
    """The difference between L and L + 1 layers is exactly the theory's line for a layer."""
    layout = f"--tp 2 --micro-batch-size {b} {'--sequence-parallel' if sequence else ''}"
    models = [f"--num-layers {layers} --global-batch-size 4" for layers in (2, 3)]
    shallow, deep = (step_events(ranks, layout, world_size=2, model=model) for model in models)
    more = Counter(deep.counts)
    more.subtract(shallow.counts)
    found = {key: count for key, count in more.items() if count}
    m, activation = micro_batches, S * b * H
    if sequence:
        norms = {layers: (2 * layers + 1) * H for layers in (2, 3)}
        expected = {
            **exchanges("all_gather", (2 + 4) * m, activation),
            **exchanges("reduce_scatter", (2 + 2) * m, activation),
            ("tp", "all_reduce", norms[3], 4 * norms[3]): 1,  # one exchange of all norms' gradients: larger, not more
            ("tp", "all_reduce", norms[2], 4 * norms[2]): -1,
        }
    else:
        expected = exchanges("all_reduce", (2 + 2) * m, activation)
    assert found == dict(expected)
    ops = ("all_gather", "reduce_scatter") if sequence else ("all_reduce",)
    one_layer = {(direction, op): 2 * m for direction in ("forward", "backward") for op in ops}
    if sequence:
        one_layer["backward", "all_gather"] = 4 * m
    assert deep.activations(activation) - shallow.activations(activation) == one_layer


WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
CHOSEN = "--recompute-granularity selective --recompute-modules"


@diagonal(2)
@pytest.mark.parametrize(
    ("flags", "gathers", "scatters"),
    [
        (f"{CHOSEN} layernorm", 2 * 6, 2 * 4),
        (f"{CHOSEN} mlp attention", 2 * 6, 2 * 4),
        (f"{WHOLE} 1", 2 * 6, 2 * 5),
        (f"{WHOLE} 2", 2 * 6, 6 + 5),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", 2 * 4, 2 * 4),
    ],
)
def test_nothing_is_gathered_more_often_than_needed(ranks: RankPool, flags: str, gathers: int, scatters: int):
    """Two layers: what a second run gathers is not gathered a third time; the last scatter of a region is not repeated."""
    layout = f"--tp 2 --sequence-parallel --ffn-hidden-size 64 {flags}"
    found = step_events(ranks, layout, world_size=2, model="--global-batch-size 2")
    counted = Counter(event.op for event in found.forward_and_backward if event.elements == S * 2 * H)
    assert counted == {"all_gather": gathers + 2, "reduce_scatter": scatters + 2}, "and those of both ends"


@pytest.mark.parametrize("recompute", ["", f"{WHOLE} 1"])
def test_overlap_communicates_the_same_elements_in_chunks(ranks: RankPool, recompute: str):
    """Two layers at tp 2: a rank's 16 rows of 2 sequences in chunks of 6, 5 and 5, for the forward pass of every linear."""
    plain, overlapped = (
        step_events(
            ranks, f"--tp 2 --sequence-parallel {flags} {recompute}", world_size=2, model="--global-batch-size 2"
        )
        for flags in ("", "--tp-comm-overlap --tp-comm-overlap-chunks 3")
    )
    for op in ("all_gather", "reduce_scatter"):
        moved = [sum(e.elements for e in events.all if e.op == op) for events in (plain, overlapped)]
        assert moved[0] == moved[1]
        chunks = Counter(e.elements for e in overlapped.all if e.op == op and e.elements < S * 2 * H)
        linears = 2 * 2 if not recompute else 2 * 2 + (2 * 2 if op == "all_gather" else 2)
        assert chunks == {2 * 6 * H: linears, 2 * 5 * H: 2 * linears}


@pytest.mark.parametrize("recompute", [later(""), f"{CHOSEN} mlp", later(f"{WHOLE} 1")])
def test_weight_gradients_that_wait_gather_no_more(ranks: RankPool, recompute: str):
    """zb-h1 on the rank without embedding and head: as many gathers for two layers as without a pipeline."""
    layout = f"--pp 3 --tp 2 --sequence-parallel --pipeline-schedule zb-h1 {recompute}"
    for events in all_step_events(ranks, layout, world_size=6, model="--num-layers 6")[2:4]:
        counted = Counter(event.op for event in events.forward_and_backward if event.elements == S * 2 * H)
        assert counted["all_gather"] == 4 * 2 * 6, "micro-batches x layers x gathers"


@pytest.mark.parametrize(("sequence", "tied"), [(False, False), (True, True), later(False, True), later(True, False)])
def test_every_event_of_a_step(ranks: RankPool, sequence: bool, tied: bool):
    """tp 2 x dp 2, 2 layers, 2 micro-batches of 2: nothing but what is listed here."""
    layers, b, micro_batches = 2, 2, 2
    layout = f"--tp 2 --dp 2 {'--sequence-parallel' if sequence else ''}"
    model = "--no-untie-embeddings-and-output-weights" if tied else ""
    found = step_events(ranks, layout, world_size=4, model=model)
    activation, m = S * b * H, micro_batches
    expected = loss_exchanges(b, m)
    if sequence:
        expected += exchanges("reduce_scatter", m * (1 + 4 * layers + 1), activation)
        expected += exchanges("all_gather", m * (1 + 6 * layers + 1), activation)
        expected += exchanges("all_reduce", 1, (2 * layers + 1) * H)
    else:
        expected += exchanges("all_reduce", m * (1 + 4 * layers + 1), activation)
    counts = found.counts
    assert Counter({key: n for key, n in counts.items() if key[0] == "tp"}) == expected
    # Over the world the token count and the loss in float64; over data parallel each local gradient element once in float32.
    over_dp = [event for event in found.forward_and_backward if event.axis in ("dp_cp", "world")]
    scalars = [event for event in over_dp if event.elements == 1]
    assert [(event.op, event.dtype) for event in scalars] == [("all_reduce", torch.float64)] * 2
    assert len(found.forward_and_backward) == len(over_dp) + expected.total(), "no other axis speaks"
    rows = -(-VOCABULARY // 16) * 8
    layer = 4 * H * H // 2 + 3 * H * FFN // 2 + 2 * H
    assert found.parameters == layers * layer + H + rows * H * (1 if tied else 2)
    assert sum(event.bytes for event in over_dp) == 4 * found.parameters + 2 * 8
    # The update asks for one number.
    assert [(e.axis, e.op, e.elements) for e in found.update] == [("world", "all_reduce", 1)]


@diagonal(2)
@pytest.mark.parametrize("bucket_size", [1, 3000, 10**9])
@pytest.mark.parametrize("overlap", ["", "--no-overlap-grad-reduce"])
def test_data_parallel_reduces_each_gradient_once(ranks: RankPool, bucket_size: int, overlap: str):
    """Whatever the buckets and the number of micro-batches."""
    for micro_batch_size in (1, 2):
        layout = f"--dp 2 --micro-batch-size {micro_batch_size} --ddp-bucket-size {bucket_size} {overlap}"
        found = step_events(ranks, layout, world_size=2, model="--global-batch-size 4")
        gradients = [event for event in found.forward_and_backward if event.elements > 1]
        assert {(event.axis, event.op, event.dtype) for event in gradients} == {("dp_cp", "all_reduce", torch.float32)}
        assert sum(event.bytes for event in gradients) == 4 * found.parameters
        assert len(found.forward_and_backward) == len(gradients) + 2
        assert [(e.axis, e.op, e.elements) for e in found.update] == [("world", "all_reduce", 1)]
        assert (len(gradients) == 2) == (bucket_size == 10**9), "one bucket each for decayed and undecayed weights"


def test_half_precision_halves_the_activations_and_not_the_gradients(ranks: RankPool):
    found = step_events(ranks, "--tp 2 --dp 2 --bf16", world_size=4)
    b = 2
    activations = [event for event in found.forward_and_backward if event.elements == S * b * H and event.axis == "tp"]
    assert len(activations) == 2 * (1 + 4 * 2 + 1) and {event.dtype for event in activations} == {torch.bfloat16}
    over_dp = sum(event.bytes for event in found.forward_and_backward if event.axis in ("dp_cp", "world"))
    assert over_dp == 4 * found.parameters + 2 * 8


def test_shared_key_value_heads_and_head_norms_add_one_exchange_each(ranks: RankPool):
    """Key/value heads held by pairs of ranks are summed over those pairs, per-head norms over all."""
    model = "--num-query-groups 2 --qk-layernorm"
    found = step_events(ranks, "--tp 4 --micro-batch-size 8", world_size=4, model=model)
    width, layers = 8, 2
    assert found.counts[("tp/2", "all_reduce", layers * 2 * width * H, layers * 2 * width * H * 4)] == 1
    assert found.counts[("tp", "all_reduce", layers * 2 * width, layers * 2 * width * 4)] == 1


def test_events_say_who_asked(ranks: RankPool):
    found = step_events(ranks, "--tp 2 --dp 2", world_size=4)
    asked = {(event.axis, event.caller.split(":")[0]) for event in found.forward_and_backward}
    assert asked == {
        ("tp", "layers/linear.py"),
        ("tp", "vocabulary/embedding.py"),
        ("tp", "kernels/fused_linear_cross_entropy.py"),
        ("tp", "pipeline/executor.py"),  # backward: autograd has no frame of the layer
        ("world", "parallel/parallel_model.py"),
        ("dp_cp", "data/gradient_reduction.py"),
    }


def test_one_process_says_nothing():
    run = tiny_run("--train-iters 2 --lr-warmup-iters 0 --sequence-parallel")
    mesh = ParallelMesh.single()
    model = build_model(run, mesh)
    model.train_step(next(iter(build_loader(run, mesh))))
    build_optimizer(run, model).step()
    assert mesh.record.count == 0
