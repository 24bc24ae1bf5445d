"""Steps with their collectives as CUDA graphs: losses, norms and weights of a run without, to the bit, in every layout.

Sequences are short, one tile of any attention kernel: its backward pass then adds up in one order.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.parallel.pipeline.cuda_graph import WARM_UP_STEPS, CudaGraphCapture, Replay, StepFunction
from petatron.parallel.pipeline.executor import StepResult
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from petatron.validate import load_config
from tests.dist import RankPool
from tests.nccl.layouts import mesh_of

VOCABULARY = 512
MODEL = (
    f"--num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 4 "
    f"--vocab-size {VOCABULARY} --seq-length 64 --position-embedding-type rope --normalization RMSNorm --swiglu --no-compile "
    "--disable-bias-linear --bf16 --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --mock-data "
    "--device cuda --num-workers 0 --micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-3 --eval-iters 0 "
    "--ddp-bucket-size 50000"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-aux-loss-coeff 0.01"
PADDED = f"{EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
STEPS = WARM_UP_STEPS + 3
CASES = {
    "dp": ("--dp 2", 2),
    "dp, reduced after the step": ("--dp 2 --no-overlap-grad-reduce", 2),
    "zero-1": ("--dp 2 --use-distributed-optimizer", 2),
    "zero-1, gathers overlap": ("--dp 2 --use-distributed-optimizer --overlap-param-gather", 2),
    "zero-1 in bf16, two replicas": (
        "--dp 4 --use-distributed-optimizer --num-distributed-optimizer-instances 2 --grad-reduce-in-bf16",
        4,
    ),
    "tp": ("--tp 2", 2),
    "tp with dropout": ("--tp 2 --hidden-dropout 0.1", 2),
    "sp": ("--tp 2 --sequence-parallel", 2),
    "sp, overlapped": ("--tp 2 --sequence-parallel --tp-comm-overlap", 2),
    "sp and dp": ("--tp 2 --sequence-parallel --dp 2 --use-distributed-optimizer", 4),
    "cp ring": ("--cp 2", 2),
    "cp gather": ("--cp 2 --cp-comm-type all_gather", 2),
    "cp heads": ("--cp 2 --cp-comm-type a2a", 2),
    "cp heads and ring, dp": ("--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4),
    "ep, padded": (f"--dp 2 --ep 2 --moe-token-dispatcher-type alltoall {PADDED}", 2),
    "ep, all-gather": (f"--dp 2 --ep 2 {EXPERTS} --moe-expert-capacity-factor 1.0", 2),
    "ep and etp": (
        f"--tp 2 --sequence-parallel --dp 2 --ep 2 --etp 2 --moe-token-dispatcher-type alltoall {PADDED}",
        4,
    ),
    "balanced over replicas": (f"--dp 2 {EXPERTS} --moe-router-load-balancing-type global_aux_loss", 2),
    "pp": ("--pp 2", 2),
    "pp interleaved": ("--pp 2 --num-layers-per-virtual-pipeline-stage 1", 2),
    "pp zero-bubble and dp": ("--pp 2 --dp 2 --pipeline-schedule zb-h1 --use-distributed-optimizer", 4),
    "pp and sp": ("--pp 2 --tp 2 --sequence-parallel", 4),
}


@dataclass
class Trained:
    """A run of some steps, and how many graphs it captured."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    graphs: int = 0


class CountingCapture(CudaGraphCapture):
    graphs = 0

    def capture(self, step: StepFunction) -> tuple[StepResult, Replay]:
        self.graphs += 1
        return super().capture(step)


def batches(run: RunConfig, mesh: ParallelMesh, step: int) -> list[Batch]:
    """Every replica has its own; ranks of one replica have the same."""
    generator = torch.Generator().manual_seed(1000 * mesh.dp.rank + step)
    shape = (run.train.micro_batch_size, run.model.seq_length + 1)
    count = run.train.global_batch_size // run.train.micro_batch_size // mesh.dp.size
    texts = [torch.randint(VOCABULARY, shape, generator=generator).to(mesh.device) for _ in range(count)]
    return [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous(), torch.ones_like(x[:, 1:]).float()) for x in texts]


