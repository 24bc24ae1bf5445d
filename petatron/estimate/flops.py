"""FLOPs and parameters of a model, added up from its layers' specs.

A GEMM of T tokens with an m x n weight is 2Tmn operations, and backward does twice that, so each weight of a GEMM costs 6 per
token. Attention multiplies activations with each other: queries with keys and weights with values, 2 x 2 operations per head
channel and (query, key) pair, again times 3. With L layers, hidden size h, q = heads x head dim, k = kv heads x head dim, MLP width
f, g = 3 matrices if the MLP is gated and else 2,
padded vocabulary V and sequence length s, a step over T tokens costs

    6 T (L (h (q + 2k) + q h + g h f) + h V)  +  12 L q (T / s) pairs(s)

An MoE layer does, in place of the MLP's g h f, the router's h E for E experts, and for each of the K experts of a token g h e of
width e, plus g h u for a shared expert of width u. With a latent width l the experts' matrices are g l e, and the projections into
the latent space and out of it cost 2 h l. Experts that a token is not routed to cost nothing, so a step costs that of a dense model
of the *active* parameters.

Latent attention has, in place of h (q + 2k), the down-projections h (a + c + r) to latents of widths a and c and a rotary key of
width r, and the up-projections a q + c (k + v), with q = heads x query width, k = heads x key width without r, v = heads x value
width; it multiplies 6 (q + v) per pair instead of 12 q. Without a query latent h q stands for h a + a q.

Sparse attention multiplies heads with K tokens of a query only, pairs(s) = K s - K^2 / 2. Its indexer, J heads of width E, has weights
a J E + h (E + J), and 2 J E operations per pair of all tokens for its scores; its loss costs 6 J E + 2 q more per pair that it is over.

Every depth of multi-token prediction is one more layer, with 2 h^2 for its projection, and one more h V.

In a hybrid each kind of branch is in layers of its own: M of Mamba-2, A of attention, F of MLPs; one with
both mixers in parallel counts as both. With d the width of all heads of a
Mamba-2 layer, H heads, G groups of state width N and chunks of c tokens, it has weights h (3 d + 2 G N + H), and its scan costs 3
times c (d + G N) inside chunks (causally half of all pairs of a chunk) and 4 d N into the states and out of them; its convolution, over w
tokens, 3 times 2 w (d + 2 G N).

A gated delta net in X layers, beside A of attention, has weights h (2 n + 3 p + 2 H), with n the width of all key heads, p that of all
H value heads, N and P the widths of one of each. Its rule costs 3 times c (2 n + p) inside chunks, c (p + H N) for their triangular
systems (both causally half of all pairs) and 6 H N P with the states; its convolution 3 times 2 w (2 n + p). Attention with a gated
output has h (2q + 2k) for h (q + 2k). With a decay of every key channel a net has weights h (2 n + 2 p + H + N + P) + H N^2 + p P, since
decays and gates come through latents as wide as a head, and 2 H N inside chunks for 2 n.

An encoder-decoder has two sequences: its steps are counted in tokens of the encoder's, of s, and the layers of the decoder and the
output head cost that of its own tokens, t for every s. Cross-attention has the GEMMs of queries and output on those, that of keys and
values on the encoder's, and s pairs for each of t.

A model that reads images has P patches and F vectors of them for every s tokens of text, at most. N layers of its encoder, of width d
with an MLP of width j, cost 6 P N (4 d^2 + g d j), and 12 d P for each patch that one sees: all P in A layers, and w in W layers with
windows. Patches of x numbers cost 4 P x d, since pixels need no gradient, and the projector 6 F for each of its weights.

The two conventions differ in pairs(s). `causal` (Megatron's, and ours) counts s^2 / 2, what a causal model needs;
`full` counts s^2, as papers that quote higher utilization do. A sliding window of w tokens leaves w s - w^2 / 2 of the
causal pairs. Norms, activations, softmax, the embedding lookup and recompute are not counted: these are model FLOPs, the work
the model needs, not the work of a particular run.

What is frozen costs less, and is counted so: a frozen weight has no gradient, 2 of the 6 per token; a layer below every trainable
parameter has no backward, and costs its forward pass, a third.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.sections.vocabulary import padded_rows
from petatron.layers.spec.param_spec import ParamSpec
from petatron.layers.ssm.recurrent_branch import RecurrentBranchSpec
from petatron.models.frozen_params import NOTHING_FROZEN, FrozenParams
from petatron.models.model_spec import ModelSpec


def flops_formula(
    *,
    causal: bool = True,
    experts: bool = False,
    latent: bool = False,
    hybrid: bool = False,
    linear: type[RecurrentBranchSpec] | None = None,
    gated: bool = False,
    sparse: bool = False,
    images: bool = False,
) -> str:
    """Returns the formula behind the reported TFLOP/s and MFU, for people.

    linear: the kind of linear attention that some layers have. gated: attention's output has a gate. sparse: an indexer chooses K tokens
    of each query; its loss is left out. images: an encoder of patches is before the decoder.
    """
    rest = " + (T/s) (6 P N (4 d^2 + g d j) + 12 d P (A P + W w) + 4 P x d + 6 F projector)" if images else ""
    pairs, chunk = ("s^2/2", "c") if causal else ("s^2", "2 c")
    qkv, width = ("h (a + c + r) + a q + c (k + v) + v h", "6 L (q + v)") if latent else ("h (q + 2k) + q h", "12 L q")
    qkv = qkv.replace("h (q + 2k)", "h (2q + 2k)") if gated else qkv
    scores = f" + 2 L J E (T/s) {pairs}" if sparse else ""
    if sparse:
        qkv, pairs = f"{qkv} + a J E + h (E + J)", "(K s - K^2/2)" if causal else "K s"
    net = "" if linear is None else f"X {linear.weights_formula}"
    rule = scores if linear is None else f" + 3 T X ({(linear.mixing_formula or '').format(c=chunk)})"
    if hybrid:
        mamba, scan = "M h (3d + 2 G N + H)", f"3 T M ({chunk} (d + G N) + 4 d N + 2 w (d + 2 G N))"
        scans = f"{mamba} + {net}" if net else mamba
        mlps = "F g h f" + (" + MoE layers (h E + K g h e + g h u)" if experts else "")
        return (
            f"6 T ({scans} + A ({qkv}) + {mlps} + h V) + {width.replace('L', 'A')} (T/s) {pairs} + {scan}{rule}{rest}"
        )
    mixers = f"A ({qkv}) + {net}" if net else f"L ({qkv})"
    width = width.replace("L", "A") if net else width
    if experts:
        layers = f"{mixers} + dense layers g h f + MoE layers (h E + K g h e + g h u)"
    else:
        layers = f"{mixers} + L g h f" if net else f"L ({qkv} + g h f)"
    return f"6 T ({layers} + h V) + {width} (T/s) {pairs}{rule}{rest}"


def linear_attention_kind(spec: ModelSpec) -> type[RecurrentBranchSpec] | None:
    """Returns the kind of linear attention that some layers have; None: none has any."""
    branches = (branch for layer in spec.count_layers() for branch in layer.branches)
    kinds = (type(branch) for branch in branches if isinstance(branch, RecurrentBranchSpec))
    return next((kind for kind in kinds if kind.weights_formula is not None), None)


def model_flops_per_token(
    spec: ModelSpec, *, tp_size: int = 1, causal: bool = True, frozen: FrozenParams = NOTHING_FROZEN
) -> float:
    """Returns forward and backward FLOPs per token of a full training sequence, of which `frozen` parameters need less."""
    length = spec.config.seq_length
    gemm_flops = _head_flops(spec, frozen, tp_size=tp_size) * spec.predicted_length / length
    gemm_flops += sum(outer_module_flops(spec, module, frozen=frozen) for module in spec.tokens_of_modules)
    mixing_flops = 0.0
    for (layer, names, has_backward), count in frozen.count_layers(spec).items():
        count *= layer.runs
        of_layer = layer.seq_length or length
        gemm_flops += count * _gemm_flops(layer.params(), names, has_input_grad=has_backward) * of_layer / length
        for branch in layer.branches:
            mixing_flops += count * branch.mixing_flops(of_layer, causal=causal) / (1 if has_backward else 3)
    return gemm_flops + mixing_flops / length


def outer_module_flops(spec: ModelSpec, module: str, *, frozen: FrozenParams = NOTHING_FROZEN) -> float:
    """Returns the FLOPs per token of a full sequence of a module in `tokens_of_modules`."""
    outer = spec.outer_params(spec.whole_model)
    params = {name: param for name, param in outer.items() if name.partition(".")[0] == module}
    reads_pixels = module in spec.modules_before_layers
    has_input_grad = not reads_pixels and (not frozen or frozen.first_backward_layer < spec.layer_after(module))
    flops = _gemm_flops(params, frozen.names, has_input_grad=has_input_grad)
    return flops * spec.tokens_of_modules[module] / spec.config.seq_length


def _gemm_flops(params: Mapping[str, ParamSpec], frozen_names: Collection[str], *, has_input_grad: bool) -> int:
    """Returns the FLOPs per token of a layer's GEMMs: forward, gradients of their inputs, and of weights that are not frozen."""
    gemms = {name: param.num_active_elements for name, param in params.items() if param.is_gemm}
    trained = sum(elements for name, elements in gemms.items() if name not in frozen_names)
    return (4 if has_input_grad else 2) * sum(gemms.values()) + 2 * trained


