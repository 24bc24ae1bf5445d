"""The program of docs/checkpoint-format.md: reads a checkpoint with json and safetensors, and nothing of ours."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


def read_checkpoint(step: Path) -> dict[str, torch.Tensor]:
    """Every logical tensor of a checkpoint, as a program written from the documentation reads it."""
    program = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert program is not None
    names: dict = {}
    exec(program.group(1).split("\n# Use it")[0], names)
    return names["read_checkpoint"](step)


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A digest of dtype, shape and bytes of every tensor."""
    return {
        key: hashlib.blake2b(
            f"{tensor.dtype} {list(tensor.shape)} ".encode()
            + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
            digest_size=8,
        ).hexdigest()
        for key, tensor in sorted(tensors.items())
    }
