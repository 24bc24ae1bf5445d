"""The module of encoder-decoder models (T5): two stacks of layers, the second of which reads the output of the first.

Both sequences are embedded with one table before the first layer, since that is where it is: the decoder's waits until the encoder is done.
So does what both stacks add to scores for relative positions, which is computed where a stack begins.
S sequence, B batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from petatron.config.pipeline_stages import PipelineStage
from petatron.kernels.attention.document_layout import Documents
from petatron.layers.cross_attention import ENCODED, CrossAttention
from petatron.layers.forward_context import ForwardContext, StatisticsKey
from petatron.layers.relative_position_bias import RELATIVE_BIAS, LocalHeadBias, RelativePositionBiasSpec
from petatron.layers.spec.generation_state import GenerationStep, StateSlots
from petatron.models.batch import Batch
from petatron.models.decoder import HIDDEN, Decoder, DecoderParts
from petatron.models.stage_inputs_outputs import StageOutput

SOURCE, ENCODER_BIAS, DECODER_BIAS = "source", "encoder_bias", "decoder_bias"
ENCODER_TOKENS, ENCODER_POSITIONS = "encoder_tokens", "encoder_positions"


class EncoderDecoderParts(DecoderParts, Protocol):
    """What the module reads of its spec (`encoder_decoder_spec.py`)."""

    @property
    def num_encoder_layers(self) -> int: ...
    @property
    def biases(self) -> Mapping[str, RelativePositionBiasSpec]: ...
    @property
    def first_layers(self) -> Mapping[str, int]: ...


class EncoderDecoder(Decoder):
    """Embedding, encoder, decoder and output head; or the part of these that one pipeline stage has."""

    def __init__(self, spec: EncoderDecoderParts, stage: PipelineStage) -> None:
        super().__init__(spec, stage)
        self.num_encoder_layers = spec.num_encoder_layers
        ends_encoder = spec.num_encoder_layers - 1 in stage.layer_indices
        self.encoder_norm = spec.final_norm.build() if ends_encoder else None
        self.local_heads = LocalHeadBias(self.config.num_attention_heads) if spec.biases else None
        for name, bias in spec.biases.items():
            begins = spec.first_layers[name] in stage.layer_indices
            self.add_module(name, bias.build() if begins else None)

    def outer_modules(self) -> list[list[nn.Module]]:
        names = ("embedding", "position", "embedding_norm", ENCODER_BIAS, "encoder_norm", DECODER_BIAS)
        first = [[module] for name in names if (module := self._modules.get(name)) is not None]
        last = [module for module in (self.norm, self.head) if module is not None]
        return [*first, last] if last else first

    def reused_params(self) -> Iterator[nn.Parameter]:
        """Both sequences are embedded with the same tables."""
        yield from super().reused_params()
        for module in (self.embedding, self.position, self.embedding_norm):
            if module is not None:
                yield from module.parameters()

    def forward(
        self,
        batch: Batch,
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        aux_loss_scale: Tensor | None = None,
        router_statistics: dict[StatisticsKey, Tensor] | None = None,
        loss_weights: Mapping[str, Tensor] | None = None,
        collect: Collection[str] = (),
    ) -> StageOutput:
        """Runs the stage (see `StageModule`); the last one computes what that of a decoder does, of the decoder's sequence."""
        streams, statistics = dict(inputs), {} if router_statistics is None else router_statistics
        source = _source_batch(batch)
        if self.embedding is not None:
            streams[SOURCE] = self._embed(source.tokens, self._positions(source))
            streams[HIDDEN] = self._embed(batch.tokens, self._positions(batch))
        if encoder := self._layers_of(encoder=True):
            tensors = self._bias(ENCODER_BIAS, streams)
            context = self._context(source, streams[SOURCE], tensors, aux_loss_scale, statistics)
            streams[SOURCE] = self.run_layers(encoder, streams[SOURCE], context)
        if self.encoder_norm is not None:
            streams[ENCODED] = self.encoder_norm(streams.pop(SOURCE))
        if decoder := self._layers_of(encoder=False):
            tensors = {ENCODED: streams[ENCODED], **self._bias(DECODER_BIAS, streams)}
            context = self._context(batch, streams[HIDDEN], tensors, aux_loss_scale, statistics)
            context = replace(context, key_spans=batch.key_spans)
            streams[HIDDEN] = self.run_layers(decoder, streams[HIDDEN], context)
        if self.head is None:
            return StageOutput(streams, {}, {})
        return self._head_output(batch, streams[HIDDEN], ForwardContext(), loss_weights, collect)

    def encode_sources(
        self,
        tokens_BS: Tensor,
        lengths_B: Tensor,
        slots_B: Tensor,
        states: Mapping[int, StateSlots],
        documents: Documents,
    ) -> None:
        """Encodes texts, and writes what layers read of them while text is generated; needs a model on one stage."""
        assert self.encoder_norm is not None, "one stage is the whole model"
        source = Batch(tokens_BS, documents=documents)
        x_SBD = self._embed(source.tokens, self._positions(source))
        context = self._context(source, x_SBD, self._bias(ENCODER_BIAS, {}), None, {})
        encoded_SBD = self.encoder_norm(self.run_layers(self._layers_of(encoder=True), x_SBD, context))
        for layer in self._layers_of(encoder=False):
            for module in layer.children():
                if isinstance(module, CrossAttention):
                    module.store(encoded_SBD, lengths_B, slots_B, states[module.layer_index])

    def generation_step(
        self, tokens_T: Tensor, positions_T: Tensor, x_SBD: Tensor | None, step: GenerationStep, rows_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Runs the decoder on packed tokens of texts whose sources are encoded."""
        assert self.head is not None and self.norm is not None, "one stage is the whole model"
        batch = Batch(tokens_T.unsqueeze(0), positions=positions_T)
        x_TD = self._embed(batch.tokens, positions_T).squeeze(1)
        context = self._context(batch, x_TD, self._bias(DECODER_BIAS, {}), None, {}, generation=step)
        x_TD = self.head.gathered_input(self.norm(self.run_layers(self._layers_of(encoder=False), x_TD, context)))
        return self.head.logits_of_rows(x_TD.index_select(0, rows_R), self._embedding_weight()), x_TD

    def hidden_states(self, batch: Batch) -> Tensor:
        """Returns this rank's part of the output head's input [S, B, hidden]; needs a model on one stage."""
        return self(batch, collect=("hidden_states",)).collected["hidden_states"].transpose(0, 1)

    def _layers_of(self, *, encoder: bool) -> list[nn.Module]:
        return [layer for index, layer in self.layers.items() if (int(index) < self.num_encoder_layers) is encoder]

    def _bias(self, name: str, streams: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns a stack's biases of this rank's heads by the name that its layers read; those of all are computed where it begins."""
        module = self._modules.get(name)
        if module is not None:
            streams[name] = module()
        return {} if self.local_heads is None else {RELATIVE_BIAS: self.local_heads(streams[name])}


def _source_batch(batch: Batch) -> Batch:
    """Returns the encoder's sequence, as tokens of a batch of its own."""
    positions = batch.arrays.get(ENCODER_POSITIONS)
    return Batch(batch[ENCODER_TOKENS], positions=positions, documents=batch.source_documents)


def with_positions(batch: Batch) -> Batch:
    """Adds the positions of both sequences, before context parallelism splits them.

    >>> batch = Batch(torch.zeros(1, 2, dtype=torch.int64), arrays={"encoder_tokens": torch.zeros(1, 3)})
    >>> with_positions(batch)["encoder_positions"]
    tensor([[0, 1, 2]])
    """
    names = {"positions": "tokens", ENCODER_POSITIONS: ENCODER_TOKENS}
    added = {name: _positions_of(batch[of]) for name, of in names.items() if name not in batch}
    return batch.with_arrays(**added) if added else batch


def _positions_of(tokens_BS: Tensor) -> Tensor:
    return torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand(tokens_BS.shape)