def _head_flops(spec: ModelSpec, frozen: FrozenParams, *, tp_size: int) -> int:
    """Returns the FLOPs per token of the output head; its input needs a gradient if something before it is trained."""
    last = PipelineStage((), has_embedding=False, has_loss=True)
    after_layers = spec.outer_params(last)
    trains_head = any(param.is_gemm for param in frozen.trained(after_layers).values())
    trains_before = frozen.first_backward_layer < len(spec.layers) or not frozen
    trains_before = trains_before or any(not param.is_gemm for param in frozen.trained(after_layers).values())
    passes = 1 + trains_before + trains_head
    return 2 * passes * spec.num_predictions * head_gemm_elements(spec, tp_size=tp_size)


def head_gemm_elements(spec: ModelSpec, *, tp_size: int = 1) -> int:
    """Returns the elements of GEMM weights after the layers, vocabulary padding included: it multiplies like the rest."""
    last = PipelineStage((), has_embedding=False, has_loss=True)
    return sum(
        (param.shape[0] if param.shard.pad_to is None else padded_rows(param.shape[0], param.shard.pad_to, tp_size))
        * math.prod(param.shape[1:])
        for param in spec.outer_params(last).values()
        if param.is_gemm
    )


def parameter_count(spec: ModelSpec, *, active: bool = False) -> int:
    """Returns the parameters, without vocabulary padding; with `active` only those one token uses."""
    layers = sum(
        count * sum(param.num_active_elements if active else param.num_elements for param in layer.params().values())
        for layer, count in spec.count_layers().items()
    )
    return layers + sum(param.num_elements for param in spec.outer_params(spec.whole_model).values())
