"""`ModelConfig`, the settings of a model's shape, composed of the sections of its features.

Its settings are declared by feature in `sections/`, each with what other places need to know of it (`setting_metadata.py`), and a model has
all of them by inheritance. A kind of layer brings its settings as one class more in the lists of bases here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from petatron.config.schema.numeric_bounds import Factor, LayerCount, PositiveFactor, SequenceLength, SmallCount, Width
from petatron.config.schema.sections.adapter import AdapterSettings
from petatron.config.schema.sections.attention import AttentionSettings, AttentionVariants
from petatron.config.schema.sections.encoder_decoder import DecoderSequenceSettings, EncoderDecoderSettings
from petatron.config.schema.sections.hybrid import HybridSettings
from petatron.config.schema.sections.latent_attention import LatentAttentionSettings
from petatron.config.schema.sections.linear_attention import DeltaNetSettings, LinearAttentionSettings
from petatron.config.schema.sections.mamba2 import Mamba2Settings
from petatron.config.schema.sections.masked_language import MaskedLanguageSettings
from petatron.config.schema.sections.mlp import MlpSettings
from petatron.config.schema.sections.moe import DispatchSettings, ExpertSettings, RouterSettings, SharedExpertSettings
from petatron.config.schema.sections.multi_token_prediction import MultiTokenPredictionSettings
from petatron.config.schema.sections.mup import MupSettings
from petatron.config.schema.sections.norm import NormSettings
from petatron.config.schema.sections.recommender import HstuSettings, RecommenderSettings
from petatron.config.schema.sections.rope import RopeScalingSettings, RopeSettings, RopeVariants, YarnSettings
from petatron.config.schema.sections.sparse_attention import SparseAttentionSettings
from petatron.config.schema.sections.task_head import TaskHeadSettings
from petatron.config.schema.sections.vision_language import PatchLimitSettings, ProjectorSettings, VisionEncoderSettings
from petatron.config.schema.sections.vocabulary import VocabularySettings
from petatron.config.schema.setting_metadata import Feature, NotWith, ToySize

REQUIRED_FIELDS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
"""What every model must say."""


@dataclass(frozen=True, kw_only=True)
class RawModelConfig(
    AttentionSettings,
    AttentionVariants,
    RopeSettings,
    RopeVariants,
    RopeScalingSettings,
    YarnSettings,
    NormSettings,
    MlpSettings,
    VocabularySettings,
    LatentAttentionSettings,
    HybridSettings,
    Mamba2Settings,
    LinearAttentionSettings,
    DeltaNetSettings,
    SparseAttentionSettings,
    MultiTokenPredictionSettings,
    MaskedLanguageSettings,
    EncoderDecoderSettings,
    DecoderSequenceSettings,
    RecommenderSettings,
    HstuSettings,
    VisionEncoderSettings,
    ProjectorSettings,
    PatchLimitSettings,
    TaskHeadSettings,
    AdapterSettings,
    MupSettings,
):
    """The shape of a model."""

    feature: ClassVar = Feature("decoder")
    model_type: Annotated[str, "selects"] = "decoder"
    """Which registered model is built: `decoder` is that of the GPT and LLaMA families, dense or with experts; `bert` an encoder that
    predicts masked tokens; `t5` an encoder, and a decoder that reads its output; `recommender` predicts the next item of a history;
    `vlm` is a decoder that reads images beside text."""
    num_layers: Annotated[LayerCount, NotWith("hybrid_layer_pattern")] = 0
    """Number of transformer layers."""
    hidden_size: Annotated[Width, ToySize(128)] = 0
    """Width of the residual stream."""
    seq_length: Annotated[SequenceLength, ToySize(128), "runtime"] = 0
    """Tokens per training sample."""
    max_position_embeddings: Annotated[SequenceLength, "at least 1", "limit"] | None = None
    """Longest position the model is built for. Derived: the sequence length."""
    init_method_xavier_uniform: Annotated[bool, "training"] = False
    """Initial weights of matrices and tables are uniform within sqrt(6 / (rows + columns)) (Glorot), in place of normal ones."""
    init_method_std: Annotated[PositiveFactor, "training"] = 0.02
    """Standard deviation of initial weights; projections into the residual stream get it divided by sqrt(2 x layers)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(RawModelConfig):
    """The resolved settings of a model. `vocab_size` may still be the tokenizer's, see `known_vocab_size`."""

    ffn_hidden_size: Width = 0
    num_query_groups: Width = 0
    kv_channels: Width = 0
    max_position_embeddings: SequenceLength = 0
    embedding_init_method_std: Factor = 0.0
    mamba_num_heads: Width = 0
    mamba_norm_groups: Width = 0
    num_token_types: Width = 0
    hstu_value_dim: Width = 0
    num_labels: SmallCount = 0


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ExpertSettings, RouterSettings, DispatchSettings, SharedExpertSettings):
    """Mixture of experts."""
