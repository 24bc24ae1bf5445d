"""One decoder for the GPT and LLaMA families, and the tables of its shard specs, initialisation and weight decay.

Parameter names are the same in every layout. S sequence, B batch, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.layers.dropout import Dropout
from petatron.layers.embedding import PositionEmbedding, TokenEmbedding
from petatron.layers.forward_context import ForwardContext
from petatron.layers.norm import build_norm
from petatron.layers.output_head import OutputHead
from petatron.layers.rope import RotaryEmbedding
from petatron.layers.transformer_layer import Residual, TransformerLayer
from petatron.models.batch import Batch
from petatron.models.stage import BoundaryTensor, LossSpec, ModelIO, StageOutput
from petatron.sharding.shard_spec import Section, Shard

HIDDEN = "hidden"
"""The tensor between two stages."""
LM_LOSS = "lm loss"

LayerRunner = Callable[[Sequence[nn.Module], Tensor, ForwardContext], Tensor]
"""Runs a stage's layers: the slot for recompute of groups of them, and for offload."""


def run_layers_sequentially(layers: Sequence[nn.Module], x_SBD: Tensor, context: ForwardContext) -> Tensor:
    residual: Residual | None = None
    for layer in layers:
        x_SBD, residual = layer(x_SBD, context, residual)
    return x_SBD if residual is None else residual.x_SBD + x_SBD


