"""`BranchSpec`, the base class of layer kinds: the frozen properties of one residual branch, and the module that it builds.

A layer is a chain of residual branches, x + f(norm(x)): usually a mixer over the sequence (attention, a scan) and a channel mixer (an
MLP, experts). A kind of branch is one file: a `BranchSpec` with the resolved numbers of one layer beside the `BranchModule` it
builds. Everything that is added up over a model is asked of the specs: parameters with their shards, initial values and weight decay,
FLOPs, bytes saved for backward, what may be recomputed. Equal specs are equal layers, so sums go over distinct specs.

A module outside of this package is a layer kind like those inside it: subclass both, and put the spec into a model's layers
(`models/registry.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from petatron.config.schema.sections.mlp import GATED_ACTIVATIONS
from petatron.kernels.activation import GluVariant
from petatron.kernels.attention.visibility import CAUSAL, Visibility
from petatron.layers.rope import RopeSpec
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.generation_state import GenerationState
from petatron.layers.spec.param_spec import ParamSpec

FULL = "full"
"""The whole layer, in a set of recomputed modules."""
ELEMENTWISE_FLOPS = 12
"""Operations per element of a norm or activation: few beside a GEMM's, but not zero."""

SequenceSharding = Literal["any", "zigzag", "contiguous", "whole"]
"""How context-parallel ranks may share a sequence: in any way, each two chunks or one part of it, or not at all.

zigzag is for attention, which balances its work so, and computes the same in contiguous parts where another layer needs those.
"""


@dataclass(frozen=True, slots=True)
class BackwardMoment:
    """A moment in a branch's backward: bytes besides what forward saved, and the share of the branch's weight gradients that exist."""

    workspace: int
    grad_share: float


class BranchModule(nn.Module):
    """A residual branch, called as (normed input, ForwardContext); the input may be a tensor or `RecomputableOutput`.

    Its linears are `Linear`s, so that tensor parallelism, FP8 and the weight-gradient target can fill their slots. Modules inside
    may declare `fp8_linears`, the names of their children that may run in FP8, `absorbed_linears`, those of them whose weights they
    multiply themselves while they generate, `tensor_slots` and `context_slots`, the attributes that tensor and context parallelism fill
    (`layers/parallel_slots.py`), `group_sum_slots`, those of `CommSlot`s that add, in place, what ranks have of each of some groups of
    channels, with the number of groups, and `kernel_slots()`, the registry's operation for each attribute that holds kernels.
    """

    saves_input: bool = False
    """Whether the branch saves its input for backward, besides the linears, which have it recomputed."""

    input_feeds_one_gemm: bool = False
    """Whether one GEMM is all that takes its input. Then that GEMM and the norm before it can be one autograd node."""

    takes_rows: bool = False
    """Whether it also takes, and then returns, rows [R, D], with `ForwardContext.token_rows` to tell their tokens apart. Rows need not be
    flattened again for each norm, GEMM and activation, which costs the host more than some of these."""

    def recompute_regions(self) -> Mapping[str, nn.Module]:
        """Returns the modules that may be recomputed, by the names of the spec, inner ones first."""
        return {}

    def offload_regions(self) -> Mapping[str, Sequence[nn.Module]]:
        """Returns the modules whose saved tensors may be offloaded, by the names of the spec's `region_bytes`.

        A tensor belongs to the innermost module that runs while it is saved.
        """
        return {}

    def region_is_recomputed(self, name: str) -> None:
        """Called where a region will be recomputed, before it is wrapped."""


