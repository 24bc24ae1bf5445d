"""The module of decoders that read images: a vision encoder, a projector, and the decoder's layers.

Text is embedded before the first layer, since that is where the table is, and waits until the images are encoded; then their vectors take
the places that it has for them. S sequence, B batch, D hidden, P patches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Protocol

from torch import Tensor, nn

from petatron.config.pipeline_stages import PipelineStage
from petatron.layers.forward_context import ForwardContext, RopeCosSin, StatisticsKey
from petatron.layers.norm import NormSpec
from petatron.layers.rope import RopeSpec, RotaryEmbedding
from petatron.layers.spec.generation_state import GenerationStep
from petatron.layers.vision.patch_embedding import PatchEmbeddingSpec
from petatron.layers.vision.projector import ImageSplice, ProjectorSpec
from petatron.models.batch import Batch
from petatron.models.decoder import HIDDEN, Decoder, DecoderParts
from petatron.models.image_text_batch import IMAGE_INDEX, PATCH_COORDINATES, PATCH_ROWS, PATCHES
from petatron.models.stage_inputs_outputs import StageOutput

ENCODED_PATCHES = "encoded_patches"
"""The name of the vision encoder's stream between two pipeline stages."""


class VisionLanguageParts(DecoderParts, Protocol):
    """What the module reads of its spec (`vision_language_spec.py`)."""

    @property
    def num_vision_layers(self) -> int: ...
    @property
    def windowed_layers(self) -> frozenset[int]: ...
    @property
    def patch_embedding(self) -> PatchEmbeddingSpec: ...
    @property
    def vision_rope(self) -> RopeSpec | None: ...
    @property
    def vision_norm(self) -> NormSpec | None: ...
    @property
    def projector(self) -> ProjectorSpec: ...


class VisionLanguageModel(Decoder):
    """Embeddings of text and patches, vision encoder, projector, decoder; or the part of these that one pipeline stage has."""

    def __init__(self, spec: VisionLanguageParts, stage: PipelineStage) -> None:
        super().__init__(spec, stage)
        self.num_vision_layers, self.windowed_layers = spec.num_vision_layers, spec.windowed_layers
        self._vision_rotary = None if spec.vision_rope is None else RotaryEmbedding(spec.vision_rope)
        ends_encoder = spec.num_vision_layers - 1 in stage.layer_indices
        self.vision = spec.patch_embedding.build() if stage.has_embedding else None
        self.vision_norm = spec.vision_norm.build() if ends_encoder and spec.vision_norm is not None else None
        self.projector = spec.projector.build() if ends_encoder else None
        self.splice = ImageSplice() if ends_encoder else None
        self.stage_follows_encoder = (
            not stage.has_embedding
            and min(stage.layer_indices, default=spec.num_vision_layers) >= spec.num_vision_layers
        )

    def outer_modules(self) -> Sequence[Sequence[nn.Module]]:
        groups = (
            [self.embedding],
            [self.embedding_norm],
            [self.vision],
            [self.vision_norm, self.projector],
            [self.norm, self.head],
        )
        return [modules for group in groups if (modules := [module for module in group if module is not None])]

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
        """Runs the stage (see `StageModule`); the last one computes what that of a decoder does."""
        streams, statistics = dict(inputs), {} if router_statistics is None else router_statistics
        if self.embedding is not None:
            streams[HIDDEN] = self._embed(batch.tokens, self._positions(batch))
        self._encode_images(batch, streams)
        context = self._context(batch, streams[HIDDEN], {}, aux_loss_scale, statistics)
        if layers := self._decoder_layers():
            streams[HIDDEN] = self.run_layers(layers, streams[HIDDEN], context)
        if self.head is None:
            return StageOutput(streams, {}, {})
        return self._head_output(batch, streams[HIDDEN], context, loss_weights, collect)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Returns this rank's part of the output head's input [S, B, hidden]; needs a model on one stage."""
        return self(batch, collect=("hidden_states",)).collected["hidden_states"].transpose(0, 1)

    def image_vectors(self, batch: Batch) -> Tensor:
        """Returns the vectors [F, hidden] of a batch's images, all on every rank; needs a model on one stage."""
        assert self.vision is not None and self.splice is not None, "one stage is the whole model"
        return self.splice.gathered(self._project(self._run_encoder(batch, {}))).squeeze(1)

    def generation_step(
        self, tokens_T: Tensor, positions_T: Tensor, x_SBD: Tensor | None, step: GenerationStep, rows_R: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the decoder; some rows take the vector of an image, and positions may be [1, 3, T]."""
        if self.embedding is not None and step.vectors is not None:
            assert self.splice is not None, "one stage is the whole model"
            text_T1D = self._embed(tokens_T.unsqueeze(0), positions_T)
            x_SBD = self.splice.place(text_T1D, step.vectors.vectors, step.vectors.index_T.unsqueeze(0)).squeeze(1)
        return super().generation_step(tokens_T, positions_T, x_SBD, step, rows_R)

    def _encode_images(self, batch: Batch, streams: dict[str, Tensor]) -> None:
        """Runs this stage's part of the encoder; where it ends, its vectors are put into the text."""
        if PATCHES not in batch or self.stage_follows_encoder:  # text alone, or all is encoded
            return
        x_P1D = self._run_encoder(batch, streams)
        if self.splice is None:
            streams[ENCODED_PATCHES] = x_P1D
            return
        streams.pop(ENCODED_PATCHES, None)
        streams[HIDDEN] = self.splice(streams[HIDDEN], self._project(x_P1D), batch[IMAGE_INDEX])

    def _run_encoder(self, batch: Batch, streams: Mapping[str, Tensor]) -> Tensor:
        """Runs this stage's layers of the encoder on the stream of the stage before, or on the embeddings of patches."""
        x_P1D = streams.get(ENCODED_PATCHES)
        if self.vision is not None:
            x_P1D = self.vision(batch[PATCHES], batch.arrays.get(PATCH_ROWS))
        assert x_P1D is not None, "a stage without the first module takes the stream of the stage before"
        cos_sin = self._patch_rope(batch, x_P1D)
        for in_windows, layers in groupby(self._vision_layers(), key=lambda item: item[0] in self.windowed_layers):
            context = ForwardContext(cos_sin, batch.window_documents if in_windows else batch.source_documents)
            x_P1D = self.run_layers([layer for _, layer in layers], x_P1D, context)
        return x_P1D

    def _project(self, x_P1D: Tensor) -> Tensor:
        assert self.projector is not None
        return self.projector(x_P1D if self.vision_norm is None else self.vision_norm(x_P1D))

    def _patch_rope(self, batch: Batch, x_P1D: Tensor) -> Mapping[RopeSpec, RopeCosSin]:
        rotary = self._vision_rotary
        has_layers = next(self._vision_layers(), None) is not None
        if rotary is None or not has_layers:
            return {}
        return {rotary.spec: rotary(batch[PATCH_COORDINATES], x_P1D.dtype)}

    def _vision_layers(self) -> Iterator[tuple[int, nn.Module]]:
        return ((int(index), layer) for index, layer in self.layers.items() if int(index) < self.num_vision_layers)

    def _decoder_layers(self) -> list[nn.Module]:
        return [layer for index, layer in self.layers.items() if int(index) >= self.num_vision_layers]

    def _main_layers(self) -> list[nn.Module]:
        return self._decoder_layers()
