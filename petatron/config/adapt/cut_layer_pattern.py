"""Cuts the patterns of a model's layers to fewer layers, so that every kind of layer is still there.

The first layers are kept; if they lack a kind of layer (the attention of a hybrid, the experts after dense layers), the last of them
give way to the first layer of each kind that is missing. With fewer layers than kinds, the most frequent kinds are kept.

    M-M-M-M*-M-M-...   to 6 layers   M-M-M*
    [0]*3+[1]*58       to 2 layers   [0, 1]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from petatron.base.errors import ConfigError
from petatron.base.format_text import count_with_noun
from petatron.config import pipeline_stages
from petatron.config.schema import attention_layer_freq
from petatron.config.schema.fields import FieldValue, unflatten_config
from petatron.config.schema.moe_layer_freq import moe_layers

HYBRID, PIPELINE_LAYOUT = "model.hybrid_layer_pattern", "parallel.pipeline_model_parallel_layout"
_NUM_LAYERS = "model.num_layers"
_MARKS = {
    "moe.moe_layer_freq": moe_layers,
    "model.window_attn_skip_freq": lambda config: attention_layer_freq.window_layers(config.model),
    "model.linear_attention_freq": lambda config: attention_layer_freq.linear_layers(config.model),
    "model.no_rope_freq": lambda config: attention_layer_freq.no_rope_layers(config.model),
}
PATTERN_PATHS = (HYBRID, *_MARKS, PIPELINE_LAYOUT)


@dataclass(frozen=True, slots=True)
class LayerCut:
    """The changed patterns, and how many of the kept layers are the first ones of the model."""

    values: Mapping[str, FieldValue]
    num_layers: int
    num_first: int

    def describe(self) -> str:
        """Says which layers were kept."""
        more = self.num_layers - self.num_first
        if self.num_first == 0:
            return f"the first of the most frequent {count_with_noun(more, 'kind')}"
        first = f"its first {self.num_first} layers" if self.num_first != 1 else "its first layer"
        kinds = f"one layer of each of the {more} kinds" if more > 1 else "one layer of the kind"
        return f"{first} and {kinds} that these lack" if more else first


def num_layer_kinds(values: Mapping[str, FieldValue]) -> int:
    """Returns how many different kinds of layers the patterns of a model describe; 1 where they cannot be read."""
    kinds = _layer_kinds(values, every_pattern=True)
    return max(1, len({*kinds}))


def cut_layers(values: Mapping[str, FieldValue], num_layers: int, *, every_pattern: bool) -> LayerCut | None:
    """Returns the patterns for fewer layers; None if there is nothing to cut, or what is given cannot be read.

    A rule such as "every second layer" holds for any number of layers, so that it is left alone unless `every_pattern`.
    """
    kinds = _layer_kinds(values, every_pattern=every_pattern)
    if not 0 < num_layers < len(kinds):
        return None
    kept = _kept_layers(kinds, num_layers)
    changed: dict[str, FieldValue] = {}
    if (pattern := values[HYBRID]) is not None:
        changed[HYBRID] = "".join(str(pattern)[index] for index in kept)
    for path, marks in _marked_layers(values, len(kinds)).items():
        if path == "moe.moe_layer_freq" and pattern is not None:
            continue
        if every_pattern or _is_list(values[path]):
            wanted = [marks[index] for index in kept]
            same = _marked_layers({**values, **changed, _NUM_LAYERS: num_layers}, num_layers).get(path)
            if _is_list(values[path]) or [*(same or ())] != wanted:
                changed[path] = attention_layer_freq.format_layers(wanted)
    if (layout := _cut_layout(values[PIPELINE_LAYOUT], num_layers)) is not None:
        changed[PIPELINE_LAYOUT] = layout
    first = next((place for place, index in enumerate(kept) if place != index), len(kept))
    return LayerCut(changed, num_layers, first) if changed else None


def _is_list(text: FieldValue) -> bool:
    return isinstance(text, str) and "[" in text


def _layer_kinds(values: Mapping[str, FieldValue], *, every_pattern: bool) -> list[Hashable]:
    """Returns the kind of every layer, or nothing if no pattern says more than a rule for all layers."""
    pattern, count = values[HYBRID], values[_NUM_LAYERS]
    length = len(pattern) if isinstance(pattern, str) else count
    if not isinstance(length, int) or length < 1:
        return []
    marked = _marked_layers(values, length)
    shown = {path: marks for path, marks in marked.items() if every_pattern or _is_list(values[path])}
    if not every_pattern and pattern is None and not shown and values[PIPELINE_LAYOUT] is None:
        return []
    columns: list[Sequence[Hashable]] = [*([pattern] if isinstance(pattern, str) else []), *shown.values()]
    return [tuple(column[index] for column in columns) for index in range(length)]


def _marked_layers(values: Mapping[str, FieldValue], length: int) -> dict[str, tuple[bool, ...]]:
    """Returns the marks of the patterns that are set and fit the model."""
    config = unflatten_config({**values, _NUM_LAYERS: length})
    marked: dict[str, tuple[bool, ...]] = {}
    for path, layers in _MARKS.items():
        if values[path] is None:
            continue
        try:
            marked[path] = layers(config)
        except ConfigError:
            continue
    return {path: marks for path, marks in marked.items() if len(marks) == length and any(marks)}


def _kept_layers(kinds: Sequence[Hashable], num_layers: int) -> list[int]:
    """Returns the indices of the layers that are kept, in order."""
    first_of = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    if num_layers < len(first_of):
        frequent = sorted(first_of, key=lambda kind: (-Counter(kinds)[kind], first_of[kind]))[:num_layers]
        return sorted(first_of[kind] for kind in frequent)
    for num_first in range(num_layers, -1, -1):
        missing = [index for kind, index in first_of.items() if kind not in kinds[:num_first]]
        if num_first + len(missing) <= num_layers:
            spare = [index for index in range(num_first, len(kinds)) if index not in missing]
            return sorted([*range(num_first), *missing, *spare[: num_layers - num_first - len(missing)]])
    raise AssertionError("no layers at all lack every kind, and there are fewer kinds than layers")


def _cut_layout(text: FieldValue, num_layers: int) -> str | None:
    """Returns a layout string of as many stages for fewer layers, shared in about the same proportions."""
    if not isinstance(text, str):
        return None
    try:
        stages = pipeline_stages.parse_pipeline_layout(text)
    except pipeline_stages.PipelineLayoutError:
        return None
    counts = [stage.count(pipeline_stages.LAYER) for stage in stages]
    total = sum(counts)
    if total == 0:
        return None
    ends = [round(sum(counts[: index + 1]) * num_layers / total) for index in range(len(counts))]
    shares = [end - start for start, end in zip([0, *ends], ends)]
    predictions = "".join(stages).count(pipeline_stages.PREDICTION)
    body = [pipeline_stages.LAYER * share for share in shares]
    body[0] = pipeline_stages.EMBEDDING + body[0]
    body[-1] += pipeline_stages.PREDICTION * predictions + pipeline_stages.LOSS
    return "|".join(body)
