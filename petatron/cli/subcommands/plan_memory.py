"""`petatron plan memory`: predicts the memory of every pipeline rank, whether it fits a device, and what would.

This is the command line, which imports no torch, so that its problems are reported at once. `plan_memory_report.py` predicts.
"""

from __future__ import annotations

from collections.abc import Sequence

from petatron.base.errors import Problem
from petatron.cli.train import load_planned

USAGE = """usage: petatron plan memory [PRESET] [--config FILE] [flags of petatron train] [--device-memory-gb N] [--host-memory-gb N]

Predicts what every pipeline rank will hold at its worst moment, by kind. With a device's memory (that of the GPU here, or
--device-memory-gb) says whether it fits, and if not the three fastest changes that would: settings, and other layouts of as many
ranks. What is offloaded is pinned in the host memory of a node, which its ranks share (8, or those of a node of --nnodes): that of
this machine if it has a GPU, or --host-memory-gb, or 1,000 GB. A pipeline is planned full where no --global-batch-size says how
many micro-batches a step has.

For example: petatron plan memory llama3-8b --bf16 --vocab-size 128256 --tp 2 --dp 4 --device-memory-gb 80
"""
_DEVICE_FLAG, _HOST_FLAG = "--device-memory-gb", "--host-memory-gb"
_EXAMPLES = {_DEVICE_FLAG: 80, _HOST_FLAG: 2000}


def main(argv: Sequence[str]) -> int:
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    flags, sizes, size_problems = _extract_sizes(argv)
    resolved = load_planned(flags, size_problems)
    from petatron.cli.subcommands.plan_memory_report import report

    return report(resolved, sizes.get(_DEVICE_FLAG), sizes.get(_HOST_FLAG))


def _extract_sizes(argv: Sequence[str]) -> tuple[list[str], dict[str, int], list[Problem]]:
    """Returns the other words, the bytes of device and host that are given, and their problems."""
    flags: list[str] = []
    sizes: dict[str, int] = {}
    problems: list[Problem] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in (_DEVICE_FLAG, _HOST_FLAG):
            flags.append(word)
            continue
        given = value if equals else next(rest, "")
        try:
            size = float(given)
        except ValueError:
            size = 0.0
        if 0.0 < size < float("inf"):
            sizes[name] = int(size * 1e9)
        else:
            fix = f"Write, for example, {name} {_EXAMPLES[name]}."
            problems.append(Problem(name, given, "is not a size above 0", fix))
    return flags, sizes, problems
