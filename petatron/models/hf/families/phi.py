"""Phi-3 and Phi-4: Llama with q, k and v in one matrix, gate and up in another, and in some models rope on a part of each head only.

Phi's scaling for long contexts ("longrope") has two lists of factors: a sequence up to the original context has the short ones, a longer
sequence the long ones. Training chooses by `--seq-length`, generation by the length of each sequence (docs/huggingface.md). Older files
call the scaling "su" or "yarn"; transformers reads both as longrope, since Phi has no other scaling.
"""

from __future__ import annotations

from petatron.models.hf.config_translation import Translation
from petatron.models.hf.decoder_config_json import dropouts, llama
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import QKV, llama_mappings_without
from petatron.models.hf.window_config_json import windows

_GATE_UP = ("layers.*.mlp.gate", "layers.*.mlp.up")


def _phi3(config: Translation) -> None:
    llama(config, without=("head_dim",), max_position_embeddings=4096, rms_norm_eps=1e-5)
    config.always(add_bias_linear=False)
    dropouts(config, "resid_pdrop", "embd_pdrop", 0.0)
    windows(config, None)
    types = {"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")}
    rope(config, types=types, partial_rotary_factor=1.0, original_max_position_embeddings=4096)


PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi-3, Phi-4, Phi-4-mini",
    what_differs="q, k and v in one matrix, gate and up in another, part of each head rotated",
    mappings=(
        *llama_mappings_without(*QKV, *_GATE_UP),
        ModuleMapping(QKV, "model.layers.*.self_attn.qkv_proj"),
        ModuleMapping(_GATE_UP, "model.layers.*.mlp.gate_up_proj"),
    ),
    translate=_phi3,
)
