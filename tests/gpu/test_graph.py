"""Recorded steps on a CUDA device: the same bits as without recording, for every kind of step, and faster where kernels are short.

Sequences are 32 tokens, one tile of any attention kernel: its backward pass then adds up in one order.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.config import RunConfig
from petatron.data.masked.span_batch import make_span_batch
from petatron.kernels.attention.document_layout import Documents
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.parallel.pipeline.cuda_graph import WARM_UP_STEPS
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from petatron.validate import load_config
from tests.dist import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)
GRAPHS = "--cuda-graphs"
AUTO = "--cuda-graphs auto"
VOCABULARY = 1000
MODEL = (
    f"--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --num-query-groups 2 "
    f"--vocab-size {VOCABULARY} --seq-length 32 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --bf16 --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --mock-data "
    "--num-workers 0 --micro-batch-size 4 --global-batch-size 8 --train-iters 100 --lr 1e-3 --eval-iters 0 "
    "--cuda-graphs off"
)
FP8 = "--fp8-format hybrid --fp8-recipe"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
CASES = {
    "bf16": "",
    "fp16": "--no-bf16 --fp16 --initial-loss-scale 1024 --loss-scale-window 2",
    "fp32": "--no-bf16",
    "tied": "--no-untie-embeddings-and-output-weights --scale-embeddings --apply-layernorm-1p",
    "compiled": "--normalization LayerNorm --activation gelu --add-bias-linear --position-embedding-type learned_absolute",
    "dropout": "--hidden-dropout 0.1",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "window": "--window-size 8",
    "experts": f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    "dropping": f"{EXPERTS} --moe-expert-capacity-factor 0.9",
    "padded": f"{EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "tensorwise": f"{FP8} tensorwise",
    "delayed": f"{FP8} delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
    "rowwise": f"{FP8} rowwise",
    "blockwise": f"{FP8} blockwise",
    "fp8 experts": f"{FP8} tensorwise {EXPERTS}",
    "offloaded optimizer": "--optimizer-cpu-offload",
    "muon": "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2",
    "decoupled rate": "--decoupled-lr 1e-4",
}


def run_of(flags: str, *, world_size: int = 1) -> RunConfig:
    return load_config([*MODEL.split(), *flags.split()], world_size=world_size).config


def batches(run: RunConfig, count: int, step: int, *, rank: int = 0, one_label: bool = False) -> list[Batch]:
    """With `one_label`, each step asks for one token of its own, which no step before has taught."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    shape = (run.train.micro_batch_size, run.model.seq_length + 1)
    found = []
    for _ in range(count):
        text = torch.randint(VOCABULARY, shape, generator=generator).to(DEVICE)
        mask = (torch.rand(shape[0], shape[1] - 1, generator=generator) > 0.1).float().to(DEVICE)
        labels = torch.full_like(text[:, 1:], step) if one_label else text[:, 1:].contiguous()
        found.append(Batch(text[:, :-1].contiguous(), labels, mask))
    return found


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


def train(
    run: RunConfig,
    counts: Sequence[int],
    *,
    evaluate_after: Sequence[int] = (),
    rank: int = 0,
    one_label: bool = False,
) -> Trained:
    """Steps of so many micro-batches each."""
    state = TrainState.build(run, ParallelMesh(Layout.from_config(run.parallel), rank, device=DEVICE))
    found = Trained()
    for step, count in enumerate(counts):
        metrics = train_step(state, batches(run, count, step, rank=rank, one_label=one_label))
        found.losses.append(float(torch.as_tensor(metrics.loss)))
        found.norms.append(float(torch.as_tensor(metrics.grad_norm)))
        if step in evaluate_after:
            found.evaluated.append(float(state.model.evaluate(batches(run, 3, 99, rank=rank))[0]))
    found.weights = [weight.cpu().clone() for group in state.model.param_groups for weight in group.weights()]
    return found


def same(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert one.evaluated == other.evaluated
    assert all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case: str):
    """Also after evaluations before and behind the recording, which see the weights of that step."""
    if FP8 in CASES[case] and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a CUDA device of capability 9.0")
    plain, recorded = (
        train(run_of(f"{CASES[case]} {flags}"), [2] * 8, evaluate_after=(1, 4, 5, 6, 7)) for flags in ("", GRAPHS)
    )
    assert len(set(plain.losses)) == 8 and len(set(plain.evaluated)) == 5
    same(recorded, plain)


def test_the_number_of_micro_batches_changes():
    counts = [1] * 5 + [2] * 5 + [3] * 2 + [1, 2, 3]
    plain, recorded = (train(run_of(flags), counts) for flags in ("", GRAPHS))
    same(recorded, plain)


