"""File names by which model folders are recognized: config.json, and the tracker file of Megatron-LM."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "config.json"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""The file in which Megatron-LM names its newest step."""


def is_hf_folder(path: Path) -> bool:
    """Whether this is a Hugging Face model folder, and not one of checkpoints."""
    return (path / CONFIG_FILE).is_file() and any(path.glob("*.safetensors"))
