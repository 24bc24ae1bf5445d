"""Dequantises tensors that a folder holds in FP8 with one scale per block, as DeepSeek published V3: 128 x 128 elements.

An element is its e4m3 number times the scale of its block, in float32, and is rounded once to the dtype that it is read into. Scales are
small, a 16,384th of the elements, and are read whole.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from petatron.base import untrusted_files
from petatron.checkpoint.files.manifest import BlockScale
from petatron.checkpoint.files.safetensors_file import read_header
from petatron.checkpoint.files.step_folder import damaged_error
from petatron.sharding.boxes import Box
from petatron.sharding.shard_spec import Shape


def scale_shape(shape: Shape, block: Shape) -> Shape:
    """Returns the shape of the scales of a matrix; blocks at its edges may be smaller.

    >>> scale_shape((256, 130), (128, 128))
    (2, 2)
    """
    return tuple(-(-size // each) for size, each in zip(shape, block, strict=True))


def read_scale(source: Path, scale: BlockScale) -> Tensor:
    """Reads all scales of a matrix, in float32."""
    path = source / scale.file
    with untrusted_files.reading_untrusted(path, damaged_error):
        info = read_header(path).get(scale.entry_name)
        if info is None or info.dtype != "F32" or len(info.shape) != 2:
            raise damaged_error(path, f"lacks {scale.entry_name} as a matrix of float32")
        with untrusted_files.open_regular_file(path) as file:
            file.seek(info.begin)
            found = np.frombuffer(file.read(info.end - info.begin), np.float32).reshape(info.shape)
    return torch.from_numpy(found.copy())


def apply_scale(values: Tensor, box: Box, scale: Tensor, block: Shape) -> None:
    """Multiplies what was read of a matrix, its box in the matrix, with the scales of its blocks, in place."""
    rows, columns = (range(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
    scale = scale.to(values.device)[:, torch.arange(columns.start, columns.stop, device=values.device) // block[1]]
    first = rows.start
    while first < rows.stop:
        number = first // block[0]
        last = min((number + 1) * block[0], rows.stop)
        part = values[first - rows.start : last - rows.start]
        part.copy_(part.to(torch.promote_types(part.dtype, torch.float32)) * scale[number])
        first = last
