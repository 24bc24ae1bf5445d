"""The settings of encoders that predict masked tokens (BERT, RoBERTa, ModernBERT), besides those that they share with decoders."""

from __future__ import annotations

from typing import Annotated, ClassVar

from petatron.config.schema.numeric_bounds import SequenceLength, Width
from petatron.config.schema.sections.mlp import PlainActivationName
from petatron.config.schema.setting_metadata import Feature, UsedWhen, settings_section

MASKED_LANGUAGE_MODEL = "bert"
_IS_ENCODER = UsedWhen(
    lambda run: run.model.model_type == MASKED_LANGUAGE_MODEL, f"it is for --model-type {MASKED_LANGUAGE_MODEL}"
)


@settings_section
class MaskedLanguageSettings:
    """Encoders of masked text."""

    feature: ClassVar = Feature("masked language model", (_IS_ENCODER,))
    bert_binary_head: Annotated[bool, "selects"] = True
    """BERT: samples are two segments, and the model predicts from their first token whether they are in their order."""
    num_token_types: Width | None = None
    """BERT: number of segments with an embedding each. Derived: 2 with `--bert-binary-head`, else none."""
    position_offset: SequenceLength = 0
    """Row of the first position in a table of positions; the rows before it are unused (RoBERTa: 2)."""
    prediction_activation: PlainActivationName | None = None
    """Activation between the last layer and the output head. Unset means that of `--activation`, of its gate if it is gated."""
    prediction_bias: bool = True
    """Bias per token id of the output head."""
    first_attention_norm: Annotated[bool, "later"] = True
    """Norm before the first layer's attention; ModernBERT leaves it out, since the embeddings are normalized."""
