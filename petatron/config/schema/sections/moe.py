"""The settings of mixtures of experts: the experts, the router, how tokens reach experts, and the shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from petatron.config.schema.moe_layer_freq import marked_from_the_first
from petatron.config.schema.numeric_bounds import DropoutRate, ExpertCount, Factor, PositiveFactor, Size
from petatron.config.schema.setting_metadata import (
    ComparedAs,
    Feature,
    NotWith,
    ToySize,
    UsedWhen,
    settings_section,
    used_with,
)

HAS_EXPERTS = used_with("moe.num_experts", reason="the model has no experts")
_SHARED = used_with("moe.moe_shared_expert_intermediate_size", reason="there is no shared expert")
_GROUPED = used_with("moe.moe_router_group_topk")
_BIASED = used_with("moe.moe_router_enable_expert_bias")
_SOFTMAX = used_with(
    "moe.moe_router_score_function", value="softmax", reason="scores are {run.moe.moe_router_score_function}"
)
_DROPS = used_with("moe.moe_expert_capacity_factor", reason="no token is dropped without --moe-expert-capacity-factor")
_SCORED = UsedWhen(lambda run: run.moe.moe_router_load_balancing_type != "sinkhorn", "sinkhorn has scores of its own")
_BALANCED = UsedWhen(
    lambda run: run.moe.moe_router_load_balancing_type != "none", "--moe-router-load-balancing-type is none"
)
_NO_PATTERN = UsedWhen(
    lambda run: run.model.hybrid_layer_pattern is None, "--hybrid-layer-pattern says which layers have experts"
)
_GROUPED_GEMM = (
    UsedWhen(lambda run: run.train.device != "cpu", "the CPU multiplies for one expert after the other"),
    UsedWhen(
        lambda run: not run.moe.moe_pad_expert_input_to_capacity,
        "inputs padded to capacity are one batched GEMM anyway",
    ),
    used_with("precision.bf16", reason="the grouped kernel takes bfloat16 (--bf16)"),
    UsedWhen(
        lambda run: run.precision.fp8_format is None or run.precision.first_last_layers_bf16,
        "experts in FP8 are one grouped GEMM anyway",
    ),
)
_ALL_TO_ALL = (
    _SHARED,
    UsedWhen(
        lambda run: run.parallel.expert_model_parallel_size * (run.parallel.expert_tensor_parallel_size or 1) != 1,
        "every rank holds all experts, and tokens stay where they are",
    ),
    used_with(
        "moe.moe_token_dispatcher_type",
        value="alltoall",
        reason="it is for --moe-token-dispatcher-type alltoall, and that is {run.moe.moe_token_dispatcher_type}",
    ),
)
_SINKHORN = "--moe-router-load-balancing-type sinkhorn"
_ASSIGNED = NotWith(
    "moe_router_load_balancing_type",
    lambda kind: kind == "sinkhorn",
    f"cannot be combined with {_SINKHORN}, which assigns tokens by itself",
    "Use aux_loss or none, or leave it out.",
    shown="",
)
_NO_LOSS = replace(_ASSIGNED, rule=f"weighs a balancing loss, but {_SINKHORN} has none", fix="Use 0.", shown="{:g}")
_NO_GROUPS = NotWith("moe_router_num_groups", lambda groups: groups is None)
_SIGMOID = NotWith(
    "moe_router_score_function",
    lambda score: score != "sigmoid",
    "balances sigmoid scores, but --moe-router-score-function is {value}",
    "Use --moe-router-score-function sigmoid.",
    shown="",
)


@settings_section
class ExpertSettings:
    """Experts."""

    feature: ClassVar = Feature(
        "experts",
        (HAS_EXPERTS,),
        recompute_modules=("moe", "moe_act"),
        offload_modules=("moe", "expert_fc1", "moe_act", "experts"),
    )
    num_experts: Annotated[ExpertCount, "at least 1", ToySize(8), "selects"] | None = None
    """Number of routed experts per MoE layer; unset means a dense model."""
    moe_layer_freq: Annotated[str, _NO_PATTERN, ComparedAs(marked_from_the_first)] = "1"
    """Which layers are MoE: N means layers 0, N, 2N, ...; or one 0 or 1 per layer, as in ([0]*1+[1]*23)."""
    moe_ffn_hidden_size: Annotated[Size, ToySize(64)] | None = None
    """Width inside one expert. Derived: the MLP width."""
    moe_latent_size: Annotated[Size, ToySize(64)] | None = None
    """Width that tokens are projected to before the routed experts and back from after them; unset means the hidden size."""
    moe_apply_probs_on_input: Annotated[bool, "later"] = False
    """Multiply an expert's input by the router's weight instead of its output; for one expert per token (Llama 4)."""
    moe_grouped_gemm: Annotated[bool, "runtime", *_GROUPED_GEMM] = True
    """Run all local experts in one grouped GEMM where there is one; off: one expert after the other."""


@settings_section
class RouterSettings:
    """The router and load balancing."""

    feature: ClassVar = Feature("router", (HAS_EXPERTS,))
    moe_router_topk: ExpertCount = 2
    """Experts each token is sent to."""
    moe_router_load_balancing_type: Annotated[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"], "training"
    ] = "aux_loss"
    """How the load of the experts is kept even."""
    moe_aux_loss_coeff: Annotated[Factor, "at least 0", "training", _BALANCED, _NO_LOSS] = 0.0
    """Weight of the balancing loss."""
    moe_z_loss_coeff: Annotated[Factor, "at least 0", "training"] | None = None
    """Weight of the router z-loss; unset means none."""
    moe_router_score_function: Annotated[Literal["softmax", "sigmoid"], _SCORED] = "softmax"
    """What turns router logits into scores."""
    moe_router_pre_softmax: Annotated[bool, _SCORED, _SOFTMAX] = False
    """Apply the softmax before choosing the top k."""
    moe_router_enable_expert_bias: Annotated[bool, _SIGMOID, _ASSIGNED] = False
    """Balance with a learned-by-rule bias per expert instead of a loss (DeepSeek-V3)."""
    moe_router_bias_update_rate: Annotated[Factor, "at least 0", "training", _BIASED] = 1e-3
    """Step of that bias."""
    moe_router_linear_bias: Annotated[bool, "later"] = False
    """A bias of the router's linear layer, which is trained as its weight is (gpt-oss)."""
    moe_router_num_groups: Annotated[ExpertCount, _GROUPED, replace(_ASSIGNED, rule="")] | None = None
    """Groups of experts for group-limited routing."""
    moe_router_group_topk: Annotated[ExpertCount, _NO_GROUPS, _ASSIGNED] | None = None
    """Groups each token may use."""
    moe_router_group_score_topk: Annotated[ExpertCount, _GROUPED, _NO_GROUPS] | None = None
    """Best experts of a group whose scores are summed to rank it; unset: `--moe-router-topk` / `--moe-router-group-topk`."""
    moe_router_topk_scaling_factor: PositiveFactor | None = None
    """Factor on the chosen scores."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router; unset means that of the model."""
    moe_input_jitter_eps: Annotated[DropoutRate, "training"] | None = None
    """Multiply the router's input by noise between 1 - eps and 1 + eps while training; unset means none."""
    moe_router_force_load_balancing: Annotated[bool, "runtime"] = False
    """Route at random instead of by the router, for measuring speed; such a model learns nothing useful."""


