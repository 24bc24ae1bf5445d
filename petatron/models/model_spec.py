"""`ModelSpec`: one resolved, immutable description of a model, from which everything else is derived.

A model is a chain of layers, numbered through, with something before the first (embeddings) and after the last (a norm, heads,
losses). Its spec names all its parameters with their shards, builds any pipeline stage of it, and answers what estimates, memory
plans, checkpoints and conversions ask. Nothing below takes settings of the model in another form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.required_settings import known_vocab_size
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.sections.mup import relative_width
from petatron.layers.moe.moe_layer import MoESpec
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import SequenceSharding
from petatron.layers.spec.param_spec import ParamSpec, widen_layer, widen_outer, with_prefix
from petatron.layers.transformer_layer import LayerSpec
from petatron.models.batch import Batch
from petatron.models.stage_inputs_outputs import ModelIO
from petatron.models.stage_interface import StageModule
from petatron.sharding.initial_values import NormalValues, XavierValues
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shape, TensorShard, compute_placement

Part = Literal["language model", "vision encoder"]
"""The parts of a model that settings name."""
Collate = Callable[[Sequence[Any], Any], Batch]
"""Makes the batch of one micro-batch's samples with the loader's options."""


class ModelSpec(ABC):
    """The description of one model. Subclasses are frozen dataclasses, one for each way in which layers are put together.

    config, moe: the settings the model was made from; a checkpoint stores them as the model's identity.
    layers: of the whole model.
    tied_params: parameters that compute with another's values: {"head.weight": "embedding.weight"}.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> spec = petatron.build_model(run, petatron.launch(run)).spec
    >>> spec.params()["layers.0.attention.out.weight"].shard.tp
    1
    """

    config: ModelConfig
    moe: MoEConfig | None
    layers: tuple[LayerSpec, ...]

    @property
    def vocab_size(self) -> int:
        """The number of token ids; `ConfigError` if it is that of a tokenizer that was not opened."""
        return known_vocab_size(self.config)

    @property
    def tied_params(self) -> Mapping[str, str]:
        return {}

    @abstractmethod
    def io(self, stages: Sequence[PipelineStage]) -> ModelIO:
        """Returns what the model takes and gives when it is cut into these stages: tensors between stages, losses, outputs."""

    @property
    def collate(self) -> Collate | None:
        """Returns what makes a batch of samples; None: samples are text, and tokens predict the next one."""
        return None

    @abstractmethod
    def build_stage(self, stage: PipelineStage) -> StageModule:
        """Builds the module of one stage, with whole parameters."""

    @abstractmethod
    def outer_params(self, stage: PipelineStage, *, tied_across_ranks: bool = False) -> Mapping[str, ParamSpec]:
        """Returns the parameters of a stage outside its layers.

        `tied_across_ranks`: first and last stage are on different ranks, so a tied parameter of the last is a replica.
        """

    @abstractmethod
    def outer_saved_bytes(self, shape: ActivationShape, stage: PipelineStage) -> int:
        """Returns the bytes that a stage saves of a micro-batch outside its layers."""

    def frozen_outer_bytes(self, shape: ActivationShape, stage: PipelineStage, frozen: Collection[str]) -> int:
        """Returns the bytes among those of `outer_saved_bytes` that nothing saves while these parameters are frozen."""
        return 0

    def loss_workspace_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes that computing the loss of a micro-batch needs, and does not save."""
        return 0

    def params(self, stage: PipelineStage | None = None, *, tied_across_ranks: bool = False) -> dict[str, ParamSpec]:
        """Returns every parameter of a stage by name, or of the whole model, in the order of its modules."""
        stage = stage or self.whole_model
        width = relative_width(self.config, self.config.hidden_size)
        outer = widen_outer(self.outer_params(stage, tied_across_ranks=tied_across_ranks), width)
        layers: dict[str, ParamSpec] = {}
        for index in stage.layer_indices:
            layers |= with_prefix(f"layers.{index}", widen_layer(self.layers[index].params(), width))
        before = {name: param for name, param in outer.items() if name.split(".")[0] in self.modules_before_layers}
        params = before | layers | {name: param for name, param in outer.items() if name not in before}
        if not self.config.init_method_xavier_uniform:
            return params
        return {name: _with_xavier_values(param) for name, param in params.items()}

    @property
    def num_predictions(self) -> int:
        """How many tokens the output head predicts at each position."""
        return 1

    @property
    def generation_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that compute the next token; others are done before the first."""
        return self.layers

    @property
    def source_length(self) -> int | None:
        """The most tokens of a prompt that an encoder reads, to which the answer is a text of its own; None: prompts are continued."""
        return None

    @property
    def predicted_length(self) -> int:
        """The tokens of the sequence whose next tokens are predicted."""
        return self.config.seq_length

    @property
    def modules_before_layers(self) -> tuple[str, ...]:
        """The modules of the first stage that run before its layers."""
        return ("embedding", "position", "embedding_norm")

    @property
    def tokens_of_modules(self) -> Mapping[str, int]:
        """The tokens per sample of modules outside of layers that have GEMMs, but for the output head."""
        return {}

    def params_of_part(self, part: Part) -> tuple[str, ...]:
        """Returns patterns of the parameters of a part that can be frozen as one."""
        return ()

    def layer_after(self, module: str) -> int:
        """Returns the index of the first layer that takes what a module outside of layers computes; their number if none does."""
        return 0 if module in self.modules_before_layers else len(self.layers)

    @property
    def whole_model(self) -> PipelineStage:
        """The one stage that is the whole model."""
        return PipelineStage(tuple(range(len(self.layers))), has_embedding=True, has_loss=True)

    def logical_tensors(self) -> Iterator[tuple[TensorShard, ParamSpec]]:
        """Yields every logical tensor, which no layout changes, with the parameter it is part of."""
        for name, param in self.params().items():
            for shard in compute_placement(name, param.shape, param.shard, ModelParallelCoordinate()).tensor_shards:
                yield shard, param

    def logical_shapes(self) -> dict[str, Shape]:
        """Returns name and shape of every logical tensor."""
        return {shard.name: shard.logical_shape for shard, _ in self.logical_tensors()}

    def stage_layers(self, stage: PipelineStage) -> tuple[LayerSpec, ...]:
        return tuple(self.layers[index] for index in stage.layer_indices)

    def count_layers(self, stage: PipelineStage | None = None) -> Counter[LayerSpec]:
        """Returns the distinct layers of a stage, or of the model, and how many there are of each."""
        return _count_layers(self, stage)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The indices of layers with experts."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.channel_mixer, MoESpec))

    @property
    def num_layers_by_aux_loss(self) -> Mapping[str, int]:
        """How many layers attach each auxiliary loss (`BranchSpec.aux_loss_names`), by name."""
        counts: Counter[str] = Counter()
        for layer, count in self.count_layers().items():
            for branch in layer.branches:
                counts.update(dict.fromkeys(branch.aux_loss_names, count))
        return counts

    @property
    def max_positions(self) -> int:
        """The positions that a sequence may have in this run."""
        return self.config.max_position_embeddings

    @property
    def original_context(self) -> int | None:
        """The length after which all tokens of a sequence have other positions, as with LongRoPE; None: they never have."""
        return None

    @property
    def sequence_sharding(self) -> SequenceSharding:
        """How context parallelism may shard sequences so that every layer can work with it; `whole`: not at all."""
        branches = (branch for layer in self.count_layers() for branch in layer.branches)
        orders: set[SequenceSharding] = {
            branch.sequence_sharding for branch in branches if branch.sequence_sharding != "any"
        }
        if orders == {"zigzag", "contiguous"}:
            return "contiguous"
        if len(orders) > 1:
            return "whole"
        return orders.pop() if orders else "zigzag"


def _with_xavier_values(param: ParamSpec) -> ParamSpec:
    """Returns a parameter with uniform initial values, if it has normal ones; experts have a GEMM each."""
    if not isinstance(param.init, NormalValues) or len(param.shape) < 2:
        return param
    rows, columns = param.shape[-2:]
    return replace(param, init=XavierValues(rows, columns))


@lru_cache(maxsize=256)
def _count_layers(spec: ModelSpec, stage: PipelineStage | None) -> Counter[LayerSpec]:
    return Counter(spec.layers if stage is None else spec.stage_layers(stage))
