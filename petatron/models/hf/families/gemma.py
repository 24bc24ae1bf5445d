"""Gemma: norms as offsets from one, scaled embeddings, tanh GELU gates.

Gemma 2 adds a norm after each branch, caps of attention scores and logits, windows in every second layer, and scores scaled by a number
of its own; Gemma 3 drops the caps for a qk-norm, and has windows in five of six layers, with a rope of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.config.required_settings import required
from petatron.config.schema.sections.mlp import ActivationName
from petatron.models.hf.config_translation import Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import GATED, activation, llama, no_biases
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import LLAMA_MAPPINGS, llama_mappings_without
from petatron.models.hf.window_config_json import windows
from petatron.models.model_spec import ModelSpec

_GATES: Mapping[str, ActivationName] = {name: GATED[name] for name in ("gelu_pytorch_tanh", "gelu", "silu", "relu")}

# The name that is the MLP's norm in a Llama is that of attention's output here.
_POST_NORM_MAPPINGS = (
    *llama_mappings_without("layers.*.mlp_norm"),
    ModuleMapping(("layers.*.attention_post_norm",), "model.layers.*.post_attention_layernorm"),
    ModuleMapping(("layers.*.mlp_norm",), "model.layers.*.pre_feedforward_layernorm"),
    ModuleMapping(("layers.*.mlp_post_norm",), "model.layers.*.post_feedforward_layernorm"),
)


def _gemma(config: Translation) -> None:
    _decoder(config, num_key_value_heads=16, max_position_embeddings=8192)
    # Older files of this family, and of no other, say "gelu" and mean its approximation by tanh, as transformers reads them.
    activation(config, "hidden_act", "gelu_pytorch_tanh", {**_GATES, "gelu": "geglu_tanh"})
    config.only(use_bidirectional_attention=None)
    rope(config)


def _decoder(config: Translation, **defaults: Any) -> None:
    llama(config, without=("hidden_act",), head_dim=256, tie_word_embeddings=True, **defaults)
    no_biases(config)
    config.always(apply_layernorm_1p=True, scale_embeddings=True)
    config.only(attention_bias=False)


def _later_decoder(config: Translation, *, max_position_embeddings: int, full_attention_every: int) -> None:
    _decoder(config, num_key_value_heads=4, max_position_embeddings=max_position_embeddings, heads_divide_width=True)
    activation(config, "hidden_activation", "gelu_pytorch_tanh", _GATES)
    config.always(norm_placement="both")
    config.convert(("softmax_scale",), _read_query_scale, _write_query_scale, query_pre_attn_scalar=256)
    config.expect("softmax_scale", "always one", lambda spec: spec.config.softmax_scale is not None)
    windows(config, 4096, layer_types=None, full_attention_every=full_attention_every)


def _gemma2(config: Translation) -> None:
    _later_decoder(config, max_position_embeddings=8192, full_attention_every=2)
    config.copy_same(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    config.only(use_bidirectional_attention=None)
    rope(config)


def _gemma3(config: Translation) -> None:
    _later_decoder(config, max_position_embeddings=131072, full_attention_every=6)
    config.always(qk_layernorm=True)
    config.copy_same(final_logit_softcapping=None)
    # transformers caps no scores here, whatever the key says.
    config.only(use_bidirectional_attention=False, attn_logit_softcapping=None)
    rope(config, by_layer_type=True, rope_theta=1e6, rope_local_base_freq=1e4)


def _read_query_scale(keys: Keys) -> tuple[Settings, list[Problem]]:
    scalar = keys["query_pre_attn_scalar"]
    if scalar <= 0:
        return {}, [Problem("query_pre_attn_scalar", str(scalar), "is not positive", "Correct config.json.")]
    return {"softmax_scale": scalar**-0.5}, []


def _write_query_scale(spec: ModelSpec) -> Keys:
    """Writes a whole number where it is one but for rounding: transformers takes no other."""
    scalar = required("softmax_scale", spec.config.softmax_scale) ** -2
    return {"query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar}


GEMMA = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    models="Gemma (1)",
    what_differs="norms that multiply by one plus their weight, embeddings times the square root of the width, tanh GELU gates",
    mappings=LLAMA_MAPPINGS,
    translate=_gemma,
)
GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    models="Gemma 2",
    what_differs="norms before and after branches, soft caps of scores and logits, windows in every second layer",
    mappings=_POST_NORM_MAPPINGS,
    translate=_gemma2,
)
GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    models="Gemma 3 (text)",
    what_differs="qk-norm, windows in five of six layers, with a rope of their own",
    mappings=_POST_NORM_MAPPINGS,
    translate=_gemma3,
)
