"""Scores: equal to transformers, the same in every layout, whatever shares the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.base.errors import ConfigError, DataError, TrainError
from petatron.config import RunConfig
from petatron.evaluate.score_sequences import score_sequences
from petatron.kernels.fused_linear_cross_entropy import VocabColumns, linear_losses_and_greedy
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.hf import fill_model, to_logical
from petatron.models.registry import model_spec
from petatron.parallel.forward_sequences import plan_micro_batches
from petatron.train.build_run import build_model
from tests.dist import RankPool
from tests.hf.ours import run_config
from tests.longform import diagonal, over_nccl
from tests.parity.harness import tiny_run

LENGTHS = (24, 3, 1, 9, 64, 2, 17)
FAMILIES = ("gpt2", "llama-gqa", "mixtral")


def _sequences(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_transformers(family: str, tmp_path: Path):
    from tests.hf import zoo  # transformers, which the ranks that score need not import

    reference = zoo.build(family)
    run = run_config(reference.config.to_dict(), tmp_path, length=32)
    model = build_model(run, ParallelMesh.single())
    logical = to_logical(reference.config.model_type, zoo.saved(reference), model_spec(run))
    fill_model(model.module, model.placements, logical)
    sequences = _sequences(zoo.VOCABULARY)
    for ids, score in zip(sequences, score_sequences(model, sequences, batch_tokens=64), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0, :-1].double()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).view(-1, 1))[:, 0]
        assert score.logprobs == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-5)
        assert score.greedy.tolist() == (logits.argmax(-1) == torch.tensor(ids[1:])).tolist()


def _score(run: RunConfig) -> tuple[np.ndarray, np.ndarray]:
    return score(run, ParallelMesh(Layout.from_config(run.parallel), dist.get_rank()), batch_tokens=48)


def score(run: RunConfig, mesh: ParallelMesh, *, batch_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs on a rank: log-probabilities of `SEQUENCES`, and which tokens are greedy."""
    scores = score_sequences(build_model(run, mesh), SEQUENCES, batch_tokens=batch_tokens)
    return np.concatenate([x.logprobs for x in scores]), np.concatenate([x.greedy for x in scores])


MODEL = "--num-layers 4 --max-position-embeddings 64 --vocab-size 37"
EXPERTS = f"{MODEL} --num-experts 4 --moe-router-topk 2"


# Greedy ids repeat, so that some targets are greedy.
SEQUENCES = [*_sequences(37), [5] * 20]
LAYOUTS = [
    over_nccl("--tp 2 --sequence-parallel", MODEL),
    ("--pp 2", MODEL),
    over_nccl("--pp 2 --num-virtual-stages-per-pipeline-rank 2", MODEL),
    over_nccl("--cp 2", MODEL),
    ("--dp 2", MODEL),
    ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", MODEL),
    over_nccl("--dp 2 --ep 2", EXPERTS),
]


@diagonal(3)
@pytest.mark.parametrize(("layout", "model"), LAYOUTS)
def test_layouts_agree(ranks: RankPool, layout: str, model: str):
    expected, greedy = score(tiny_run(model, dtype="float64"), ParallelMesh.single(), batch_tokens=64)
    run = tiny_run(f"{model} {layout}", world_size=2, dtype="float64")
    for found, same in ranks.run(_score, 2, run):
        assert found == pytest.approx(expected, rel=1e-10)
        assert (same == greedy).all() and greedy.any()


def _greedy_over_shards(logits: Tensor, targets: Tensor) -> Tensor:
    """The argmax over two ranks' halves of the vocabulary."""
    rank, half = dist.get_rank(), logits.shape[1] // 2
    mine = logits[:, rank * half : (rank + 1) * half]

    def reduce(op: dist.ReduceOp.RedOpType):
        def over_ranks(x: Tensor) -> Tensor:
            dist.all_reduce(x, op=op)
            return x

        return over_ranks

    columns = VocabColumns(half, rank * half, reduce(dist.ReduceOp.MAX), reduce(dist.ReduceOp.SUM))
    # An identity for the input: the weight's rows are then the logits of single tokens.
    return linear_losses_and_greedy(torch.eye(len(logits)), mine.t(), targets, columns, chunk_size=2)[1]


def test_of_equal_logits_the_smallest_id_is_greedy(ranks: RankPool):
    logits = torch.tensor([[1.0, 3, 3, 0], [0, 1, 2, 2], [0, 2, 1, 2], [5, 0, 0, 5]])
    for targets, expected in (([1, 2, 1, 0], [True] * 4), ([2, 3, 3, 3], [False] * 4)):
        ids = torch.tensor(targets)
        alone = linear_losses_and_greedy(torch.eye(4), logits.t(), ids, VocabColumns(4))[1]
        assert alone.tolist() == expected
        assert [found.tolist() for found in ranks.run(_greedy_over_shards, 2, logits, ids)] == [expected, expected]


def test_micro_batches_hold_their_tokens_and_every_sequence_once():
    plans = plan_micro_batches(list(range(100)), dp_size=2, batch_tokens=200, multiple=4, max_length=100)
    assert sorted(index for plan in plans for index in plan.indices) == list(range(1, 100))
    assert all(plan.length % 4 == 0 and plan.rows * plan.length <= 200 for plan in plans)
    assert max(plan.length for plan in plans) == 100, "no position beyond the model's last"


def test_progress_ends_at_all_tokens():
    model = build_model(tiny_run(MODEL), ParallelMesh.single())
    seen: list[tuple[int, int]] = []
    score_sequences(model, [[1, 2, 3], [4]], on_progress=lambda *now: seen.append(now))
    assert seen == [(2, 2)]


def test_what_cannot_be_scored_is_refused():
    model = build_model(tiny_run(MODEL), ParallelMesh.single())
    with pytest.raises(DataError, match="A sequence has 66 tokens, but the model has 64 positions"):
        score_sequences(model, [[1] * 66])
    with pytest.raises(DataError, match=r"ids 0\.\.37, but the model's vocabulary has 37 ids"):
        score_sequences(model, [[0, 37]])
    with pytest.raises(ConfigError, match="batch_tokens 0 is below 1"):
        score_sequences(model, [[0, 1]], batch_tokens=0)
    for output in ("greedy_targets", "token_losses"):
        with pytest.raises(DataError, match="no array 'labels'"):
            model.forward([Batch(torch.zeros(1, 8, dtype=torch.int64))], collect=[output])
    with pytest.raises(
        TrainError, match=r"no output 'nothing'\. It has: logits, hidden_states, token_losses, greedy_targets"
    ):
        model.forward([Batch(torch.zeros(1, 8, dtype=torch.int64))], collect=["nothing"])
