"""The number of calls of Python functions per layer: what the host's time is made of, and the same on every machine."""

from __future__ import annotations

import pytest

from petatron.bench.measure.host_time import HostCost, measure_host
from tests.longform import diagonal

TINY = (
    "--preset tiny-llama --hidden-size 64 --num-attention-heads 4 --num-query-groups 4 --vocab-size 256 --seq-length 16 "
    "--micro-batch-size 2 --device cpu "
)
# Flags, and the most calls of a layer forward and backward. There were 284 + 429 once, 297 + 552 of GPT's, 314 + 510 with qk-norm.
CASES = {
    "llama": ("--no-bf16", 159, 98),
    "one sequence": ("--no-bf16 --micro-batch-size 1", 159, 98),
    "gpt": ("--no-bf16 --normalization LayerNorm --activation gelu --add-bias-linear", 161, 122),
    "qk-norm": ("--no-bf16 --qk-layernorm", 191, 136),
}


def host_calls(flags: list[str]) -> HostCost:
    return HostCost(**measure_host(flags, steps=1)["calls"])


@diagonal(2)
@pytest.mark.parametrize("case", CASES)
def test_calls_per_layer_are_bounded(case: str):
    flags, forward, backward = CASES[case]
    calls = host_calls((TINY + flags).split())
    assert 0 < calls.forward <= forward and 0 < calls.backward <= backward, calls


def test_micro_batches_cost_no_more_than_their_layers():
    """What a step does once is not done again for each micro-batch."""
    once, thrice = (host_calls([*TINY.split(), "--no-bf16", *more]) for more in ([], ["--global-batch-size", "6"]))
    assert thrice.forward == 3 * once.forward and thrice.backward <= 3 * once.backward
    assert thrice.elsewhere < 2.5 * once.elsewhere


def test_the_cost_of_a_layer_is_that_of_two_more():
    assert HostCost.of((31.0, 80.0), (51.0, 120.0)) == HostCost(10.0, 10.0, 40.0)
