"""Weights of a blend from the sizes of its sources, and how often a run then reads each.

The share of a source is its number of tokens to the power 1 / temperature, or its given weight, normalized: temperature 1 is in proportion
to size, and higher ones are more even. Of `target_tokens` in all, a source gives its share, which is a number of its epochs. Repeating
data up to about four times costs little, and more epochs add less and less (Muennighoff et al. 2023). With `max_epochs`, what a
source cannot give is divided among the others in proportion to their shares, as in UniMax (Chung et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from petatron.base.errors import ConfigError, Problem

MANY_EPOCHS = 4.0
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset by its prefix, and its size."""

    prefix: str
    tokens: int


@dataclass(frozen=True, slots=True)
class MixedSource:
    """What a run takes of a source."""

    source: Source
    weight: float
    tokens: int
    epochs: float


@dataclass(frozen=True, slots=True)
class Mix:
    """The sources of a blend; weights sum to 1."""

    sources: tuple[MixedSource, ...]
    target_tokens: int

    @property
    def data_path(self) -> list[str]:
        """The words of `--data-path`."""
        return [text for part in self.sources for text in (f"{part.weight:.{_DIGITS}g}", part.source.prefix)]

    @property
    def repeated(self) -> list[MixedSource]:
        """The sources that are read very often."""
        return [part for part in self.sources if part.epochs > MANY_EPOCHS]

    def config(self) -> dict[str, Any]:
        """Returns the section of a configuration file."""
        return {"data": {"data_path": self.data_path}}


def mix_sources(
    sources: Sequence[Source],
    *,
    weights: Sequence[float] | None = None,
    temperature: float = 1.0,
    target_tokens: int | None = None,
    max_epochs: float | None = None,
) -> Mix:
    """Returns the blend; without `target_tokens` a run reads as many tokens as all sources have together.

    >>> mix = mix_sources([Source("web", 9000), Source("code", 1000)], temperature=2)
    >>> [(part.weight, part.tokens, round(part.epochs, 2)) for part in mix.sources]
    [(0.75, 7500, 0.83), (0.25, 2500, 2.5)]
    """
    _check(sources, weights, temperature, target_tokens, max_epochs)
    target = sum(source.tokens for source in sources) if target_tokens is None else target_tokens
    largest = max(source.tokens for source in sources)
    by_size = [(source.tokens / largest) ** (1 / temperature) for source in sources]
    given = by_size if weights is None else list(weights)
    shares = [weight / sum(given) for weight in given]
    if max_epochs is not None:
        shares = _capped(shares, [max_epochs * source.tokens / target for source in sources])
    mixed = (
        MixedSource(source, share, round(share * target), share * target / source.tokens)
        for source, share in zip(sources, shares)
    )
    return Mix(tuple(mixed), target)


def _capped(shares: Sequence[float], caps: Sequence[float]) -> list[float]:
    """Returns shares that sum to 1, none above its cap, the free ones in their former proportion."""
    if sum(caps) < 1 - 1e-9:
        rule = f"is too low: all sources together have {sum(caps):.1%} of the tokens then"
        raise ConfigError([Problem("--max-epochs", "", rule, "Raise it, or lower --target-tokens.")])
    at_cap: set[int] = set()
    while True:
        left = 1 - sum(caps[index] for index in at_cap)
        free = sum(share for index, share in enumerate(shares) if index not in at_cap)
        result = [
            caps[index] if index in at_cap else share / free * left if free else 0.0
            for index, share in enumerate(shares)
        ]
        above = {index for index, share in enumerate(result) if share > caps[index] * (1 + 1e-12)} - at_cap
        if not above:
            total = sum(result)
            if total < 1 - 1e-9:  # what is left has the weight 0
                rule = "leaves tokens that only sources of weight 0 could give"
                raise ConfigError([Problem("--max-epochs", "", rule, "Give these sources weights.")])
            return [share / total for share in result]
        at_cap |= above


def _check(
    sources: Sequence[Source],
    weights: Sequence[float] | None,
    temperature: float,
    target_tokens: int | None,
    max_epochs: float | None,
) -> None:
    problems: list[Problem] = []
    if weights is not None:
        shown = " ".join(f"{weight:g}" for weight in weights)
        if len(weights) != len(sources):
            rule = f"are {len(weights)} for {len(sources)} datasets"
            problems.append(Problem("--weights", shown, rule, "Give one for each, in their order."))
        elif not (min(weights) >= 0 and 0 < sum(weights) < float("inf")):
            rule = "are not all at least 0 with one above"
            problems.append(Problem("--weights", shown, rule, "Only their proportions count."))
    if not 0 < temperature < float("inf"):
        problems.append(Problem("--temperature", f"{temperature:g}", "is not above 0", "1 is in proportion to size."))
    if target_tokens is not None and target_tokens < 1:
        problems.append(Problem("--target-tokens", str(target_tokens), "is below 1", "Leave it out for all tokens."))
    if max_epochs is not None and not max_epochs > 0:
        problems.append(Problem("--max-epochs", f"{max_epochs:g}", "is not above 0", "Use 4, say."))
    if len({source.prefix for source in sources}) < len(sources):
        problems.append(Problem("PREFIX", "", "names a dataset twice", "Name each once; its weight says how often."))
    if problems:
        raise ConfigError(problems)
