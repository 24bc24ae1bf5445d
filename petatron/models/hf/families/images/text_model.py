"""The text model inside of one that reads images: its table in config.json, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.model import MoEConfig
from petatron.models.decoder_spec import decoder_spec
from petatron.models.hf import shared_tensor_names as tables
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, ConfigWriter, Keys, Table, Translation
from petatron.models.hf.families.llama import LLAMA
from petatron.models.hf.families.mistral import MISTRAL
from petatron.models.hf.families.qwen import QWEN2, QWEN3
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.model_spec import ModelSpec

_TEXT_FAMILIES: Mapping[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
_TEXT_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
"""What LLaVA's published files leave out of a Llama's table."""


def text_spec(spec: ModelSpec) -> ModelSpec:
    """Returns the decoder by itself."""
    config = replace(spec.config, model_type="decoder", mrope_section=())
    return decoder_spec(config, spec.moe or MoEConfig())


def text_table(content: Keys, *, flat: bool = False, tied_inside: bool = True) -> dict[str, Any]:
    """Returns the table of the text model.

    flat: older files have its keys beside the others. tied_inside: whether embeddings are tied may be said in it, and not outside.
    """
    given = content.get("text_config")
    table = dict(given) if isinstance(given, Mapping) else dict(content) if flat else {}
    tied = content.get("tie_word_embeddings") or (tied_inside and table.get("tie_word_embeddings"))
    table["tie_word_embeddings"] = bool(tied)
    return table


def any_text(config: Translation, *, tied_inside: bool) -> None:
    """Translates the text model by the family that its table names, or, of a model that is written, the first that can express it."""
    chosen: list[str] = []

    def read(content: Keys) -> dict[str, Any]:
        table = text_table(content, tied_inside=tied_inside)
        chosen.append(str(table.get("model_type", LLAMA.name)))
        return {**(_TEXT_DEFAULTS if chosen[0] == LLAMA.name else {}), **table}

    def translate(inside: Translation) -> None:
        if isinstance(inside, ConfigWriter):
            chosen[:] = [_family_that_expresses(inside.spec)]
        family = _TEXT_FAMILIES.get(chosen[0])
        if family is None:
            rule = f"is not one of {', '.join(_TEXT_FAMILIES)}, whose layers are here"
            inside.problems.append(Problem("model_type", chosen[0], rule, OTHER_MODEL_FIX))
        (family or LLAMA).translate(inside)

    def write(keys: Keys, spec: ModelSpec) -> Keys:
        return {"model_type": chosen[0], **keys}

    config.within("text_config", translate, Table(read, write, text_spec))
    config.convert((), None, lambda spec: {"tie_word_embeddings": not spec.config.untie_embeddings_and_output_weights})


def _family_that_expresses(spec: ModelSpec) -> str:
    for family in _TEXT_FAMILIES.values():
        writer = ConfigWriter(family.name, spec)
        family.translate(writer)
        writer.finish()
        if not writer.problems:
            return family.name
    return LLAMA.name


def text_mappings(model: str, head: str) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of a Llama inside of another model: `model` and `head` are what it names its parts."""
    return tuple(
        replace(
            mapping,
            hf_module=head if mapping.hf_module == "lm_head" else mapping.hf_module.replace("model.", f"{model}.", 1),
            stack="decoder" if "*" in mapping.hf_module else None,
        )
        for mapping in tables.LLAMA_MAPPINGS
    )
