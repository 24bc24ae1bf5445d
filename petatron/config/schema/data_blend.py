"""Parses `--data-path` and `--split`; the validator and the data layer use the same two functions."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from petatron.base.remote_address import is_remote
from petatron.base.untrusted_files import read_limited_bytes

_MAX_BLEND_FILE_BYTES = 1 << 26
_NAMED_WORD = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)=(.+)", re.DOTALL)


class BlendError(ValueError):
    """The words do not form a blend or a split; the message completes the sentence "--data-path ... ." """


@dataclass(frozen=True, slots=True)
class BlendPart:
    """One dataset of a blend. No weight means "in proportion to its size"."""

    prefix: str
    weight: float | None


def parse_blend(blend: Sequence[str]) -> tuple[BlendPart, ...]:
    """Parses `a b` or `0.3 a 0.7 b`; either every dataset has a weight or none has.

    >>> [part.weight for part in parse_blend(["0.3", "a", "0.7", "b"])]
    [0.3, 0.7]
    """
    numeric = [_number(word) is not None for word in blend]
    if not any(numeric):
        prefixes = [dataset_prefix(word) for word in blend]
        # `corpus.*` names both files of a dataset, which is still one.
        return tuple(
            BlendPart(word, None) for word in (prefixes if prefixes == list(blend) else dict.fromkeys(prefixes))
        )
    if len(blend) % 2 or numeric != [True, False] * (len(blend) // 2):
        raise BlendError("mixes weights and prefixes that do not pair up")
    weights = [float(word) for word in blend[::2]]
    if min(weights) < 0 or sum(weights) <= 0:
        raise BlendError("has weights that are negative or all zero")
    return tuple(BlendPart(dataset_prefix(prefix), weight) for weight, prefix in zip(weights, blend[1::2]))


def named_sets(paths: Sequence[str]) -> dict[str | None, list[str]]:
    """Returns the words of each of several sets by its name, `web=a code=0.3 b 0.7 c`; of one without a name by None.

    A word `NAME=...` begins a set. A relative path that begins like that is written with `./` in front of it.

    >>> named_sets(["web=a", "code=0.3", "b", "0.7", "c"]), named_sets(["a", "b"])
    ({'web': ['a'], 'code': ['0.3', 'b', '0.7', 'c']}, {None: ['a', 'b']})
    """
    sets: dict[str | None, list[str]] = {}
    name: str | None = None
    for word in paths:
        named = _NAMED_WORD.fullmatch(word)
        if named is not None:
            name, word = named.groups()
            if name in sets:
                raise BlendError(f"names {name} twice")
        sets.setdefault(name, []).append(word)
    if len(sets) > 1 and None in sets:
        raise BlendError("has datasets before the first with a name")
    return sets


def named_validation_sets(paths: Sequence[str], names: Sequence[str]) -> tuple[str, ...] | None:
    """Returns the prefixes as sets of their own, each with a name; None where they cannot be, or are already.

    >>> named_validation_sets(["data/web", "data/code"], []), named_validation_sets(["0.5", "a"], ["x"])
    (('web=data/web', 'code=data/code'), None)
    """
    chosen = list(names) or [os.path.basename(path.rstrip("/")) for path in paths]
    if len(chosen) != len(paths) or len(set(chosen)) != len(chosen) or any("=" in path for path in paths):
        return None
    named = tuple(f"{name}={path}" for name, path in zip(chosen, paths))
    return named if all(_NAMED_WORD.fullmatch(word) for word in named) else None


def dataset_prefix(word: str) -> str:
    """Returns the prefix of a dataset of which one of its two files may be named, as completion of a shell does.

    >>> dataset_prefix("corpus_text_document.bin"), dataset_prefix("corpus.idx"), dataset_prefix("corpus")
    ('corpus_text_document', 'corpus', 'corpus')
    """
    stem = word.removesuffix(".bin") if word.endswith(".bin") else word.removesuffix(".idx")
    return word if not stem or os.path.isfile(f"{word}.idx") else stem


def default_cache_folder(prefix: str, object_storage_cache: str | None) -> str:
    """Returns the folder of sample indices that `--data-cache-path` is by default: beside the data, or with what is kept of remote data.

    >>> default_cache_folder("data/corpus", None), default_cache_folder("s3://bucket/corpus", "/scratch")
    ('data/cache', '/scratch/samples')
    """
    if is_remote(prefix):
        return os.path.join(object_storage_cache or ".", "samples")
    return str(Path(prefix).parent / "cache")


def parse_split(text: str) -> tuple[float, float, float]:
    """Returns shares of train, validation and test that sum to 1; omitted shares are 0.

    >>> parse_split("3,1")
    (0.75, 0.25, 0.0)
    """
    shares = [_number(part.strip()) for part in text.split(",")]
    if len(shares) > 3:
        raise BlendError("has more than three shares")
    numbers = [share for share in shares if share is not None]
    if len(numbers) != len(shares) or min(numbers) < 0:
        raise BlendError("has a share that is not a number of at least 0")
    total = sum(numbers)
    if total <= 0:
        raise BlendError("has no share above 0")
    train, valid, test = [number / total for number in numbers] + [0.0] * (3 - len(numbers))
    return train, valid, test


def read_blend_file(path: str) -> list[str]:
    """Reads the words of a `--data-args-path` file; OSError or UnicodeDecodeError if it is no such file."""
    return read_limited_bytes(Path(path), _MAX_BLEND_FILE_BYTES).decode().split()


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
