"""A tiny run that knows text, for the subcommands that generate."""

from __future__ import annotations

from pathlib import Path

from petatron.cli.main import main

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 96 --mock-data --tokenizer-type ByteTokenizer "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights --lr 1e-3 "
    "--train-iters 1 --eval-iters 0 --num-workers 0 --live off --init-method-std 0.5 --device cpu"
).split()


def train_text_model(folder: Path, *flags: str) -> Path:
    """Trains one step and returns the run's folder."""
    assert main(["train", *MODEL, *flags, "--save", str(folder)]) == 0
    return folder
