"""Which layers have a window, linear attention, or no rotary positions.

These are the values of `--window-attn-skip-freq`, `--linear-attention-freq` and `--no-rope-freq`. A number N marks every N-th layer:
layers N - 1, 2N - 1, ... have no window, attention, or no rotary positions. Anything else is one 0 or 1 per layer in Python's notation
for lists, as for `--moe-layer-freq`; 1 stands for a window, for linear attention, or for no positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from petatron.base.errors import ConfigError, Problem
from petatron.config.schema.fields import flag_name
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.moe_layer_freq import MoELayerFreqError, parse_moe_layer_freq

_FIX = "Give a number, or one 0 or 1 per layer such as ([1]*3+[0])*8."


def window_layers(model: RawModelConfig) -> tuple[bool, ...]:
    """Returns for each layer whether it has the window.

    >>> window_layers(RawModelConfig(num_layers=4, window_size=8, window_attn_skip_freq="2"))
    (True, False, True, False)
    """
    if model.window_size is None:
        return (False,) * model.num_layers
    if model.window_attn_skip_freq is None:
        return (True,) * model.num_layers
    every, pattern = _parsed("window_attn_skip_freq", model)
    return tuple((layer + 1) % every != 0 for layer in range(model.num_layers)) if pattern is None else pattern


def linear_layers(model: RawModelConfig) -> tuple[bool, ...]:
    """Returns for each layer whether it has linear attention.

    >>> linear_layers(RawModelConfig(num_layers=4, experimental_attention_variant="gated_delta_net", linear_attention_freq="4"))
    (True, True, True, False)
    """
    if model.experimental_attention_variant is None:
        return (False,) * model.num_layers
    every, pattern = _parsed("linear_attention_freq", model)
    return tuple((layer + 1) % every != 0 for layer in range(model.num_layers)) if pattern is None else pattern


def no_rope_layers(model: RawModelConfig) -> tuple[bool, ...]:
    """Returns for each layer whether it has no rotary positions although others do.

    >>> no_rope_layers(RawModelConfig(num_layers=4, no_rope_freq="[0]*3+[1]"))
    (False, False, False, True)
    """
    if model.no_rope_freq is None:
        return (False,) * model.num_layers
    every, pattern = _parsed("no_rope_freq", model)
    return tuple((layer + 1) % every == 0 for layer in range(model.num_layers)) if pattern is None else pattern


def format_layers(marked: Sequence[bool]) -> str:
    """Returns the pattern of marked layers.

    >>> format_layers([True, False])
    '[1, 0]'
    """
    return str([int(mark) for mark in marked])


def layer_pattern_problems(name: str, model: RawModelConfig) -> Iterator[Problem]:
    """Yields problems of one pattern, if it is set."""
    text: str | None = getattr(model, name)
    if text is None:
        return
    try:
        pattern = parse_moe_layer_freq(text)
    except MoELayerFreqError as error:
        yield Problem(flag_name(name), text or "''", str(error), _FIX)
        return
    if isinstance(pattern, int):
        if pattern < 1:
            yield Problem(flag_name(name), text, "is below 1", _FIX)
    elif set(pattern) - {0, 1}:
        yield Problem(flag_name(name), text, "holds a number that is neither 0 nor 1", _FIX)
    elif model.num_layers > 0 and len(pattern) != model.num_layers:
        rule = f"is a pattern of {len(pattern)} layers, but --num-layers is {model.num_layers}"
        yield Problem(flag_name(name), text, rule, "Write one 0 or 1 per layer.")


def _parsed(name: str, model: RawModelConfig) -> tuple[int, tuple[bool, ...] | None]:
    """Returns (N, None) or (0, the pattern)."""
    problems = list(layer_pattern_problems(name, model))
    if problems:
        raise ConfigError(problems)
    pattern = parse_moe_layer_freq(getattr(model, name))
    return (pattern, None) if isinstance(pattern, int) else (0, tuple(bit == 1 for bit in pattern))
