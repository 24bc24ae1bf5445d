"""Llama 1 to 3: rotary positions, RMSNorm, a gated MLP. Most families differ from it in a detail."""

from __future__ import annotations

from petatron.models.hf.config_translation import Translation
from petatron.models.hf.decoder_config_json import biases, llama
from petatron.models.hf.family import Family, TaskHeadForm
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import LLAMA_MAPPINGS


def _llama(config: Translation) -> None:
    llama(config, heads_divide_width=True)
    biases(config)
    rope(config)


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    models="Llama 1 to 3",
    what_differs="rotary positions, RMSNorm, a gated MLP; linear, Llama 3 and YaRN scaling",
    mappings=LLAMA_MAPPINGS,
    translate=_llama,
    task_head=TaskHeadForm("LlamaForSequenceClassification", "last"),
)