def test_packed_documents_have_the_same_bits():
    """Documents of one tile, also where there is room for more of them than there are."""

    def trained(flags: str) -> tuple[list[float], list[Tensor]]:
        run = run_of(f"--seq-length 128 --reset-attention-mask {flags}")
        state = TrainState.build(run, ParallelMesh.single(DEVICE))
        losses = []
        for step in range(10):
            packed = []
            for batch in batches(run, 2, step):
                begins = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(step)) < (step + 1) / 40
                starts = (torch.arange(128) * begins).cummax(1).values
                packed.append(replace(batch, documents=Documents.of(starts.to(DEVICE))))
            losses.append(float(torch.as_tensor(train_step(state, packed).loss)))
        return losses, [weight.cpu().clone() for group in state.model.param_groups for weight in group.weights()]

    plain, recorded = trained(""), trained(GRAPHS)
    assert recorded[0] == plain[0] and len(set(plain[0])) == 10
    assert all(map(torch.equal, recorded[1], plain[1]))


def test_encoder_decoders_have_the_same_bits():
    """Padded texts with relative positions: where they end is read on the device. No kernel of theirs adds in any order."""
    sizes = "--encoder-num-layers 1 --decoder-num-layers 1 --decoder-seq-length 24 --num-query-groups 4 --seq-length 40"

    def trained(flags: str) -> tuple[list[float], list[Tensor]]:
        run = run_of(f"--model-type t5 --position-embedding-type relative {sizes} {flags}")
        state = TrainState.build(run, ParallelMesh.single(DEVICE))
        losses = []
        for step in range(9):
            made = [
                make_span_batch([span_sample(step, number) for number in (0, 1, 2, 3)]).to(DEVICE) for _ in range(2)
            ]
            losses.append(float(torch.as_tensor(train_step(state, made).loss)))
        return losses, [weight.cpu().clone() for group in state.model.param_groups for weight in group.weights()]

    plain, recorded = trained(""), trained(GRAPHS)
    assert recorded[0] == plain[0] and len(set(plain[0])) == 9
    assert all(map(torch.equal, recorded[1], plain[1]))


def span_sample(step: int, number: int) -> dict[str, Any]:
    generator = np.random.default_rng((step, number))
    tokens = {name: generator.integers(0, VOCABULARY, size) for name, size in (("encoder_tokens", 40), ("tokens", 24))}
    count = int(generator.integers(1, 24))
    lengths = {"num_encoder_tokens": np.int64(generator.integers(1, 40)), "num_tokens": np.int64(count)}
    return tokens | lengths | {"labels": tokens["tokens"], "loss_mask": (np.arange(24) < count).astype(np.float32)}


def test_attention_of_cudnn_is_recorded():
    """Sequences long enough for it; its backward pass adds in any order, so bits may differ.

    A replay of an old batch would show: its one label is learnt, and the loss falls.
    """
    runs = (run_of(f"--seq-length 512 {flags}") for flags in ("", GRAPHS))
    plain, recorded = (train(run, [2] * 8, one_label=True) for run in runs)
    assert min(plain.losses) > 6.0
    assert recorded.losses == pytest.approx(plain.losses, rel=5e-3)
    assert recorded.norms == pytest.approx(plain.norms, rel=3e-2)


def test_every_replay_draws_anew():
    """Without an update between them, equal batches differ by their dropout alone."""
    run = run_of(f"--hidden-dropout 0.3 --attention-dropout 0.3 {GRAPHS}")
    model = TrainState.build(run, ParallelMesh.single(DEVICE)).model
    losses = [float(model.train_step(batches(run, 2, 0))) for _ in range(WARM_UP_STEPS + 5)]
    assert len(set(losses)) == len(losses)


def test_going_back_to_a_checkpoint_between_replays(tmp_path: Path):
    """Weights, optimizer state and random states are read into memory that graphs know."""
    run = run_of(f"--hidden-dropout 0.1 --save {tmp_path} {GRAPHS}")
    state = TrainState.build(run, ParallelMesh.single(DEVICE))
    state.record_data_fingerprint("made up")

    def steps(first: int, last: int) -> list[float]:
        return [float(train_step(state, batches(run, 2, step)).loss) for step in range(first, last)]

    steps(0, WARM_UP_STEPS + 2)
    state.save()
    ahead = steps(WARM_UP_STEPS + 2, WARM_UP_STEPS + 5)
    assert state.load(str(tmp_path))
    assert steps(WARM_UP_STEPS + 2, WARM_UP_STEPS + 5) == ahead


