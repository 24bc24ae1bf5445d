"""Warnings about data that are too small for what a run does with them, before the first step.

None of this is an error, since a person may want to overfit on purpose. But a model that memorized a page of text, or a validation loss
of one document, looks like a result. Only these numbers show that it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from petatron.base.format_text import count_with_noun

MAX_EPOCHS = 16
"""Training warns above this. Muennighoff et al. (2023, "Scaling Data-Constrained Language Models") fit the value of repeated tokens by an
exponential that has fallen to 1/e after about 15 repetitions: four epochs are nearly as good as new text, forty are worth nothing."""
MAX_EVALUATION_EPOCHS = 2
"""An evaluation warns above this: more than half of its time would repeat what it has measured."""
MAX_NAMED_SOURCES = 3
"""A blend may have thousands of sources; a line describes this many, and counts the others."""


@dataclass(frozen=True, slots=True)
class SourceUse:
    """What one split takes from one token file."""

    prefix: str
    unit: str
    """"documents" or "sequences"."""
    num_units: int
    num_tokens: int
    samples: float
    """Samples that training takes in the whole run, or that one evaluation takes."""

    def epochs(self, seq_length: int) -> float:
        return self.samples * seq_length / self.num_tokens


def size_warnings(split: str, sources: Sequence[SourceUse], *, seq_length: int, eval_iters: int) -> list[str]:
    """Returns one line for each kind of problem that sources of a split have.

    >>> size_warnings("train", [SourceUse("tiny", "documents", 1, 7, 100.0)], seq_length=256, eval_iters=10)
    ['few tokens for training: tiny has 7 tokens, and one sample has 256, which repeats them 36.6 times; the run repeats them 3,657 times']
    """
    warn = _training_warnings if split == "train" else _evaluation_warnings
    return list(warn(split, sources, seq_length, eval_iters))


def _training_warnings(split: str, sources: Sequence[SourceUse], seq_length: int, eval_iters: int) -> Iterator[str]:
    few = [source for source in sources if source.num_tokens <= seq_length]
    many = [source for source in sources if source not in few and source.epochs(seq_length) > MAX_EPOCHS]
    if few:
        texts = (
            f"{_few_tokens(source, seq_length)}; the run repeats them {source.epochs(seq_length):,.0f} times"
            for source in few
        )
        yield f"few tokens for training: {_join(texts, len(few))}"
    if many:
        texts = (
            f"{source.prefix} has {source.num_tokens:,} tokens, which the run reads {source.epochs(seq_length):,.1f} times"
            for source in many
        )
        yield (
            f"many epochs: {_join(texts, len(many))}. Above about {MAX_EPOCHS} epochs a model mostly memorizes: "
            "use more data, or fewer iterations"
        )


def _evaluation_warnings(split: str, sources: Sequence[SourceUse], seq_length: int, eval_iters: int) -> Iterator[str]:
    name = {"valid": "validation"}.get(split, split)
    few = [source for source in sources if source.num_tokens <= seq_length]
    single = [source for source in sources if source not in few and source.num_units == 1]
    if few:
        yield f"few tokens for {name}: {_join((_few_tokens(source, seq_length) for source in few), len(few))}"
    if single:
        texts = (f"one of {source.prefix} ({source.num_tokens:,} tokens)" for source in single)
        yield (
            f"the {name} split is a single {single[0].unit.removesuffix('s')}: {_join(texts, len(single))}. "
            "Its loss tells about that text alone; give the split a larger share (--split), or data of its own"
        )
    epochs = sum(source.samples for source in sources) * seq_length / sum(source.num_tokens for source in sources)
    if epochs > MAX_EVALUATION_EPOCHS:
        tokens = sum(source.num_tokens for source in sources)
        yield (
            f"an evaluation reads the {tokens:,} tokens of the {name} split {epochs:,.1f} times; "
            f"--eval-iters {max(1, round(eval_iters / epochs))} reads them about once"
        )


def _few_tokens(source: SourceUse, seq_length: int) -> str:
    repeats = seq_length / source.num_tokens
    tokens = count_with_noun(source.num_tokens, "token")
    return f"{source.prefix} has {tokens}, and one sample has {seq_length:,}, which repeats them {repeats:,.1f} times"


def _join(texts: Iterator[str], count: int) -> str:
    named = [text for text, _ in zip(texts, range(MAX_NAMED_SOURCES))]
    rest = count - len(named)
    return "; ".join(named) + (f"; and {count_with_noun(rest, 'more dataset')}" if rest else "")
