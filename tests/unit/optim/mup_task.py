"""A small real task for runs of several widths: the next byte of the source files of Python's standard library, on a CPU in float32."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import petatron
from petatron.models.batch import Batch
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.build_run import build_model, build_optimizer
from petatron.validate import load_config

LENGTH, ROWS, BASE, HEADS = 32, 16, 32, 4
PLAIN = (
    f"--num-layers 2 --num-attention-heads {HEADS} --seq-length {LENGTH} --vocab-size 256 --mock-data --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 "
    f"--attention-dropout 0 --num-workers 0 --global-batch-size {ROWS} --micro-batch-size {ROWS} --train-iters 1000 --eval-iters 0 "
    "--weight-decay 0 --adam-beta2 0.95 --lr-decay-style constant --device cpu --init-method-std 0.18"
)
MUP = f"--use-mup --mup-base-hidden-size {BASE} --mup-base-head-dim {BASE // HEADS}"


@cache
def text_bytes() -> Tensor:
    """The files at the top of the standard library, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(seed: int = 0) -> Iterator[Batch]:
    generator, text = torch.Generator().manual_seed(seed), text_bytes()
    while True:
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=generator)
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()]).long()
        yield Batch(rows[:, :-1], rows[:, 1:], torch.ones(ROWS, LENGTH))


def model_of(width: int, lr: float, flags: str = "") -> tuple[petatron.RunConfig, ParallelModel]:
    sizes = f"--hidden-size {width} --ffn-hidden-size {2 * width} --lr {lr}"
    run = load_config(f"{PLAIN} {sizes} {flags}".split(), world_size=1).config
    return run, build_model(run, petatron.launch(run))


def losses(width: int, lr: float, flags: str, *, steps: int) -> list[float]:
    """Trains a model of a width: warm-up over a tenth of the steps, then linear decay. Every model gets the same batches."""
    run, model = model_of(width, lr, flags)
    optimizer, loader, warmup = build_optimizer(run, model), batches(), steps / 10
    found: list[float] = []
    for step in range(steps):
        loss = model.train_step([next(loader)])
        optimizer.step(lr=lr * min((step + 1) / warmup, (steps - step) / (steps - warmup)))
        found.append(float(loss))
    return found


def last_loss(width: int, lr: float, flags: str, *, steps: int) -> float:
    """The mean loss of the last tenth of the steps, where the learning rate is near zero."""
    last = losses(width, lr, flags, steps=steps)[-(steps // 10) :]
    return sum(last) / len(last)


def best_exponent(flags: str, width: int, exponents: Sequence[int], *, steps: int) -> int:
    """The power of 2 that is the learning rate with the lowest loss; one that diverged is the worst."""
    found = {exponent: last_loss(width, 2.0**exponent, flags, steps=steps) for exponent in exponents}
    print(width, {exponent: round(loss, 3) for exponent, loss in found.items()})
    return min(found, key=lambda exponent: math.inf if math.isnan(found[exponent]) else found[exponent])