def train_on_rank(flags: str) -> Trained:
    rank = dist.get_rank()
    return train(run_of(flags, world_size=2), [2] * 6, rank=rank)


@pytest.mark.parametrize("sharding", ["", "--use-distributed-optimizer"])
def test_gradients_are_reduced_behind_a_replay(ranks: RankPool, sharding: str):
    flags = f"--dp 2 --global-batch-size 16 --no-overlap-grad-reduce {sharding}"
    plain, recorded = (ranks.run(train_on_rank, 2, f"{flags} {more}", timeout_s=180.0) for more in ("", GRAPHS))
    assert plain[0].losses == plain[1].losses
    for ours, theirs in zip(recorded, plain, strict=True):
        same(ours, theirs)


def test_a_small_model_is_faster():
    """Its kernels are far shorter than starting one takes."""
    times: list[float] = []
    for flags in ("", GRAPHS):
        run = run_of(f"--num-layers 8 --micro-batch-size 1 --global-batch-size 1 {flags}")
        state = TrainState.build(run, ParallelMesh.single(DEVICE))
        given = batches(run, 1, 0)
        for _ in range(WARM_UP_STEPS + 5):
            train_step(state, given)
        blocks = []
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(20):
                train_step(state, given)
            torch.cuda.synchronize()
            blocks.append(time.perf_counter() - started)
        times.append(statistics.median(blocks) / 20)
    print(f"a step takes {times[0] * 1e3:.2f} ms as it is, {times[1] * 1e3:.2f} ms replayed")
    assert times[0] / times[1] > 1.1


@pytest.mark.parametrize("case", ["bf16", "dropout", "experts", "recompute"])
def test_a_small_model_is_recorded_by_itself(case: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "petatron")
    plain, decided = (train(run_of(f"{CASES[case]} {flags}"), [2] * 10) for flags in ("", AUTO))
    same(decided, plain)
    [line] = [text for text in caplog.messages if "CUDA graphs" in text]
    assert re.fullmatch(r"CUDA graphs: on from step 5: the device was idle \d\d % of a step", line), line


def test_a_device_that_is_busy_is_left_alone(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "petatron")
    run = run_of(f"--hidden-size 4096 --ffn-hidden-size 16384 --seq-length 2048 --num-layers 6 {AUTO}")
    train(run, [1] * 4)
    [line] = [text for text in caplog.messages if "CUDA graphs" in text]
    assert re.fullmatch(r"CUDA graphs: off: the device was idle at most \d % of a step", line), line


def test_recompute_with_dropout_stays_as_it_is(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "petatron")
    flags = f"{CASES['recompute']} --hidden-dropout 0.1"
    plain, decided = (train(run_of(f"{flags} {more}"), [2] * 8) for more in ("", AUTO))
    same(decided, plain)
    assert (
        "CUDA graphs: off: recompute and random numbers: the host would set random states back inside it" in caplog.text
    )


class AsksTheDevice(torch.nn.Module):
    """A layer that reads a number from the device when it is captured, as a bug would."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *args: object, **options: object) -> object:
        if torch.cuda.is_current_stream_capturing():
            float(x.detach().sum())
        return self.layer(x, *args, **options)


def test_a_recording_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Not in the generators, not in the allocator, not in Python: another model is recorded afterwards."""
    caplog.set_level("INFO", "petatron")
    flags = "--hidden-dropout 0.1"
    plain = train(run_of(flags), [2] * 8)
    build = TrainState.build

    def with_a_bug(run: RunConfig, mesh: ParallelMesh) -> TrainState:
        state = build(run, mesh)
        stage = state.model.module
        stage.layers["1"] = AsksTheDevice(stage.layers["1"])
        return state

    with monkeypatch.context() as patched:
        patched.setattr(TrainState, "build", with_a_bug)
        same(train(run_of(f"{flags} {AUTO}"), [2] * 8), plain)
    [line] = [text for text in caplog.messages if "CUDA graphs" in text]
    assert line.startswith("CUDA graphs: off: a step could not be captured: "), line
    assert memory_of_two_streams_is_freed()
    same(train(run_of(f"{flags} {GRAPHS}"), [2] * 8), plain)


def memory_of_two_streams_is_freed() -> bool:
    """During a capture, the allocator would hold it back."""
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    x = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
    x.record_stream(torch.cuda.Stream())
    del x
    torch.cuda.synchronize()
    torch.empty(1, device=DEVICE)
    return torch.cuda.memory_stats()["active_bytes.all.current"] < before + (1 << 20)
