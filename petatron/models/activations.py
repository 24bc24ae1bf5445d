"""How many bytes a stage keeps for the backward pass, and what to recompute so that they fit.

Counted is every tensor that the forward pass of one micro-batch makes and that lives until its backward pass, each memory
once: what autograd saves, and what is kept alive because it lies in the same memory. Weights and the batch itself are not
counted. The formulas follow the layers term by term and are tested for equality, so they change with them.

With e bytes per element (w where a norm or softmax computes in at least float32), t tokens of the residual stream on this
rank, g tokens that a split matrix sees (g = t unless the sequence is split over tensor-parallel ranks), hidden width D, and q,
k, f the widths of queries, keys and MLP on this rank, a dense layer keeps

    norm        input, normalised input and statistics (RMSNorm)                      2 t D e + t w
                float32 copy, normalised input and statistics, in half precision      t D (w + e) + t w
                input and statistics (LayerNorm)                                      t D e + 2 t w
    its output  as the operand of the product that follows, gathered                  g D e
    attention   queries, keys and values, and those rotated                           g (q + 2k) e + g (q + k) e
                output and log-sum-exp                                                g q e + g heads w
    MLP         gate and up, activated gate, product of both (gated)                  4 g f e
                input and output of the activation (gelu, silu)                       2 g f e
    dropout     a mask per branch                                                     t D (e, or 1 on CUDA)

and, recomputed, `layernorm` the norm's input alone, `core_attn` everything but the log-sum-exp, `attention` and `mlp` nothing
but their input (which `layernorm` frees as well), a whole layer its input.

Mixtures of experts are counted for an even load; then a rank's experts get as many rows as its own tokens make choices.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from petatron.config.layer_pattern import moe_layers
from petatron.config.schema import GATED_ACTIVATIONS, ModelConfig, MoEConfig, RunConfig
from petatron.config.stages import Stage
from petatron.models.flops import padded_vocabulary

FULL = "full"
"""Stands in a set of recomputed modules for the whole layer."""

# Tensors of the MLP's inner width that are kept from the first product to the second.
_KEPT_BY_ACTIVATION = {"gelu": 2, "gelu_tanh": 2, "quick_gelu": 3, "relu": 1, "squared_relu": 2, "silu": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationShape:
    """A model and the part of a micro-batch that one rank sees of it.

    element: bytes of an activation. batch and sequence are those of the rank's tokens where they are gathered.
    byte_masks: dropout keeps a byte per element, as CUDA's kernel does, and not a number.
    mixed: for every layer of the whole model whether it is a mixture of experts.
    """

    model: ModelConfig
    moe: MoEConfig
    mixed: tuple[bool, ...]
    element: int
    batch: int
    sequence: int
    tp: int
    etp: int
    sequence_parallel: bool
    byte_masks: bool

    @classmethod
    def of(cls, run: RunConfig, *, device: Literal["cpu", "cuda"]) -> ActivationShape:
        """The shape that every rank of a derived config has."""
        parallel, precision = run.parallel, run.precision
        split = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
        return cls(
            model=run.model,
            moe=run.moe,
            mixed=moe_layers(run),
            element=8 if precision.fp64 else 2 if precision.bf16 or precision.fp16 else 4,
            batch=run.train.micro_batch_size,
            sequence=run.model.seq_length // parallel.context_parallel_size,
            tp=parallel.tensor_model_parallel_size,
            etp=parallel.expert_tensor_parallel_size or 1,
            sequence_parallel=split,
            # Ranks that hold the same activation draw from a generator of their own, which makes masks of numbers.
            byte_masks=device == "cuda" and (split or parallel.tensor_model_parallel_size == 1),
        )

    @property
    def wide(self) -> int:
        """Bytes of what is computed in at least float32."""
        return max(self.element, 4)

    @property
    def gathered(self) -> int:
        """Tokens that a split matrix sees."""
        return self.batch * self.sequence

    @property
    def tokens(self) -> int:
        """Tokens of the residual stream."""
        return self.gathered // self.tp if self.sequence_parallel else self.gathered

    @property
    def queries(self) -> int:
        assert self.model.kv_channels is not None, "the config must be derived first"
        return self.model.num_attention_heads // self.tp * self.model.kv_channels

    @property
    def keys(self) -> int:
        """Width of this rank's keys; ranks beyond the number of key/value heads hold copies."""
        assert self.model.kv_channels is not None and self.model.num_query_groups is not None
        return max(self.model.num_query_groups // self.tp, 1) * self.model.kv_channels

    @property
    def gated(self) -> bool:
        return self.model.activation in GATED_ACTIVATIONS

    def stream(self, tokens: int) -> int:
        """Bytes of hidden vectors."""
        return tokens * self.model.hidden_size * self.element


def layer_bytes(shape: ActivationShape, modules: Collection[str] = (), *, mixed: bool = False) -> int:
    """Bytes that one layer keeps of one micro-batch while `modules` are recomputed."""
    if FULL in modules:
        return shape.stream(shape.tokens)
    norms = 2 * (shape.stream(shape.tokens) if "layernorm" in modules else _norm(shape, shape.tokens))
    branches = _attention(shape, modules) + (_mixture(shape, modules) if mixed else _dense(shape, modules))
    return norms + branches + 2 * _dropout_mask(shape)


def _norm(shape: ActivationShape, tokens: int, width: int | None = None, *, input_is_kept: bool = False) -> int:
    """What a norm keeps: without its output, and without its input if that is kept for another reason."""
    elements = tokens * (width or shape.model.hidden_size)
    if shape.model.normalization == "LayerNorm":
        return (0 if input_is_kept else elements * shape.element) + 2 * tokens * shape.wide
    copied = shape.wide > shape.element
    input_bytes = elements * shape.wide if copied else 0 if input_is_kept else elements * shape.element
    return input_bytes + elements * shape.element + tokens * shape.wide


def _dropout_mask(shape: ActivationShape) -> int:
    if shape.model.hidden_dropout == 0.0:
        return 0
    return shape.tokens * shape.model.hidden_size * (1 if shape.byte_masks else shape.element)


def _operand(shape: ActivationShape, modules: Collection[str], owner: str) -> int:
    """What a branch's first product keeps of the norm's output, or the whole branch if that is recomputed."""
    if "layernorm" in modules:
        return 0
    return shape.stream(shape.tokens if owner in modules else shape.gathered)


def _attention(shape: ActivationShape, modules: Collection[str]) -> int:
    kept = _operand(shape, modules, "attention")
    if "attention" in modules:
        return kept
    model, rows, both = shape.model, shape.gathered, shape.queries + shape.keys
    rotary = model.position_embedding_type in ("rope", "yarn")
    assert model.kv_channels is not None
    kept += rows * (both + shape.keys) * shape.element
    kept += rows * both * shape.element if rotary else 0
    if model.qk_layernorm:
        heads = both // model.kv_channels
        kept += _norm(shape, rows * heads, model.kv_channels, input_is_kept=True)
        kept += 0 if rotary else rows * both * shape.element
    kept += rows * shape.queries * shape.element
    return kept + (0 if "core_attn" in modules else rows * shape.queries // model.kv_channels * shape.wide)


def _inside_mlp(shape: ActivationShape, rows: int, width: int, *, activated: bool = True) -> int:
    """What lies between the products; without what the activation makes, if that is recomputed."""
    tensors = 4 if shape.gated else _KEPT_BY_ACTIVATION[shape.model.activation]
    if not activated:
        tensors = 2 if shape.gated else 1
    return tensors * rows * width * shape.element


def _dense(shape: ActivationShape, modules: Collection[str]) -> int:
    assert shape.model.ffn_hidden_size is not None
    kept = _operand(shape, modules, "mlp")
    return (
        kept if "mlp" in modules else kept + _inside_mlp(shape, shape.gathered, shape.model.ffn_hidden_size // shape.tp)
    )


def _mixture(shape: ActivationShape, modules: Collection[str]) -> int:
    """Without the few numbers per token and choice that routing keeps."""
    moe = shape.moe
    kept = 0 if "layernorm" in modules else shape.stream(shape.tokens)
    if "moe" in modules:
        return kept
    copy = {None: 0, "fp32": 4, "fp64": 8}[moe.moe_router_dtype]
    if copy > shape.element:  # the router multiplies a wider copy of its input
        kept = kept if _takes_norm(shape, modules) else 0
        kept += shape.tokens * shape.model.hidden_size * copy
    assert moe.moe_ffn_hidden_size is not None
    width = moe.moe_latent_size or shape.model.hidden_size
    choices = shape.tokens * moe.moe_router_topk
    rows = choices * shape.etp
    kept += (rows + choices) * width * shape.element
    kept += _inside_mlp(shape, rows, moe.moe_ffn_hidden_size // shape.etp, activated="moe_act" not in modules)
    kept += shape.tokens * (moe.moe_latent_size or 0) * shape.element
    return kept + _shared_expert(shape, modules)


def _takes_norm(shape: ActivationShape, modules: Collection[str]) -> bool:
    """Whether something besides the router keeps the norm's output as it is on this rank."""
    moe = shape.moe
    shared = bool(moe.moe_shared_expert_intermediate_size)
    as_it_is = not shape.sequence_parallel or "shared_experts" in modules
    return moe.moe_latent_size is not None or (shared and (as_it_is or moe.moe_shared_expert_gate))


def _shared_expert(shape: ActivationShape, modules: Collection[str]) -> int:
    moe = shape.moe
    if not moe.moe_shared_expert_intermediate_size:
        return 0
    kept = shape.stream(shape.tokens) if moe.moe_shared_expert_gate else 0
    if "shared_experts" in modules:
        return kept
    if shape.sequence_parallel and "layernorm" not in modules:
        kept += shape.stream(shape.gathered)
    return kept + _inside_mlp(shape, shape.gathered, moe.moe_shared_expert_intermediate_size // shape.tp)


def ends_bytes(shape: ActivationShape, stage: Stage) -> int:
    """What a stage keeps of a micro-batch outside its layers: positions, embedding, last norm, loss."""
    model, kept = shape.model, 0
    assert model.kv_channels is not None and model.vocab_size is not None
    if model.position_embedding_type in ("rope", "yarn"):
        kept += 2 * shape.sequence * int(model.kv_channels * model.rotary_percent) * shape.element
    if stage.embedding:
        kept += _dropout_mask(shape)
        kept += 8 * shape.sequence if model.position_embedding_type == "learned_absolute" else 0
        kept += 9 * shape.gathered if shape.tp > 1 else 0  # row (8 bytes) and whether it lies elsewhere (1)
    if stage.loss:
        columns = min(padded_vocabulary(model, tensor_parallel=shape.tp) // shape.tp, model.vocab_size)
        kept += _norm(shape, shape.tokens) + shape.stream(shape.gathered)
        kept += shape.gathered * (columns * shape.wide + 9)  # softmax; target (8) and whether it lies here (1)
    return kept