def train(run: RunConfig, mesh: ParallelMesh, *, graphs: bool, steps: int = STEPS) -> Trained:
    state = TrainState.build(run, mesh)
    capture = CountingCapture(mesh.device, generators=[state.model.rng_streams.tp_shared])
    if graphs:
        state.model.use_cuda_graphs(capture)
    found = Trained()
    for step in range(steps):
        metrics = train_step(state, batches(run, mesh, step))
        found.losses.append(float(torch.as_tensor(metrics.loss)))
        found.norms.append(float(torch.as_tensor(metrics.grad_norm)))
        found.evaluated.append(
            float(state.model.evaluate(batches(run, mesh, 100 + step))[0]) if step >= WARM_UP_STEPS else 0.0
        )
    state.model.all_gather_params()
    found.weights = [weight.cpu().clone() for group in state.model.param_groups for weight in group.weights()]
    found.graphs = capture.graphs
    return found


def differences(flags: str, world_size: int) -> tuple[list[float], list[str]]:
    """On a rank: the losses with graphs, and what differs from a run without."""
    run = load_config([*MODEL.split(), *flags.split(), "--cuda-graphs", "off"], world_size=world_size).config
    mesh = mesh_of(run)
    plain, graphed = (train(run, mesh, graphs=graphs) for graphs in (False, True))
    gc.collect()  # NCCL cannot end before the graphs that hold its collectives
    found = []
    if graphed.evaluated != plain.evaluated:
        found.append(f"evaluations {plain.evaluated} {graphed.evaluated}")
    if graphed.graphs != 2 or plain.graphs != 0:
        found.append(f"{plain.graphs} and {graphed.graphs} graphs")
    if graphed.losses != plain.losses:
        found.append(f"losses {plain.losses} {graphed.losses}")
    if graphed.norms != plain.norms:
        found.append(f"norms {plain.norms} {graphed.norms}")
    pairs = zip(plain.weights, graphed.weights, strict=True)
    found += [f"weights {i}" for i, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
    return graphed.losses, found


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(gpu_ranks: RankPool, case: str):
    flags, world_size = CASES[case]
    answers = gpu_ranks.run(differences, world_size, flags, world_size, timeout_s=60.0)
    assert [found for _, found in answers] == [[]] * world_size
    losses = answers[0][0]
    assert len(set(losses)) == len(losses) and all(own == losses for own, _ in answers)


def decided(flags: str, world_size: int) -> tuple[list[str], bool]:
    """On a rank: what `auto` says, and whether the run is that of one that decides nothing."""
    found: list[Trained] = []
    said = _Said()
    logging.getLogger("petatron").addHandler(said)
    logging.getLogger("petatron").setLevel(logging.INFO)
    for mode in ("off", "auto"):
        run = load_config([*MODEL.split(), *flags.split(), "--cuda-graphs", mode], world_size=world_size).config
        found.append(train(run, mesh_of(run), graphs=False, steps=10))
    logging.getLogger("petatron").removeHandler(said)
    gc.collect()
    one, other = found
    equal = (one.losses, one.norms, one.evaluated) == (other.losses, other.norms, other.evaluated)
    return said.lines, equal and all(map(torch.equal, one.weights, other.weights))


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "CUDA graphs" in record.getMessage():
            self.lines.append(record.getMessage())


@pytest.mark.parametrize("case", ["zero-1", "sp and dp", "pp", "cp ring"])
def test_ranks_decide_alike(gpu_ranks: RankPool, case: str):
    flags, world_size = CASES[case]
    answers = gpu_ranks.run(decided, world_size, flags, world_size, timeout_s=60.0)
    assert answers == [answers[0]] * world_size
    lines, equal = answers[0]
    print(lines)
    assert equal and len(lines) == 1
