"""The settings of models that read images beside text: a vision encoder, and the projector before the decoder.

The decoder has the settings of any other. A vision encoder cuts images into patches of equal size, which are its tokens; the projector
makes one vector as wide as the decoder's stream of each, or of each block of merge x merge neighbors, and these take the places of the
image token in the text.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from petatron.config.schema.numeric_bounds import Factor, LayerCount, PositiveFactor, RotaryBase, SequenceLength, Width
from petatron.config.schema.sections.mlp import ActivationName, PlainActivationName
from petatron.config.schema.setting_metadata import (
    Feature,
    NotWith,
    RunSettings,
    ToySize,
    UsedWhen,
    settings_section,
    used_with,
)

VISION_LANGUAGE_MODEL = "vlm"
PATCH_BLOCKS = 16
"""Patches of a micro-batch are padded to a multiple of so many blocks that become one vector, so that ranks can share them."""
VisionNormName = Literal["LayerNorm", "RMSNorm"]
PatchPositionName = Literal["learned", "rope"]


def reads_images(run: RunSettings) -> bool:
    return run.model.model_type == VISION_LANGUAGE_MODEL


def num_vision_layers(model: Any) -> int:
    """Returns the layers of a model before those of its decoder, which the vision encoder has."""
    return (model.vision_num_layers or 0) if model.model_type == VISION_LANGUAGE_MODEL else 0


READS_IMAGES = UsedWhen(reads_images, f"it is for --model-type {VISION_LANGUAGE_MODEL}")
_TABLE = used_with("model.vision_position_embedding_type", value="learned")
_ROTARY = used_with("model.vision_position_embedding_type", value="rope")
_TWO_GEMMS = used_with("model.projector_num_layers", value=2)
_NO_WINDOWS = NotWith(
    "vision_window_size",
    lambda size: size is None,
    "names layers without windows, but there is no --vision-window-size",
    "Give --vision-window-size, or leave it out.",
)


@settings_section
class VisionEncoderSettings:
    """The encoder of images."""

    feature: ClassVar = Feature("vision encoder", (READS_IMAGES,))
    vision_num_layers: Annotated[LayerCount, "at least 1", ToySize(2)] | None = None
    """Layers of the vision encoder; `--num-layers` counts those of the decoder."""
    vision_hidden_size: Annotated[Width, "at least 1", ToySize(64)] | None = None
    """Width of the residual stream of the vision encoder."""
    vision_num_attention_heads: Annotated[Width, "at least 1", ToySize(4)] | None = None
    """Attention heads of the vision encoder."""
    vision_ffn_hidden_size: Annotated[Width, "at least 1", ToySize(128)] | None = None
    """Width inside the MLPs of the vision encoder. Derived: 4 x its hidden size."""
    vision_activation: ActivationName = "gelu"
    """Activation of the MLPs of the vision encoder."""
    vision_normalization: VisionNormName = "LayerNorm"
    """Norm of the vision encoder."""
    vision_norm_epsilon: Annotated[Factor, "above 0"] = 1e-6
    """Added to the variance in the norms of the vision encoder."""
    vision_patch_size: Annotated[Width, "at least 1", ToySize(4)] = 14
    """Rows and columns of pixels in a patch."""
    vision_temporal_patch_size: Annotated[Width, "at least 1"] = 1
    """Frames in a patch (Qwen2-VL: 2); an image is repeated to fill it."""
    vision_patch_bias: bool = True
    """Bias of the GEMM that embeds patches."""
    vision_image_size: Annotated[Width, "at least 1", _TABLE, ToySize(16)] = 224
    """Rows and columns of pixels of the images that the table of positions is for."""
    vision_position_embedding_type: PatchPositionName = "learned"
    """How positions of patches enter: a learned table of rows and columns, or rotary embedding of both."""
    vision_rotary_base: Annotated[RotaryBase, "above 1", _ROTARY] = 10000.0
    """Base of the rotary frequencies of patches."""
    vision_class_token: Annotated[bool, _TABLE] = False
    """A learned token before the patches of every image (CLIP), which the decoder does not read."""
    vision_input_norm: bool = False
    """Norm before the first layer of the vision encoder (CLIP)."""
    vision_final_norm: bool = True
    """Norm after the last layer of the vision encoder."""
    vision_window_size: Annotated[Width, "at least 1"] | None = None
    """Rows and columns of pixels of the windows in which patches attend to each other (Qwen2.5-VL: 112). Unset means to all of their
    image."""
    vision_full_attention_layers: tuple[Annotated[LayerCount, _NO_WINDOWS], ...] = ()
    """Layers of the vision encoder, counted from 0, that attend to all patches of an image where others have windows."""
    vision_merge_size: Annotated[Width, "at least 1"] = 1
    """Blocks of so many rows and columns of patches become one vector of the decoder (pixel shuffle, patch merger)."""
    vision_pixel_mean: tuple[Annotated[Factor, "later"], ...] = (0.48145466, 0.4578275, 0.40821073)
    """Mean of each channel, of pixels between 0 and 1; it is subtracted."""
    vision_pixel_std: tuple[Annotated[PositiveFactor, "later"], ...] = (0.26862954, 0.26130258, 0.27577711)
    """Standard deviation of each channel, of pixels between 0 and 1; they are divided by it."""
    video_time_step: Annotated[Width, "at least 1", "later"] = 1
    """Positions in time from one patch of a video to the next, with `--mrope-section`."""
    image_token_id: Width | None = None
    """The token id whose places in the text images take, one for each of their vectors."""


@settings_section
class ProjectorSettings:
    """The projector from the vision encoder to the decoder."""

    feature: ClassVar = Feature("projector", (READS_IMAGES,))
    projector_num_layers: Annotated[LayerCount, "at least 1"] = 2
    """GEMMs of the projector: 1, or 2 with an activation between them."""
    projector_hidden_size: Annotated[Width, "at least 1", _TWO_GEMMS, ToySize(128)] | None = None
    """Width between the two GEMMs of the projector. Derived: the hidden size of the decoder."""
    projector_activation: Annotated[PlainActivationName, _TWO_GEMMS] = "gelu"
    """Activation between the two GEMMs of the projector."""
    projector_bias: bool = True
    """Biases of the projector."""
    projector_norm: bool = False
    """A norm of every patch before the projector, of the kind that the vision encoder has (Qwen2-VL)."""


@settings_section
class PatchLimitSettings:
    """How many patches a sample has."""

    feature: ClassVar = Feature("patches", (READS_IMAGES,), role="runtime")
    max_patches: Annotated[SequenceLength, "at least 1", ToySize(64)] | None = None
    """Patches of all images of a sample, at most, class tokens included: memory is planned for them. Derived: those of one image of
    `--vision-image-size`, or of 1,024 x 1,024 pixels with rotary positions."""
