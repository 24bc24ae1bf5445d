"""`--toy`: the model of a preset, a file or a folder at a size that a laptop trains in seconds.

What makes the model what it is stays: kinds of layers and their order, experts and how tokens are routed to them, latent attention, sharing
of key/value heads, windows, scaled positions, multi-token prediction, factors, norms, activations, dropout. Sizes shrink, none grows:
widths, heads, experts, layers, vocabulary, the length of samples. All sizes split over 2, 4 and 8 ranks. A flag that the user types wins,
and sizes that depend on it follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.config.adapt.cut_layer_pattern import HYBRID, LayerCut, cut_layers, num_layer_kinds
from petatron.config.derived_defaults import MOCK_VOCAB_SIZE
from petatron.config.schema.fields import FieldValue, all_fields, fields_by_name
from petatron.config.schema.sections.rope import LongRopeFactorError, format_longrope_factors, parse_longrope_factors
from petatron.config.schema.setting_metadata import ToySize

_LAYERS, _HEADS, _POSITIONS = 4, 8, 2048


def _toy_size(name: str) -> int:
    """Returns the most that is left of a size."""
    return fields_by_name()[name].notes_of(ToySize)[0].limit


class _ToyValues:
    """Values by name while they shrink; a typed one stays as it is."""

    def __init__(self, values: Mapping[str, FieldValue], typed: Mapping[str, FieldValue]) -> None:
        self.before, self.values = values, {**values, **typed}
        self.changed: dict[str, FieldValue] = {}
        self._typed = typed

    def __getitem__(self, name: str) -> Any:
        return self.values[fields_by_name()[name].path]

    def original(self, name: str) -> Any:
        """Returns the value of preset, file or folder."""
        return self.before[fields_by_name()[name].path]

    def is_typed(self, name: str) -> bool:
        return fields_by_name()[name].path in self._typed

    def set(self, name: str, value: FieldValue) -> None:
        path = fields_by_name()[name].path
        if path not in self._typed and self.values[path] != value:
            self.values[path] = self.changed[path] = value

    def lower(self, name: str, limit: int | None = None) -> None:
        """Lowers a number that is set and above the limit, or above the size of a toy that is declared with it."""
        value = self[name]
        limit = _toy_size(name) if limit is None else limit
        if isinstance(value, int) and value > limit:
            self.set(name, limit)


def toy_values(
    values: Mapping[str, FieldValue], typed: Mapping[str, FieldValue], *, has_tokenizer: bool
) -> tuple[dict[str, FieldValue], LayerCut | None]:
    """Returns what `--toy` changes in the values of preset, files and folder, and how layers were cut."""
    toy = _ToyValues(values, typed)
    cut = _shrink_layers(toy)
    for shrink in (_shrink_attention, _shrink_linear_attention, _shrink_experts, _shrink_positions):
        shrink(toy)
    for info in all_fields():
        for note in info.notes_of(ToySize):
            toy.lower(info.name, note.limit)
    _shrink_longrope(toy)
    _shrink_images(toy)
    if has_tokenizer:
        toy.set("vocab_size", None)  # the tokenizer's
    else:
        toy.lower("vocab_size", MOCK_VOCAB_SIZE)
        toy.lower("image_token_id", (toy["vocab_size"] or MOCK_VOCAB_SIZE) - 1)
    return toy.changed, cut


def _shrink_layers(toy: _ToyValues) -> LayerCut | None:
    """Keeps a layer of each kind, and as many as the pipeline's stages share evenly."""
    before = toy.before
    pattern = before[HYBRID]
    number = current = len(pattern) if isinstance(pattern, str) else toy["num_layers"]
    if not toy.is_typed("num_layers"):
        stages = toy["pipeline_model_parallel_size"] * (toy["num_virtual_stages_per_pipeline_rank"] or 1)
        stages *= 2 if toy["pipeline_schedule"] == "zb-v" and not toy["num_virtual_stages_per_pipeline_rank"] else 1
        least = max(_LAYERS, num_layer_kinds(before) + (2 if pattern is not None else 0))
        number = min(current, -(-least // max(1, stages)) * max(1, stages))
        toy.lower("num_layers", number)  # a pattern of layers may say it alone
    number = toy["num_layers"] or number
    cut = cut_layers(before, number, every_pattern=True)
    for path, value in (cut.values if cut is not None else {}).items():
        toy.set(path.partition(".")[2], value)
    for name, limit in (("recompute_num_layers", number), ("cpu_offloading_num_layers", max(0, number - 1))):
        toy.lower(name, limit)
    return cut


def _shrink_attention(toy: _ToyValues) -> None:
    """Keeps whether heads share keys and values: none, some or all of them; and a head width that does not follow from the rest."""
    names = ("num_attention_heads", "num_query_groups", "hidden_size", "kv_channels")
    heads, groups, hidden, width = (toy.original(name) for name in names)
    if heads < 1:
        return
    toy.lower("num_attention_heads", _HEADS)
    toy_heads = toy["num_attention_heads"]
    if groups is not None and 1 < groups < heads:
        toy.set("num_query_groups", next(size for size in (toy_heads // 2, 1) if size and toy_heads % size == 0))
    elif groups == heads:
        toy.set("num_query_groups", toy_heads)
    if width is not None and width * heads == hidden:
        toy.set("kv_channels", None)
    else:
        toy.lower("kv_channels", 32)


def _shrink_images(toy: _ToyValues) -> None:
    """Keeps whether some layers see whole images, and which coordinates rotate more channels than others."""
    layers, chosen = toy["vision_num_layers"] or 0, toy["vision_full_attention_layers"]
    if chosen and layers:
        toy.set("vision_full_attention_layers", tuple(index for index in chosen if index < layers) or (layers - 1,))
    if len(toy["mrope_section"]) == 3:
        heads, width = toy["num_attention_heads"], toy["kv_channels"]
        width = toy["hidden_size"] // max(1, heads) if width is None else width
        pairs = int(width * toy["rotary_percent"]) // 2
        of_image = 3 * pairs // 8
        toy.set("mrope_section", (pairs - 2 * of_image, of_image, of_image))


def _shrink_linear_attention(toy: _ToyValues) -> None:
    keys, values = toy["linear_num_key_heads"], toy["linear_num_value_heads"]
    toy.lower("linear_num_key_heads")
    ratio = 2 if values > keys > 0 else 1
    toy.lower("linear_num_value_heads", ratio * toy["linear_num_key_heads"])


def _shrink_experts(toy: _ToyValues) -> None:
    """Keeps whether a token has one expert or several, and whether groups of experts limit the choice."""
    if toy["num_experts"] is None:
        return
    toy.lower("num_experts")
    experts, grouped = toy["num_experts"], toy["moe_router_num_groups"] is not None
    if grouped:
        toy.lower("moe_router_num_groups", next(size for size in (4, 2, 1) if experts % size == 0))
        toy.lower("moe_router_group_topk", max(1, toy["moe_router_num_groups"] // 2))
        toy.lower("moe_router_group_score_topk", 2)
        within = toy["moe_router_group_topk"] or toy["moe_router_num_groups"]
        toy.lower("moe_router_topk", min(4, within * (experts // toy["moe_router_num_groups"])))
    toy.lower("moe_router_topk", min(experts, 4 if grouped else 2))


def _shrink_positions(toy: _ToyValues) -> None:
    """A table of learned positions is as long as samples; other positions have no size, and what generation keeps of them is small."""
    if toy["attention_temperature_scale"] is not None:
        toy.lower("attention_temperature_floor", 32)
    length = toy["seq_length"] if toy.is_typed("seq_length") else _toy_size("seq_length")
    has_table = toy["position_embedding_type"] == "learned_absolute" or toy["learned_position_table"]
    toy.lower("max_position_embeddings", length if has_table else max(length, _POSITIONS))


def _shrink_longrope(toy: _ToyValues) -> None:
    """LongRoPE has one factor for each rotary pair."""
    width = toy["qk_pos_emb_head_dim"] if toy["multi_latent_attention"] else toy["kv_channels"]
    heads = toy["num_attention_heads"]
    width = width or (toy["hidden_size"] // heads if heads else 0)
    pairs = int(width * toy["rotary_percent"]) // 2
    for name in ("longrope_short_factor", "longrope_long_factor"):
        if isinstance(text := toy[name], str):
            try:
                factors = parse_longrope_factors(text)
            except LongRopeFactorError:  # a problem of its own
                continue
            toy.set(name, format_longrope_factors(factors[:pairs]) if 0 < pairs < len(factors) else text)