class BranchSpec(ABC):
    """One residual branch. Subclasses are frozen dataclasses of resolved numbers.

    name: of the module in its layer, and so of its tensors: `layers.3.attention.q.weight`.
    title: what messages call it; None: its name.
    hidden_size: the width of the residual stream.
    output_multiplier: the factor on what the branch adds to it.
    region: the name of the whole branch in `--recompute-modules`; `inner_regions` are parts of it.
    sequence_sharding: how context parallelism may shard the sequence.
    separates_documents: whether tokens of one packed document do not see those of another.
    can_generate: whether a token can be computed from its own input and what `generation_state` keeps of those before.
    decode_is_capturable: whether a step of decoding needs nothing of the host, so that it may be in a CUDA graph.
    without_adapters: linears that have no adapter: the branch multiplies by their weights itself while it trains.
    """

    name: ClassVar[str]
    title: ClassVar[str | None] = None
    region: ClassVar[str]
    inner_regions: ClassVar[tuple[str, ...]] = ()
    hidden_size: int
    output_multiplier: float = 1.0
    sequence_sharding: ClassVar[SequenceSharding] = "whole"
    separates_documents: ClassVar[bool] = False
    can_generate: ClassVar[bool] = False
    decode_is_capturable: ClassVar[bool] = True
    without_adapters: ClassVar[tuple[str, ...]] = ()

    @property
    def aux_loss_names(self) -> tuple[str, ...]:
        """The names of the auxiliary losses that the branch attaches and logs show (`LayerLoss`); MoE losses are in router statistics."""
        return ()

    @property
    def prompt_is_capturable(self) -> bool:
        """Whether that also holds for a step with chunks of prompts, whose bounds only the device knows then."""
        return self.decode_is_capturable

    def generation_state(self, tp: int) -> GenerationState | None:
        """Returns what one rank keeps of every token, or of every sequence, while text is generated; None: nothing."""
        return None

    def batch_dependence(self) -> str | None:
        """Returns what of the branch has functions whose bits depend on the rows beside a row; None: nothing, with `--exact-rollouts`."""
        return f"{self.title or self.name} layers"

    def head_state(self, tp: int) -> GenerationState | None:
        """Returns the same with keys and values of heads in place of what they are computed from."""
        return self.generation_state(tp)

    @abstractmethod
    def build(self, layer_index: int) -> BranchModule: ...

    @abstractmethod
    def params(self) -> Mapping[str, ParamSpec]:
        """Returns every parameter by its name in the module."""

    @abstractmethod
    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        """Returns the bytes saved for the backward of one micro-batch, besides the norm's, while some regions are recomputed."""

    def mixing_flops(self, seq_length: int, *, causal: bool) -> float:
        """Returns the FLOPs of forward and backward over one sequence outside of GEMMs with weights: model FLOPs.

        `causal`: only what a causal model needs is counted, not what a kernel without a mask would do.
        """
        return 0.0

    def saved_input_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        """Returns the bytes of the norm's output that the branch saves unless `layernorm` is recomputed."""
        return 0

    def region_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> Mapping[str, int]:
        """Returns the part of `saved_bytes` (and `saved_input_bytes`) that each region saves which may be offloaded by itself."""
        return {}

    def regathered_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        """Returns the bytes that GEMMs of recomputed regions gather in the second run, and hold until their backward."""
        if not shape.sequence_parallel or shape.fp8_recipe is not None:
            return 0
        gathers = self.region in recomputed or FULL in recomputed
        return shape.activation_bytes(shape.gathered_tokens, self.hidden_size) if gathers else 0

    def backward_moments(self, shape: ActivationShape) -> Sequence[BackwardMoment]:
        """Returns the moments of backward at which most memory may be needed; by default with gradients of all that is saved."""
        return [BackwardMoment(self.stream_grad_bytes(shape) + self.saved_bytes(shape, ()), 1.0)]

    def stream_grad_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes of two gradients as wide as the residual stream: that of the branch's output, and the stream's."""
        return 2 * shape.activation_bytes(shape.tokens, self.hidden_size)

    def context_parallel_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes that a context-parallel rank sends to one other for one micro-batch: keys and values."""
        return 0

    def recompute_flops(self, shape: ActivationShape, region: str) -> float:
        """Returns the operations repeated where one region is recomputed: by default the whole branch."""
        return self.forward_flops(shape)

    def forward_flops(self, shape: ActivationShape) -> float:
        """Returns the operations of one micro-batch's forward on one rank, its norm included."""
        elements = sum(param.num_active_elements for param in self.params().values() if param.is_gemm)
        mixing = self.mixing_flops(shape.whole_sequence, causal=True) / shape.whole_sequence / 3.0
        return self.norm_flops(shape) + shape.gathered_tokens * (2.0 * elements + mixing) / shape.tp

    def norm_flops(self, shape: ActivationShape) -> float:
        return float(ELEMENTWISE_FLOPS * shape.tokens * self.hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxAttentionSpec(BranchSpec):
    """Softmax attention between two projections, the last of which is one GEMM.

    rope: how queries and keys are rotated; None: they are not.
    visibility: what a token sees (`kernels/attention/visibility.py`), documents aside.
    std, out_std: of the initial weights of the first GEMMs and of the last one.
    """

    hidden_size: int
    num_heads: int
    rope: RopeSpec | None
    visibility: Visibility = CAUSAL
    out_bias: bool
    dropout: float
    std: float
    out_std: float

    name = region = "attention"
    inner_regions = ("core_attn",)
    sequence_sharding = "zigzag"
    separates_documents = True

    @abstractmethod
    def core_flops(self, shape: ActivationShape) -> float:
        """Returns the operations of one micro-batch's forward between the projections."""

    @abstractmethod
    def out_flops(self, shape: ActivationShape) -> float:
        """Returns the operations of the last GEMM."""

    @abstractmethod
    def core_saved_bytes(self, shape: ActivationShape) -> tuple[int, int, int]:
        """Returns the bytes saved of the inputs of core attention that nothing before it saves, of its output, and of log-sum-exp."""

    @property
    def core_output_feeds_gemm(self) -> bool:
        """Whether the last GEMM takes the output of core attention as it is."""
        return True

    def out_saved_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes that the last GEMM saves besides the output of core attention."""
        return 0

    def region_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> Mapping[str, int]:
        """The output of core attention belongs to that, or, where it is recomputed, to what takes it."""
        if self.region in recomputed:
            return {}
        inputs, output, log_sum_exp = self.core_saved_bytes(shape)
        recomputes_core = "core_attn" in recomputed
        core = inputs + (0 if recomputes_core else output + log_sum_exp)
        out = self.out_saved_bytes(shape) + (output if recomputes_core and self.core_output_feeds_gemm else 0)
        return {"qkv_linear": self.saved_bytes(shape, recomputed) - core - out, "core_attn": core, "attn_proj": out}

    def recompute_flops(self, shape: ActivationShape, region: str) -> float:
        """The last GEMM is not repeated, since its input is the last tensor saved, unless in FP8 a scale comes after it."""
        if region == "core_attn":
            return self.core_flops(shape)
        return self.forward_flops(shape) - (0.0 if shape.fp8_saves_scale else self.out_flops(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMixerSpec(BranchSpec):
    """A branch that computes each token by itself (an MLP, experts), so sequences and documents may be split in any way.

    width: the inner width. activation: the activation function, by name; glu_variant: of a gated one; None: it has none.
    std, out_std: of the initial weights of first and last GEMMs.
    """

    name = "mlp"
    sequence_sharding = "any"
    separates_documents = can_generate = True

    hidden_size: int
    width: int
    activation: str
    bias: bool
    std: float
    out_std: float
    glu_variant: GluVariant | None = None
    output_multiplier: float = 1.0

    @property
    def gated(self) -> bool:
        return self.activation in GATED_ACTIVATIONS


def residual_std(std: float, num_layers: int, *, branches: int = 2) -> float:
    """Returns the initial standard deviation of weights that write into the residual stream.

    They start smaller, so that the sum over the branches of all layers has the same size for every depth (GPT-2).
    """
    return std / math.sqrt(float(branches) * max(num_layers, 1))
