"""Bamba: layers of Mamba-2 and some of attention, each with a gated MLP; half of each head is rotated.

Falcon-H1 has its names and keys: every layer runs attention and Mamba-2 on the same normed input and adds both, then an MLP; factors are
everywhere. In a pattern each of its layers is `P-`. The norm of a scan's output, where there is one, is over as many groups as B and C
have, before or after the gate. Factors on inputs of projections are here factors on what these make; no projection has a bias. The factor
on logits is the inverse of `logits_scaling`.
"""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.sections.hybrid import ATTENTION, MAMBA, MLP, PARALLEL
from petatron.config.schema.sections.rope import is_factor
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import Keys, Settings, Translation
from petatron.models.hf.families.hybrid import shared_mamba_config
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.rope_config_json import rope
from petatron.models.model_spec import ModelSpec


def _read_bamba_layers(keys: Keys) -> str | Problem:
    count, chosen = shared_mamba_config.read_layer_count(keys), keys.get("attn_layer_indices") or []
    if isinstance(count, Problem):
        return count
    if not isinstance(chosen, list) or not all(is_count(index) and index < count for index in chosen):
        return Problem("attn_layer_indices", f"{chosen!r:.40}", f"are not some of the {count} layers", OWN_FOLDER_FIX)
    attention = set(chosen)
    return "".join((ATTENTION if index in attention else MAMBA) + MLP for index in range(count))


def _write_bamba_layers(pattern: str) -> Keys:
    mixers = pattern[::2]
    chosen = [index for index, symbol in enumerate(mixers) if symbol == ATTENTION]
    return {"num_hidden_layers": len(mixers), "attn_layer_indices": chosen}


def _bamba(config: Translation) -> None:
    config.layer_pattern(r"([M*]-)+", _read_bamba_layers, _write_bamba_layers, stand_in="M-*-")
    shared_mamba_config.bamba_decoder(config, max_position_embeddings=262144, head_dim=False)
    rope(config, only_part=0.5)
    shared_mamba_config.bamba_expansion(config)


BAMBA = Family(
    name="bamba",
    architecture="BambaForCausalLM",
    models="Bamba",
    what_differs="a [hybrid](mamba.md): Mamba-2 in most layers, half of each attention head rotated",
    mappings=(
        ModuleMapping(("layers.*.mamba_norm",), "model.layers.*.input_layernorm"),
        *shared_mamba_config.BAMBA_MAPPINGS,
    ),
    branches=2,
    translate=_bamba,
)


_FACTORS = (
    *("embedding_multiplier", "attention_in_multiplier", "key_multiplier", "attention_out_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier"),
)
_FACTOR_LISTS = {"ssm_multipliers": 5, "mlp_multipliers": 2}
_HEAD_FACTOR = "lm_head_multiplier"
_NORMS = {
    (False, False): "none",
    (False, True): "none",
    (True, False): "gate_then_norm",
    (True, True): "norm_then_gate",
}
"""By `mamba_rms_norm` and `mamba_norm_before_gate`."""


def _factor_problems(keys: Keys) -> list[Problem]:
    problems = [
        Problem(key, f"{keys[key]!r:.40}", "is not a positive number", OWN_FOLDER_FIX)
        for key in (*_FACTORS, _HEAD_FACTOR)
        if not is_factor(keys[key])
    ]
    for key, count in _FACTOR_LISTS.items():
        given = keys[key]
        sound = isinstance(given, list | tuple) and len(given) == count and all(map(is_factor, given))
        if given is not None and not sound:
            problems.append(Problem(key, f"{given!r:.40}", f"is no list of {count} positive numbers", OWN_FOLDER_FIX))
    return problems


def _size_problems(keys: Keys) -> list[Problem]:
    heads, head_dim, width = (keys[key] for key in ("mamba_n_heads", "mamba_d_head", "mamba_d_ssm"))
    key, times = "mamba_d_ssm", ""
    if width is None:
        expand, hidden_size = keys["mamba_expand"], keys["hidden_size"]
        key, times = "mamba_expand", f"times hidden_size {hidden_size} "
        width = expand * hidden_size if is_count(expand, 1) else None
    if width == heads * head_dim:
        return []
    rule = f"{times}is not the width of {heads} heads of {head_dim} channels"
    return [Problem(key, f"{keys[key]!r:.40}", rule, OWN_FOLDER_FIX)]


def _read_factors(keys: Keys) -> tuple[Settings, list[Problem]]:
    problems = [*_factor_problems(keys), *_size_problems(keys)]
    if problems:
        return {}, problems
    lists = {key: tuple(map(float, keys[key] or (1,) * count)) for key, count in _FACTOR_LISTS.items()}
    norm = _NORMS[bool(keys["mamba_rms_norm"]), bool(keys["mamba_norm_before_gate"])]
    groups = {"mamba_norm_groups": keys["mamba_n_groups"], "mamba_gated_norm": norm}
    return {**lists, **groups, "logits_scaling": 1.0 / keys[_HEAD_FACTOR]}, []


def _inverse(scaling: float) -> float:
    """Returns the factor of which this is the inverse, as it was written where that had 15 digits.

    >>> _inverse(1.0 / 0.01953125), _inverse(1.0 / 0.3)
    (0.01953125, 0.3)
    """
    short = float(f"{1.0 / scaling:.15g}")
    return short if 1.0 / short == scaling else 1.0 / scaling


def _write_factors(spec: ModelSpec) -> Keys:
    model = spec.config
    norm = next(keys for keys, name in _NORMS.items() if name == model.mamba_gated_norm)
    return {
        **{key: list(getattr(model, key)) for key in _FACTOR_LISTS},
        _HEAD_FACTOR: _inverse(model.logits_scaling),
        "mamba_d_ssm": model.mamba_num_heads * model.mamba_head_dim,
        "mamba_rms_norm": norm[0],
        "mamba_norm_before_gate": norm[1],
    }


def _falcon_h1(config: Translation) -> None:
    shared_mamba_config.equal_layers(config, PARALLEL + MLP)
    shared_mamba_config.bamba_decoder(config, max_position_embeddings=8192, head_dim=True)
    config.only(projectors_bias=False)
    rope(config)
    config.copy_same(**dict.fromkeys(_FACTORS, 1.0))
    settings = (*_FACTOR_LISTS, "logits_scaling", "mamba_gated_norm", "mamba_norm_groups")
    sizes = {"mamba_d_ssm": 1024, "mamba_expand": 2, "mamba_rms_norm": False, "mamba_norm_before_gate": True}
    factors = {_HEAD_FACTOR: 1.0, **dict.fromkeys(_FACTOR_LISTS)}
    config.convert(settings, _read_factors, _write_factors, **sizes, **factors)
    config.expect("mamba_norm_groups", "a norm over as many groups as B and C have", _has_common_groups)


def _has_common_groups(spec: ModelSpec) -> bool:
    model = spec.config
    return model.mamba_gated_norm == "none" or model.mamba_norm_groups == model.mamba_num_groups


FALCON_H1 = Family(
    name="falcon_h1",
    architecture="FalconH1ForCausalLM",
    models="Falcon-H1",
    what_differs="a [hybrid](mamba.md): attention and Mamba-2 in parallel in every layer, with factors on all they take and give",
    mappings=shared_mamba_config.BAMBA_MAPPINGS,
    ignored_tensors=("*rotary_emb.inv_freq", "*.mup_vector"),
    branches=2,
    translate=_falcon_h1,
)
