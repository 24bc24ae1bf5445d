"""Encoder-decoder models (T5): their spec, made from the settings of a model.

The layers of both stacks are a decoder's; those of the encoder see all tokens of a text, and those of the decoder have cross-attention over
the encoder's output between attention and MLP. Layers are numbered through, the encoder's first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.required_settings import required
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.sections.encoder_decoder import RELATIVE_POSITIONS
from petatron.layers.attention import AttentionSpec
from petatron.layers.cross_attention import ENCODED, CrossAttentionSpec
from petatron.layers.relative_position_bias import RelativePositionBiasSpec
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import ParamSpec, with_prefix
from petatron.layers.transformer_layer import LayerSpec
from petatron.models.decoder import HIDDEN
from petatron.models.decoder_spec import DecoderSpec, decoder_spec
from petatron.models.encoder_decoder_model import (
    DECODER_BIAS,
    ENCODER_BIAS,
    ENCODER_TOKENS,
    SOURCE,
    EncoderDecoder,
    with_positions,
)
from petatron.models.stage_inputs_outputs import BoundaryTensor, ModelIO


@dataclass(frozen=True, slots=True)
class EncoderDecoderSpec(DecoderSpec):
    """One table for the tokens of both sequences, an encoder with a norm at its end, a decoder, and the loss of its next token."""

    __hash__ = DecoderSpec.__hash__

    @property
    def num_encoder_layers(self) -> int:
        return required("encoder_num_layers", self.config.encoder_num_layers)

    @property
    def decoder_length(self) -> int:
        return required("decoder_seq_length", self.config.decoder_seq_length)

    @property
    def generation_layers(self) -> tuple[LayerSpec, ...]:
        return self.layers[self.num_encoder_layers :]

    @property
    def source_length(self) -> int:
        return self.config.seq_length

    @property
    def predicted_length(self) -> int:
        return self.decoder_length

    @property
    def first_layers(self) -> Mapping[str, int]:
        """The layer at which each stack begins, by the name of its biases."""
        return {ENCODER_BIAS: 0, DECODER_BIAS: self.num_encoder_layers}

    @property
    def biases(self) -> Mapping[str, RelativePositionBiasSpec]:
        """The biases of relative positions of both stacks, if they have some."""
        config = self.config
        if config.position_embedding_type != RELATIVE_POSITIONS:
            return {}
        return {
            name: RelativePositionBiasSpec(
                config.relative_attention_num_buckets,
                config.relative_attention_max_distance,
                config.num_attention_heads,
                both_sides=name == ENCODER_BIAS,
                std=config.init_method_std,
            )
            for name in (ENCODER_BIAS, DECODER_BIAS)
        }

    def io(self, stages: Sequence[PipelineStage]) -> ModelIO:
        """A stage takes the stream of the encoder, until that is done, or its output; and the decoder's stream, from the first stage on."""
        done, boundaries = 0, list[tuple[BoundaryTensor, ...]]()
        for stage in stages:
            boundaries.append(self._taken(done) if boundaries else ())
            done += len(stage.layer_indices)
        decoder = super(EncoderDecoderSpec, self).io(stages)
        return replace(decoder, boundaries=tuple(boundaries), extend_batch=with_positions)

    def _taken(self, done: int) -> tuple[BoundaryTensor, ...]:
        """Returns what a stage takes after so many layers."""
        width, encoder = self.config.hidden_size, self.num_encoder_layers
        hidden = BoundaryTensor(HIDDEN, width)
        if done == len(self.layers):
            return (hidden,)
        name, bias, first = (SOURCE, ENCODER_BIAS, 0) if done < encoder else (ENCODED, DECODER_BIAS, encoder)
        taken = (BoundaryTensor(name, width, like=ENCODER_TOKENS), hidden)
        if done == first or bias not in self.biases:
            return taken
        spec = self.biases[bias]
        rows = {"rows": spec.num_distances, "sequence_sharded": False}
        return (*taken, BoundaryTensor(bias, spec.num_heads, **rows))

    def build_stage(self, stage: PipelineStage) -> EncoderDecoder:
        return EncoderDecoder(self, stage)

    @property
    def modules_before_layers(self) -> tuple[str, ...]:
        return ("embedding", "position", "embedding_norm", *self.biases)

    def layer_after(self, module: str) -> int:
        after = {"encoder_norm": self.num_encoder_layers, DECODER_BIAS: self.num_encoder_layers}
        return after.get(module, super(EncoderDecoderSpec, self).layer_after(module))

    def outer_params(self, stage: PipelineStage, *, tied_across_ranks: bool = False) -> Mapping[str, ParamSpec]:
        params = dict(super(EncoderDecoderSpec, self).outer_params(stage, tied_across_ranks=tied_across_ranks))
        for name, bias in self.biases.items():
            if self.first_layers[name] in stage.layer_indices:
                params |= with_prefix(name, bias.params())
        if self.num_encoder_layers - 1 in stage.layer_indices:
            params = with_prefix("encoder_norm", self.final_norm.params()) | params
        return params

    def outer_saved_bytes(self, shape: ActivationShape, stage: PipelineStage) -> int:
        """Returns what a decoder saves of its sequence, and what the embedding and the norm of the encoder do."""
        saved = super(EncoderDecoderSpec, self).outer_saved_bytes(shape.with_length(self.decoder_length), stage)
        if stage.has_embedding:
            only_embedding = PipelineStage((), has_embedding=True, has_loss=False)
            saved += super(EncoderDecoderSpec, self).outer_saved_bytes(shape, only_embedding)
        if self.num_encoder_layers - 1 in stage.layer_indices:
            saved += self.final_norm.saved_bytes(shape, shape.tokens)
        if any(index >= self.num_encoder_layers for index in stage.layer_indices):
            saved += shape.activation_bytes(shape.tokens, self.config.hidden_size)  # the encoder's output
        return saved + sum(self._bias_bytes(name, shape, stage) for name in self.biases)

    def _bias_bytes(self, name: str, shape: ActivationShape, stage: PipelineStage) -> int:
        """Returns the bytes of a stack's biases: those of this rank's heads, in at least float32, and what the stage before gives."""
        encoder, bias = self.num_encoder_layers, self.biases[name]
        if not any((index < encoder) == (name == ENCODER_BIAS) for index in stage.layer_indices):
            return 0
        begins = self.first_layers[name] in stage.layer_indices
        given = 0 if begins else shape.activation_bytes(bias.num_distances, bias.num_heads)
        return given + bias.num_distances * (bias.num_heads // shape.tp) * shape.compute_bytes

    def loss_workspace_bytes(self, shape: ActivationShape) -> int:
        return super(EncoderDecoderSpec, self).loss_workspace_bytes(shape.with_length(self.decoder_length))


def encoder_decoder_spec(config: ModelConfig, moe: MoEConfig) -> EncoderDecoderSpec:
    """Makes the spec of a resolved config.

    >>> from petatron.validate import load_config
    >>> flags = "--model-type t5 --encoder-num-layers 2 --decoder-seq-length 16 --vocab-size 256".split()
    >>> run = load_config(flags, preset="t5-small", require_training=False).config
    >>> [layer.mixer.visibility.kind for layer in encoder_decoder_spec(run.model, run.moe).layers][1:3]
    ['full', 'causal']
    """
    spec = decoder_spec(config, moe)
    encoder = required("encoder_num_layers", config.encoder_num_layers)
    layers = [_encoder_layer(layer) for layer in spec.layers[:encoder]]
    layers += [_decoder_layer(layer, config) for layer in spec.layers[encoder:]]
    return EncoderDecoderSpec(config, spec.moe, tuple(layers), spec.final_norm)


def _encoder_layer(layer: LayerSpec) -> LayerSpec:
    attention = _attention(layer)
    return replace(layer, mixer=replace(attention, visibility=replace(attention.visibility, kind="full")))


def _decoder_layer(layer: LayerSpec, config: ModelConfig) -> LayerSpec:
    attention = _attention(layer)
    cross = CrossAttentionSpec(
        hidden_size=attention.hidden_size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        key_length=config.seq_length,
        qkv_bias=attention.qkv_bias,
        out_bias=attention.out_bias,
        qk_norm=attention.qk_norm,
        rope=None,
        softmax_scale=attention.softmax_scale,
        dropout=attention.dropout,
        std=attention.std,
        out_std=attention.out_std,
        output_multiplier=attention.output_multiplier,
    )
    return replace(layer, cross_mixer=cross, seq_length=required("decoder_seq_length", config.decoder_seq_length))


def _attention(layer: LayerSpec) -> AttentionSpec:
    assert isinstance(layer.mixer, AttentionSpec), "other mixers are refused before"
    return layer.mixer
