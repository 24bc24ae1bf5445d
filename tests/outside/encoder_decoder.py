"""A model of two streams that the package does not know: an encoder whose output every decoder layer reads, and two losses.

The first half of the layers encodes the first half of each sample, seeing all of it; the others continue the second half of
the sample, causally, with cross-attention to what was encoded. The encoder predicts its own tokens, a second loss.
S sequence, B batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import petatron
from petatron.config import ModelConfig, MoEConfig
from petatron.config.pipeline_stages import PipelineStage
from petatron.kernels.attention.visibility import Visibility
from petatron.layers.attention import AttentionSpec
from petatron.layers.core_attention import CoreAttention
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.norm import NormSpec
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import BranchModule, BranchSpec
from petatron.layers.spec.param_spec import ParamSpec, linear_params, with_prefix
from petatron.layers.transformer_layer import LayerSpec
from petatron.layers.vocabulary.embedding import TokenEmbedding
from petatron.layers.vocabulary.output_head import OutputHead
from petatron.models.batch import Batch
from petatron.models.decoder_spec import decoder_spec
from petatron.models.model_spec import Collate, ModelSpec
from petatron.models.stage_inputs_outputs import BoundaryTensor, LossSpec, ModelIO, StageOutput
from petatron.models.stage_interface import StageModule, run_layers_sequentially
from petatron.sharding.initial_values import NormalValues
from petatron.sharding.shard_spec import Section, Shard

ENCODED, SOURCE, TARGET = "encoded", "source", "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(BranchSpec):
    name = "cross_attention"
    region = "cross_attention"
    sequence_sharding = "zigzag"

    hidden_size: int
    num_heads: int
    std: float

    def build(self, layer_index: int) -> CrossAttention:
        return CrossAttention(self)

    def params(self) -> Mapping[str, ParamSpec]:
        width, heads = self.hidden_size, self.num_heads
        kv = Shard(tp=0, sections=(Section("k", width, heads), Section("v", width, heads)))
        q = linear_params(width, width, Shard(tp=0, sections=(Section("q", width, heads),)), bias=False, std=self.std)
        out = linear_params(width, width, Shard(tp=1), bias=False, std=self.std)
        parts = {"q": q, "kv": linear_params(width, 2 * width, kv, bias=False, std=self.std), "out": out}
        return {name: param for part, params in parts.items() for name, param in with_prefix(part, params).items()}

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        return shape.activation_bytes(shape.gathered_tokens, 4 * self.hidden_size // shape.tp)


class CrossAttention(BranchModule):
    fp8_linears = ("q", "kv", "out")

    def __init__(self, spec: CrossAttentionSpec) -> None:
        super().__init__()
        width = spec.hidden_size
        self.head_dim = width // spec.num_heads
        self.q = Linear(width, (width,), bias=False)
        self.kv = Linear(width, (width, width), bias=False)
        self.core = CoreAttention(dropout=0.0)
        self.out = Linear(width, (width,), bias=False)

    def forward(self, x_SBD: Tensor | RecomputableOutput, context: ForwardContext) -> Tensor:
        parts = (self.q(x_SBD), *self.kv(context.tensors[ENCODED]).split(self.kv.sections, dim=-1))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return self.out(self.core(q, k, v, Visibility.cross()).flatten(-2))


@dataclass(frozen=True, slots=True)
class EncoderDecoderSpec(ModelSpec):
    config: ModelConfig
    moe: MoEConfig | None
    layers: tuple[LayerSpec, ...]
    norm: NormSpec

    @property
    def num_encoder_layers(self) -> int:
        return len(self.layers) // 2

    @property
    def collate(self) -> Collate:
        return halves_of_samples

    def io(self, stages: Sequence[PipelineStage]) -> ModelIO:
        """Stage 0 embeds both streams; the decoder's waits until the encoder is done."""
        width = self.config.hidden_size
        before = (BoundaryTensor(SOURCE, width, like="source"), BoundaryTensor(TARGET, width))
        after = (BoundaryTensor(ENCODED, width, like="source"), BoundaryTensor(TARGET, width))
        firsts = [stage.layer_indices[0] for stage in stages[1:]]
        return ModelIO(
            boundaries=((), *(before if first < self.num_encoder_layers else after for first in firsts)),
            losses=(LossSpec("lm loss"), LossSpec("source loss", mask="source_mask", weight=0.5)),
            outputs=("logits",),
        )

    def build_stage(self, stage: PipelineStage) -> EncoderDecoder:
        return EncoderDecoder(self, stage)

    def outer_params(self, stage: PipelineStage, *, tied_across_ranks: bool = False) -> Mapping[str, ParamSpec]:
        config, params = self.config, dict[str, ParamSpec]()
        table = ParamSpec(
            shape=(config.vocab_size or 0, config.hidden_size),
            shard=Shard(tp=0, pad_to=config.make_vocab_size_divisible_by),
            init=NormalValues(config.init_method_std),
            role="vocabulary",
            weight_decay=True,
        )
        if stage.has_embedding:
            params["embedding.weight"] = table
        for name, index in (("encoder", self.num_encoder_layers - 1), ("decoder", len(self.layers) - 1)):
            if index in stage.layer_indices:
                params |= with_prefix(f"{name}_norm", self.norm.params())
                params[f"{name}_head.weight"] = replace(table, is_gemm=True)
        return params

    def outer_saved_bytes(self, shape: ActivationShape, stage: PipelineStage) -> int:
        return 3 * shape.activation_bytes(shape.gathered_tokens, self.config.hidden_size)


