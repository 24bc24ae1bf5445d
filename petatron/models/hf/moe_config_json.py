"""Converts the experts' part of config.json to `MoEConfig` values and back.

Which layers have experts is two keys there (every n-th layer, except those listed) and a pattern of ours; the list is always
written, since it can express everything. Load balancing in training, capacity and jitter are no part of a model: those settings
prevent no export and are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.model import MoEConfig
from petatron.models.hf.deepseek_config_json import (
    deepseek_routing_from_hf_config,
    deepseek_routing_to_hf_config,
    deepseek_unsupported_settings,
)
from petatron.models.hf.family import OWN_FOLDER_FIX, Family, unsupported_setting
from petatron.models.model_spec import ModelSpec

_DENSE, _SPARSE = "dense", "sparse"
# Parts of a layer with experts that a family does not have unless its tables name them.
_OPTIONAL_PARTS: Mapping[str, Any] = {"moe_router_linear_bias": False, "moe_apply_probs_on_input": False}


def moe_from_hf_config(
    family: Family, hf_config: Mapping[str, Any], num_layers: int
) -> tuple[dict[str, Any], list[Problem]]:
    """Returns MoEConfig values, and what the decoder cannot express."""
    if not family.moe_keys:
        return {}, []
    values = {**family.moe_fixed, **{ours: hf_config[key] for ours, key in family.moe_keys.items()}}
    if "norm_topk_prob" in family.defaults and "moe_router_pre_softmax" not in family.moe_fixed:
        values["moe_router_pre_softmax"] = not hf_config["norm_topk_prob"]
    if "moe_latent_size" in family.defaults:
        values["moe_latent_size"] = hf_config["moe_latent_size"]
    problems: list[Problem] = []
    if family.group_score_topk is not None:
        found, problems = deepseek_routing_from_hf_config(family, hf_config, values)
        values |= found
    is_moe = _moe_layers(family, hf_config, num_layers)
    if isinstance(is_moe, Problem):
        problems = [*problems, is_moe]
    if values["moe_router_topk"] > values["num_experts"]:
        rule = f"is more than the {values['num_experts']} experts there are"
        key, found = family.moe_keys["moe_router_topk"], str(values["moe_router_topk"])
        problems = [*problems, Problem(key, found, rule, OWN_FOLDER_FIX)]
    if problems or isinstance(is_moe, Problem):
        return {}, problems
    return values | {"moe_layer_freq": _layer_freq(is_moe)}, []


def _moe_layers(family: Family, hf_config: Mapping[str, Any], num_layers: int) -> list[bool] | Problem:
    """Returns which layers have experts."""
    is_moe = [True] * num_layers
    if "first_k_dense_replace" in family.defaults:
        dense = hf_config["first_k_dense_replace"] or 0
        if not is_count(dense) or dense >= num_layers:
            rule = f"leaves no layer of {num_layers} for the experts"
            return Problem("first_k_dense_replace", f"{dense!r:.40}", rule, "Use fewer.")
        is_moe = [layer >= dense for layer in range(num_layers)]
    if hf_config.get("mlp_layer_types") is not None and "mlp_layer_types" in family.defaults:
        kinds = hf_config["mlp_layer_types"]
        if not isinstance(kinds, list) or len(kinds) != num_layers or {str(kind) for kind in kinds} - {_DENSE, _SPARSE}:
            rule = f"does not name each of the {num_layers} layers {_DENSE} or {_SPARSE}"
            return Problem("mlp_layer_types", "", rule, OWN_FOLDER_FIX)
        is_moe = [kind == _SPARSE for kind in kinds]
        if not any(is_moe):
            rule = f"leaves no layer of {num_layers} for the experts"
            return Problem("mlp_layer_types", f"{_DENSE} in every layer", rule, "Use a dense family.")
    if "decoder_sparse_step" in family.defaults:
        step, dense = hf_config["decoder_sparse_step"], hf_config["mlp_only_layers"] or []
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
    if "moe_layers" in family.defaults:
        chosen, step = hf_config["moe_layers"], hf_config["interleave_moe_layer_step"]
        if chosen is None and is_count(step, 1):
            chosen = list(range(step - 1, num_layers, step))
        if not isinstance(chosen, list) or not chosen or any(layer not in range(num_layers) for layer in chosen):
            rule = f"and interleave_moe_layer_step {step!r:.20} name no layers of {num_layers} for the experts"
            return Problem("moe_layers", f"{chosen!r:.40}", rule, "Use a dense family.")
        named = frozenset(chosen)
        is_moe = [layer in named for layer in range(num_layers)]
    return is_moe


def format_moe_layer_freq(spec: ModelSpec) -> str:
    """Returns the value of `moe_layer_freq` for the MoE layers of a model."""
    return _layer_freq([layer in spec.moe_layers for layer in range(spec.config.num_layers)])


def _layer_freq(is_moe: Sequence[bool]) -> str:
    """Returns the value of `moe_layer_freq` for given layers.

    >>> _layer_freq([True, True]), _layer_freq([False, True])
    ('1', '[0, 1]')
    """
    return "1" if all(is_moe) else str([int(chosen) for chosen in is_moe])


def moe_to_hf_config(family: Family, moe: MoEConfig, spec: ModelSpec) -> dict[str, Any]:
    """Returns the experts' keys; transformers adds the load-balancing loss only with `output_router_logits`."""
    content = {key: getattr(moe, ours) for ours, key in family.moe_keys.items()}
    content |= {"router_aux_loss_coef": moe.moe_aux_loss_coeff, "output_router_logits": False}
    if "norm_topk_prob" in family.defaults and "moe_router_pre_softmax" not in family.moe_fixed:
        content["norm_topk_prob"] = not moe.moe_router_pre_softmax
    if "moe_latent_size" in family.defaults:
        content["moe_latent_size"] = moe.moe_latent_size
    if family.group_score_topk is not None:
        content |= deepseek_routing_to_hf_config(family, moe)
    if "first_k_dense_replace" in family.defaults and _dense_layers_are_first(spec):
        content["first_k_dense_replace"] = spec.moe_layers[0]
    if "mlp_layer_types" in family.defaults:
        layers = range(len(spec.layers))
        content["mlp_layer_types"] = [_SPARSE if layer in spec.moe_layers else _DENSE for layer in layers]
    if "decoder_sparse_step" in family.defaults:
        content["decoder_sparse_step"] = 1
        content["mlp_only_layers"] = [layer for layer in range(len(spec.layers)) if layer not in spec.moe_layers]
    if "moe_layers" in family.defaults:
        content |= {"moe_layers": list(spec.moe_layers), "interleave_moe_layer_step": 1}
    return content


