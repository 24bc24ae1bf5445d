"""StarCoder2: LayerNorm and biases everywhere and a plain MLP as in GPT-2; rope, kv heads and windows as in Mistral."""

from __future__ import annotations

from petatron.models.hf.config_translation import Translation
from petatron.models.hf.decoder_config_json import PLAIN, dropouts, llama
from petatron.models.hf.family import Family
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import GATED_MLP, llama_mappings_without, module_mappings
from petatron.models.hf.window_config_json import windows


def _starcoder2(config: Translation) -> None:
    llama(
        config,
        without=("head_dim", "rms_norm_eps"),
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.018042,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        activations={name: PLAIN[name] for name in PLAIN if name not in ("gelu_new", "gelu_fast")},
    )
    config.copy("norm_epsilon", "norm_epsilon", 1e-5)
    config.copy("add_bias_linear", "use_bias", True)
    config.always(normalization="LayerNorm", add_qkv_bias=False)
    dropouts(config, "residual_dropout", "embedding_dropout", 0.0)
    windows(config, None)
    rope(config)


STARCODER2 = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    models="StarCoder2",
    what_differs="LayerNorm, biases, a plain MLP",
    mappings=(
        *llama_mappings_without(*(f"layers.*.mlp.{name}" for name in GATED_MLP)),
        *module_mappings("layers.*.mlp", "model.layers.*.mlp", {"up": "c_fc", "down": "c_proj"}),
    ),
    translate=_starcoder2,
)
