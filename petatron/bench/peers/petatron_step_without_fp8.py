"""Our own step without FP8: the same run without its FP8 flags, measured against itself on the same device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petatron.base.errors import Problem
from petatron.bench.peers import OWN_BF16, BenchSpec
from petatron.bench.peers.petatron_step import PetatronContender
from petatron.config import RunConfig
from petatron.config.schema.fields import fields_by_name

_FP8 = "fp8_"


def problems(spec: BenchSpec) -> Sequence[Problem]:
    if spec.run.precision.fp8_format is not None:
        return ()
    rule = "compares FP8 with bf16, and this run has no FP8 to compare"
    return [Problem("--against", OWN_BF16, rule, "Add --fp8-recipe tensorwise, for instance, or leave it out.")]


def build(spec: BenchSpec) -> PetatronContender:
    return PetatronContender(replace(spec, run=without_fp8(spec.run), fp8_recipe=None))


def without_fp8(run: RunConfig) -> RunConfig:
    """Returns the run with every FP8 setting at its default.

    >>> from petatron.validate import load_config
    >>> run = load_config(["--fp8-hybrid", "--bf16"], preset="tiny-llama", require_training=False).config
    >>> without_fp8(run).precision.fp8_format is None
    True
    """
    for field in fields_by_name().values():
        if field.name.startswith(_FP8):
            section = replace(getattr(run, field.section), **{field.name: field.default})
            run = replace(run, **{field.section: section})
    return run
