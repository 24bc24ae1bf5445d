"""One decoder for the GPT and LLaMA families, and the tables that say how its weights are split, first drawn and decayed.

Parameter names are the same in every layout. S sequence, B batch, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from petatron.config.pipeline_stages import Stage
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.layers.dropout import Dropout
from petatron.layers.embedding import PositionEmbedding, TokenEmbedding
from petatron.layers.forward_context import Pass
from petatron.layers.norm import build_norm
from petatron.layers.output_head import OutputHead
from petatron.layers.rope import Rotary
from petatron.layers.transformer_layer import Block, Rest
from petatron.models.batch import Batch
from petatron.sharding.shard_spec import Section, Shard

LayerRunner = Callable[[Sequence[nn.Module], Tensor, Pass], Tensor]
"""How a stage's blocks are run: the slot for recomputing groups of them."""


def one_by_one(blocks: Sequence[nn.Module], x_SBD: Tensor, passing: Pass) -> Tensor:
    rest: Rest | None = None
    for block in blocks:
        x_SBD, rest = block(x_SBD, passing, rest)
    return x_SBD if rest is None else rest.x_SBD + x_SBD


class Decoder(nn.Module):
    """Embedding, blocks, final norm, output head; or one pipeline stage of that: some blocks, and what ends it holds.

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
        experts_in: Sequence[bool] = (),
        stage: Stage | None = None,
    ) -> None:
        """`experts_in` says which layers of the whole model are mixtures of experts; without a stage, all is here."""
        super().__init__()
        assert config.vocab_size and config.kv_channels and config.max_position_embeddings, "the config is not derived"
        self.config = config
        self.stage = stage or Stage(tuple(range(config.num_layers)), embedding=True, loss=True)
        rotary = config.position_embedding_type in ("rope", "yarn")
        learned = config.position_embedding_type == "learned_absolute" and self.stage.embedding
        self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size) if self.stage.embedding else None
        self.position = PositionEmbedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.embedding_dropout = Dropout(config.hidden_dropout)
        self.rotary = Rotary(config, config.kv_channels) if rotary else None
        mixed = {index for index, is_mixed in enumerate(experts_in) if is_mixed}
        self.layers = nn.ModuleDict(
            {str(index): Block(config, moe if index in mixed else None, number=index) for index in self.stage.layers}
        )
        self.run_layers: LayerRunner = one_by_one
        self.norm = build_norm(config, config.hidden_size) if self.stage.loss else None
        self.head = self._build_head() if self.stage.loss else None

    def _build_head(self) -> OutputHead:
        """A tied head borrows the embedding where that is on the same stage, and holds a copy of it elsewhere."""
        borrows = not self.config.untie_embeddings_and_output_weights and self.embedding is not None
        assert self.config.vocab_size is not None
        return OutputHead(self.config.vocab_size, self.config.hidden_size, tied=borrows)

    def forward(
        self,
        batch: Batch,
        x_SBD: Tensor | None = None,
        *,
        extra_loss_scale: Tensor | None = None,
        reports: dict[int, Tensor] | None = None,
        loss_weights_SB: Tensor | None = None,
    ) -> Tensor:
        """Token losses [S, B] from the last stage, else what the next stage takes; `x_SBD` is the stage before's.

        `extra_loss_scale` and `reports` are those of `Pass`. `loss_weights_SB` are the gradients of the token losses, where
        they are known beforehand: that saves a product.
        """
        x_SBD = self._run(batch, x_SBD, extra_loss_scale, {} if reports is None else reports)
        if self.head is None or self.norm is None:
            return x_SBD
        return self.head.losses(self.norm(x_SBD), self._table(), batch.labels.t(), weights_SB=loss_weights_SB)

    def logits(self, tokens_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [B, S, vocabulary], whole on every rank; needs both ends of the model."""
        assert self.embedding is not None and self.head is not None and self.norm is not None
        x_SBD = self._run(Batch(tokens_BS, tokens_BS, tokens_BS, positions), None, None, {})
        return self.head.vocabulary.whole_logits(self.head(self.norm(x_SBD), self._table())).transpose(0, 1)

    def _table(self) -> Tensor | None:
        return None if self.embedding is None else self.embedding.weight

    def _run(
        self, batch: Batch, x_SBD: Tensor | None, extra_loss_scale: Tensor | None, reports: dict[int, Tensor]
    ) -> Tensor:
        """Activations behind the last block."""
        positions = batch.positions
        if positions is None:
            positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        if self.embedding is not None:
            x_SBD = self._embed(batch.tokens, positions)
        assert x_SBD is not None, "a stage without the embedding takes the activations of the stage before"
        rotation = None if self.rotary is None else self.rotary(positions, x_SBD.dtype)
        passing = Pass(rotation, batch.documents, extra_loss_scale, reports)
        return self.run_layers(list(self.layers.values()), x_SBD, passing)

    def _embed(self, tokens_BS: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding is not None
        x_SBD = self.embedding(tokens_BS)
        if self.config.scale_embeddings:
            x_SBD = x_SBD * x_SBD.new_full((), math.sqrt(self.config.hidden_size))
        if self.position is not None:
            x_SBD = x_SBD + self.position(positions)
        return self.embedding_dropout(x_SBD)


def shards(config: ModelConfig, moe: MoEConfig | None = None, *, ends_apart: bool = False) -> dict[str, Shard]:
    """How each parameter is split over the tensor- and expert-parallel ranks, by module name.

    `ends_apart` says that embedding and head lie on different ranks; a tied head is then a copy of the embedding.
    """
    assert config.kv_channels and config.num_query_groups and config.ffn_hidden_size
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    kv = groups * width
    qkv = (Section("q", heads * width, heads), Section("k", kv, groups), Section("v", kv, groups))
    ffn = config.ffn_hidden_size
    copied = ends_apart and not config.untie_embeddings_and_output_weights
    vocabulary = Shard(tp=0, pad_to=config.make_vocab_size_divisible_by, ends=copied)
    return {
        "embedding": vocabulary,
        "head": replace(vocabulary, copy_of="embedding.weight") if copied else vocabulary,
        "position": Shard(partial="sequence"),
        "layers.*.attention.qkv": Shard(tp=0, sections=qkv),
        "layers.*.attention.out": Shard(tp=1),
        "layers.*.attention.[qk]_norm": Shard(partial="always"),
        "layers.*.mlp.gate_up": Shard(tp=0, sections=(Section("gate", ffn, ffn), Section("up", ffn, ffn))),
        "layers.*.mlp.up": Shard(tp=0),
        "layers.*.mlp.down": Shard(tp=1),
        **(_expert_shards(moe) if moe is not None else {}),
        "layers.*_norm": Shard(partial="sequence"),
        "norm": Shard(partial="sequence"),
    }


def _expert_shards(moe: MoEConfig) -> dict[str, Shard]:
    assert moe.moe_ffn_hidden_size is not None
    ffn, shared = moe.moe_ffn_hidden_size, moe.moe_shared_expert_intermediate_size or 0
    gate_up = (Section("gate", ffn, ffn), Section("up", ffn, ffn))
    return {
        "layers.*.mlp.router": Shard(partial="sequence"),
        "layers.*.mlp.experts.gate_up": Shard(ep=0, tp=1, sections=gate_up),
        "layers.*.mlp.experts.up": Shard(ep=0, tp=1),
        "layers.*.mlp.experts.down": Shard(ep=0, tp=2),
        "layers.*.mlp.shared.gate_up": Shard(
            tp=0, sections=(Section("gate", shared, shared), Section("up", shared, shared))
        ),
        "layers.*.mlp.shared.up": Shard(tp=0),
        "layers.*.mlp.shared.down": Shard(tp=1),
        "layers.*.mlp.shared_gate": Shard(partial="sequence"),
        "layers.*.mlp.latent_*": Shard(partial="sequence"),
    }


def takes_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Biases and the weights of norms are left alone."""
    return not name.endswith(".bias") and parameter.dim() > 1


def initial_constant(config: ModelConfig, name: str) -> float:
    """The first value of what is not drawn: biases are zero, and norms do nothing."""
    return 0.0 if name.endswith(".bias") or config.apply_layernorm_1p else 1.0


def initial_std(config: ModelConfig, name: str) -> float | None:
    """Standard deviation of a weight's first values; None for norms and biases, which are not drawn.

    What is added to the residual stream starts smaller, so that its sum over 2 x layers branches has the same size for
    every depth (GPT-2).
    """
    if name.endswith(".bias") or "norm" in name:
        return None
    if name.startswith(("embedding.", "position.")):
        return config.embedding_init_method_std
    if name.endswith(("attention.out.weight", ".down.weight")):
        return config.init_method_std / math.sqrt(2.0 * config.num_layers)
    return config.init_method_std
