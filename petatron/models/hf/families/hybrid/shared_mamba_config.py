"""The translations that families with Mamba-2 layers share: tensor names, kinds of layers, sizes of mixers.

Sizes have two spellings of keys: `num_heads`, `state_size` and so on in Mamba-2 and Nemotron-H, `mamba_n_heads`, `mamba_d_state` in
Bamba and Granite. The gated norm is over all channels but in Nemotron-H.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.sections.hybrid import ATTENTION, EXPERTS, MAMBA, MLP, branch_symbols
from petatron.models.hf.check_claimed_counts import MAX_LAYERS
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import REQUIRED, Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import SILU_ALONE, llama, no_biases
from petatron.models.hf.family import ModuleMapping
from petatron.models.hf.shared_tensor_names import ATTENTION as SELF_ATTENTION
from petatron.models.hf.shared_tensor_names import GATED_MLP, leaf_mappings, module_mappings
from petatron.models.model_spec import ModelSpec

LAYER_TYPES = {MAMBA: "linear_attention", ATTENTION: "full_attention", MLP: "mlp", EXPERTS: "moe"}
_SYMBOLS = {kind: symbol for symbol, kind in LAYER_TYPES.items()} | {"mamba": MAMBA, "attention": ATTENTION}
"""The kinds of transformers 5, and what they were called before."""


def mixer_mappings(mixer: str) -> tuple[ModuleMapping, ...]:
    """Returns the tensors of a Mamba-2 mixer under the name of its module."""
    parts = tuple(f"layers.*.mamba.in_{part}" for part in ("z", "x", "B", "C", "dt"))
    channels = tuple(f"layers.*.mamba.conv_{part}" for part in ("x", "B", "C"))
    return (
        *leaf_mappings("layers.*.mamba", mixer, "A_log", "D", "dt_bias"),
        ModuleMapping(parts, f"{mixer}.in_proj"),
        ModuleMapping(channels, f"{mixer}.conv1d"),
        *module_mappings("layers.*.mamba", mixer, {"norm": "norm", "out_proj": "out_proj"}),
    )


_BAMBA_LAYER = "model.layers.*"
BAMBA_MAPPINGS = (
    ModuleMapping(("embedding",), "model.embed_tokens"),
    *mixer_mappings(f"{_BAMBA_LAYER}.mamba"),
    *module_mappings("layers.*.attention", f"{_BAMBA_LAYER}.self_attn", SELF_ATTENTION),
    ModuleMapping(("layers.*.attention_norm",), f"{_BAMBA_LAYER}.input_layernorm"),
    ModuleMapping(("layers.*.mlp_norm",), f"{_BAMBA_LAYER}.pre_ff_layernorm"),
    *module_mappings("layers.*.mlp", f"{_BAMBA_LAYER}.feed_forward", GATED_MLP),
    ModuleMapping(("norm",), "model.final_layernorm"),
    ModuleMapping(("head",), "lm_head"),
)
"""Of Bamba and Falcon-H1, but for the norms before mixers of Mamba-2 alone."""


def read_layer_count(keys: Keys) -> int | Problem:
    count: Any = keys.get("num_hidden_layers")
    if is_count(count, 1) and count <= MAX_LAYERS:
        return count
    return Problem("num_hidden_layers", f"{count!r:.40}", "is not a positive whole number of layers", OWN_FOLDER_FIX)


def equal_layers(config: Translation, symbols: str) -> None:
    """Translates layers that all have the branches of these symbols."""

    def read(keys: Keys) -> str | Problem:
        count = read_layer_count(keys)
        return count if isinstance(count, Problem) else symbols * count

    def write(pattern: str) -> Keys:
        return {"num_hidden_layers": len(pattern) // len(symbols)}

    config.layer_pattern(f"({symbols})+", read, write, stand_in=symbols)


LAYER_KEYS = ("layers_block_type", "layer_types")


def read_layer_kinds(keys: Keys, key: str, symbols: str) -> str | Problem:
    """Returns the layer pattern of the kinds under either key, `key` where there is none; two lists must say the same."""
    given = {name: keys[name] for name in LAYER_KEYS if keys.get(name)} or {key: keys.get(key)}
    patterns = [read_layer_types(name, kinds, symbols) for name, kinds in given.items()]
    if problem := next((pattern for pattern in patterns if isinstance(pattern, Problem)), None):
        return problem
    if len(set(patterns)) > 1:
        rule = f"is another spelling of {LAYER_KEYS[1]}, and names other kinds of layers"
        return Problem(LAYER_KEYS[0], "", rule, OWN_FOLDER_FIX)
    return patterns[0]


def read_layer_types(key: str, kinds: object, symbols: str) -> str | Problem:
    """Returns the layer pattern of a list of kinds of layers.

    >>> read_layer_types("layer_types", ["mamba", "full_attention"], "M*")
    'M*'
    """
    if not isinstance(kinds, Sequence) or isinstance(kinds, str) or not 0 < len(kinds) <= MAX_LAYERS:
        return Problem(key, "", "is no list of the kinds of layers", OWN_FOLDER_FIX)
    pattern = [_SYMBOLS.get(kind, "") if isinstance(kind, str) else "" for kind in kinds]
    unknown = [kind for kind, symbol in zip(kinds, pattern) if not symbol or symbol not in symbols]
    if unknown:
        rule, known = (
            "is a kind of layer that the decoder does not have",
            ", ".join(map(LAYER_TYPES.__getitem__, symbols)),
        )
        return Problem(key, f"{unknown[0]!r:.40}", rule, f"It has {known}.")
    return "".join(pattern)


def bamba_decoder(config: Translation, *, max_position_embeddings: int, head_dim: bool) -> None:
    """Translates what Bamba and Falcon-H1 have in common. head_dim: whether there is such a key."""
    llama(
        config,
        without=("num_hidden_layers", *(() if head_dim else ("head_dim",))),
        num_key_value_heads=8,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=1e-5,
        activations=SILU_ALONE,  # of the convolution too
    )
    no_biases(config)
    config.only(attention_bias=False, mlp_bias=False)
    bamba_mixers(config)


def bamba_mixers(config: Translation) -> None:
    """Translates the sizes of Mamba-2 layers in Bamba's spelling."""
    keys = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_chunk_size")
    mixer_sizes(config, keys, (128, REQUIRED, 1, 256, 256))
    config.only(mamba_d_conv=4, mamba_conv_bias=True, mamba_proj_bias=False)


