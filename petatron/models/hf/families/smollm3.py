"""SmolLM3: Llama whose every fourth layer has no positions."""

from __future__ import annotations

from petatron.models.hf.config_translation import Translation
from petatron.models.hf.decoder_config_json import biases, llama
from petatron.models.hf.family import Family
from petatron.models.hf.no_rope_config_json import read_no_rope, write_no_rope
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import LLAMA_MAPPINGS
from petatron.models.hf.window_config_json import windows


def _smollm3(config: Translation) -> None:
    llama(
        config,
        without=("head_dim",),
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    biases(config)
    windows(config, None, use_sliding_window=False, layer_types=None)
    rope(config, rope_theta=2000000.0)
    config.convert(("no_rope_freq",), read_no_rope, write_no_rope, no_rope_layers=None, no_rope_layer_interval=4)


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    models="SmolLM3",
    what_differs="every fourth layer has no positions",
    mappings=LLAMA_MAPPINGS,
    translate=_smollm3,
)
