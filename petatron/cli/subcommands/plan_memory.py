"""`petatron plan memory`: predicts the memory of every pipeline rank, whether it fits a device, and what would.

This is the command line, which imports no torch, so that its problems are reported at once. `plan_memory_report.py` predicts.
"""

from __future__ import annotations

from collections.abc import Sequence

from petatron.base.errors import Problem
from petatron.cli.train import read_settings_alone, with_preset
from petatron.config import resolve_config, without_problems

USAGE = """usage: petatron plan memory [PRESET] [--config FILE] [flags of petatron train] [--device-memory-gb N]

Predicts what every pipeline rank will hold at its worst moment, by kind. With a device's memory (that of the GPU here, or
--device-memory-gb) says whether it fits, and if not the three cheapest changes that would. A pipeline is planned full where
no --global-batch-size says how many micro-batches a step has.

For example: petatron plan memory llama3-8b --bf16 --vocab-size 128256 --tp 2 --dp 4 --device-memory-gb 80
"""
_DEVICE_MEMORY_FLAG = "--device-memory-gb"


def main(argv: Sequence[str]) -> int:
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    flags, capacity, size_problems = _extract_device_memory(argv)
    loaded, problems = resolve_config(with_preset(flags), require_training=False, read_checkpoint=read_settings_alone)
    resolved = without_problems(loaded, [*size_problems, *problems])
    from petatron.cli.subcommands.plan_memory_report import report

    return report(resolved, capacity)


def _extract_device_memory(argv: Sequence[str]) -> tuple[list[str], int | None, list[Problem]]:
    """Returns the other words, the device's bytes if given, and their problems."""
    flags: list[str] = []
    given: str | None = None
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name == _DEVICE_MEMORY_FLAG:
            given = value if equals else next(words, "")
        else:
            flags.append(word)
    if given is None:
        return flags, None, []
    try:
        size = float(given)
    except ValueError:
        size = 0.0
    if not 0.0 < size < float("inf"):
        return (
            flags,
            None,
            [
                Problem(
                    _DEVICE_MEMORY_FLAG,
                    given,
                    "is not a size above 0",
                    f"Write, for example, {_DEVICE_MEMORY_FLAG} 80.",
                )
            ],
        )
    return flags, int(size * 1e9), []
