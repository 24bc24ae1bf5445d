"""Writes the golden numbers of `tests/golden/megatron_parser`: what a Megatron derives from random flags.

    python -m tests.megatron_parser.make_golden CHECKOUT [--accepted 300] [--ramps]

CHECKOUT is any folder with `megatron/core` and `megatron/training` of one version from 0.17 on: a clone of Megatron-LM, or the published
wheel, unpacked (from 0.17 on it has both; no GPU, Apex or Transformer Engine is needed):

    pip download --no-deps --ignore-requires-python megatron-core==0.19.2
    unzip megatron_core-0.19.2-*.whl -d CHECKOUT

Cases are drawn one after the other (`random_flags.py`) until Megatron has accepted so many. `--ramps` draws --rampup-batch-size, which
0.17 was the last version to obey. The file holds the number of every case and what was derived, no text of Megatron's; a case has the
numbers that differ from those of most cases. Flags follow from the case, and a digest of all tells that they are still the same.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from tests.megatron_parser.random_flags import command_line
from tests.megatron_parser.run_parser import RefusedError, UnknownFlagError, derived_numbers, open_megatron

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron_parser"


def main() -> None:
    """Draws cases, runs them and writes the file of this Megatron's version."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--accepted", type=int, default=300)
    parser.add_argument("--ramps", action="store_true")
    parser.add_argument("--reasons", action="store_true", help="print why Megatron refuses each case")
    options = parser.parse_args()
    version = open_megatron(options.checkout)
    accepted: list[tuple[int, Any]] = []
    refused: list[int] = []
    digest = 0
    case = -1
    while len(accepted) < options.accepted:
        case += 1
        flags, world_size = command_line(case, ramps=options.ramps)
        digest = crc32(" ".join(flags).encode(), digest)
        try:
            accepted.append((case, as_json(derived_numbers(flags, world_size))))
        except RefusedError as error:
            # Older versions do not have every flag.
            if not (options.ramps and isinstance(error, UnknownFlagError)):
                refused.append(case)
            if options.reasons:
                print(case, error)
    usual = most_common([numbers for _, numbers in accepted])
    names = sorted({name for _, numbers in accepted for name in numbers})
    rows = [[case, *_unusual(numbers, names, usual)] for case, numbers in accepted]
    document = {
        "megatron": version,
        "ramps": options.ramps,
        "cases": case + 1,
        "flags_digest": digest,
        "refused": refused,
        "names": names,
        "usual": usual,
        "accepted": rows,
    }
    write(GOLDEN / f"{version}.json", document)
    print(f"{version}: {len(accepted)} of {case + 1} cases accepted")


def _unusual(numbers: Mapping[str, Any], names: list[str], usual: Mapping[str, Any]) -> Iterator[Any]:
    """Yields index and value of each number that is not the usual one; null where there is none, and most cases have one."""
    for index, name in enumerate(names):
        if numbers.get(name) != usual.get(name):
            yield index
            yield numbers.get(name)


def as_json(value: Any) -> Any:
    """Returns a number as it will be read: plain, with enums by name."""
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return (
        str(value).removeprefix("torch.")
        if isinstance(value, str | torch.dtype)
        else str(getattr(value, "name", value))
    )


def most_common(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the value that most cases have of each number, if more than half of them have it."""
    usual = {}
    for name in sorted({name for numbers in cases for name in numbers}):
        text, count = Counter(json.dumps(numbers[name]) for numbers in cases if name in numbers).most_common(1)[0]
        if count > len(cases) / 2:
            usual[name] = json.loads(text)
    return usual


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Writes one case per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, value in document.items():
        if isinstance(value, list):
            lines = (",\n" if name == "accepted" else ",").join(json.dumps(row, separators=(",", ":")) for row in value)
            parts.append(f'"{name}": [\n{lines}\n]')
        else:
            parts.append(f'"{name}": {json.dumps(value)}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
