"""Compares what Petatron reads from a Megatron checkpoint with the logits that Megatron-Core's own model had."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

import petatron
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader


def logit_difference(folder: Path, scratch: Path) -> float:
    """Converts a folder that has a `reference.safetensors`, runs the model, and returns the largest difference of its logits."""
    convert(open_model_reader(folder), scratch, ConversionOptions(target_format="petatron"))
    model = petatron.from_pretrained(str(scratch))
    model.module.eval()
    reference = load_file(folder / "reference.safetensors")
    assert reference["logits"].std() > 0.2, "small logits would be equal whatever the model"
    with torch.no_grad():
        return (model.module.logits(reference["tokens"]) - reference["logits"]).abs().max().item()
