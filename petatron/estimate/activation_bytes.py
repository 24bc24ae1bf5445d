"""How many bytes a stage keeps for the backward pass, and what to recompute so that they fit.

Counted is every tensor that the forward pass of one micro-batch makes and that lives until its backward pass, each memory
once: what autograd saves, and what is kept alive because it lies in the same memory. Weights, their gradients and the batch
itself are not counted. The formulas follow the layers term by term and are tested for equality, so they change with them.

With e bytes per element (w where a norm or softmax computes in at least float32), t tokens of the residual stream on this
rank, g tokens that a split matrix sees (g = t unless the sequence is split over tensor-parallel ranks), hidden width D, and q,
k, f the widths of queries, keys and MLP on this rank, a dense layer keeps

    norms       input and statistics of both (two numbers per token for LayerNorm)    2 (t D e + t w)
    attention   queries, keys and values, rotated if they are                         g (q + 2k) e
                with normalised queries and keys, those too                           g (q + k) e
                and statistics, unless one kernel normalises (RMSNorm) and rotates    g (heads of both) w
                output and log-sum-exp                                                g q e + g heads w
    MLP         gate and up, or up alone                                              2 g f e, g f e
    dropout     a mask per branch                                                     t D (e, or 1 on CUDA)

Outputs of norms and activation functions are not there: products have them made again, and gathered again
(`layers/ops/recompute_output.py`, `layers/ops/linear_op.py`). The loss keeps the gradient of its input, since it is known in the forward
pass, and no logits.

Recomputed, `layernorm` frees what a router keeps of its norm, `core_attn` the log-sum-exp, `attention` and `mlp` all they have, a
whole layer all but its input. A recomputed part that is made again holds what its products gather, until it is through.

In eight bits (FP8), the products of attention, MLP and shared expert keep what they multiply themselves, one byte an element and
its scales, gathered or not; all layers are counted as if they did.

Mixtures of experts are counted for an even load; then a rank's experts get as many rows as its own tokens make choices.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from petatron.config.checks.data_parallel import FSDP_STRATEGIES
from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.model import GATED_ACTIVATIONS, ModelConfig, MoEConfig
from petatron.config.schema.moe_layer_freq import moe_layers
from petatron.config.schema.run import RunConfig
from petatron.estimate.flops import padded_vocab_size

FULL = "full"
"""Stands in a set of recomputed modules for the whole layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationShape:
    """A model and the part of a micro-batch that one rank sees of it.

    element_bytes: bytes of an activation. batch and sequence are those of the rank's tokens where they are gathered.
    byte_dropout_masks: dropout keeps a byte per element, as CUDA's kernel does, and not a number.
    moe_layer_mask: for every layer of the whole model whether it is a mixture of experts.
    ep, etp: over how many ranks the experts of a layer are spread, and over how many each of them is cut.
    fully_sharded: autograd takes the gradients of the weights, the last product's between the two passes.
    fp8_recipe: the recipe of products in FP8; None where there are none.
    """

    model: ModelConfig
    moe: MoEConfig
    moe_layer_mask: tuple[bool, ...]
    element_bytes: int
    batch: int
    sequence: int
    tp: int
    ep: int
    etp: int
    sequence_parallel: bool
    byte_dropout_masks: bool
    fully_sharded: bool
    fp8_recipe: str | None = None

    @classmethod
    def from_config(cls, run: RunConfig, *, device: Literal["cpu", "cuda"]) -> ActivationShape:
        """The shape that every rank of a derived config has."""
        parallel, precision = run.parallel, run.precision
        split = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
        return cls(
            model=run.model,
            moe=run.moe,
            moe_layer_mask=moe_layers(run),
            element_bytes=8 if precision.fp64 else 2 if precision.bf16 or precision.fp16 else 4,
            batch=run.train.micro_batch_size,
            sequence=run.model.seq_length // parallel.context_parallel_size,
            tp=parallel.tensor_model_parallel_size,
            ep=parallel.expert_model_parallel_size,
            etp=parallel.expert_tensor_parallel_size or 1,
            sequence_parallel=split,
            # Ranks that hold the same activation draw from a generator of their own, which makes masks of numbers.
            byte_dropout_masks=device == "cuda" and (split or parallel.tensor_model_parallel_size == 1),
            fully_sharded=parallel.data_parallel_sharding_strategy in FSDP_STRATEGIES
            and (parallel.world_size or 1) > 1,
            fp8_recipe=None if precision.fp8_format is None else precision.fp8_recipe,
        )

    @property
    def compute_bytes(self) -> int:
        """Bytes of what is computed in at least float32."""
        return max(self.element_bytes, 4)

    @property
    def gathered_tokens(self) -> int:
        """Tokens that a split matrix sees."""
        return self.batch * self.sequence

    @property
    def tokens(self) -> int:
        """Tokens of the residual stream."""
        return self.gathered_tokens // self.tp if self.sequence_parallel else self.gathered_tokens

    @property
    def q_dim(self) -> int:
        assert self.model.kv_channels is not None, "the config must be derived first"
        return self.model.num_attention_heads // self.tp * self.model.kv_channels

    @property
    def kv_dim(self) -> int:
        """Width of this rank's keys; ranks beyond the number of key/value heads hold copies."""
        assert self.model.kv_channels is not None and self.model.num_query_groups is not None
        return max(self.model.num_query_groups // self.tp, 1) * self.model.kv_channels

    @property
    def gated(self) -> bool:
        return self.model.activation in GATED_ACTIVATIONS

    @property
    def applies_router_weights(self) -> bool:
        """Whether experts apply the router's weights: those are here and no bias would escape. Else their outputs are kept."""
        weights_here = self.ep * self.etp == 1 or self.moe.moe_token_dispatcher_type == "allgather"
        return weights_here and not self.model.add_bias_linear

    def hidden_bytes(self, tokens: int) -> int:
        """Bytes of hidden vectors."""
        return tokens * self.model.hidden_size * self.element_bytes


def layer_bytes(shape: ActivationShape, modules: Collection[str] = (), *, is_moe: bool = False) -> int:
    """Bytes that one layer keeps of one micro-batch while `modules` are recomputed."""
    if FULL in modules:
        return shape.hidden_bytes(shape.tokens)
    branches = _attention_bytes(shape, modules) + (
        _moe_bytes(shape, modules) if is_moe else _dense_mlp_bytes(shape, modules)
    )
    branches += 0 if "layernorm" in modules else saved_norm_output_bytes(shape, modules, is_moe=is_moe)
    return 2 * _norm_bytes(shape, shape.tokens) + branches + 2 * _dropout_mask_bytes(shape)


def saved_norm_output_bytes(shape: ActivationShape, modules: Collection[str], *, is_moe: bool) -> int:
    """Bytes of what a norm makes that are kept unless `layernorm` is recomputed: what a router multiplies as it is."""
    return shape.hidden_bytes(shape.tokens) if is_moe and "moe" not in modules and not _router_casts_input(shape) else 0


def regathered_bytes(shape: ActivationShape, modules: Collection[str], *, is_moe: bool) -> int:
    """Bytes of what products of one layer's recomputed parts gather in the second run, and hold until it is used."""
    if not shape.sequence_parallel or shape.fp8_recipe is not None:
        return 0
    attention = bool({"attention", FULL}.intersection(modules))
    mlp = bool(({"moe", "shared_experts", FULL} if is_moe else {"mlp", FULL}).intersection(modules))
    if is_moe and not shape.moe.moe_shared_expert_intermediate_size:
        mlp = False
    return (attention + mlp) * shape.hidden_bytes(shape.gathered_tokens)


def _norm_bytes(shape: ActivationShape, rows: int) -> int:
    """Input and statistics."""
    return shape.hidden_bytes(rows) + _norm_statistics_bytes(shape, rows)


def _norm_statistics_bytes(shape: ActivationShape, rows: int) -> int:
    return (2 if shape.model.normalization == "LayerNorm" else 1) * rows * shape.compute_bytes


def _dropout_mask_bytes(shape: ActivationShape) -> int:
    if shape.model.hidden_dropout == 0.0:
        return 0
    return shape.tokens * shape.model.hidden_size * (1 if shape.byte_dropout_masks else shape.element_bytes)


def _fp8_operand_bytes(shape: ActivationShape, *widths: int) -> int:
    """What products in eight bits keep of inputs of these widths; others have it made again."""
    if shape.fp8_recipe is None:
        return 0
    scales = {"rowwise": 1, "blockwise": -(-shape.gathered_tokens // 128)}.get(shape.fp8_recipe)
    return sum(shape.gathered_tokens * width + 4 * (1 if scales is None else scales * width) for width in widths)


def _attention_bytes(shape: ActivationShape, modules: Collection[str]) -> int:
    if "attention" in modules:
        return 0
    model, rows, both = shape.model, shape.gathered_tokens, shape.q_dim + shape.kv_dim
    assert model.kv_channels is not None
    kept = rows * (both + shape.kv_dim) * shape.element_bytes
    if model.qk_layernorm:
        kept += rows * both * shape.element_bytes
        one_kernel = model.normalization == "RMSNorm" and model.position_embedding_type in ("rope", "yarn")
        kept += 0 if one_kernel else _norm_statistics_bytes(shape, rows * both // model.kv_channels)
    kept += rows * shape.q_dim * shape.element_bytes + _fp8_operand_bytes(shape, model.hidden_size, shape.q_dim)
    return kept + (0 if "core_attn" in modules else rows * shape.q_dim // model.kv_channels * shape.compute_bytes)


def _mlp_intermediate_bytes(shape: ActivationShape, rows: int, width: int) -> int:
    """What the first product makes."""
    return (2 if shape.gated else 1) * rows * width * shape.element_bytes


def _dense_mlp_bytes(shape: ActivationShape, modules: Collection[str]) -> int:
    assert shape.model.ffn_hidden_size is not None
    return 0 if "mlp" in modules else _mlp_bytes(shape, shape.model.ffn_hidden_size // shape.tp)


def _mlp_bytes(shape: ActivationShape, width: int) -> int:
    return _mlp_intermediate_bytes(shape, shape.gathered_tokens, width) + _fp8_operand_bytes(
        shape, shape.model.hidden_size, width
    )


def _moe_bytes(shape: ActivationShape, modules: Collection[str]) -> int:
    """Without the few numbers per token and choice that routing keeps."""
    moe = shape.moe
    if "moe" in modules:
        return 0
    assert moe.moe_ffn_hidden_size is not None
    width = moe.moe_latent_size or shape.model.hidden_size
    rows = shape.tokens * moe.moe_router_topk * shape.etp
    kept = rows * width * shape.element_bytes
    kept += 0 if shape.applies_router_weights else rows * width * shape.element_bytes
    kept += _mlp_intermediate_bytes(shape, rows, moe.moe_ffn_hidden_size // shape.etp)
    kept += shape.tokens * (moe.moe_latent_size or 0) * shape.element_bytes
    return kept + _router_bytes(shape) + _shared_expert_bytes(shape, modules)


def _router_casts_input(shape: ActivationShape) -> bool:
    """Whether the router multiplies a tensor of its own, instead of what the norm makes."""
    return bool(shape.moe.moe_input_jitter_eps) or _router_element_bytes(shape) > shape.element_bytes


def _router_element_bytes(shape: ActivationShape) -> int:
    return max(shape.element_bytes, {None: 0, "fp32": 4, "fp64": 8}[shape.moe.moe_router_dtype])


def _router_bytes(shape: ActivationShape) -> int:
    """Its input, if that is a tensor of its own, and the noise it was multiplied with."""
    tensors = (2 if shape.moe.moe_input_jitter_eps else 1) if _router_casts_input(shape) else 0
    return tensors * shape.tokens * shape.model.hidden_size * _router_element_bytes(shape)


def _shared_expert_bytes(shape: ActivationShape, modules: Collection[str]) -> int:
    moe = shape.moe
    if not moe.moe_shared_expert_intermediate_size:
        return 0
    kept = shape.hidden_bytes(shape.tokens) if moe.moe_shared_expert_gate else 0
    if "shared_experts" in modules:
        return kept
    return kept + _mlp_bytes(shape, moe.moe_shared_expert_intermediate_size // shape.tp)


def embedding_and_head_bytes(shape: ActivationShape, stage: PipelineStage) -> int:
    """What a stage keeps of a micro-batch outside its layers: positions, embedding, last norm, loss."""
    model, kept = shape.model, 0
    assert model.kv_channels is not None
    if model.position_embedding_type in ("rope", "yarn"):
        kept += 2 * shape.sequence * int(model.kv_channels * model.rotary_percent) * shape.element_bytes
    if stage.has_embedding:
        kept += _dropout_mask_bytes(shape)
        kept += 8 * shape.sequence if model.position_embedding_type == "learned_absolute" else 0
        kept += 8 * shape.gathered_tokens if shape.tp > 1 else 0  # rows of this rank's part of the table
    if stage.has_loss:
        kept += _norm_bytes(shape, shape.tokens)
        kept += shape.hidden_bytes(shape.gathered_tokens)  # the gradient of what the last product saw
        if shape.fully_sharded:
            rows = padded_vocab_size(model, tp_size=shape.tp) // shape.tp
            kept += rows * model.hidden_size * shape.compute_bytes
    return kept
