"""Trains a recommender on histories and prints its HR@10 and NDCG@10 beside those of three baselines.

    python examples/recommender/train.py runs/movies
    python examples/recommender/train.py runs/movies --recommender-layers hstu --item-loss sampled_softmax --save runs/recommender

Further flags are those of `petatron train`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from baselines import BASELINES, LEFT_OUT, evaluate

import petatron
from petatron.data.recommendation.history_file import ItemHistories, read_histories
from petatron.train import evaluate_loss
from petatron.train.build_run import build_loaders

MODEL = (
    "--model-type recommender --num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 128 --seq-length 50 "
    "--activation gelu --hidden-dropout 0.1 --attention-dropout 0 --init-method-std 0.05"
)
TRAINING = (
    "--lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.01 --adam-beta2 0.98 --eval-micro-batch-size 1 "
    "--log-interval 100 --num-workers 1 --device auto"
)
BATCH = 64


def train(path: Path, histories: ItemHistories, iterations: int, flags: list[str]) -> petatron.Run:
    """Trains a model, in this process or as one of the ranks that torchrun started."""
    users = int((histories.lengths > LEFT_OUT).sum())
    sizes = {
        "--vocab-size": histories.num_items,
        "--train-iters": iterations,
        "--global-batch-size": BATCH,
        "--micro-batch-size": BATCH,
        "--eval-iters": -(-users // BATCH),
    }
    data = {f"--{split}-data-path": path for split in ("train", "valid", "test")}
    words = [str(word) for pair in (sizes | data).items() for word in pair]
    run = petatron.load(None, [*MODEL.split(), *TRAINING.split(), *words, *flags])
    for record in run.train():
        print(f"  step {record['iteration']}: loss {record['lm_loss']:.3f}", flush=True)
    return run


def test_metrics(run: petatron.Run, histories: ItemHistories) -> tuple[float, float]:
    """Returns HR@10 and NDCG@10 of the last items of all users that have one left out."""
    users = int((histories.lengths > LEFT_OUT).sum())
    batches = [(first, min(BATCH, users - first)) for first in range(0, users, BATCH)]
    loader = build_loaders(run.config, run.state.mesh).test
    assert loader is not None
    result = evaluate_loss.evaluate(run.state, loader, batches=batches)
    assert isinstance(result, evaluate_loss.EvaluatedLosses)
    return result.metrics["HR@10"], result.metrics["NDCG@10"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a recommender beside its baselines.", allow_abbrev=False)
    parser.add_argument("histories", type=Path)
    parser.add_argument("--iterations", type=int, default=600)
    args, flags = parser.parse_known_args()
    histories = read_histories(args.histories)
    started = time.perf_counter()
    run = train(args.histories, histories, args.iterations, flags)
    print(f"trained in {time.perf_counter() - started:.0f} s")
    rows = {name: evaluate(build(histories), histories) for name, build in BASELINES.items()}
    rows["model"] = test_metrics(run, histories)
    print(f"{'':14}{'HR@10':>8}{'NDCG@10':>9}")
    for name, (hits, gains) in rows.items():
        print(f"{name:14}{hits:8.4f}{gains:9.4f}")


if __name__ == "__main__":
    main()
