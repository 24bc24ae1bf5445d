"""The settings of masked and span-corrupted text: samples for BERT and for T5."""

from __future__ import annotations

from typing import Annotated, ClassVar

from petatron.config.schema.default_objective_names import BERT_DATASET, MASKED_DATASETS, T5_DATASET
from petatron.config.schema.numeric_bounds import Fraction, SequenceLength
from petatron.config.schema.setting_metadata import Feature, UsedWhen, settings_section, used_with

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
    decoder_seq_length: (
        Annotated[SequenceLength, "at least 1", used_with("data.dataset_type", value=T5_DATASET)] | None
    ) = None
    """Tokens of the decoder's sequences, which have the corrupted spans; `--seq-length` is that of the encoder."""
