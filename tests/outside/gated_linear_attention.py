"""A mixer that the package does not know: gated linear attention, as somebody outside would add it.

With c the running sum of the log of a decay per head and token, o_i = sum over j <= i of exp(c_i - c_j) (q_i . k_j) v_j.
S sequence, B batch, H heads of this rank, E head dim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import petatron
from petatron.config import ModelConfig, MoEConfig
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import BranchModule, BranchSpec
from petatron.layers.spec.param_spec import ParamSpec, linear_params, with_prefix
from petatron.models.decoder_spec import DecoderSpec, decoder_spec
from petatron.sharding.shard_spec import Section, Shard, TensorShard


@dataclass(frozen=True, slots=True)
class SpreadDecays:
    """Head h starts with the decay bias h / 2: from short memory to long."""

    def fill(self, out: Tensor, shard: TensorShard, *, seed: int) -> None:
        out.copy_(torch.arange(shard.start[0], shard.start[0] + shard.shape[0]) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedLinearAttentionSpec(BranchSpec):
    name = "gla"
    region = "attention"

    hidden_size: int
    num_heads: int
    head_dim: int
    std: float
    out_std: float

    def build(self, layer_index: int) -> GatedLinearAttention:
        return GatedLinearAttention(self)

    def params(self) -> Mapping[str, ParamSpec]:
        width = self.num_heads * self.head_dim
        rows = {"q": width, "k": width, "v": width, "decay": self.num_heads}
        sections = tuple(Section(name, size, self.num_heads) for name, size in rows.items())
        inputs = linear_params(self.hidden_size, rows, Shard(tp=0, sections=sections), bias=False, std=self.std)
        out = linear_params(width, self.hidden_size, Shard(tp=1), bias=False, std=self.out_std)
        bias = ParamSpec(shape=(self.num_heads,), shard=Shard(tp=0), init=SpreadDecays())
        return {"decay_bias": bias} | with_prefix("inputs", inputs) | with_prefix("out", out)

    def mixing_flops(self, seq_length: int, *, causal: bool) -> float:
        return 12 * self.num_heads * self.head_dim * seq_length * seq_length

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if self.region in recomputed:
            return 0
        tokens, heads = shape.gathered_tokens, self.num_heads // shape.tp
        pairs = 3 * tokens * shape.sequence * heads  # the scores, their decays, and the product of both
        inputs = tokens * heads * (3 * self.head_dim + 1)
        activations = inputs + tokens * heads + tokens * heads * self.head_dim  # the decay's argument, the output
        fp8 = shape.fp8_input_bytes(self.hidden_size, heads * self.head_dim)
        return (activations + pairs) * shape.element_bytes + shape.sequence**2 + fp8


class GatedLinearAttention(BranchModule):
    fp8_linears = ("inputs", "out")

    def __init__(self, spec: GatedLinearAttentionSpec) -> None:
        super().__init__()
        width = spec.num_heads * spec.head_dim
        self.head_dim = spec.head_dim
        self.inputs = Linear(spec.hidden_size, (width, width, width, spec.num_heads), bias=False)
        self.decay_bias = nn.Parameter(torch.empty(spec.num_heads))
        self.out = Linear(width, (spec.hidden_size,), bias=False)

    def recompute_regions(self) -> Mapping[str, nn.Module]:
        return {"attention": self}

    def forward(self, x_SBD: Tensor | RecomputableOutput, context: ForwardContext) -> Tensor:
        q, k, v, decay_SBH = self.inputs(x_SBD).split(self.inputs.sections, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        c_SBH = F.logsigmoid(decay_SBH + self.decay_bias).cumsum(0)
        later = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu(1)
        decay_BHST = (c_SBH.permute(1, 2, 0).unsqueeze(-1) - c_SBH.permute(1, 2, 0).unsqueeze(-2)).masked_fill(
            later, -torch.inf
        )
        scores_BHST = torch.einsum("sbhe,tbhe->bhst", q, k) * decay_BHST.exp()
        return self.out(torch.einsum("bhst,tbhe->sbhe", scores_BHST, v).flatten(-2))


def hybrid_spec(config: ModelConfig, moe: MoEConfig) -> DecoderSpec:
    """Every second layer of a decoder mixes with gated linear attention."""
    spec = decoder_spec(config, moe)
    attention = spec.layers[0].mixer
    assert attention is not None
    mixer = GatedLinearAttentionSpec(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        std=config.init_method_std,
        out_std=config.init_method_std / (2 * config.num_layers) ** 0.5,
    )
    layers = [replace(layer, mixer=mixer) if index % 2 else layer for index, layer in enumerate(spec.layers)]
    return replace(spec, layers=tuple(layers))


petatron.register_model("hybrid", hybrid_spec)
