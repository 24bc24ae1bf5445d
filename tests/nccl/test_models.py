"""Models that the proof matrix has not, over NCCL: Kimi-Linear, gpt-oss, depths of multi-token prediction at pipeline boundaries, and
soft caps, sinks, linear biases and chunks under context parallelism.

Models and layouts are those of `tests/parity/models`: every tensor of the small model in float64, and a wide one in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from petatron.verify.compare_traces import compare_traces
from tests.dist import RankPool
from tests.longform import cases_over_nccl
from tests.nccl.layouts import assert_close, train, wide_flags, wide_reference, wide_run
from tests.parity.harness import BOUNDS, TINY, layout_run, reference, with_batch
from tests.parity.models import test_conversations, test_gpt_oss, test_kimi, test_layer_variants, test_mtp

VARIANTS = [
    ("sinks of zero, capped", "cp2"),
    ("sinks of zero, capped", "cp2-gather"),
    ("sinks of zero, capped", "cp2-a2a"),
    ("norms on both sides, caps, scales", "tp2-cp2"),
    ("learned sinks", "cp2-a2a"),
    ("learned sinks", "cp2-documents"),
    ("chunks, temperature and norms without weights", "cp2"),
    ("linear biases", "cp2-gather"),
    ("linear biases", "tp2-cp2"),
]


@dataclass(frozen=True, slots=True)
class Case:
    """A model in a layout."""

    name: str
    model: str
    layout: str
    world_size: int


def _cases() -> list[Case]:
    found = [Case(f"kimi {layout}", model, layout, size) for layout, size, model in cases_over_nccl(test_kimi.LAYOUTS)]
    found += [
        Case(f"gpt-oss {layout}", test_gpt_oss.MODEL, layout, size)
        for layout, size in cases_over_nccl(test_gpt_oss.LAYOUTS)
    ]
    found += [Case(f"mtp {layout}", model, layout, size) for layout, size, model in cases_over_nccl(test_mtp.LAYOUTS)]
    found += [
        Case(f"conversations {layout}", model, layout, size)
        for layout, model, size in cases_over_nccl(test_conversations.CASES)
    ]
    found += [Case(f"{model} {layout}", *test_layer_variants.flags_of(model, layout)) for model, layout in VARIANTS]
    return found


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_a_layout_over_nccl_equals_one_process(gpu_ranks: RankPool, case: Case):
    model = with_batch(case.model, case.layout, world_size=case.world_size, dtype="float64")
    small = layout_run(f"{case.layout} --device cuda", model, world_size=case.world_size, dtype="float64")
    wide = wide_flags(f"{TINY} {case.model}")
    runs = [small, wide_run(wide, case.layout, world_size=case.world_size)]
    wanted = wide_reference(gpu_ranks, wide)
    answers = [traces for traces, _ in gpu_ranks.run(train, case.world_size, runs, timeout_s=90)]
    verdict = compare_traces([reference(model, "float64")], [own for own, _ in answers], BOUNDS["float64"])
    assert len(verdict.steps) == small.train.train_iters
    assert verdict.agrees, verdict.first_departure
    for _, own in answers:
        assert_close(own, wanted)
