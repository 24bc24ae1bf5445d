"""Parses `--moe-layer-freq`: which layers are MoE layers.

A number N makes layers 0, N, 2N, ... MoE. Anything else is one 0 or 1 per layer, in Python's notation for lists: brackets,
`+` to join and `*` to repeat. Python's own parser reads it, but only these forms are accepted and nothing is evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from petatron.base.errors import Problem, raise_problems
from petatron.base.untrusted_files import is_count
from petatron.config.schema.sections.hybrid import EXPERTS
from petatron.config.schema.setting_metadata import RunSettings

_FIX = "Give a number, or one 0 or 1 per layer such as ([0]*1+[1]*23)."
# Far above any model; keeps `[1]*999999999` from filling memory before it is refused.
MAX_PATTERN_LAYERS = 100_000


class MoELayerFreqError(ValueError):
    """What is wrong with a pattern, as the predicate of a sentence about it."""


def moe_layers(config: RunSettings) -> tuple[bool, ...]:
    """Returns for each layer whether it is an MoE layer; `ConfigError` if the pattern does not fit the model.

    >>> from petatron.config import ModelConfig, MoEConfig, RunConfig
    >>> moe_layers(RunConfig(model=ModelConfig(num_layers=3), moe=MoEConfig(num_experts=2, moe_layer_freq="[0]+[1]*2")))
    (False, True, True)
    """
    layers = config.model.num_layers
    if config.moe.num_experts is None:
        return (False,) * layers
    if config.model.hybrid_layer_pattern is not None:
        return tuple(symbol == EXPERTS for symbol in config.model.hybrid_layer_pattern)
    raise_problems(moe_layer_freq_problems(config))
    return _marked(config)


def moe_layer_freq_problems(config: RunSettings) -> Iterator[Problem]:
    """Yields problems of the pattern, for a model with experts; the layers of a hybrid are in a pattern of their own."""
    if config.model.hybrid_layer_pattern is not None:
        return
    problems = list(pattern_problems("moe_layer_freq", config.moe.moe_layer_freq, config.model.num_layers, _FIX))
    yield from problems
    if not problems and not any(_marked(config)):
        rule = "leaves no layer for the experts"
        yield Problem("--moe-layer-freq", config.moe.moe_layer_freq, rule, "Leave --num-experts out, or write a 1.")


def pattern_problems(name: str, text: str, num_layers: int, fix: str) -> Iterator[Problem]:
    """Yields problems of one pattern: a number from 1 on, or one 0 or 1 for each layer."""
    flag = f"--{name.replace('_', '-')}"
    try:
        pattern = parse_moe_layer_freq(text)
    except MoELayerFreqError as error:
        yield Problem(flag, text or "''", str(error), fix)
        return
    if isinstance(pattern, int):
        if pattern < 1:
            every = "Use 1 for experts in every layer." if name == "moe_layer_freq" else fix
            yield Problem(flag, text, "is below 1", every)
    elif set(pattern) - {0, 1}:
        yield Problem(flag, text, "holds a number that is neither 0 nor 1", fix)
    elif num_layers > 0 and len(pattern) != num_layers:
        rule = f"is a pattern of {len(pattern)} layers, but --num-layers is {num_layers}"
        yield Problem(flag, text, rule, "Write one 0 or 1 per layer.")


def every_layer_has_experts(config: RunSettings) -> bool:
    """Whether no layer has an MLP instead; False while the pattern is a problem of its own."""
    if config.moe.num_experts is None or config.model.hybrid_layer_pattern is not None:
        return False
    return all(_marked(config))


def _marked(config: RunSettings) -> tuple[Any, ...]:
    return marked_from_the_first(config.moe.moe_layer_freq, {"num_layers": config.model.num_layers})


def marked_from_the_first(text: Any, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns for each layer whether it is marked, where N marks layers 0, N, 2N, ...; to compare patterns by what they mean.

    >>> marked_from_the_first("2", {"num_layers": 3}) == marked_from_the_first("[1, 0, 1]", {"num_layers": 3})
    True
    """
    return _marks("1" if text is None else text, settings, lambda layer, number: layer % number == 0)


def marked_by_multiples(text: Any, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same where N marks layers N - 1, 2N - 1, ..., and no pattern marks none."""
    return _marks(text, settings, lambda layer, number: (layer + 1) % number == 0)


def unmarked_by_multiples(text: Any, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same where N marks all layers but these."""
    return _marks(text, settings, lambda layer, number: (layer + 1) % number != 0)


def _marks(text: Any, settings: Mapping[str, Any], marks: Callable[[int, int], bool]) -> tuple[Any, ...]:
    """Returns the mark of each layer; a pattern that means nothing stands for itself."""
    layers = settings.get("num_layers", 0)
    if text is None:
        return ()
    try:
        pattern = parse_moe_layer_freq(str(text))
    except MoELayerFreqError:
        return ("", text)
    if isinstance(pattern, int):
        known = is_count(layers, 1) and layers <= MAX_PATTERN_LAYERS and pattern > 0
        return tuple(marks(layer, pattern) for layer in range(layers)) if known else ("", text, layers)
    return tuple(bool(bit) for bit in pattern)


def parse_moe_layer_freq(text: str) -> int | tuple[int, ...]:
    """Returns the number, or the list that the expression denotes."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error) if isinstance(error, MoELayerFreqError) else "is neither a number nor a list of 0 and 1"
        raise MoELayerFreqError(reason) from None


def _value(node: ast.expr) -> int | tuple[int, ...]:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
        case ast.List(elts=items):
            numbers = [_value(item) for item in items]
            if all(isinstance(number, int) for number in numbers):
                return tuple(number for number in numbers if isinstance(number, int))
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _list(left) + _list(right)
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            unit, count = (left, right) if not isinstance(left, ast.Constant) else (right, left)
            times, items = _value(count), _list(unit)
            if isinstance(times, int) and times * len(items) > MAX_PATTERN_LAYERS:
                raise MoELayerFreqError(f"has more than {MAX_PATTERN_LAYERS} layers")
            if isinstance(times, int):
                return items * times
    raise MoELayerFreqError("is neither a number nor a list of 0 and 1")


def _list(node: ast.expr) -> tuple[int, ...]:
    value = _value(node)
    if isinstance(value, int):
        raise MoELayerFreqError("adds or repeats a number where a list is needed")
    return value
