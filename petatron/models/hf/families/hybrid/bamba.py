"""Bamba: layers of Mamba-2 and some of attention, each with a gated MLP; half of each head is rotated."""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.sections.hybrid import ATTENTION, MAMBA, MLP
from petatron.models.hf.families.hybrid.mamba_tables import (
    BAMBA_MAPPINGS,
    bamba_decoder,
    bamba_expansion,
    read_layer_count,
)
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.setting_types import OWN_FOLDER_FIX
from petatron.models.hf.translation import Keys, Translation


def _read_layers(keys: Keys) -> str | Problem:
    count, chosen = read_layer_count(keys), keys.get("attn_layer_indices") or []
    if isinstance(count, Problem):
        return count
    if not isinstance(chosen, list) or not all(is_count(index) and index < count for index in chosen):
        return Problem("attn_layer_indices", f"{chosen!r:.40}", f"are not some of the {count} layers", OWN_FOLDER_FIX)
    attention = set(chosen)
    return "".join((ATTENTION if index in attention else MAMBA) + MLP for index in range(count))


def _write_layers(pattern: str) -> Keys:
    mixers = pattern[::2]
    chosen = [index for index, symbol in enumerate(mixers) if symbol == ATTENTION]
    return {"num_hidden_layers": len(mixers), "attn_layer_indices": chosen}


def _translate(config: Translation) -> None:
    config.layer_pattern(r"([M*]-)+", _read_layers, _write_layers, stand_in="M-*-")
    bamba_decoder(config, max_position_embeddings=262144, head_dim=False)
    rope(config, only_part=0.5)
    bamba_expansion(config)


BAMBA = Family(
    name="bamba",
    architecture="BambaForCausalLM",
    models="Bamba",
    what_differs="a [hybrid](mamba.md): Mamba-2 in most layers, half of each attention head rotated",
    mappings=(ModuleMapping(("layers.*.mamba_norm",), "model.layers.*.input_layernorm"), *BAMBA_MAPPINGS),
    branches=2,
    translate=_translate,
)
