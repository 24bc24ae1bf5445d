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

With FP8, GEMMs of activation functions' outputs save them quantized, one byte an element and its scales; others cast their input a second
time in backward, and save a scale at most (`layers/ops/fp8_gemm.py`). Inputs that tensor-parallel ranks share are saved quantized
too, gathered or not. All layers are counted as if they used FP8.

MoE layers are counted for an even load; then a rank's experts get as many rows as its own tokens make choices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import FULL, BranchSpec
from petatron.layers.transformer_layer import LayerSpec


def layer_bytes(layer: LayerSpec, shape: ActivationShape, modules: Collection[str] = ()) -> int:
    """Returns the bytes that one layer saves of one micro-batch, of all its runs, while `modules` are recomputed."""
    shape = layer.shape_of(shape)
    if FULL in modules:
        return layer.runs * layer_input_bytes(layer, shape)
    branches = sum(branch_bytes(layer, branch, shape, modules) for branch in layer.branches)
    return layer.runs * (layer.extra_saved_bytes(shape) + branches)


def branch_bytes(layer: LayerSpec, branch: BranchSpec, shape: ActivationShape, modules: Collection[str] = ()) -> int:
    """Returns the bytes that one branch of a layer and its norms save of one micro-batch while `modules` are recomputed."""
    shape = layer.shape_of(shape)
    saved = 0 if "layernorm" in modules else branch.saved_input_bytes(shape, modules)
    norms = (branch.name in layer.input_norms) + (branch.name in layer.output_norms)
    saved += norms * layer.norm.saved_bytes(shape, shape.tokens) + branch.saved_bytes(shape, modules)
    if layer.saves_branch_inputs:
        saved += shape.activation_bytes(shape.tokens, branch.hidden_size)
    saved += 0 if branch.region in modules else layer.adapter_saved_bytes(branch, shape)
    return saved + shape.dropout_mask_bytes(branch.hidden_size, layer.dropout)


def region_bytes(layer: LayerSpec, shape: ActivationShape, modules: Collection[str] = ()) -> Mapping[str, int]:
    """Returns the bytes that each part of a layer saves which may be offloaded by itself, while `modules` are recomputed."""
    return {} if FULL in modules else layer.region_bytes(layer.shape_of(shape), modules)


def layer_input_bytes(layer: LayerSpec, shape: ActivationShape) -> int:
    """Returns the bytes of a layer's input: all that is saved of one that is recomputed as a whole."""
    return shape.activation_bytes(layer.shape_of(shape).tokens, layer.norm.width)


def regathered_bytes(layer: LayerSpec, shape: ActivationShape, modules: Collection[str]) -> int:
    """Returns the bytes that GEMMs of one layer's recomputed modules gather in the second run, and hold until their backward."""
    shape = layer.shape_of(shape)
    return sum(branch.regathered_bytes(shape, modules) for branch in layer.branches)
