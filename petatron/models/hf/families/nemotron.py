"""Nemotron 3 (2023), Nemotron-4 and Minitron: LayerNorm with weights stored as offsets from one, squared ReLU, rope on half of each head.

The MLP has no gate.
"""

from __future__ import annotations

from petatron.models.hf.config_translation import Translation
from petatron.models.hf.decoder_config_json import SQUARED_RELU, biases, llama
from petatron.models.hf.family import Family
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import llama_mappings_without


def _nemotron(config: Translation) -> None:
    llama(
        config,
        without=("rms_norm_eps",),
        max_position_embeddings=4096,
        initializer_range=0.0134,
        hidden_act="relu2",
        activations=SQUARED_RELU,
    )
    config.copy("norm_epsilon", "norm_eps", 1e-5)
    config.always(normalization="LayerNorm", apply_layernorm_1p=True)
    biases(config)
    rope(config, partial_rotary_factor=0.5)


NEMOTRON = Family(
    name="nemotron",
    architecture="NemotronForCausalLM",
    models="Nemotron-3 (2023), Nemotron-4, Minitron",
    what_differs="LayerNorm as offset from one, squared ReLU, half of each head rotated",
    mappings=llama_mappings_without("layers.*.mlp.gate"),
    translate=_nemotron,
)
