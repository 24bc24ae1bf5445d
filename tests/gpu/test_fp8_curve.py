"""Training in FP8 follows bfloat16 on real text, in every recipe: 200 steps of a small Llama on Python's own sources.

Two runs that differ in rounding part, and after 200 steps one may be some steps ahead of the other: that is chance, not
precision. So the mean is over three runs, each from other first weights on other samples, the same in every recipe.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from petatron.config import load_config
from petatron.mesh.mesh import ParallelMesh
from petatron.models.base import Batch
from petatron.train.quickstart.corpus import read_corpus, standard_library
from petatron.train.state import TrainState
from petatron.train.step import train_step

CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not CAPABLE, reason="needs a CUDA device of capability 9.0"),
]

STEPS, LAST, RUNS, ALLOWED = 200, 20, 3, 5e-3
SIZES = "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1536 --num-attention-heads 8 --seq-length 512 --micro-batch-size 32"
TRAINING = (
    f"--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --vocab-size 256 --bf16 "
    f"--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --mock-data --eval-iters 0 "
    f"--train-iters {STEPS} --lr 5e-4 --min-lr 5e-5 --lr-warmup-iters 20 --lr-decay-style cosine --lr-decay-iters {STEPS} "
    f"--adam-beta2 0.95 --weight-decay 0.1"
)
RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise"]


def text() -> Tensor:
    """Files one after the other, as bytes."""
    files = read_corpus(standard_library(), max_bytes=4_000_000).train
    return torch.frombuffer(bytearray("\n".join(file.text for file in files).encode()), dtype=torch.uint8)


def losses(flags: str, device: torch.device, *, seed: int = 1, sizes: str = SIZES) -> list[float]:
    """One per step; first weights and samples follow from the seed, whatever the flags."""
    run = load_config([*sizes.split(), *TRAINING.split(), "--seed", str(seed), *flags.split()]).config
    state = TrainState.build(run, ParallelMesh.single(device))
    source, generator = text().to(device), torch.Generator().manual_seed(seed)
    within = torch.arange(run.model.seq_length + 1, device=device)
    mask = torch.ones(run.train.micro_batch_size, run.model.seq_length, device=device)
    found: list[Tensor] = []
    for _ in range(STEPS):
        begins = torch.randint(len(source) - len(within), (run.train.micro_batch_size, 1), generator=generator)
        samples = source[begins.to(device) + within].long()
        found.append(train_step(state, [Batch(samples[:, :-1], samples[:, 1:], mask)]).loss)
    return torch.stack(found).tolist()


@cache
def on_the_device(flags: str) -> list[list[float]]:
    return [losses(flags, torch.device("cuda", 0), seed=seed) for seed in range(1, RUNS + 1)]


def at_the_end(curves: list[list[float]]) -> list[float]:
    return [sum(curve[-LAST:]) / LAST for curve in curves]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_curve_is_that_of_bfloat16(recipe: str):
    wide, ours = on_the_device(""), on_the_device(f"--fp8-format hybrid --fp8-recipe {recipe}")
    ends, wide_ends = at_the_end(ours), at_the_end(wide)
    ratio = sum(ends) / sum(wide_ends)
    said = ", ".join(f"{end:.4f} for {wide_end:.4f}" for end, wide_end in zip(ends, wide_ends))
    print(f"{recipe}: {said} of bfloat16; {ratio - 1:+.3%}")
    assert all(mine != theirs for mine, theirs in zip(ours, wide, strict=True)), "nothing was done in FP8"
    assert all(end < 0.5 * curve[0] for end, curve in zip(wide_ends, wide, strict=True)), "it does not learn"
    assert ratio == pytest.approx(1.0, rel=ALLOWED), said
