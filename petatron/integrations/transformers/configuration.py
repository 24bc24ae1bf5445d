"""The configuration of a model inside transformers: Petatron's own config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from petatron.models.decoder_spec import DecoderSpec
from petatron.models.hf import OWN_MODEL_TYPE, parse_config_json
from petatron.models.registry import model_spec
from petatron.pretrained.settings_as_config_file import config_sections, load_config_sections


def _setting(name: str) -> property:
    return property(lambda self: self.model.get(name) if isinstance(self.model, Mapping) else None)


class PetatronConfig(PreTrainedConfig):
    """`model` and `moe` are the settings that make the model what it is (docs/huggingface.md); what else transformers asks for follows."""

    model_type = OWN_MODEL_TYPE

    def __init__(
        self, model: Mapping[str, Any] | None = None, moe: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.model, self.moe = model, moe
        super().__init__(**kwargs)

    def spec(self) -> DecoderSpec:
        """Returns the description of the model; `ConfigError` with everything that is wrong with the settings."""
        values, experts = parse_config_json(self.to_dict())
        spec = model_spec(load_config_sections(config_sections(values, experts)).config)
        assert isinstance(spec, DecoderSpec), "config.json is that of a decoder"
        return spec

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        return content if self.moe is not None else {name: value for name, value in content.items() if name != "moe"}

    vocab_size = _setting("vocab_size")
    hidden_size = _setting("hidden_size")
    num_hidden_layers = _setting("num_layers")
    num_attention_heads = _setting("num_attention_heads")
    max_position_embeddings = _setting("max_position_embeddings")
