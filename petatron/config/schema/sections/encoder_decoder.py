"""The settings of encoder-decoder models (T5), besides those that they share with decoders."""

from __future__ import annotations

from typing import Annotated, ClassVar

from petatron.config.schema.numeric_bounds import LayerCount, SequenceLength, Width
from petatron.config.schema.objective_and_dataset_names import T5_DATASET
from petatron.config.schema.setting_metadata import (
    Feature,
    RunSettings,
    ToySize,
    UsedWhen,
    settings_section,
    used_with,
)

ENCODER_DECODER_MODEL = "t5"
RELATIVE_POSITIONS = "relative"


def is_encoder_decoder(run: RunSettings) -> bool:
    return run.model.model_type == ENCODER_DECODER_MODEL


_IS_ENCODER_DECODER = UsedWhen(is_encoder_decoder, f"it is for --model-type {ENCODER_DECODER_MODEL}")
_TWO_SEQUENCES = UsedWhen(
    lambda run: is_encoder_decoder(run) or run.data.dataset_type == T5_DATASET,
    f"it is for --model-type {ENCODER_DECODER_MODEL} and --dataset-type {T5_DATASET}",
)
_RELATIVE = used_with("model.position_embedding_type", value=RELATIVE_POSITIONS)


@settings_section
class EncoderDecoderSettings:
    """An encoder and a decoder."""

    feature: ClassVar = Feature("encoder-decoder model", (_IS_ENCODER_DECODER,))
    encoder_num_layers: Annotated[LayerCount, "at least 1", ToySize(2)] | None = None
    """T5: layers of the encoder; `--num-layers` is derived, and counts those of both."""
    decoder_num_layers: Annotated[LayerCount, "at least 1", ToySize(2)] | None = None
    """T5: layers of the decoder. Derived: as many as the encoder has."""
    relative_attention_num_buckets: Annotated[Width, "at least 4", _RELATIVE] = 32
    """T5: rows of the tables of `--position-embedding-type relative`: classes of distances that have one bias of scores each."""
    relative_attention_max_distance: Annotated[SequenceLength, "at least 2", _RELATIVE] = 128
    """T5: the distance from which on all have the bias of the last class."""


@settings_section
class DecoderSequenceSettings:
    """The sequences of the decoder."""

    feature: ClassVar = Feature("decoder sequences", (_TWO_SEQUENCES,), role="runtime")
    decoder_seq_length: Annotated[SequenceLength, "at least 1", ToySize(64)] | None = None
    """T5: tokens of the decoder's sequences, which have the corrupted spans; `--seq-length` is that of the encoder."""
