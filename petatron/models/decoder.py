"""One decoder for the GPT and LLaMA families, and the tables that say how its weights are split, first drawn and decayed.

Parameter names are the same in every layout. S sequence, B batch, D hidden.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from petatron.config.schema import ModelConfig
from petatron.layers.block import Block
from petatron.layers.dropout import Dropout
from petatron.layers.norm import build_norm
from petatron.layers.rope import Rotary
from petatron.layers.vocabulary import OutputHead, PositionEmbedding, TokenEmbedding
from petatron.mesh.spec import Section, Shard
from petatron.models.base import Batch


class Decoder(nn.Module):
    """Embedding, blocks, final norm, output head.

    >>> from petatron.config import load_config
    >>> flags = ["--vocab-size", "256"]
    >>> model = Decoder(load_config(flags, preset="tiny-llama", require_training=False).config.model)
    >>> sorted({name.split(".")[0] for name, _ in model.named_parameters()})
    ['embedding', 'head', 'layers', 'norm']
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size and config.kv_channels and config.max_position_embeddings, "the config is not derived"
        self.config = config
        rotary = config.position_embedding_type in ("rope", "yarn")
        learned = config.position_embedding_type == "learned_absolute"
        self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.position = PositionEmbedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.embedding_dropout = Dropout(config.hidden_dropout)
        self.rotary = Rotary(config, config.kv_channels) if rotary else None
        self.layers = nn.ModuleDict({str(index): Block(config) for index in range(config.num_layers)})
        self.norm = build_norm(config, config.hidden_size)
        tied = not config.untie_embeddings_and_output_weights
        self.head = OutputHead(config.vocab_size, config.hidden_size, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Token losses [S, B]."""
        logits = self.head(self.hidden(batch.tokens, batch.positions), self.embedding.weight)
        return self.head.vocabulary.token_losses(logits, batch.labels.t())

    def logits(self, tokens_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [B, S, vocabulary], whole on every rank."""
        logits = self.head(self.hidden(tokens_BS, positions), self.embedding.weight)
        return self.head.vocabulary.whole_logits(logits).transpose(0, 1)

    def hidden(self, tokens_BS: Tensor, positions: Tensor | None) -> Tensor:
        """The normalised residual stream after the last block, as the head takes it."""
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_SBD = self.embedding(tokens_BS)
        if self.position is not None:
            x_SBD = x_SBD + self.position(positions)
        x_SBD = self.embedding_dropout(x_SBD)
        rotation = None if self.rotary is None else self.rotary(positions, x_SBD.dtype)
        for block in self.layers.values():
            x_SBD = block(x_SBD, rotation)
        return self.norm(x_SBD)


def shards(config: ModelConfig) -> dict[str, Shard]:
    """How each parameter is split over the tensor-parallel ranks, by module name."""
    assert config.kv_channels and config.num_query_groups and config.ffn_hidden_size
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    kv = groups * width
    qkv = (Section("q", heads * width, heads), Section("k", kv, groups), Section("v", kv, groups))
    ffn = config.ffn_hidden_size
    vocabulary = Shard(tp=0, pad_to=config.make_vocab_size_divisible_by)
    return {
        "embedding": vocabulary,
        "head": vocabulary,
        "position": Shard(partial="sequence"),
        "layers.*.attention.qkv": Shard(tp=0, sections=qkv),
        "layers.*.attention.out": Shard(tp=1),
        "layers.*.attention.[qk]_norm": Shard(partial="always"),
        "layers.*.mlp.gate_up": Shard(tp=0, sections=(Section("gate", ffn, ffn), Section("up", ffn, ffn))),
        "layers.*.mlp.up": Shard(tp=0),
        "layers.*.mlp.down": Shard(tp=1),
        "layers.*_norm": Shard(partial="sequence"),
        "norm": Shard(partial="sequence"),
    }


def takes_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Biases and the weights of norms have one dimension and are left alone."""
    return parameter.dim() > 1


def initial_std(config: ModelConfig, name: str) -> float | None:
    """Standard deviation of a weight's first values; None for norms (ones) and biases (zeros).

    What is added to the residual stream starts smaller, so that its sum over 2 x layers branches has the same size for
    every depth (GPT-2).
    """
    if name.endswith(".bias") or "norm" in name:
        return None
    if name.startswith(("embedding.", "position.")):
        return config.embedding_init_method_std
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        return config.init_method_std / math.sqrt(2.0 * config.num_layers)
    return config.init_method_std
