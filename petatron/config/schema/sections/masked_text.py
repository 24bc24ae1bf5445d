"""The settings of masked and span-corrupted text: samples for BERT and for T5."""

from __future__ import annotations

from typing import Annotated, ClassVar

from petatron.config.schema.numeric_bounds import Fraction
from petatron.config.schema.objective_and_dataset_names import BERT_DATASET, MASKED_DATASETS, T5_DATASET
from petatron.config.schema.setting_metadata import Feature, UsedWhen, settings_section

_MASKED = UsedWhen(
    lambda run: run.data.dataset_type in MASKED_DATASETS, f"it is for --dataset-type {BERT_DATASET} and {T5_DATASET}"
)


@settings_section
class MaskedTextSettings:
    """Samples of masked text."""

    feature: ClassVar = Feature("masked text", (_MASKED,), role="training")
    mask_prob: Annotated[Fraction, "above 0", "below 1"] = 0.15
    """Share of the tokens of a sample that are masked, or replaced by sentinels."""
    short_seq_prob: Fraction = 0.1
    """Share of samples that are made shorter than `--seq-length`, at random."""
