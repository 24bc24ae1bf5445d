"""Bytes of activations that a stage saves for backward.

Counted is every tensor that the forward of one micro-batch creates and that lives until its backward, each storage once: what
autograd saves, and what is kept alive by sharing its storage. Weights, their gradients and the batch itself are not counted. The
formulas follow the layers term by term and are tested for equality, so they change with them.

With e bytes per element (w where a norm or softmax computes in at least float32), t tokens of the residual stream on this
rank, g tokens that a sharded linear sees (g = t without sequence parallelism), hidden size D, and q, k, f the widths of queries,
keys and MLP on this rank, a dense layer saves

    norms       input and statistics of both (two numbers per token for LayerNorm)    2 (t D e + t w)
    attention   queries, keys and values, after rope                                  g (q + 2k) e
                with qk-norm, its outputs too                                         g (q + k) e
                and statistics, unless one kernel fuses RMSNorm and rope              g (heads of both) w
                output and log-sum-exp                                                g q e + g heads w
    MLP         gate and up, or up alone                                              2 g f e, g f e
    dropout     a mask per branch                                                     t D (e, or 1 on CUDA)

Outputs of norms and activation functions are not saved: GEMMs have them recomputed, and gathered again
(`layers/ops/recompute_output.py`, `layers/ops/linear_op.py`). The loss saves the gradient of its input, since it is known in forward,
and no logits.

Recomputed, `layernorm` frees what a router saves of its norm, `core_attn` the log-sum-exp, `attention` and `mlp` all they save, a
whole layer all but its input. A recomputed module holds what its GEMMs gather, until its backward is done.

With FP8, the GEMMs of attention, MLP and shared expert save their quantised inputs, one byte an element and its scales, gathered or
not; all layers are counted as if they did.

MoE layers are counted for an even load; then a rank's experts get as many rows as its own tokens make choices.
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
"""The whole layer, in a set of recomputed modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationShape:
    """A model and one rank's share of a micro-batch.

    element_bytes: bytes of an activation. batch and sequence are those of the rank's tokens where they are gathered.
    byte_dropout_masks: dropout saves a byte per element, as CUDA's kernel does, and not a number.
    moe_layer_mask: for every layer of the whole model whether it is an MoE layer.
    ep, etp: expert-parallel and expert-tensor-parallel size.
    fully_sharded: autograd receives the weight gradients, the output head's between forward and backward.
    fp8_recipe: the recipe of FP8 GEMMs; None where there are none.
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
        """Returns the shape of every rank of a derived config."""
        parallel, precision = run.parallel, run.precision
        sequence_parallel = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
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
            sequence_parallel=sequence_parallel,
            # Ranks that hold the same activation share a generator, whose masks are numbers.
            byte_dropout_masks=device == "cuda" and (sequence_parallel or parallel.tensor_model_parallel_size == 1),
            fully_sharded=parallel.data_parallel_sharding_strategy in FSDP_STRATEGIES
            and (parallel.world_size or 1) > 1,
            fp8_recipe=None if precision.fp8_format is None else precision.fp8_recipe,
        )

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element that is computed in at least float32."""
        return max(self.element_bytes, 4)

    @property
    def gathered_tokens(self) -> int:
        """Tokens that a sharded linear sees."""
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
        """Width of this rank's keys; ranks beyond the number of kv heads have replicas."""
        assert self.model.kv_channels is not None and self.model.num_query_groups is not None
        return max(self.model.num_query_groups // self.tp, 1) * self.model.kv_channels

    @property
    def gated(self) -> bool:
        return self.model.activation in GATED_ACTIVATIONS

    @property
    def applies_router_weights(self) -> bool:
        """Whether experts apply the router's weights: these are local and there is no bias. Else the experts' outputs are saved."""
        weights_are_local = self.ep * self.etp == 1 or self.moe.moe_token_dispatcher_type == "allgather"
        return weights_are_local and not self.model.add_bias_linear

    def hidden_bytes(self, tokens: int) -> int:
        """Bytes of hidden vectors."""
        return tokens * self.model.hidden_size * self.element_bytes


def layer_bytes(shape: ActivationShape, modules: Collection[str] = (), *, is_moe: bool = False) -> int:
    """Returns the bytes that one layer saves of one micro-batch while `modules` are recomputed."""
    if FULL in modules:
        return shape.hidden_bytes(shape.tokens)
    branches = _attention_bytes(shape, modules) + (
        _moe_bytes(shape, modules) if is_moe else _dense_mlp_bytes(shape, modules)
    )
    branches += 0 if "layernorm" in modules else saved_norm_output_bytes(shape, modules, is_moe=is_moe)
    return 2 * _norm_bytes(shape, shape.tokens) + branches + 2 * _dropout_mask_bytes(shape)


def saved_norm_output_bytes(shape: ActivationShape, modules: Collection[str], *, is_moe: bool) -> int:
    """Returns the bytes of a norm's output, saved unless `layernorm` is recomputed: the router's input, if it is not cast."""
    return shape.hidden_bytes(shape.tokens) if is_moe and "moe" not in modules and not _router_casts_input(shape) else 0


def regathered_bytes(shape: ActivationShape, modules: Collection[str], *, is_moe: bool) -> int:
    """Returns the bytes that GEMMs of one layer's recomputed modules gather in the second run, and hold until their backward."""
    if not shape.sequence_parallel or shape.fp8_recipe is not None:
        return 0
    attention = bool({"attention", FULL}.intersection(modules))
    mlp = bool(({"moe", "shared_experts", FULL} if is_moe else {"mlp", FULL}).intersection(modules))
    if is_moe and not shape.moe.moe_shared_expert_intermediate_size:
        mlp = False
    return (attention + mlp) * shape.hidden_bytes(shape.gathered_tokens)


def _norm_bytes(shape: ActivationShape, rows: int) -> int:
    """Returns the bytes of input and statistics."""
    return shape.hidden_bytes(rows) + _norm_statistics_bytes(shape, rows)


def _norm_statistics_bytes(shape: ActivationShape, rows: int) -> int:
    return (2 if shape.model.normalization == "LayerNorm" else 1) * rows * shape.compute_bytes


def _dropout_mask_bytes(shape: ActivationShape) -> int:
    if shape.model.hidden_dropout == 0.0:
        return 0
    return shape.tokens * shape.model.hidden_size * (1 if shape.byte_dropout_masks else shape.element_bytes)


def _fp8_operand_bytes(shape: ActivationShape, *widths: int) -> int:
    """Returns the bytes of the quantised inputs, of these widths, that FP8 GEMMs save; other GEMMs recompute their input."""
    if shape.fp8_recipe is None:
        return 0
    scales = {"rowwise": 1, "blockwise": -(-shape.gathered_tokens // 128)}.get(shape.fp8_recipe)
    return sum(shape.gathered_tokens * width + 4 * (1 if scales is None else scales * width) for width in widths)


def _attention_bytes(shape: ActivationShape, modules: Collection[str]) -> int:
    if "attention" in modules:
        return 0
    model, rows, qk_dim = shape.model, shape.gathered_tokens, shape.q_dim + shape.kv_dim
    assert model.kv_channels is not None
    saved = rows * (qk_dim + shape.kv_dim) * shape.element_bytes
    if model.qk_layernorm:
        saved += rows * qk_dim * shape.element_bytes
        fused = model.normalization == "RMSNorm" and model.position_embedding_type in ("rope", "yarn")
        saved += 0 if fused else _norm_statistics_bytes(shape, rows * qk_dim // model.kv_channels)
    saved += rows * shape.q_dim * shape.element_bytes + _fp8_operand_bytes(shape, model.hidden_size, shape.q_dim)
    return saved + (0 if "core_attn" in modules else rows * shape.q_dim // model.kv_channels * shape.compute_bytes)


def _mlp_intermediate_bytes(shape: ActivationShape, rows: int, width: int) -> int:
    """Returns the bytes of the first GEMM's output."""
    return (2 if shape.gated else 1) * rows * width * shape.element_bytes


def _dense_mlp_bytes(shape: ActivationShape, modules: Collection[str]) -> int:
    assert shape.model.ffn_hidden_size is not None
    return 0 if "mlp" in modules else _mlp_bytes(shape, shape.model.ffn_hidden_size // shape.tp)


def _mlp_bytes(shape: ActivationShape, width: int) -> int:
    return _mlp_intermediate_bytes(shape, shape.gathered_tokens, width) + _fp8_operand_bytes(
        shape, shape.model.hidden_size, width
    )


def _moe_bytes(shape: ActivationShape, modules: Collection[str]) -> int:
    """Returns the bytes of an MoE layer, without the few numbers per token and choice that routing saves."""
    moe = shape.moe
    if "moe" in modules:
        return 0
    assert moe.moe_ffn_hidden_size is not None
    width = moe.moe_latent_size or shape.model.hidden_size
    rows = shape.tokens * moe.moe_router_topk * shape.etp
    saved = rows * width * shape.element_bytes
    saved += 0 if shape.applies_router_weights else rows * width * shape.element_bytes
    saved += _mlp_intermediate_bytes(shape, rows, moe.moe_ffn_hidden_size // shape.etp)
    saved += shape.tokens * (moe.moe_latent_size or 0) * shape.element_bytes
    return saved + _router_bytes(shape) + _shared_expert_bytes(shape, modules)


def _router_casts_input(shape: ActivationShape) -> bool:
    """Whether the router's input is a tensor of its own, instead of the norm's output."""
    return bool(shape.moe.moe_input_jitter_eps) or _router_element_bytes(shape) > shape.element_bytes


def _router_element_bytes(shape: ActivationShape) -> int:
    return max(shape.element_bytes, {None: 0, "fp32": 4, "fp64": 8}[shape.moe.moe_router_dtype])


def _router_bytes(shape: ActivationShape) -> int:
    """Returns the bytes of the router's input, if it is a tensor of its own, and of its jitter."""
    tensors = (2 if shape.moe.moe_input_jitter_eps else 1) if _router_casts_input(shape) else 0
    return tensors * shape.tokens * shape.model.hidden_size * _router_element_bytes(shape)


def _shared_expert_bytes(shape: ActivationShape, modules: Collection[str]) -> int:
    moe = shape.moe
    if not moe.moe_shared_expert_intermediate_size:
        return 0
    saved = shape.hidden_bytes(shape.tokens) if moe.moe_shared_expert_gate else 0
    if "shared_experts" in modules:
        return saved
    return saved + _mlp_bytes(shape, moe.moe_shared_expert_intermediate_size // shape.tp)


def embedding_and_head_bytes(shape: ActivationShape, stage: PipelineStage) -> int:
    """Returns the bytes a stage saves of a micro-batch outside its layers: positions, embedding, last norm, loss."""
    model, saved = shape.model, 0
    assert model.kv_channels is not None
    if model.position_embedding_type in ("rope", "yarn"):
        saved += 2 * shape.sequence * int(model.kv_channels * model.rotary_percent) * shape.element_bytes
    if stage.has_embedding:
        saved += _dropout_mask_bytes(shape)
        saved += 8 * shape.sequence if model.position_embedding_type == "learned_absolute" else 0
        saved += 8 * shape.gathered_tokens if shape.tp > 1 else 0  # row indices of this rank's vocabulary shard
    if stage.has_loss:
        saved += _norm_bytes(shape, shape.tokens)
        saved += shape.hidden_bytes(shape.gathered_tokens)  # the gradient of the output GEMM's input
        if shape.fully_sharded:
            rows = padded_vocab_size(model, tp_size=shape.tp) // shape.tp
            saved += rows * model.hidden_size * shape.compute_bytes
    return saved