@settings_section
class DispatchSettings:
    """How tokens reach their experts."""

    feature: ClassVar = Feature("dispatch and capacity", (HAS_EXPERTS,))
    moe_token_dispatcher_type: Annotated[Literal["allgather", "alltoall"], "runtime"] = "allgather"
    """How tokens reach their experts."""
    moe_expert_capacity_factor: Annotated[PositiveFactor, _ASSIGNED] | None = None
    """Tokens an expert takes, as a factor of an even share; unset means no token is dropped."""
    moe_token_drop_policy: Annotated[Literal["probs", "position"], _DROPS] = "probs"
    """Which tokens are dropped when an expert is full: those with the lowest scores, or the last in the batch."""
    moe_pad_expert_input_to_capacity: Annotated[bool, "runtime"] = False
    """Pad what each expert gets to its capacity, so that shapes never change; needs a capacity factor."""


@settings_section
class SharedExpertSettings:
    """The shared expert, which every token passes."""

    feature: ClassVar = Feature("shared expert", (HAS_EXPERTS,))
    moe_shared_expert_intermediate_size: Annotated[Size, ToySize(64)] | None = None
    """Width of the shared expert that every token passes; unset means none."""
    moe_shared_expert_gate: Annotated[bool, _SHARED] = False
    """Scale the shared expert's output by a learned sigmoid gate per token (Qwen2-MoE)."""
    moe_shared_expert_overlap: Annotated[bool, "runtime", *_ALL_TO_ALL] = True
    """Compute the shared expert while the all-to-all of tokens is in flight, forward and backward; off: after it."""
