"""The settings of normalization and of the residual stream."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from petatron.config.schema.numeric_bounds import DropoutRate, PositiveFactor
from petatron.config.schema.setting_metadata import Feature, NotWith, UsedWhen, settings_section

NormPlacementName = Literal["pre", "post", "both", "output", "stream"]
_PARALLEL = NotWith("residual_branches", lambda kind: kind != "sequential")
STREAM = UsedWhen(lambda run: run.model.norm_placement == "stream", "it is for --norm-placement stream")
_LAYER_NORM = UsedWhen(lambda run: run.model.normalization != "RMSNorm", "an RMSNorm has no bias")


@settings_section
class NormSettings:
    """Norms and residuals."""

    feature: ClassVar = Feature("norms and residuals")
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Which normalization stands before attention, before the MLP and at the end."""
    norm_epsilon: PositiveFactor = 1e-5
    """Added to the variance inside normalization."""
    apply_layernorm_1p: bool = False
    """Keep the weights of norms as an offset from one (Gemma), so that they start at zero."""
    norm_bias: Annotated[bool, "variant", _LAYER_NORM] = True
    """Biases of LayerNorms (`--no-norm-bias` leaves them out, as MPT does)."""
    embed_layernorm: Annotated[bool, "variant"] = False
    """Normalize embeddings before the first layer (BLOOM)."""
    norm_placement: Annotated[NormPlacementName, "variant", _PARALLEL] = "pre"
    """Where a layer's norms are: before each branch, after its sum with the residual (BERT), before and after it (Gemma 2), after it only
    (OLMo 2), or on the residual stream, so that a branch is added to the normed stream that it takes (MiniMax-Text-01)."""
    attention_stream_multiplier: Annotated[PositiveFactor, "variant", STREAM] = 1.0
    """Factor on the residual stream that attention is added to, with `--norm-placement stream` (MiniMax-Text-01)."""
    mlp_stream_multiplier: Annotated[PositiveFactor, "variant", STREAM] = 1.0
    """The same of MLPs and experts."""
    residual_branches: Annotated[Literal["sequential", "parallel", "parallel_shared_norm"], "variant"] = "sequential"
    """Whether the MLP takes what attention made of the stream, or both take the same, with a norm each (GPT-NeoX) or one for both."""
    residual_multiplier: Annotated[PositiveFactor, "variant"] = 1.0
    """Factor on what each branch adds to the residual stream (Granite)."""
    hidden_dropout: Annotated[DropoutRate, "training"] = 0.1
    """Dropout on the embedding and on each residual branch. Modern language models use 0."""