def mixer_sizes(config: Translation, keys: Sequence[str], defaults: Sequence[Any]) -> None:
    """Translates the sizes of Mamba-2 layers: heads, their width, groups, the width of a state, tokens of a chunk."""
    names = ("num_heads", "head_dim", "num_groups", "state_dim", "chunk_size")
    for name, key, default in zip(names, keys, defaults, strict=True):
        config.copy(f"mamba_{name}", key, default)
    config.convert((), _read_time_steps)


def bamba_expansion(config: Translation) -> None:
    """Writes the width of mixers, whose gated norm is over all channels, in Bamba's spelling; a model without Mamba-2 layers has sizes
    that fit all the same."""

    def write(spec: ModelSpec) -> Keys:
        if has_mamba(spec):
            return {"mamba_expand": expansion(spec)}
        return {"mamba_expand": 1, "mamba_n_heads": 1, "mamba_d_head": spec.config.hidden_size}

    config.convert((), None, write)
    one_norm_group(config)


def one_norm_group(config: Translation) -> None:
    """Says that the gated norm is over all channels, whose number is a multiple of the width."""
    config.convert(("mamba_norm_groups",), lambda keys: ({"mamba_norm_groups": 1}, []))
    config.expect("mamba_num_heads", "heads that are a multiple of the width", _is_multiple)
    config.expect("mamba_norm_groups", "one", lambda spec: not has_mamba(spec) or spec.config.mamba_norm_groups == 1)


def _is_multiple(spec: ModelSpec) -> bool:
    model = spec.config
    return not has_mamba(spec) or model.mamba_num_heads * model.mamba_head_dim % model.hidden_size == 0


def _read_time_steps(keys: Keys) -> tuple[Settings, list[Problem]]:
    """Refuses bounds of step sizes; the decoder's are any positive numbers."""
    match keys.get("time_step_limit"):
        case None | [0 | 0.0, {"__float__": "Infinity"}]:
            return {}, []
        case [0 | 0.0, float(most)] | (0 | 0.0, float(most)) if math.isinf(most):
            return {}, []
        case other:
            rule = "bounds the step sizes of Mamba-2 layers, which the decoder does not"
            return {}, [Problem("time_step_limit", f"{other!r:.40}", rule, "Use another model.")]


def has_mamba(spec: ModelSpec) -> bool:
    return MAMBA in branch_symbols(spec.config.hybrid_layer_pattern)


def expansion(spec: ModelSpec) -> int:
    """Returns the width of all heads of a Mamba-2 layer, as a multiple of the hidden size."""
    model = spec.config
    return model.mamba_num_heads * model.mamba_head_dim // model.hidden_size
