"""The settings of how conversations are written."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from petatron.config.schema.objective_and_dataset_names import CHAT_DATASETS
from petatron.config.schema.setting_metadata import Feature, UsedWhen, settings_section
from petatron.config.schema.setting_types import FilePath

CHATML, PLAIN = "chatml", "plain"
NEMOTRON_NANO, NEMOTRON_ALIGNED, IDENTITY = "nemotron-nano-v2", "nemotron-h-aligned", "identity"
BUILT_IN_TEMPLATES = (CHATML, PLAIN, NEMOTRON_NANO, NEMOTRON_ALIGNED, IDENTITY)

_READS_CHATS = UsedWhen(
    lambda run: run.data.dataset_type in CHAT_DATASETS, "--dataset-type conversations alone reads it (--sft)"
)


@settings_section
class ChatTemplateSettings:
    """How conversations are written."""

    feature: ClassVar = Feature("data", role="training")
    chat_template: FilePath | None = None
    """How conversations are written, in place of the tokenizer's own template, and saved with the model: a file (jinja), or a built-in
    template: `chatml`, `plain`, `nemotron-nano-v2`, `nemotron-h-aligned`, `identity`."""
    sft_tokenizer_prompt_format: (
        Annotated[Literal["nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"], _READS_CHATS] | None
    ) = None
    """Megatron's name of the template of conversations; `default` is the tokenizer's own. With `default` and `identity` every token is
    learned, as there."""
