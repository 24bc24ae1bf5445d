"""Translates the experts' part of config.json: which layers have them, what all families with experts have in common, and DeepSeek's
routing with groups of experts, shared experts and a scaling factor.

Families say which layers in four ways; where a list can express everything, it is what is written. Load balancing in training, capacity
and jitter are no part of a model: those settings prevent no export and are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.model import MoEConfig
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import REQUIRED, Keys, Settings, Translation, Write
from petatron.models.model_spec import ModelSpec

_DENSE, _SPARSE = "dense", "sparse"


def expert_sizes(
    config: Translation,
    experts: str = "num_local_experts",
    topk: str = "num_experts_per_tok",
    width: str = "intermediate_size",
    *,
    defaults: Sequence[Any] = (REQUIRED,) * 3,
) -> None:
    """Translates how many experts there are, how many a token has, and their width, by these keys."""
    settings = ("num_experts", "moe_router_topk", "moe_ffn_hidden_size")
    for setting, key, default in zip(settings, (experts, topk, width), defaults, strict=True):
        config.copy(setting, key, default)


def softmax_router(config: Translation) -> None:
    """Says that weights are a softmax of the chosen scores and nothing else, and that no expert is shared."""
    config.always(
        moe_router_score_function="softmax",
        moe_router_pre_softmax=False,
        moe_router_enable_expert_bias=False,
        moe_router_group_topk=None,
        moe_router_topk_scaling_factor=None,
        moe_latent_size=None,
        moe_shared_expert_intermediate_size=None,
        moe_shared_expert_gate=False,
    )


def normalized_weights(config: Translation, default: bool) -> None:
    """Translates `norm_topk_prob`: whether the weights of the chosen experts are divided by their sum."""
    config.convert(
        ("moe_router_pre_softmax",),
        lambda keys: ({"moe_router_pre_softmax": not keys["norm_topk_prob"]}, []),
        lambda spec: {"norm_topk_prob": spec.moe is not None and not spec.moe.moe_router_pre_softmax},
        norm_topk_prob=default,
    )


def experts_in_every_layer(config: Translation) -> None:
    """Translates experts of which the sizes were copied; so do the functions below."""
    _experts(config, lambda keys, layers: [True] * layers)
    config.expect(
        "moe_layer_freq", "experts in every layer", lambda spec: len(spec.moe_layers) in (0, len(spec.layers))
    )


def experts_of_pattern(config: Translation) -> None:
    """The layers with experts are those of a hybrid's pattern."""
    _experts(config, lambda keys, layers: [True] * layers, in_every_model=False)


def experts_after_dense_layers(config: Translation, first_k_dense_replace: int, **layer_types: None) -> None:
    """The first layers have none; `mlp_layer_types`, in a family that has it, names the kind of each."""
    keys: dict[str, Any] = {"first_k_dense_replace": first_k_dense_replace, **layer_types}

    def write(spec: ModelSpec) -> Keys:
        kinds = [_SPARSE if layer in spec.moe_layers else _DENSE for layer in range(spec.config.num_layers)]
        content = {"first_k_dense_replace": spec.moe_layers[0]} if _dense_layers_are_first(spec) else {}
        return content | ({"mlp_layer_types": kinds} if layer_types else {})

    _experts(config, _read_dense_first, write, **keys)
    if not layer_types:
        config.expect("moe_layer_freq", "dense layers first, then experts in every layer", _dense_layers_are_first)


def experts_at_steps(config: Translation) -> None:
    """Every n-th layer has experts, except those listed."""

    def write(spec: ModelSpec) -> Keys:
        dense = [layer for layer in range(spec.config.num_layers) if layer not in spec.moe_layers]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    _experts(config, _read_steps, write, decoder_sparse_step=1, mlp_only_layers=None)


