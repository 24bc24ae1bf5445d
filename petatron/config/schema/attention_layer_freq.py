"""Parses the per-layer settings of attention: which layers have a window, linear attention, or no rotary positions.

These are the values of `--window-attn-skip-freq`, `--linear-attention-freq` and `--no-rope-freq`. A number N marks every N-th layer:
layers N - 1, 2N - 1, ... have no window, attention, or no rotary positions. Anything else is one 0 or 1 per layer in Python's notation
for lists, as for `--moe-layer-freq`; 1 stands for a window, for linear attention, or for no positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from petatron.base.errors import Problem, raise_problems
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.moe_layer_freq import marked_by_multiples, pattern_problems, unmarked_by_multiples
from petatron.config.schema.sections.linear_attention import has_linear_variant

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
    return _marked_layers("window_attn_skip_freq", model, unmarked_by_multiples)


def linear_layers(model: RawModelConfig) -> tuple[bool, ...]:
    """Returns for each layer whether it has linear attention.

    >>> linear_layers(RawModelConfig(num_layers=4, experimental_attention_variant="gated_delta_net", linear_attention_freq="4"))
    (True, True, True, False)
    """
    if not has_linear_variant(model):
        return (False,) * model.num_layers
    return _marked_layers("linear_attention_freq", model, unmarked_by_multiples)


def no_rope_layers(model: RawModelConfig) -> tuple[bool, ...]:
    """Returns for each layer whether it has no rotary positions although others do.

    >>> no_rope_layers(RawModelConfig(num_layers=4, no_rope_freq="[0]*3+[1]"))
    (False, False, False, True)
    """
    if model.no_rope_freq is None:
        return (False,) * model.num_layers
    return _marked_layers("no_rope_freq", model, marked_by_multiples)


def format_layers(marked: Sequence[bool]) -> str:
    """Returns the pattern of marked layers.

    >>> format_layers([True, False])
    '[1, 0]'
    """
    return str([int(mark) for mark in marked])


def layer_pattern_problems(name: str, model: RawModelConfig) -> Iterator[Problem]:
    """Yields problems of one pattern, if it is set."""
    text: str | None = getattr(model, name)
    return iter(()) if text is None else pattern_problems(name, text, model.num_layers, _FIX)


def _marked_layers(
    name: str, model: RawModelConfig, marks: Callable[[Any, Mapping[str, Any]], tuple[bool, ...]]
) -> tuple[bool, ...]:
    raise_problems(layer_pattern_problems(name, model))
    return marks(getattr(model, name), {"num_layers": model.num_layers})
