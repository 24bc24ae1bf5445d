"""`--sft [FILE...]`: supervised fine-tuning on conversations, with defaults of its own.

With files it names the training data, as `--data-path` does, or `--train-data-path` where there is a `--valid-data-path`. Alone, as in
Megatron, it says what the files of `--data-path` are. Its defaults give way to a preset, files and flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from petatron.config.flags.parsed_flags import ParsedFlags
from petatron.config.schema.fields import FieldValue, fields_by_name
from petatron.config.schema.objective_and_dataset_names import CONVERSATIONS_DATASET
from petatron.config.schema.sections.chat_template import NEMOTRON_ALIGNED
from petatron.config.value_origins import Setting, ValueOrigin

SFT_FLAG = "--sft"
_MEGATRON_TOKENIZER = "SFTTokenizer"
_DEFAULTS: Mapping[str, FieldValue] = {
    "lr": 1e-5,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.03,
    "weight_decay": 0.0,
    "split": "95,5,0",
    "train_epochs": 1.0,
}
_ADAPTER_LR: Mapping[str, float] = {"lora": 2e-4, "rslora": 1e-4, "dora": 2e-4, "ia3": 3e-3}
"""Adapters are few and begin as nothing: B is zero, scales are one. rsLoRA's factor is the root of the rank times as large as LoRA's."""
_OTHER_WARM_UPS = ("lr_warmup_iters", "lr_warmup_samples")
SFT_ORIGIN = ValueOrigin("default", f"of {SFT_FLAG}")


def apply_sft_flag(parsed: ParsedFlags, files: Sequence[str]) -> None:
    """Adds what the flag says, once all others are parsed."""
    given = {setting.path.partition(".")[2] for setting in parsed.settings}
    if "dataset_type" not in given:
        parsed.add_setting(fields_by_name()["dataset_type"], CONVERSATIONS_DATASET, SFT_FLAG)
    if ("tokenizer_type", _MEGATRON_TOKENIZER) in parsed.renamed_values and "sft_tokenizer_prompt_format" not in given:
        parsed.add_setting(fields_by_name()["sft_tokenizer_prompt_format"], NEMOTRON_ALIGNED, _MEGATRON_TOKENIZER)
    if files:
        name = "train_data_path" if "valid_data_path" in given else "data_path"
        parsed.add_setting(fields_by_name()[name], tuple(files), SFT_FLAG)


def sft_defaults(typed: Sequence[Setting]) -> list[Setting]:
    """Returns the defaults of supervised fine-tuning; `typed` are the other settings that are given, of which the last counts."""
    given = {setting.path.partition(".")[2]: setting.value for setting in typed}
    left_out = {"lr_warmup_fraction"} if given.keys() & set(_OTHER_WARM_UPS) else set()
    defaults = [
        Setting(fields_by_name()[name].path, value, SFT_ORIGIN)
        for name, value in _DEFAULTS.items()
        if name not in left_out
    ]
    adapter = str(given.get("adapter"))
    if adapter in _ADAPTER_LR:
        origin = ValueOrigin("default", f"of {SFT_FLAG} with --adapter {adapter}")
        defaults.append(Setting(fields_by_name()["lr"].path, _ADAPTER_LR[adapter], origin))
    return defaults


def is_sft_default(origin: ValueOrigin) -> bool:
    """Whether a value is a default of supervised fine-tuning.

    >>> is_sft_default(SFT_ORIGIN), is_sft_default(ValueOrigin("default"))
    (True, False)
    """
    return origin.kind == SFT_ORIGIN.kind and origin.detail.startswith(SFT_ORIGIN.detail)
