"""Translates the routing of DeepSeek's config.json: groups of experts, shared experts, the scaling factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.model import MoEConfig
from petatron.models.hf.setting_types import OWN_FOLDER_FIX
from petatron.models.hf.translation import Keys, Settings, Translation

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
        lambda given: _read(config, routing, given, own_width=own_width),
        lambda spec: _write(routing, spec.moe or MoEConfig(), own_width=own_width),
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


def _read(config: Translation, routing: _Routing, keys: Keys, *, own_width: bool) -> tuple[Settings, list[Problem]]:
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


def _write(routing: _Routing, moe: MoEConfig, *, own_width: bool) -> Settings:
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