class Decoder(nn.Module):
    """Embedding, layers, final norm, output head; or one pipeline stage of that: some layers, and the ends it has.

    >>> from petatron.config import load_config
    >>> flags = ["--vocab-size", "256"]
    >>> model = Decoder(load_config(flags, preset="tiny-llama", require_training=False).config.model)
    >>> sorted({name.split(".")[0] for name, _ in model.named_parameters()})
    ['embedding', 'head', 'layers', 'norm']
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig | None = None,
        *,
        moe_layer_mask: Sequence[bool] = (),
        stage: PipelineStage | None = None,
    ) -> None:
        """`moe_layer_mask` says which layers of the whole model are MoE layers; without a stage, the whole model is built."""
        super().__init__()
        assert config.vocab_size and config.kv_channels and config.max_position_embeddings, "the config is not derived"
        self.config = config
        self.stage = stage or PipelineStage(tuple(range(config.num_layers)), has_embedding=True, has_loss=True)
        rotary = config.position_embedding_type in ("rope", "yarn")
        learned = config.position_embedding_type == "learned_absolute" and self.stage.has_embedding
        self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size) if self.stage.has_embedding else None
        self.position = PositionEmbedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.embedding_dropout = Dropout(config.hidden_dropout)
        self.rotary = RotaryEmbedding(config, config.kv_channels) if rotary else None
        moe_layers = {index for index, is_moe in enumerate(moe_layer_mask) if is_moe}
        self.layers = nn.ModuleDict(
            {
                str(index): TransformerLayer(config, moe if index in moe_layers else None, layer_index=index)
                for index in self.stage.layer_indices
            }
        )
        self.run_layers: LayerRunner = run_layers_sequentially
        self.norm = build_norm(config, config.hidden_size) if self.stage.has_loss else None
        self.head = self._build_head() if self.stage.has_loss else None

    def _build_head(self) -> OutputHead:
        """Builds the head; a tied one uses the embedding's weight if it is on the same stage, and else has a replica of it."""
        tied = not self.config.untie_embeddings_and_output_weights and self.embedding is not None
        assert self.config.vocab_size is not None
        return OutputHead(self.config.vocab_size, self.config.hidden_size, tied=tied)

    def forward(
        self,
        batch: Batch,
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        aux_loss_scale: Tensor | None = None,
        router_statistics: dict[int, Tensor] | None = None,
        loss_weights: Mapping[str, Tensor] | None = None,
        collect: Collection[str] = (),
    ) -> StageOutput:
        """Runs the stage as `StageModule` says. Knowing the loss weights beforehand saves a GEMM.

        The last stage computes the loss if the batch has labels. It can collect "logits" [B, S, vocabulary] and "hidden_states"
        [B, S, hidden], the input of the output head: of this rank's part of the sequence, and else whole on every rank.
        """
        statistics = {} if router_statistics is None else router_statistics
        x_SBD = self._run_stage(batch, inputs.get(HIDDEN), aux_loss_scale, statistics)
        if self.head is None or self.norm is None:
            return StageOutput({HIDDEN: x_SBD}, {}, {})
        x_SBD, losses = self.norm(x_SBD), {}
        if "labels" in batch:
            weights = None if loss_weights is None else loss_weights[LM_LOSS]
            losses[LM_LOSS] = self.head.losses(
                x_SBD, self._embedding_weight(), batch.labels.t(), loss_weights_SB=weights
            )
        compute = {"logits": self._logits, "hidden_states": self._hidden_states}
        return StageOutput({}, losses, {name: compute[name](x_SBD) for name in collect})

    def logits(self, tokens_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns logits [B, S, vocabulary], whole on every rank; needs embedding and head on one stage."""
        assert self.embedding is not None and self.head is not None and self.norm is not None
        return self._logits(self.norm(self._run_stage(Batch(tokens_BS, positions=positions), None, None, {})))

    def _logits(self, x_SBD: Tensor) -> Tensor:
        assert self.head is not None
        return self.head.vocab_shard.full_logits(self.head(x_SBD, self._embedding_weight())).transpose(0, 1)

    def _hidden_states(self, x_SBD: Tensor) -> Tensor:
        assert self.head is not None
        return self.head.input_comm(x_SBD).transpose(0, 1)  # gathers what sequence parallelism has sharded

    def _embedding_weight(self) -> Tensor | None:
        return None if self.embedding is None else self.embedding.weight

    def _run_stage(
        self, batch: Batch, x_SBD: Tensor | None, aux_loss_scale: Tensor | None, router_statistics: dict[int, Tensor]
    ) -> Tensor:
        """Returns the activations after the last layer."""
        positions = batch.positions
        if positions is None:
            positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        if self.embedding is not None:
            x_SBD = self._embed(batch.tokens, positions)
        assert x_SBD is not None, "a stage without the embedding takes the activations of the stage before"
        rope_cos_sin = None if self.rotary is None else self.rotary(positions, x_SBD.dtype)
        context = ForwardContext(rope_cos_sin, batch.documents, aux_loss_scale, router_statistics)
        return self.run_layers(list(self.layers.values()), x_SBD, context)

    def _embed(self, tokens_BS: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding is not None
        x_SBD = self.embedding(tokens_BS)
        if self.config.scale_embeddings:
            x_SBD = x_SBD * x_SBD.new_full((), math.sqrt(self.config.hidden_size))
        if self.position is not None:
            x_SBD = x_SBD + self.position(positions)
        return self.embedding_dropout(x_SBD)


def decoder_io(config: ModelConfig, *, num_stages: int) -> ModelIO:
    """Returns what a decoder of so many stages takes and gives: one tensor between stages, one loss."""
    hidden = (BoundaryTensor(HIDDEN, config.hidden_size),)
    return ModelIO(
        boundaries=((), *(hidden,) * (num_stages - 1)),
        losses=(LossSpec(LM_LOSS),),
        outputs=("logits", "hidden_states"),
    )


def shard_specs(
    config: ModelConfig, moe: MoEConfig | None = None, *, head_on_other_rank: bool = False
) -> dict[str, Shard]:
    """Returns how each parameter is sharded over the tensor- and expert-parallel ranks, by module name.

    `head_on_other_rank`: embedding and head are on different ranks; a tied head is then a replica of the embedding.
    """
    assert config.kv_channels and config.num_query_groups and config.ffn_hidden_size
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    kv = groups * width
    qkv = (Section("q", heads * width, heads), Section("k", kv, groups), Section("v", kv, groups))
    ffn = config.ffn_hidden_size
    replicated = head_on_other_rank and not config.untie_embeddings_and_output_weights
    vocabulary = Shard(tp=0, pad_to=config.make_vocab_size_divisible_by, shared_embedding=replicated)
    return {
        "embedding": vocabulary,
        "head": replace(vocabulary, replica_of="embedding.weight") if replicated else vocabulary,
        "position": Shard(partial_grad="sequence"),
        "layers.*.attention.qkv": Shard(tp=0, sections=qkv),
        "layers.*.attention.out": Shard(tp=1),
        "layers.*.attention.[qk]_norm": Shard(partial_grad="always"),
        "layers.*.mlp.gate_up": Shard(tp=0, sections=(Section("gate", ffn, ffn), Section("up", ffn, ffn))),
        "layers.*.mlp.up": Shard(tp=0),
        "layers.*.mlp.down": Shard(tp=1),
        **(_moe_shard_specs(moe) if moe is not None else {}),
        "layers.*_norm": Shard(partial_grad="sequence"),
        "norm": Shard(partial_grad="sequence"),
    }


def _moe_shard_specs(moe: MoEConfig) -> dict[str, Shard]:
    assert moe.moe_ffn_hidden_size is not None
    ffn, shared = moe.moe_ffn_hidden_size, moe.moe_shared_expert_intermediate_size or 0
    gate_up = (Section("gate", ffn, ffn), Section("up", ffn, ffn))
    return {
        "layers.*.mlp.router": Shard(partial_grad="sequence"),
        "layers.*.mlp.experts.gate_up": Shard(ep=0, tp=1, sections=gate_up),
        "layers.*.mlp.experts.up": Shard(ep=0, tp=1),
        "layers.*.mlp.experts.down": Shard(ep=0, tp=2),
        "layers.*.mlp.shared.gate_up": Shard(
            tp=0, sections=(Section("gate", shared, shared), Section("up", shared, shared))
        ),
        "layers.*.mlp.shared.up": Shard(tp=0),
        "layers.*.mlp.shared.down": Shard(tp=1),
        "layers.*.mlp.shared_gate": Shard(partial_grad="sequence"),
        "layers.*.mlp.latent_*": Shard(partial_grad="sequence"),
    }


def takes_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: not to biases and norm weights."""
    return not name.endswith(".bias") and parameter.dim() > 1


def initial_constant(config: ModelConfig, name: str) -> float:
    """Returns the initial value of norms and biases: biases are zero, and norms have unit scale."""
    return 0.0 if name.endswith(".bias") or config.apply_layernorm_1p else 1.0


def initial_std(config: ModelConfig, name: str) -> float | None:
    """Returns the standard deviation of a weight's initialisation; None for norms and biases, which are constant.

    Weights of residual branches start smaller, so that the sum over 2 x layers branches has the same size for every depth
    (GPT-2).
    """
    if name.endswith(".bias") or "norm" in name:
        return None
    if name.startswith(("embedding.", "position.")):
        return config.embedding_init_method_std
    if name.endswith(("attention.out.weight", ".down.weight")):
        return config.init_method_std / math.sqrt(2.0 * config.num_layers)
    return config.init_method_std
