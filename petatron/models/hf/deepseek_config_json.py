"""Converts the routing of DeepSeek's config.json to `MoEConfig` values and back: groups of experts, shared experts, the scaling factor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.model import MoEConfig
from petatron.models.hf.family import OWN_FOLDER_FIX, Family, unsupported_setting

_LIMITED, _GREEDY, _BIASED = "group_limited_greedy", "greedy", "noaux_tc"
_SHARED_WIDTH = "moe_shared_expert_intermediate_size"


_GROUP_KEYS: Mapping[str, Any] = {"n_group": None, "topk_group": None, "topk_method": _BIASED}


def _key(family: Family, name: str) -> str:
    """Returns the family's spelling of a key."""
    return family.routing_keys.get(name, name)


def deepseek_routing_from_hf_config(
    family: Family, hf_config: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """Returns MoEConfig values besides those of the family's tables, and what the decoder cannot express."""
    shared_key, topk_key = _key(family, "n_shared_experts"), family.moe_keys["moe_router_topk"]
    shared, scaling = hf_config[shared_key], hf_config["routed_scaling_factor"]
    factor = float(scaling or 0.0)
    problems: list[Problem] = []
    if not is_count(shared, 1):
        problems.append(Problem(shared_key, f"{shared!r:.40}", "is not a positive whole number", OWN_FOLDER_FIX))
    if not factor > 0:
        problems.append(Problem("routed_scaling_factor", f"{scaling!r:.40}", "is not above 0", OWN_FOLDER_FIX))
    if values["moe_router_score_function"] == "sigmoid" and values["moe_router_topk"] == 1:
        rule = "with a normalised weight gives every token the weight 1, which the decoder does not for sigmoids"
        problems.append(Problem(topk_key, "1", rule, "Use another model."))
    groups, found = _read_groups(family, hf_config, values)
    if problems or found:
        return {}, problems + found
    own_width = {} if _SHARED_WIDTH in family.moe_keys else {_SHARED_WIDTH: shared * values["moe_ffn_hidden_size"]}
    return {"moe_router_topk_scaling_factor": None if factor == 1.0 else factor, **own_width, **groups}, []


def _read_groups(
    family: Family, hf_config: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """Reads the groups that a token's experts come from; choosing all of them is having none."""
    names = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk")
    groups, chosen, method = (hf_config.get(_key(family, key), default) for key, default in _GROUP_KEYS.items())
    groups_key = _key(family, "n_group")
    if method == _GREEDY or groups is None or chosen is None:
        if method == _LIMITED:
            return {}, [
                Problem(
                    groups_key, "", f"is missing, and topk_method {_LIMITED} needs it and topk_group", OWN_FOLDER_FIX
                )
            ]
        return dict.fromkeys(names), []
    if method not in (_LIMITED, _BIASED):
        rule = "is a way to choose experts that the decoder does not have"
        return {}, [Problem("topk_method", f'"{str(method)[:40]}"', rule, f"It has {_GREEDY} and {_LIMITED}.")]
    experts, topk = values["num_experts"], values["moe_router_topk"]
    if not is_count(groups, 1) or experts % groups:
        return {}, [Problem(groups_key, f"{groups!r:.40}", f"does not divide the {experts} experts", OWN_FOLDER_FIX)]
    if not is_count(chosen, 1) or chosen > groups or topk > chosen * (experts // groups):
        rule = f"of {groups} groups cannot give a token its {topk} experts of {experts}"
        return {}, [Problem("topk_group", f"{chosen!r:.40}", rule, OWN_FOLDER_FIX)]
    if chosen == groups:
        return dict.fromkeys(names), []
    summed = family.group_score_topk
    if summed is not None and summed > experts // groups:
        return {}, [Problem(groups_key, str(groups), f"leaves groups of fewer than {summed} experts", OWN_FOLDER_FIX)]
    return dict(zip(names, (groups, chosen, None if summed == max(1, topk // chosen) else summed), strict=True)), []


def deepseek_routing_to_hf_config(family: Family, moe: MoEConfig) -> dict[str, Any]:
    """Returns the keys besides those of the family's tables."""
    limited = moe.moe_router_num_groups is not None and moe.moe_router_group_topk is not None
    width, shared = moe.moe_ffn_hidden_size or 1, moe.moe_shared_expert_intermediate_size or 0
    content: dict[str, Any] = {
        _key(family, "n_shared_experts"): 1 if _SHARED_WIDTH in family.moe_keys else shared // width,
        "routed_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
        _key(family, "n_group"): moe.moe_router_num_groups if limited else 1,
        "topk_group": moe.moe_router_group_topk if limited else 1,
    }
    if family.defaults.get("topk_method", _BIASED) != _BIASED:
        content["topk_method"] = _LIMITED if limited else _GREEDY
    return content


def deepseek_unsupported_settings(family: Family, moe: MoEConfig) -> list[Problem]:
    """Returns the settings of routing and shared experts that the family has no key for."""
    width, shared = moe.moe_ffn_hidden_size or 1, moe.moe_shared_expert_intermediate_size
    problems: list[Problem] = []
    if _SHARED_WIDTH not in family.moe_keys and (shared is None or shared % width):
        allowed = "one shared expert or more of the routed experts' width"
        problems.append(unsupported_setting("moe_shared_expert_intermediate_size", shared, family, allowed))
    chosen = moe.moe_router_group_topk
    if chosen is not None and chosen < (moe.moe_router_num_groups or 0):
        summed = moe.moe_router_group_score_topk or max(1, moe.moe_router_topk // chosen)
        if summed != family.group_score_topk:
            allowed = f"groups ranked by their best {family.group_score_topk}"
            problems.append(unsupported_setting("moe_router_group_score_topk", summed, family, allowed))
    if moe.moe_router_score_function == "sigmoid" and moe.moe_router_topk == 1:
        problems.append(unsupported_setting("moe_router_topk", 1, family, "weights that add up to one"))
    return problems
