"""Kimi delta attention (the linear mixer of Kimi-Linear): a gated delta net whose states have a decay of every key channel.

    q | k | v | b  =  W_in u                        one GEMM
    q | k | v      =  silu(conv(q | k | v))
    f | z          =  W_f (F u) | W_z (Z u)         through latents as wide as one head
    g              =  -exp(A_log) softplus(f + dt_bias)    of every key channel;  beta = sigmoid(b)
    S_t = diag(exp(g_t)) S_{t-1} + beta_t k_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t)^T,   o_t = S_t^T q_t
    out            =  W_out (norm(o) sigmoid(z))

`gated_delta_net.py` has all that is the same. Decays and gates of all heads would be two more GEMMs as wide as that of the keys; their
down-projections F and Z are small instead, and whole on every tensor-parallel rank, as those of latent attention are
(`layers/mla.py`): under sequence parallelism each rank projects its own tokens, and the latents are gathered. W_f and W_z are shared
out by heads.

S sequence, B batch, D hidden, H value heads, P value head dim, N key head dim; those of this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petatron.kernels.ssm import chunk_channel_delta_rule as channel_reference
from petatron.layers.linear import Linear
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, linear_params, with_prefix
from petatron.layers.ssm.gated_delta_net import DeltaRule, GatedDeltaNet, GatedDeltaNetSpec, HeadNormThenGate
from petatron.layers.ssm.initial_values import LogDecayValues, StepBiasValues
from petatron.sharding.shard_spec import Shard

OPERATION = "gated delta rule by channel"


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec(GatedDeltaNetSpec):
    """A gated delta net with a decay of every key channel, and decays and output gates from latents as wide as a head."""

    title = "Kimi delta attention"
    weights_formula = "(h (2 n + 2 p + H + N + P) + H N^2 + p P)"
    mixing_formula = "{c} (2 H N + 2 p + H N) + 6 H N P + 2 w (2 n + p)"

    def build(self, layer_index: int) -> KimiDeltaAttention:
        return KimiDeltaAttention(self, layer_index)

    @property
    def decay_size(self) -> int:
        """The width of the decays of all heads."""
        return self.num_value_heads * self.key_head_dim

    @property
    def product_size(self) -> int:
        """Decays are inside the products, so every value head has its own."""
        return self.decay_size

    def sections(self) -> dict[str, tuple[int, int]]:
        sections = GatedDeltaNetSpec.sections(self)
        return {name: sections[name] for name in ("q", "k", "v", "b")}

    def params(self) -> Mapping[str, ParamSpec]:
        """Those of a gated delta net, with a bias of every decay, and the projections of decays and gates."""
        by_head = Shard(tp=0)
        params = dict(GatedDeltaNetSpec.params(self)) | {
            "A_log": ParamSpec(shape=(1, 1, self.num_value_heads, 1), shard=Shard(tp=2), init=LogDecayValues()),
            "dt_bias": ParamSpec(shape=(self.decay_size,), shard=by_head, init=StepBiasValues()),
        }
        for name, latent, rows in (
            ("decay", self.key_head_dim, self.decay_size),
            ("gate", self.value_head_dim, self.inner_size),
        ):
            down = linear_params(self.hidden_size, latent, REPLICATED, bias=False, std=self.std)
            up = linear_params(latent, rows, by_head, bias=False, std=self.std)
            params |= with_prefix(f"{name}_down", down) | with_prefix(f"{name}_up", up)
        return params

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if self.region in recomputed:
            return 0
        rows, values, heads = shape.gathered_tokens, self.inner_size // shape.tp, self.num_value_heads // shape.tp
        channels, decays = self.conv_channels(shape.tp), self.decay_size // shape.tp
        # The first GEMM's output, the convolution's, the gate, the delta rule's, and the input of the last GEMM.
        saved = shape.activation_bytes(rows, channels + heads + channels + 3 * values)
        saved += shape.activation_bytes(shape.tokens, self.key_head_dim + self.value_head_dim)
        saved += rows * (heads + 3 * decays) * shape.compute_bytes  # beta; f with its bias, softplus of it, g
        rates = 2 * heads * shape.compute_bytes  # the exponential of A_log, and its negative
        return saved + rates + shape.fp8_input_bytes(self.hidden_size, values)

    def regathered_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        hidden = GatedDeltaNetSpec.regathered_bytes(self, shape, recomputed)
        latents = self.key_head_dim + self.value_head_dim
        return hidden + (shape.activation_bytes(shape.gathered_tokens, latents) if hidden else 0)

    def forward_flops(self, shape: ActivationShape) -> float:
        """Down-projections are whole on every rank, of the tokens that it has outside of the branch."""
        down = self.hidden_size * (self.key_head_dim + self.value_head_dim)
        return GatedDeltaNetSpec.forward_flops(self, shape) + 2.0 * down * (
            shape.tokens - shape.gathered_tokens / shape.tp
        )


class KimiDeltaAttention(GatedDeltaNet):
    """out_proj(norm(delta(conv(q | k | v))) sigmoid(z)), with decays and z through latents."""

    def __init__(self, spec: KimiDeltaSpec, layer_index: int) -> None:
        super().__init__(spec, layer_index)
        hidden, keys, values = spec.hidden_size, spec.key_head_dim, spec.value_head_dim
        # In the shape that published weights have.
        self.A_log = nn.Parameter(torch.empty(1, 1, spec.num_value_heads, 1))
        self.dt_bias = nn.Parameter(torch.empty(spec.decay_size))
        self.decay_down = Linear(hidden, (keys,), bias=False)
        self.decay_up = Linear(keys, (spec.decay_size,), bias=False)
        self.gate_down = Linear(hidden, (values,), bias=False)
        self.gate_up = Linear(values, (spec.inner_size,), bias=False)
        self.delta = DeltaRule(spec.chunk_size, operation=OPERATION, kernels=channel_reference)
        self.norm = HeadNormThenGate(values, eps=spec.norm_eps, gate="sigmoid")

    def _project(self, x: Tensor | RecomputableOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, b = self.in_proj.sections
        channels, b_part = self.in_proj(x).split((q + k + v, b), dim=-1)
        z, f = self.gate_up(self.gate_down(x)), self.decay_up(self.decay_down(x))
        keys, values = self.spec.key_head_dim, self.spec.value_head_dim
        return channels, z.unflatten(-1, (-1, values)), b_part, f.unflatten(-1, (-1, keys))

    def _decay_params(self) -> tuple[Tensor, Tensor]:
        return self.A_log.flatten(), self.dt_bias.unflatten(0, (-1, self.spec.key_head_dim))
