"""`--moe-layer-freq`: which layers are mixtures of experts, and what is not a pattern."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.config import ModelConfig, MoEConfig, RunConfig
from petatron.config.schema.moe_layer_freq import (
    MoELayerFreqError,
    moe_layer_freq_problems,
    moe_layers,
    parse_moe_layer_freq,
)


def config_with(pattern: str, *, layers: int, experts: int | None = 4) -> RunConfig:
    return RunConfig(model=ModelConfig(num_layers=layers), moe=MoEConfig(num_experts=experts, moe_layer_freq=pattern))


@pytest.mark.parametrize(
    ("pattern", "layers", "expected"),
    [
        ("1", 3, "111"),
        ("2", 5, "10101"),
        (" 3 ", 4, "1001"),
        ("([0]*1+[1]*3)", 4, "0111"),
        ("[0,1]*2", 4, "0101"),
        ("2*[1] + [0]", 3, "110"),
        ("([0]+[1]*2)*2", 6, "011011"),
        ("[0]*0+[1]", 1, "1"),
    ],
)
def test_pattern(pattern: str, layers: int, expected: str):
    assert moe_layers(config_with(pattern, layers=layers)) == tuple(bit == "1" for bit in expected)


def test_a_dense_model_has_no_mixtures_whatever_the_pattern():
    assert moe_layers(config_with("nonsense", layers=2, experts=None)) == (False, False)


NOT_A_LIST = "is neither a number nor a list of 0 and 1"


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("", NOT_A_LIST),
        ("often", NOT_A_LIST),
        ("[0]*", NOT_A_LIST),
        ("[0", NOT_A_LIST),
        ("1.5", NOT_A_LIST),
        ("[True]", NOT_A_LIST),
        ("[[1]]", NOT_A_LIST),
        ("[1]-[0]", NOT_A_LIST),
        ("__import__('os').getcwd()", NOT_A_LIST),
        ("[x for x in (1,)]", NOT_A_LIST),
        ("(" * 500 + "[1]" + ")" * 500, NOT_A_LIST),
        ("[0]+" * 20000 + "[1]", NOT_A_LIST),
        ("1+[0]", "adds or repeats a number where a list is needed"),
        ("3*3", "adds or repeats a number where a list is needed"),
        ("[1]*999999999", "has more than 100000 layers"),
    ],
)
def test_not_a_pattern(pattern: str, reason: str):
    with pytest.raises(MoELayerFreqError, match=reason):
        parse_moe_layer_freq(pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("0", "--moe-layer-freq 0 is below 1. Use 1 for experts in every layer."),
        ("-2", "--moe-layer-freq -2 is below 1. Use 1 for experts in every layer."),
        (
            "[1]*3",
            "--moe-layer-freq [1]*3 is a pattern of 3 layers, but --num-layers is 4. Write one 0 or 1 per layer.",
        ),
        (
            "[0,1,2,1]",
            "--moe-layer-freq [0,1,2,1] holds a number that is neither 0 nor 1. "
            "Give a number, or one 0 or 1 per layer such as ([0]*1+[1]*23).",
        ),
        ("[0]*4", "--moe-layer-freq [0]*4 leaves no layer for the experts. Leave --num-experts out, or write a 1."),
        ("", f"--moe-layer-freq '' {NOT_A_LIST}. Give a number, or one 0 or 1 per layer such as ([0]*1+[1]*23)."),
    ],
)
def test_a_pattern_that_does_not_fit(pattern: str, message: str):
    config = config_with(pattern, layers=4)
    assert [str(problem) for problem in moe_layer_freq_problems(config)] == [message]
    with pytest.raises(ConfigError):
        moe_layers(config)


_BITS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(_BITS, st.integers(1, 5)), min_size=1, max_size=5))
def test_any_sum_of_repeats_means_what_python_means(parts: list[tuple[list[int], int]]):
    text = "(" + "+".join(f"{bits}*{times}" for bits, times in parts) + ")"
    assert parse_moe_layer_freq(text) == tuple(bit for bits, times in parts for bit in bits * times)
