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
from petatron.config.schema.fields import flag_name
from petatron.config.schema.model import MoEConfig
from petatron.models.hf.family import Family
from petatron.models.model_spec import ModelSpec


def moe_from_hf_config(
    family: Family, hf_config: Mapping[str, Any], num_layers: int
) -> tuple[dict[str, Any], list[Problem]]:
    """Returns MoEConfig values, and what the decoder cannot express."""
    if not family.moe_keys:
        return {}, []
    values = {**family.moe_fixed, **{ours: hf_config[key] for ours, key in family.moe_keys.items()}}
    if "norm_topk_prob" in family.defaults:
        values["moe_router_pre_softmax"] = not hf_config["norm_topk_prob"]
    is_moe = [True] * num_layers
    if "decoder_sparse_step" in family.defaults:
        step, dense = hf_config["decoder_sparse_step"], set(hf_config["mlp_only_layers"] or ())
        if not is_count(step, 1):
            rule = "is not a positive whole number"
            return {}, [Problem("decoder_sparse_step", f"{step!r:.40}", rule, "Use 1 for experts in every layer.")]
        is_moe = [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
    if not any(is_moe):
        rule = f"and mlp_only_layers leave no layer of {num_layers} for the experts"
        return {}, [Problem("decoder_sparse_step", str(hf_config["decoder_sparse_step"]), rule, "Use a dense family.")]
    if values["moe_router_topk"] > values["num_experts"]:
        rule = f"is more than the {values['num_experts']} experts there are"
        key, found = family.moe_keys["moe_router_topk"], str(values["moe_router_topk"])
        return {}, [Problem(key, found, rule, "Take config.json from the model's own folder.")]
    return values | {"moe_layer_freq": _layer_freq(is_moe)}, []


def format_moe_layer_freq(spec: ModelSpec) -> str:
    """Returns the value of `moe_layer_freq` for the MoE layers of a model."""
    return _layer_freq([layer in spec.moe_layers for layer in range(len(spec.layers))])


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
    if "norm_topk_prob" in family.defaults:
        content["norm_topk_prob"] = not moe.moe_router_pre_softmax
    if "decoder_sparse_step" in family.defaults:
        content["decoder_sparse_step"] = 1
        content["mlp_only_layers"] = [layer for layer in range(len(spec.layers)) if layer not in spec.moe_layers]
    return content


def unsupported_moe_settings(family: Family, moe: MoEConfig, spec: ModelSpec) -> list[Problem]:
    """Returns the MoE settings that the family has no key for."""
    problems = [
        unsupported_setting(name, getattr(moe, name), family, f"only {value}")
        for name, value in family.moe_fixed.items()
        if getattr(moe, name) != value
    ]
    problems += [
        unsupported_setting(name, None, family, "always one") for name in family.moe_keys if getattr(moe, name) is None
    ]
    if moe.moe_router_load_balancing_type == "sinkhorn":
        problems.append(
            unsupported_setting("moe_router_load_balancing_type", "sinkhorn", family, "scores of another kind")
        )
    if "decoder_sparse_step" not in family.defaults and len(spec.moe_layers) < len(spec.layers):
        problems.append(unsupported_setting("moe_layer_freq", moe.moe_layer_freq, family, "experts in every layer"))
    return problems


def unsupported_setting(name: str, value: object, family: Family, allowed: str) -> Problem:
    """Returns the problem of a setting that the family has no key for."""
    rule = f"cannot be written as a Hugging Face {family.name} model, which has {allowed}"
    return Problem(flag_name(name), str(value), rule, "Such a model is saved in Petatron's own names.")
