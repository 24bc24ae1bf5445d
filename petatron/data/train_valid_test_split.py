"""`--split`: which units of a source (documents, records) belong to training, validation and test."""

from __future__ import annotations

from petatron.base.errors import ConfigError, Problem
from petatron.config.schema.data_blend import BlendError, parse_split


def split_units(split: str, num_units: int) -> tuple[range, range, range]:
    """Contiguous ranges of units for training, validation and test, in proportion to "969,30,1".

    >>> split_units("8,1,1", 10)
    (range(0, 8), range(8, 9), range(9, 10))
    """
    try:
        shares = parse_split(split)
    except BlendError as error:
        raise ConfigError([Problem("--split", split, str(error), "Write three numbers such as 969,30,1.")]) from error
    first, second = round(shares[0] * num_units), round((shares[0] + shares[1]) * num_units)
    return range(first), range(first, second), range(second, num_units)
