"""The types of the schema's numbers, each with the smallest and largest value that a field of it takes.

Bounds are far beyond what anyone trains, and below what overflows an index or takes minutes of arithmetic: a slipped digit is a problem
of one flag, not an error of numpy. `at least`, `above` and `below` beside them hold for settings of features in use. Rules that know more
(`validate/`) refuse more, and the memory forecast does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True)
class NumericBounds:
    """The values that a field takes, both ends included.

    >>> NumericBounds(100_000).violation(99_999_999), NumericBounds(100_000).violation(-1), NumericBounds(1).violation(0.5)
    ('is above 100,000, the most it takes', 'is below 0, the least it takes', None)
    """

    high: float
    low: float = 0

    def violation(self, value: float) -> str | None:
        """Returns the rule that a value breaks, if any."""
        if value > self.high:
            return f"is above {_text(self.high)}, the most it takes"
        if value < self.low:
            return f"is below {_text(self.low)}, the least it takes"
        return None


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


LayerCount = Annotated[int, NumericBounds(10_000)]
Width = Annotated[int, NumericBounds(1 << 24)]
Size = Annotated[Width, "at least 1"]
ExpertCount = Annotated[int, NumericBounds(1 << 20)]
SequenceLength = Annotated[int, NumericBounds(1 << 27)]
VocabularySize = Annotated[int, NumericBounds(1 << 28)]
RankCount = Annotated[int, NumericBounds(1 << 24)]
BucketElements = Annotated[int, NumericBounds(1 << 50)]
ByteCount = Annotated[int, NumericBounds(1 << 50)]
IterationCount = Annotated[int, NumericBounds(1_000_000_000)]
SampleCount = Annotated[int, NumericBounds(1_000_000_000_000)]
EpochCount = Annotated[float, NumericBounds(1e6)]
BatchSize = Annotated[int, NumericBounds(100_000_000)]
SmallCount = Annotated[int, NumericBounds(1_000_000)]
PortNumber = Annotated[int, NumericBounds(65_535, low=1)]
Seed = Annotated[int, NumericBounds((1 << 63) - 1)]
Fraction = Annotated[float, NumericBounds(1.0)]
DropoutRate = Annotated[Fraction, "below 1"]
Factor = Annotated[float, NumericBounds(1e6)]
DecayRate = Annotated[Fraction, "below 1"]
PositiveFactor = Annotated[Factor, "above 0"]
PositiveCount = Annotated[SmallCount, "at least 1"]
SignedFactor = Annotated[float, NumericBounds(1e6, low=-1e6)]
RotaryBase = Annotated[float, NumericBounds(1e15)]
LearningRate = Annotated[float, NumericBounds(1e4)]
LossScale = Annotated[float, NumericBounds(2.0**64)]
Minutes = Annotated[float, NumericBounds(1e7)]
RunMinutes = Annotated[float, NumericBounds(1e12)]
"""How long a run may take: scripts that want no limit give one of centuries."""
Seconds = Annotated[float, NumericBounds(1e7)]
Gigabytes = Annotated[float, NumericBounds(1e6)]
