"""File names by which model folders are recognized: config.json, and the tracker file of Megatron-LM."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "config.json"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""The file in which Megatron-LM names its newest step."""
ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""The files of adapters, as PEFT names them."""


def is_adapter_folder(path: Path) -> bool:
    """Whether this is a folder of adapters without the model beside which they are."""
    return (path / ADAPTER_CONFIG_FILE).is_file() and not (path / CONFIG_FILE).is_file()


def is_hf_folder(path: Path) -> bool:
    """Whether this is a Hugging Face model folder, and not one of checkpoints."""
    return (path / CONFIG_FILE).is_file() and any(path.glob("*.safetensors"))
