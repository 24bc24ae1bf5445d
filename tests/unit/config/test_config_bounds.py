"""Every number of the schema has bounds: a slipped digit is one problem that names its flag, never a traceback."""

from __future__ import annotations

import time

import pytest

from petatron.base.errors import ConfigError
from petatron.config.derived_defaults import derive_defaults
from petatron.config.schema.fields import FieldInfo, all_fields, replace_fields
from petatron.train.stop_monitor import time_limit_left_s
from petatron.validate import check_config, load_config, resolve_config

NUMBERS = [info for info in all_fields() if info.kind in ("int", "float")]
TRAINING = ["--preset", "tiny-llama", "--mock-data", "--lr", "1e-3", "--train-iters", "5", "--eval-iters", "2"]


def _takes(info: FieldInfo, value: float) -> bool:
    """Whether a value is within the bounds of a number: few take negative ones."""
    assert info.bounds is not None
    return info.bounds.low <= value <= info.bounds.high


def test_every_number_declares_bounds_that_hold_its_default():
    for info in NUMBERS:
        assert info.bounds is not None, f"{info.path} declares no bounds: give it a type of numeric_bounds.py"
        if isinstance(info.default, int | float):
            assert info.bounds.violation(info.default) is None, info.path


@pytest.mark.parametrize("text", [str(10**20), "-1", "1e300", "inf", "nan"])
def test_every_number_refuses_what_is_out_of_bounds(text: str):
    asked = [info for info in NUMBERS if info.kind == "float" or text.lstrip("-").isdigit()]
    _, problems = resolve_config([*TRAINING, *(f"{info.flag}={text}" for info in asked)])
    expected = {info.flag for info in asked if not _takes(info, float(text))}
    assert expected - {problem.where for problem in problems} == set()


@pytest.mark.parametrize("value", [10**20, -1])
def test_each_number_alone_is_a_problem_also_when_it_was_never_text(value: int):
    base = load_config(TRAINING).config
    for info in (info for info in NUMBERS if not _takes(info, value)):
        config = replace_fields(base, {info.path: (value,) if info.is_list else value})
        config, _ = derive_defaults(config, chosen_paths={info.path})
        assert info.flag in {problem.where for problem in check_config(config)}, f"{info.flag} {value}"


def test_a_time_limit_of_centuries_is_none():
    """Megatron's scripts write 235000000 minutes where a run shall not end by itself."""
    config = load_config([*TRAINING, "--exit-duration-in-mins", "235000000"]).config
    left_s = time_limit_left_s(config.train, time.monotonic())
    assert left_s is not None and left_s > 1e10


def test_a_slipped_digit_names_the_flag_and_the_bound():
    with pytest.raises(ConfigError) as raised:
        load_config([*TRAINING, "--num-layers", "99999999999999999999"])
    assert str(raised.value) == (
        "1 problem in this configuration:\n  --num-layers 99999999999999999999 is above 10,000, the most it takes. "
        "It is: Number of transformer layers."
    )
