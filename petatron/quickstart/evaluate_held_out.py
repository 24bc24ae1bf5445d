"""Evaluates a trained model on held-out text, compared with a unigram model of the same tokens.

The baseline is a unigram model: it knows how often each token occurs in the training text, and nothing of the tokens
before it. Its loss is what a language model reaches by learning frequencies alone, so anything below it was learned from
context. Both are measured on exactly the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.config.required_settings import required
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.tokenizer import Tokenizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.open_tokenizer import open_tokenizer
from petatron.train.build_run import build_loaders, launch
from petatron.train.state.train_state import TrainState
from petatron.validate import load_config

MIN_BATCHES = 8
"""Evaluated whatever time is left."""


class UnigramModel:
    """Token frequencies with add-one smoothing, so that no token is impossible.

    >>> round(UnigramModel(np.array([7, 1])).loss(np.array([0, 0, 1])), 3)
    2.056
    """

    def __init__(self, counts: NDArray[np.integer]) -> None:
        smoothed = counts.astype(np.float64) + 1.0
        self._losses = np.log(smoothed.sum()) - np.log(smoothed)

    @classmethod
    def from_dataset(cls, dataset: IndexedDataset, vocab_size: int) -> UnigramModel:
        """Counts the frequencies of a whole token file."""
        counts = np.zeros(vocab_size, np.int64)
        for sequence in range(dataset.num_sequences):
            counts += np.bincount(dataset.get(sequence), minlength=vocab_size)
        return cls(counts)

    def loss(self, tokens: NDArray[np.integer]) -> float:
        """Returns the sum of the tokens' negative log probabilities, in nats."""
        return float(self._losses[tokens].sum())


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Mean loss per token, in nats, of the model and of the unigram model."""

    tokens: int
    model_loss: float
    unigram_loss: float


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A trained model in this one process, whatever layout it was trained in."""

    model: ParallelModel
    tokenizer: Tokenizer
    held_out: HeldOutLoss
    num_parameters: int


def evaluate_held_out(
    settings: str, train: IndexedDataset, held_out: IndexedDataset, *, time_is_over: Callable[[], bool] = lambda: False
) -> TrainedModel:
    """Loads the last checkpoint of a run's settings file into one process, and evaluates every held-out token once.

    Where the time is over, those of the first batches, which are in random order, have to do.
    """
    batches = _num_batches(settings, held_out)
    flags = ["--config", settings, "--tp", "1", "--finetune", "--eval-iters", str(batches), "--num-workers", "0"]
    loaded, tokenizer = open_tokenizer(load_config(flags, world_size=1))
    assert tokenizer is not None
    run = loaded.config
    folder = required("load", run.checkpoint.load)
    mesh = launch(run)
    state = TrainState.build_for_load(run, mesh)
    if not state.load(folder):
        raise DataError(f"{folder} holds no checkpoint to evaluate. Run the quickstart with --fresh.")
    [loader] = build_loaders(run, mesh, tokenizer).valid.values()
    unigram = UnigramModel.from_dataset(train, tokenizer.vocab_size)
    total, known, tokens = 0.0, 0.0, 0
    for index in range(batches):
        if index >= MIN_BATCHES and time_is_over():
            break
        step = loader.next_step(run.train.global_batch_size, index * run.train.global_batch_size)
        loss, count = state.model.evaluate([batch.to(mesh.device) for batch in step])
        total, tokens = total + float(loss), tokens + int(count)
        known += sum(unigram.loss(batch.labels.numpy()) for batch in step)
    parameters = sum(parameter.numel() for parameter in state.model.module.parameters())
    return TrainedModel(state.model, tokenizer, HeldOutLoss(tokens, total / tokens, known / tokens), parameters)


def _num_batches(settings: str, held_out: IndexedDataset) -> int:
    """Whole batches in one pass over the held-out tokens; what does not fill one is left out."""
    run = load_config(["--config", settings, "--tp", "1"], world_size=1).config
    samples = (held_out.num_tokens - 1) // run.model.seq_length
    if samples < run.train.global_batch_size:
        raise DataError(
            f"{held_out.prefix} holds {held_out.num_tokens:,} tokens, which is less than one batch of "
            f"{run.train.global_batch_size} samples of {run.model.seq_length}. Use more text."
        )
    return samples // run.train.global_batch_size