def experts_in_named_layers(config: Translation) -> None:
    """`moe_layers` lists the layers with experts; without it they are every n-th."""

    def write(spec: ModelSpec) -> Keys:
        return {"moe_layers": list(spec.moe_layers), "interleave_moe_layer_step": 1}

    _experts(config, _read_named, write, moe_layers=None, interleave_moe_layer_step=1)


def _experts(
    config: Translation,
    read_layers: Callable[[Keys, int], list[bool] | Problem],
    write_layers: Write | None = None,
    *,
    in_every_model: bool = True,
    **keys: Any,
) -> None:
    def read(given: Keys) -> tuple[Settings, list[Problem]]:
        is_moe = read_layers(given, config.setting("num_layers"))
        problems = [is_moe] if isinstance(is_moe, Problem) else []
        topk, count = config.setting("moe_router_topk"), config.setting("num_experts")
        if topk > count:
            rule = f"is more than the {count} experts there are"
            problems.append(Problem(config.names["moe_router_topk"], str(topk), rule, OWN_FOLDER_FIX))
        return {} if isinstance(is_moe, Problem) else {"moe_layer_freq": _layer_freq(is_moe)}, problems

    def write(spec: ModelSpec) -> Keys:
        # transformers adds the load-balancing loss only with `output_router_logits`.
        loss = 0.0 if spec.moe is None else spec.moe.moe_aux_loss_coeff
        layers = {} if write_layers is None else write_layers(spec)
        return {"router_aux_loss_coef": loss, "output_router_logits": False, **layers}

    config.convert(("moe_layer_freq",), read, write, **keys)
    if in_every_model:
        config.expect("num_experts", "always some", lambda spec: spec.moe is not None)
    sinkhorn = "moe_router_load_balancing_type"
    config.expect(sinkhorn, "scores of another kind", lambda spec: config.setting(sinkhorn) != "sinkhorn")


