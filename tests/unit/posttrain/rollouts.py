"""A tiny run that learns from its own answers, on any layout of the rank pool."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from petatron.cli.posttrain import training_flags
from petatron.config import LoadedConfig, RunConfig
from petatron.config.rollout_layout import drawing_config
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.posttrain.rollout import Rollout
from petatron.posttrain.run_posttraining import RolloutSource
from petatron.train.check_and_open_run import OpenedRun, check_start, open_run
from petatron.train.train_step import train_step
from petatron.validate import load_config
from tests.nccl.layouts import mesh_of

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --vocab-size 257 --tokenizer-type ByteTokenizer "
    "--make-vocab-size-divisible-by 1 --position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 48 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --num-workers 0 "
    "--train-iters 4 --lr 5e-3 --lr-warmup-iters 0 --global-batch-size 16 --micro-batch-size 2 --init-method-std 0.1 --eval-iters 0 "
    "--rollouts-per-prompt 4 --max-answer-tokens 5 --fp64 --rollout-log-gigabytes 0"
)
REWARD = "regex:.*[a-m].*"
SEVERAL = (
    "--updates-per-rollout 2 --rollout-epochs 2 --old-log-probs computed "
    "--objective-settings entropy_weight=0.02 mask_answers_above=2"
)


ENVIRONMENT = """
import random

class Early:
    \"\"\"Rewards characters of the first half of the alphabet, and ends after one to three turns.\"\"\"

    def reset(self, record):
        self.left = random.randint(1, 3)
        return record["answer"] + ":"

    def step(self, answer):
        self.left -= 1
        return f"<{len(answer)}{random.choice('xy')}>", 0.5 * any("a" <= c <= "m" for c in answer), self.left == 0
"""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a step did: the mean loss, the gradient's norm, its answers, and the metrics of the objective."""

    loss: float
    grad_norm: float
    metrics: dict[str, float]


def write_prompts(path: Path, count: int = 6) -> Path:
    lines = [
        json.dumps({"prompt": "abcdef"[: 1 + place % 6] + str(place), "answer": str(place)}) for place in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_environment(path: Path, content: str = ENVIRONMENT) -> Path:
    path.write_text(content)
    return path


def load(flags: str, algorithm: str = "grpo", *, world_size: int = 1) -> LoadedConfig:
    rewards = [] if "--environment" in flags else ["--rewards", REWARD]
    words = training_flags([algorithm, *TINY.split(), *rewards, *flags.split()])
    return load_config(words, world_size=world_size)


def open_here(loaded: LoadedConfig) -> OpenedRun:
    rank = dist.get_rank() if dist.is_initialized() else 0
    start = check_start(loaded)
    on_gpu = torch.cuda.is_available() and loaded.config.train.device != "cpu"
    mesh = mesh_of(loaded.config) if on_gpu else ParallelMesh(Layout.from_config(loaded.config.parallel), rank)
    return open_run(start, mesh, RolloutSource(start))


def learn(loaded: LoadedConfig, steps: int = 3, *, save_after: int | None = None) -> list[Learned]:
    """Takes some steps on one rank, from where the run is."""
    torch.set_num_threads(1)
    opened = open_here(loaded)
    state, loader, learned = opened.state, opened.loaders.train, list[Learned]()
    for number in range(1, steps + 1):
        size = loaded.config.train.global_batch_size
        drawn = loader.next_step(size, state.progress.consumed_samples)
        batches = [batch.to(state.mesh.device) for batch in drawn]
        metrics = train_step(state, batches, num_samples=size)
        assert metrics.grad_norm is not None and metrics.objective_metrics is not None
        values = {name: float(value) for name, value in metrics.objective_metrics.items()}
        values |= {name: value for name, value in loader.step_metrics.items() if not name.endswith(" s")}
        learned.append(Learned(float(metrics.loss), float(metrics.grad_norm), values))
        if number == save_after:
            state.save()
    loader.close()
    return learned


def learn_or_draw(loaded: LoadedConfig, steps: int = 3, *, save_after: int | None = None) -> list[Learned]:
    """Takes some steps on one rank, or draws for those that do, and returns nothing."""
    if dist.get_rank() < loaded.config.parallel.world_size:
        return learn(loaded, steps, save_after=save_after)
    torch.set_num_threads(1)
    RolloutSource(check_start(loaded)).draw_for_others(drawing_mesh(loaded.config))
    return []


def drawing_mesh(run: RunConfig) -> ParallelMesh:
    """Returns the mesh of a rank that draws."""
    first, layout = run.parallel.world_size, Layout.from_config(drawing_config(run).parallel)
    on_gpu = torch.cuda.is_available() and run.train.device != "cpu"
    where = {"device": torch.device("cuda", torch.cuda.current_device()), "backend": "nccl"} if on_gpu else {}
    return ParallelMesh(layout, dist.get_rank() - first, first_rank=first, **where)


def rollout(text: str = "x", *, reward: float = 1.0, ids: tuple[int, ...] = (8, 1), advantage: float = 0.5) -> Rollout:
    return Rollout(
        prompt=0, group=0, sample=0, version=0, prompt_ids=(5, 6), ids=ids, log_probs=(-0.5,) * len(ids), text=text, finished=True,
        reward=reward, advantage=advantage,
    )  # fmt: skip
