"""The settings of models that recommend the next item of a history, besides those that they share with decoders."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from petatron.config.schema.numeric_bounds import SmallCount, Width
from petatron.config.schema.setting_metadata import Feature, ToySize, UsedWhen, settings_section, used_with

RECOMMENDER_MODEL = "recommender"
ItemLossName = Literal["full_softmax", "sampled_softmax"]
ItemNegativesName = Literal["uniform", "in_batch", "both"]
_IS_RECOMMENDER = UsedWhen(
    lambda run: run.model.model_type == RECOMMENDER_MODEL, f"it is for --model-type {RECOMMENDER_MODEL}"
)
_HSTU = used_with("model.recommender_layers", value="hstu")
_SAMPLED = used_with("model.item_loss", value="sampled_softmax")


@settings_section
class RecommenderSettings:
    """Recommenders: the next item of a history. `--vocab-size` is the number of items."""

    feature: ClassVar = Feature("recommender", (_IS_RECOMMENDER,))
    recommender_layers: Literal["attention", "hstu"] = "attention"
    """Layers over a history: attention and MLP (SASRec), or HSTU with its gate and biases of positions and times."""
    item_loss: Annotated[ItemLossName, "training"] = "full_softmax"
    """Softmax over all items, or over the target and sampled items, corrected by how probable each was."""
    item_negatives: Annotated[ItemNegativesName, "training", _SAMPLED] = "uniform"
    """Sampled items: drawn uniformly, the other targets of the micro-batch, or both."""
    num_item_negatives: Annotated[SmallCount, "at least 1", "training", _SAMPLED] = 128
    """Items drawn uniformly for each history; all histories of a micro-batch share theirs."""


@settings_section
class HstuSettings:
    """HSTU layers."""

    feature: ClassVar = Feature("HSTU", (_IS_RECOMMENDER, _HSTU))
    hstu_value_dim: Annotated[Width, "at least 1", ToySize(64)] | None = None
    """HSTU: width of the values and gates of a head. Derived: `--kv-channels`, the width of its queries and keys."""
    hstu_time_buckets: SmallCount = 128
    """HSTU: buckets of the time between two interactions; 0 if times are not used."""