class EncoderDecoder(StageModule):
    def __init__(self, spec: EncoderDecoderSpec, stage: PipelineStage) -> None:
        super().__init__()
        config, self.stage = spec.config, stage
        self.num_encoder_layers, sizes = spec.num_encoder_layers, (config.vocab_size or 0, config.hidden_size)
        self.embedding = TokenEmbedding(*sizes) if stage.has_embedding else None
        self.layers = nn.ModuleDict({str(index): spec.layers[index].build(index) for index in stage.layer_indices})
        ends = {"encoder": spec.num_encoder_layers - 1, "decoder": len(spec.layers) - 1}
        for name, index in ends.items():
            here = index in stage.layer_indices
            self.register_module(f"{name}_norm", spec.norm.build() if here else None)
            self.register_module(f"{name}_head", OutputHead(*sizes, tied=False) if here else None)
        self.run_layers = run_layers_sequentially

    def outer_modules(self) -> Sequence[Sequence[nn.Module]]:
        groups = ([self.embedding], [self.encoder_norm, self.encoder_head], [self.decoder_norm, self.decoder_head])
        return [modules for group in groups if (modules := [module for module in group if module is not None])]

    def reused_params(self) -> Iterator[nn.Parameter]:
        """Both streams are embedded with one table."""
        if self.embedding is not None:
            yield self.embedding.weight

    def forward(
        self,
        batch: Batch,
        inputs: Mapping[str, Tensor],
        *,
        aux_loss_scale: Tensor | None = None,
        router_statistics: dict[int, Tensor] | None = None,
        loss_weights: Mapping[str, Tensor] | None = None,
        collect: Collection[str] = (),
    ) -> StageOutput:
        streams, losses, collected = dict(inputs), dict[str, Tensor](), dict[str, Tensor]()
        if self.embedding is not None:
            streams |= {SOURCE: self.embedding(batch["source"]), TARGET: self.embedding(batch.tokens)}
        encoder, decoder = self._layers_of(encoder=True), self._layers_of(encoder=False)
        if encoder:
            streams[SOURCE] = self.run_layers(encoder, streams[SOURCE], ForwardContext())
        if self.encoder_norm is not None and self.encoder_head is not None:
            streams[ENCODED] = self.encoder_norm(streams[SOURCE])
            weights = None if loss_weights is None else loss_weights["source loss"]
            labels = batch["source_labels"].t()
            losses["source loss"] = self.encoder_head.losses(streams[ENCODED], None, labels, loss_weights_SB=weights)
        if decoder:
            context = ForwardContext(tensors={ENCODED: streams[ENCODED]})
            streams[TARGET] = self.run_layers(decoder, streams[TARGET], context)
        if self.decoder_norm is not None and self.decoder_head is not None:
            x_SBD, weights = (
                self.decoder_norm(streams[TARGET]),
                None if loss_weights is None else loss_weights["lm loss"],
            )
            losses["lm loss"] = self.decoder_head.losses(x_SBD, None, batch.labels.t(), loss_weights_SB=weights)
            if "logits" in collect:
                logits = self.decoder_head.vocab_shard.full_logits(self.decoder_head(x_SBD, None))
                collected["logits"] = logits.transpose(0, 1)
        return StageOutput(streams, losses, collected)

    def _layers_of(self, *, encoder: bool) -> list[nn.Module]:
        return [layer for index, layer in self.layers.items() if (int(index) < self.num_encoder_layers) is encoder]


def halves_of_samples(samples: Sequence[Any], options: Any) -> Batch:
    """Tokens to encode, with those at odd positions to be predicted; then tokens to continue."""
    text = torch.from_numpy(np.stack(samples))
    length = (text.shape[1] - 1) // 2
    source, target = text[:, :length], text[:, length : 2 * length + 1]
    mask = (torch.arange(length) % 2).double().expand(source.shape).contiguous()
    source_arrays = {"source": source * (1 - mask.long()), "source_labels": source.contiguous(), "source_mask": mask}
    tokens, labels = target[:, :-1].contiguous(), target[:, 1:].contiguous()
    return Batch(tokens, labels, torch.ones(labels.shape), arrays=source_arrays)


def encoder_decoder_spec(config: ModelConfig, moe: MoEConfig) -> EncoderDecoderSpec:
    spec = decoder_spec(config, moe)
    attention = spec.layers[0].mixer
    assert isinstance(attention, AttentionSpec)
    attention = replace(attention, rope=None)
    cross = CrossAttentionSpec(
        hidden_size=config.hidden_size, num_heads=config.num_attention_heads, std=config.init_method_std
    )
    encoder = replace(spec.layers[0], mixer=replace(attention, visibility=Visibility.full()))
    decoder = replace(spec.layers[0], mixer=attention, cross_mixer=cross)
    half = config.num_layers // 2
    return EncoderDecoderSpec(config, spec.moe, (encoder,) * half + (decoder,) * half, spec.final_norm)


petatron.register_model("encoder-decoder", encoder_decoder_spec)