def plain_moe_problems(family: Family) -> list[Problem]:
    """Returns what experts with default settings lack in a family that always has some."""
    routing = [] if family.group_score_topk is None else deepseek_unsupported_settings(family, MoEConfig())
    return _unlike_fixed(family, MoEConfig()) + routing


def _unlike_fixed(family: Family, moe: MoEConfig) -> list[Problem]:
    return [
        unsupported_setting(name, getattr(moe, name), family, f"only {value}")
        for name, value in family.moe_fixed.items()
        if getattr(moe, name) != value
    ]


def unsupported_moe_settings(family: Family, moe: MoEConfig, spec: ModelSpec) -> list[Problem]:
    """Returns the MoE settings that the family has no key for."""
    problems = _unlike_fixed(family, moe)
    problems += [
        unsupported_setting(name, getattr(moe, name), family, "no such part")
        for name, default in _OPTIONAL_PARTS.items()
        if getattr(moe, name) != default and name not in family.moe_fixed
    ]
    problems += [
        unsupported_setting(name, None, family, "always one") for name in family.moe_keys if getattr(moe, name) is None
    ]
    for name, key in family.moe_keys.items():
        first = next(ours for ours, other in family.moe_keys.items() if other == key)
        if getattr(moe, name) is not None and getattr(moe, name) != getattr(moe, first):
            problems.append(unsupported_setting(name, getattr(moe, name), family, f"the value of {first} there"))
    if moe.moe_router_load_balancing_type == "sinkhorn":
        problems.append(
            unsupported_setting("moe_router_load_balancing_type", "sinkhorn", family, "scores of another kind")
        )
    if family.group_score_topk is not None:
        problems += deepseek_unsupported_settings(family, moe)
    if "first_k_dense_replace" in family.defaults:
        if "mlp_layer_types" not in family.defaults and not _dense_layers_are_first(spec):
            allowed = "dense layers first, then experts in every layer"
            problems.append(unsupported_setting("moe_layer_freq", moe.moe_layer_freq, family, allowed))
    elif (
        family.hybrid is None
        and not {"decoder_sparse_step", "moe_layers"} & family.defaults.keys()
        and len(spec.moe_layers) < len(spec.layers)
    ):
        problems.append(unsupported_setting("moe_layer_freq", moe.moe_layer_freq, family, "experts in every layer"))
    return problems


def _dense_layers_are_first(spec: ModelSpec) -> bool:
    return spec.moe_layers == tuple(range(spec.moe_layers[0], len(spec.layers)))
