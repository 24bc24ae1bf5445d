"""Decoders that read images beside text (LLaVA, Qwen2-VL): their spec, made from the settings of a model.

Layers are numbered through, those of the vision encoder first. Its patches are a sequence of their own (`layers/vision/`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.required_settings import required
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.kernels.attention.visibility import Visibility
from petatron.layers.attention import AttentionSpec
from petatron.layers.mla import MlaSpec
from petatron.layers.mlp import MLPSpec
from petatron.layers.norm import NormSpec
from petatron.layers.rope import RopeSpec
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import residual_std
from petatron.layers.spec.param_spec import ParamSpec, with_prefix
from petatron.layers.transformer_layer import LayerSpec
from petatron.layers.vision.image_attention import ImageAttentionSpec, ImageLayerSpec
from petatron.layers.vision.patch_embedding import PatchEmbeddingSpec
from petatron.layers.vision.projector import ProjectorSpec
from petatron.models.decoder import HIDDEN
from petatron.models.decoder_spec import DecoderSpec, decoder_spec
from petatron.models.image_text_batch import PATCHES
from petatron.models.model_spec import Part
from petatron.models.stage_inputs_outputs import BoundaryTensor, ModelIO
from petatron.models.vision_language_model import ENCODED_PATCHES, VisionLanguageModel

CHANNELS = 3


@dataclass(frozen=True, slots=True)
class VisionLanguageSpec(DecoderSpec):
    """A vision encoder, a projector, and a decoder with the loss of its next token."""

    __hash__ = DecoderSpec.__hash__

    @property
    def num_vision_layers(self) -> int:
        return required("vision_num_layers", self.config.vision_num_layers)

    @property
    def first_depth_layer(self) -> int:
        return self.num_vision_layers + self.config.num_layers

    @property
    def generation_layers(self) -> tuple[LayerSpec, ...]:
        return self.layers[self.num_vision_layers :]

    @property
    def windowed_layers(self) -> frozenset[int]:
        """The indices of layers in which patches attend to those of their window."""
        layers = enumerate(self.layers[: self.num_vision_layers])
        return frozenset(index for index, layer in layers if isinstance(layer, ImageLayerSpec) and layer.in_windows)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        branches = (branch for layer in self.generation_layers for branch in layer.branches)
        ropes = (branch.rope for branch in branches if isinstance(branch, AttentionSpec | MlaSpec))
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def vision_rope(self) -> RopeSpec | None:
        return _vision_rope(self.config)

    @property
    def patch_embedding(self) -> PatchEmbeddingSpec:
        config = self.config
        learned = config.vision_position_embedding_type == "learned"
        table = (config.vision_image_size // config.vision_patch_size) ** 2 + config.vision_class_token
        return PatchEmbeddingSpec(
            hidden_size=_width(config),
            channels=CHANNELS,
            pixels_per_channel=config.vision_temporal_patch_size * config.vision_patch_size**2,
            bias=config.vision_patch_bias,
            positions=table if learned else 0,
            class_token=config.vision_class_token,
            norm=_norm(config) if config.vision_input_norm else None,
            pixel_mean=config.vision_pixel_mean,
            pixel_std=config.vision_pixel_std,
            std=config.init_method_std,
        )

    @property
    def vision_norm(self) -> NormSpec | None:
        """The norm at the end of the encoder."""
        return _norm(self.config) if self.config.vision_final_norm else None

    @property
    def projector(self) -> ProjectorSpec:
        config = self.config
        inner = required("projector_hidden_size", config.projector_hidden_size)
        return ProjectorSpec(
            input_size=_width(config),
            output_size=config.hidden_size,
            merged_patches=config.vision_merge_size**2,
            inner_width=inner if config.projector_num_layers == 2 else None,
            activation=config.projector_activation,
            bias=config.projector_bias,
            norm=_norm(config) if config.projector_norm else None,
            std=config.init_method_std,
        )

    def io(self, stages: Sequence[PipelineStage]) -> ModelIO:
        """A stage takes the stream of the encoder until that is done, and the text's from the first stage on."""
        done, boundaries = 0, list[tuple[BoundaryTensor, ...]]()
        for stage in stages:
            boundaries.append(self._taken(done) if boundaries else ())
            done += len(stage.layer_indices)
        decoder = super(VisionLanguageSpec, self).io(stages)
        return replace(decoder, boundaries=tuple(boundaries))

    def _taken(self, done: int) -> tuple[BoundaryTensor, ...]:
        """Returns what a stage takes after so many layers."""
        if done >= self.num_vision_layers:
            return (BoundaryTensor(HIDDEN, self.config.hidden_size),)
        encoder = frozenset(["vision", *(f"layers.{index}" for index in range(self.num_vision_layers))])
        text = frozenset(["embedding", "embedding_norm"])
        return (
            BoundaryTensor(ENCODED_PATCHES, _width(self.config), like=PATCHES, computed_by=encoder),
            BoundaryTensor(HIDDEN, self.config.hidden_size, computed_by=text),
        )

    def build_stage(self, stage: PipelineStage) -> VisionLanguageModel:
        return VisionLanguageModel(self, stage)

    @property
    def modules_before_layers(self) -> tuple[str, ...]:
        return ("embedding", "embedding_norm", "vision")

    @property
    def tokens_of_modules(self) -> Mapping[str, int]:
        patches = required("max_patches", self.config.max_patches)
        return {"vision": patches, "projector": patches // self.projector.merged_patches}

    def params_of_part(self, part: Part) -> tuple[str, ...]:
        count, encoder = self.num_vision_layers, part == "vision encoder"
        layers = range(count) if encoder else range(count, len(self.layers))
        outside = ("vision", "vision_norm") if encoder else ("embedding", "embedding_norm", "norm", "head")
        names = {name.partition(".")[0] for name in (*self.outer_params(self.whole_model), *self.tied_params)}
        return (*(f"{name}.*" for name in outside if name in names), *(f"layers.{index}.*" for index in layers))

    def layer_after(self, module: str) -> int:
        """Text and the vectors of images meet before the first layer of the decoder."""
        if module in ("embedding", "embedding_norm", "vision_norm", "projector"):
            return self.num_vision_layers
        return super(VisionLanguageSpec, self).layer_after(module)

    def outer_params(self, stage: PipelineStage, *, tied_across_ranks: bool = False) -> Mapping[str, ParamSpec]:
        params = dict(super(VisionLanguageSpec, self).outer_params(stage, tied_across_ranks=tied_across_ranks))
        last = {name: params.pop(name) for name in list(params) if name.split(".")[0] in ("norm", "head")}
        if stage.has_embedding:
            params |= with_prefix("vision", self.patch_embedding.params())
        if self.num_vision_layers - 1 in stage.layer_indices:
            params |= with_prefix("vision_norm", {} if self.vision_norm is None else self.vision_norm.params())
            params |= with_prefix("projector", self.projector.params())
        return params | last

    def outer_saved_bytes(self, shape: ActivationShape, stage: PipelineStage) -> int:
        saved = super(VisionLanguageSpec, self).outer_saved_bytes(shape, stage)
        saved += self._encoder_outer_bytes(shape, stage)
        if self.num_vision_layers - 1 in stage.layer_indices:
            patches = self.layers[0].shape_of(shape)
            saved += self.projector.saved_bytes(patches) + 9 * shape.tokens  # what tells images from text
        return saved

    def _encoder_outer_bytes(self, shape: ActivationShape, stage: PipelineStage) -> int:
        """Returns the bytes that the encoder saves outside of its layers."""
        patches, saved, norm = self.layers[0].shape_of(shape), 0, self.vision_norm
        if stage.has_embedding:
            saved += self.patch_embedding.saved_bytes(patches)
        if self.num_vision_layers - 1 in stage.layer_indices and norm is not None:
            saved += norm.saved_bytes(patches, patches.tokens)
        if self.vision_rope is not None and any(index < self.num_vision_layers for index in stage.layer_indices):
            saved += 2 * patches.gathered_tokens * self.vision_rope.rotary_dim * shape.element_bytes
        return saved

    def frozen_outer_bytes(self, shape: ActivationShape, stage: PipelineStage, frozen: Collection[str]) -> int:
        trained = self.params(stage).keys() - set(frozen)
        if any(name.startswith("vision_norm.") or _is_of_encoder(name, self.num_vision_layers) for name in trained):
            return 0
        return self._encoder_outer_bytes(shape, stage)


def _is_of_encoder(name: str, num_layers: int) -> bool:
    """Whether a parameter is of the vision encoder, before the norm at its end."""
    module, index, *_ = name.split(".")
    return module == "vision" or (module == "layers" and int(index) < num_layers)


def vision_language_spec(config: ModelConfig, moe: MoEConfig) -> VisionLanguageSpec:
    """Makes the spec of a resolved config.

    >>> from petatron.validate import load_config
    >>> flags = "--model-type vlm --vision-num-layers 2 --vision-hidden-size 32 --vision-num-attention-heads 2 --vocab-size 256"
    >>> run = load_config([*flags.split(), "--image-token-id", "255"], preset="tiny-llama", require_training=False).config
    >>> [layer.mixer.visibility.kind for layer in vision_language_spec(run.model, run.moe).layers][1:3]
    ['full', 'causal']
    """
    spec = decoder_spec(config, moe)
    count = required("vision_num_layers", config.vision_num_layers)
    vision = tuple(_vision_layer(config, index) for index in range(count))
    return VisionLanguageSpec(config, spec.moe, vision + spec.layers, spec.final_norm)


def _width(config: ModelConfig) -> int:
    return required("vision_hidden_size", config.vision_hidden_size)


def _norm(config: ModelConfig) -> NormSpec:
    return NormSpec(config.vision_normalization, _width(config), config.vision_norm_epsilon)


def _vision_rope(config: ModelConfig) -> RopeSpec | None:
    if config.vision_position_embedding_type != "rope":
        return None
    head_dim = _width(config) // required("vision_num_attention_heads", config.vision_num_attention_heads)
    axes = (head_dim // 4,) * 2
    return RopeSpec(rotary_dim=head_dim, base=config.vision_rotary_base, axes=axes, frequencies_per_axis=True)


def _vision_layer(config: ModelConfig, index: int) -> ImageLayerSpec:
    width, heads = _width(config), required("vision_num_attention_heads", config.vision_num_attention_heads)
    patches = required("max_patches", config.max_patches)
    window = config.vision_window_size
    in_windows = window is not None and index not in config.vision_full_attention_layers
    std = config.init_method_std
    out_std = residual_std(std, required("vision_num_layers", config.vision_num_layers), branches=2)
    visible = patches if window is None or not in_windows else (window // config.vision_patch_size) ** 2
    attention = ImageAttentionSpec(
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        qkv_bias=True,
        out_bias=True,
        qk_norm=None,
        rope=_vision_rope(config),
        visibility=Visibility.full(),
        dropout=0.0,
        std=std,
        out_std=out_std,
        in_windows=in_windows,
        most_visible=visible,
    )
    inner = required("vision_ffn_hidden_size", config.vision_ffn_hidden_size)
    mlp = MLPSpec(
        hidden_size=width, width=inner, activation=config.vision_activation, bias=True, std=std, out_std=out_std
    )
    return ImageLayerSpec(mixer=attention, channel_mixer=mlp, norm=_norm(config), seq_length=patches)
