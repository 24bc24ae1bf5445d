"""Warnings about data that are too small for what a run does with them, before the first step.

None of this is an error, since a person may want to overfit on purpose. But a model that memorized a page of text, or a validation loss
of one document, looks like a result. Only these numbers show that it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from petatron.base.format_text import count_with_noun
from petatron.data.dataset_kinds import SourceShare

MAX_EPOCHS = 16
"""Training warns above this. Muennighoff et al. (2023, "Scaling Data-Constrained Language Models") fit the value of repeated tokens by an
exponential that has fallen to 1/e after about 15 repetitions: four epochs are nearly as good as new text, forty are worth nothing."""
MAX_EVALUATION_EPOCHS = 2
"""An evaluation warns above this: more than half of its time would repeat what it has measured."""
MAX_NAMED_SOURCES = 3
"""A blend may have thousands of sources; a line describes this many, and counts the others."""


def size_warnings(split: str, shares: Sequence[SourceShare], *, seq_length: int, eval_iters: int) -> list[str]:
    """Returns one line for each kind of problem that token files of a split have.

    >>> from petatron.data.dataset_kinds import DataSource
    >>> class Tiny(DataSource):
    ...     def dataset(self, units, request):
    ...         raise NotImplementedError
    >>> share = SourceShare(Tiny("tiny", num_units=1), range(1), size=7, samples=100.0)
    >>> size_warnings("train", [share], seq_length=256, eval_iters=10)
    ['few tokens for training: tiny has 7 tokens, and one sample has 256, which repeats them 36.6 times; the run repeats them 3,657 times']
    """
    warn = _training_warnings if split == "train" else _evaluation_warnings
    return list(warn(split, shares, seq_length, eval_iters))


def _training_warnings(split: str, shares: Sequence[SourceShare], seq_length: int, eval_iters: int) -> Iterator[str]:
    few = [share for share in shares if share.size <= seq_length]
    many = [share for share in shares if share not in few and _epochs(share, seq_length) > MAX_EPOCHS]
    if few:
        texts = (
            f"{_few_tokens(share, seq_length)}; the run repeats them {_epochs(share, seq_length):,.0f} times"
            for share in few
        )
        yield f"few tokens for training: {_join(texts, len(few))}"
    if many:
        texts = (
            f"{share.source.name} has {share.size:,} tokens, which the run reads {_epochs(share, seq_length):,.1f} times"
            for share in many
        )
        yield (
            f"many epochs: {_join(texts, len(many))}. Above about {MAX_EPOCHS} epochs a model mostly memorizes: "
            "use more data, or fewer iterations"
        )


def _evaluation_warnings(split: str, shares: Sequence[SourceShare], seq_length: int, eval_iters: int) -> Iterator[str]:
    name = {"valid": "validation"}.get(split, split)
    few = [share for share in shares if share.size <= seq_length]
    single = [share for share in shares if share not in few and len(share.units) == 1]
    if few:
        yield f"few tokens for {name}: {_join((_few_tokens(share, seq_length) for share in few), len(few))}"
    if single:
        texts = (f"one of {share.source.name} ({share.size:,} tokens)" for share in single)
        yield (
            f"the {name} split is a single {single[0].source.unit.removesuffix('s')}: {_join(texts, len(single))}. "
            "Its loss tells about that text alone; give the split a larger share (--split), or data of its own"
        )
    epochs = sum(share.samples for share in shares) * seq_length / sum(share.size for share in shares)
    if epochs > MAX_EVALUATION_EPOCHS:
        tokens = sum(share.size for share in shares)
        yield (
            f"an evaluation reads the {tokens:,} tokens of the {name} split {epochs:,.1f} times; "
            f"--eval-iters {max(1, round(eval_iters / epochs))} reads them about once"
        )


def _epochs(share: SourceShare, seq_length: int) -> float:
    return share.samples * seq_length / share.size


def _few_tokens(share: SourceShare, seq_length: int) -> str:
    repeats = seq_length / share.size
    tokens = count_with_noun(share.size, "token")
    return (
        f"{share.source.name} has {tokens}, and one sample has {seq_length:,}, which repeats them {repeats:,.1f} times"
    )


def _join(texts: Iterator[str], count: int) -> str:
    named = [text for text, _ in zip(texts, range(MAX_NAMED_SOURCES))]
    rest = count - len(named)
    return "; ".join(named) + (f"; and {count_with_noun(rest, 'more dataset')}" if rest else "")