def _read_dense_first(keys: Keys, num_layers: int) -> list[bool] | Problem:
    dense, kinds = keys["first_k_dense_replace"] or 0, keys.get("mlp_layer_types")
    if not is_count(dense) or dense >= num_layers:
        rule = f"leaves no layer of {num_layers} for the experts"
        return Problem("first_k_dense_replace", f"{dense!r:.40}", rule, "Use fewer.")
    if kinds is None:
        return [layer >= dense for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or {str(kind) for kind in kinds} - {_DENSE, _SPARSE}:
        rule = f"does not name each of the {num_layers} layers {_DENSE} or {_SPARSE}"
        return Problem("mlp_layer_types", "", rule, OWN_FOLDER_FIX)
    if _SPARSE not in kinds:
        rule = f"leaves no layer of {num_layers} for the experts"
        return Problem("mlp_layer_types", f"{_DENSE} in every layer", rule, "Use a dense family.")
    return [kind == _SPARSE for kind in kinds]


def _read_steps(keys: Keys, num_layers: int) -> list[bool] | Problem:
    step, dense = keys["decoder_sparse_step"], keys["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(map(is_count, dense)):
        return Problem("mlp_only_layers", f"{dense!r:.40}", "is not a list of layers", OWN_FOLDER_FIX)
    if not is_count(step, 1):
        rule = "is not a positive whole number"
        return Problem("decoder_sparse_step", f"{step!r:.40}", rule, "Use 1 for experts in every layer.")
    without = frozenset(dense)  # a file may name very many
    is_moe = [layer not in without and (layer + 1) % step == 0 for layer in range(num_layers)]
    if not any(is_moe):
        rule = f"and mlp_only_layers leave no layer of {num_layers} for the experts"
        return Problem("decoder_sparse_step", str(step), rule, "Use a dense family.")
    return is_moe


def _read_named(keys: Keys, num_layers: int) -> list[bool] | Problem:
    chosen, step = keys["moe_layers"], keys["interleave_moe_layer_step"]
    if chosen is None and is_count(step, 1):
        chosen = list(range(step - 1, num_layers, step))
    if not isinstance(chosen, list) or not chosen or any(layer not in range(num_layers) for layer in chosen):
        rule = f"and interleave_moe_layer_step {step!r:.20} name no layers of {num_layers} for the experts"
        return Problem("moe_layers", f"{chosen!r:.40}", rule, "Use a dense family.")
    named = frozenset(chosen)
    return [layer in named for layer in range(num_layers)]


def format_moe_layer_freq(spec: ModelSpec) -> str:
    """Returns the value of `moe_layer_freq` for the MoE layers of a model."""
    return _layer_freq([layer in spec.moe_layers for layer in range(spec.config.num_layers)])


def _layer_freq(is_moe: Sequence[bool]) -> str:
    """Returns the value of `moe_layer_freq` for given layers.

    >>> _layer_freq([True, True]), _layer_freq([False, True])
    ('1', '[0, 1]')
    """
    return "1" if all(is_moe) else str([int(chosen) for chosen in is_moe])


def _dense_layers_are_first(spec: ModelSpec) -> bool:
    return not spec.moe_layers or spec.moe_layers == tuple(range(spec.moe_layers[0], len(spec.layers)))


_LIMITED, _GREEDY, _BIASED = "group_limited_greedy", "greedy", "noaux_tc"
_GROUPS = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk")
_SHARED_WIDTH = "moe_shared_expert_intermediate_size"


def sigmoid_router(config: Translation) -> None:
    """Says what DeepSeek-V3's router is: normalized sigmoids in float32, and a bias by which experts are chosen."""
    config.always(
        moe_shared_expert_gate=False,
        moe_router_dtype="fp32",
        moe_router_score_function="sigmoid",
        moe_router_pre_softmax=False,
        moe_router_enable_expert_bias=True,
        moe_latent_size=None,
    )


@dataclass(frozen=True, slots=True)
class _Routing:
    """The keys of shared experts and groups, how many of its experts' scores are summed to rank a group, and the default `topk_method`."""

    shared_key: str
    groups_key: str
    group_score_topk: int
    topk_method: str


def deepseek_routing(
    config: Translation,
    group_score_topk: int,
    *,
    shared_key: str = "n_shared_experts",
    groups_key: str = "n_group",
    topk_method: str = _BIASED,
    **keys: Any,
) -> None:
    """Translates routing after experts' sizes, as `_Routing` says; `keys` are the keys of routing with their defaults.

    A width of the shared experts that was copied before is that of all of them; else each has the width of a routed one.
    """
    routing = _Routing(shared_key, groups_key, group_score_topk, topk_method)
    own_width = _SHARED_WIDTH not in config.names
    if topk_method != _BIASED:
        keys["topk_method"] = topk_method
    config.convert(
        (*_GROUPS, "moe_router_topk_scaling_factor", *(_SHARED_WIDTH,) * own_width),
        lambda given: _read_routing(config, routing, given, own_width=own_width),
        lambda spec: _write_routing(routing, spec.moe or MoEConfig(), own_width=own_width),
        **keys,
    )
    if own_width:
        allowed = "one shared expert or more of the routed experts' width"
        config.expect(_SHARED_WIDTH, allowed, lambda spec: _is_multiple(spec.moe or MoEConfig()))
    ranked = f"groups ranked by their best {group_score_topk}"
    config.expect(_GROUPS[2], ranked, lambda spec: _ranked_by(spec.moe or MoEConfig()) in (None, group_score_topk))
    config.expect("moe_router_topk", "weights that add up to one", lambda spec: not _gives_weight_one(config))


def _gives_weight_one(config: Translation) -> bool:
    return config.setting("moe_router_score_function") == "sigmoid" and config.setting("moe_router_topk") == 1


def _is_multiple(moe: MoEConfig) -> bool:
    shared = moe.moe_shared_expert_intermediate_size
    return shared is not None and shared % (moe.moe_ffn_hidden_size or 1) == 0


def _ranked_by(moe: MoEConfig) -> int | None:
    """Returns how many scores rank a group; None where all groups are chosen, or there is none."""
    chosen = moe.moe_router_group_topk
    if chosen is None or chosen >= (moe.moe_router_num_groups or 0):
        return None
    return moe.moe_router_group_score_topk or max(1, moe.moe_router_topk // chosen)


def _read_routing(
    config: Translation, routing: _Routing, keys: Keys, *, own_width: bool
) -> tuple[Settings, list[Problem]]:
    shared, scaling = keys[routing.shared_key], keys["routed_scaling_factor"]
    factor = float(scaling or 0.0)
    problems: list[Problem] = []
    if not is_count(shared, 1):
        problems.append(
            Problem(routing.shared_key, f"{shared!r:.40}", "is not a positive whole number", OWN_FOLDER_FIX)
        )
    if not factor > 0:
        problems.append(Problem("routed_scaling_factor", f"{scaling!r:.40}", "is not above 0", OWN_FOLDER_FIX))
    if _gives_weight_one(config):
        rule = "with a normalized weight gives every token the weight 1, which the decoder does not for sigmoids"
        problems.append(Problem(config.names["moe_router_topk"], "1", rule, "Use another model."))
    groups = _read_groups(config, routing, keys)
    if isinstance(groups, Problem):
        problems.append(groups)
    if problems or isinstance(groups, Problem):
        return {}, problems
    width = {_SHARED_WIDTH: shared * config.setting("moe_ffn_hidden_size")} if own_width else {}
    return {"moe_router_topk_scaling_factor": None if factor == 1.0 else factor, **width, **groups}, []


def _read_groups(config: Translation, routing: _Routing, keys: Keys) -> Settings | Problem:
    """Reads the groups that a token's experts come from; choosing all of them is having none."""
    key, method = routing.groups_key, keys.get("topk_method", _BIASED)
    groups, chosen = keys.get(key), keys.get("topk_group")
    if method == _GREEDY or groups is None or chosen is None:
        if method == _LIMITED:
            return Problem(key, "", f"is missing, and topk_method {_LIMITED} needs it and topk_group", OWN_FOLDER_FIX)
        return dict.fromkeys(_GROUPS)
    if method not in (_LIMITED, _BIASED):
        rule = "is a way to choose experts that the decoder does not have"
        return Problem("topk_method", f'"{str(method)[:40]}"', rule, f"It has {_GREEDY} and {_LIMITED}.")
    experts, topk = config.setting("num_experts"), config.setting("moe_router_topk")
    if not is_count(groups, 1) or experts % groups:
        return Problem(key, f"{groups!r:.40}", f"does not divide the {experts} experts", OWN_FOLDER_FIX)
    if not is_count(chosen, 1) or chosen > groups or topk > chosen * (experts // groups):
        rule = f"of {groups} groups cannot give a token its {topk} experts of {experts}"
        return Problem("topk_group", f"{chosen!r:.40}", rule, OWN_FOLDER_FIX)
    if chosen == groups:
        return dict.fromkeys(_GROUPS)
    summed = routing.group_score_topk
    if summed > experts // groups:
        return Problem(key, str(groups), f"leaves groups of fewer than {summed} experts", OWN_FOLDER_FIX)
    return dict(zip(_GROUPS, (groups, chosen, None if summed == max(1, topk // chosen) else summed), strict=True))


def _write_routing(routing: _Routing, moe: MoEConfig, *, own_width: bool) -> Settings:
    limited = moe.moe_router_num_groups is not None and moe.moe_router_group_topk is not None
    width, shared = moe.moe_ffn_hidden_size or 1, moe.moe_shared_expert_intermediate_size or 0
    content: Settings = {
        routing.shared_key: shared // width if own_width else 1,
        "routed_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
        routing.groups_key: moe.moe_router_num_groups if limited else 1,
        "topk_group": moe.moe_router_group_topk if limited else 1,
    }
    if routing.topk_method != _BIASED:
        content["topk_method"] = _LIMITED if limited else _GREEDY
    return content
