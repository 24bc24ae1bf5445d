"""Dequantizes tensors of a folder, in the two formats that models are published in.

FP8 with one scale per block, as DeepSeek published V3: 128 x 128 elements. An element is its e4m3 number times the scale of its block, in
float32, and is rounded once to the dtype that it is read into. Scales are small, a 16,384th of the elements, and are read whole.

MXFP4, as OpenAI published gpt-oss: 4 bits per element, one scale per 32 of a row. An element is a sign, two bits of exponent and one of
mantissa (e2m1): 0, 0.5, 1, 1.5, 2, 3, 4 or 6 and their negatives. Its block has a power of two, stored as a byte with a bias of 127. Two
elements share a byte, the first in its low half, so a tensor [..., columns] is stored as bytes [..., columns / 32, 16] and scales
[..., columns / 32] (OCP Microscaling Formats, version 1.0). Every product is a number of bfloat16, so nothing is rounded.

The blocks are along the input of a linear layer: experts are stored [expert, out, in] here, and [expert, in, out] where the same
family is not quantized.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from petatron.base import untrusted_files
from petatron.checkpoint.files.manifest import BlockScale
from petatron.checkpoint.files.safetensors_file import TensorInfo, read_header
from petatron.checkpoint.files.step_folder import damaged_error
from petatron.sharding.boxes import Box
from petatron.sharding.shard_spec import Shape

BLOCK = 32
"""Elements with one scale."""
PACKED_DTYPE = "U8"
_BYTES = BLOCK // 2
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scale_shape(shape: Shape, block: Shape) -> Shape:
    """Returns the shape of the scales of a matrix; blocks at its edges may be smaller.

    >>> scale_shape((256, 130), (128, 128))
    (2, 2)
    """
    return tuple(-(-size // block_size) for size, block_size in zip(shape, block, strict=True))


def read_scale(source: Path, scale: BlockScale) -> Tensor:
    """Reads all scales of a matrix, in float32."""
    path = source / scale.file
    with untrusted_files.reading_untrusted(path, damaged_error):
        info = read_header(path).get(scale.entry_name)
        if info is None or info.dtype != "F32" or len(info.shape) != 2:
            raise damaged_error(path, f"lacks {scale.entry_name} as a matrix of float32")
        return _read_values(path, info.begin, info.end - info.begin).view(torch.float32).view(info.shape)


def _read_values(path: Path, begin: int, num_bytes: int) -> Tensor:
    with untrusted_files.open_regular_file(path) as file:
        file.seek(begin)
        return torch.frombuffer(bytearray(file.read(num_bytes)), dtype=torch.uint8)


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


def unpacked_shape(shape: Shape) -> Shape:
    """Returns the shape of the elements of bytes [..., blocks, 16]; the bytes' own if they are none.

    >>> unpacked_shape((4, 6, 3, 16))
    (4, 6, 96)
    """
    return (*shape[:-2], shape[-2] * BLOCK) if len(shape) > 2 and shape[-1] == _BYTES else shape


def dequantize(packed: Tensor, exponents: Tensor) -> Tensor:
    """Returns the elements of bytes [..., blocks, 16] with the exponents [..., blocks] of their blocks, in float32.

    >>> dequantize(torch.tensor([[0xA1] * 16], dtype=torch.uint8), torch.tensor([128], dtype=torch.uint8))[:2].tolist()
    [1.0, -2.0]
    """
    numbers = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)], device=packed.device)
    halves = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    powers = exponents.to(torch.int32) - _EXPONENT_BIAS
    return torch.ldexp(numbers[halves.int()], powers.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRead:
    """The bytes that hold a box of an entry, and what is made of them.

    info, box: of the bytes in their file, in the dimensions that the entry is addressed in and one more.
    values: where they are read to.
    elements: the box of the entry, in elements; `target` is where these go.
    """

    scale: BlockScale
    info: TensorInfo
    box: Box
    values: Tensor
    elements: Box
    target: Tensor

    @classmethod
    def of(cls, scale: BlockScale, info: TensorInfo, box: Box, target: Tensor) -> PackedRead:
        """Plans to read a box of an entry whose addressed shape `info` has; whole blocks are read."""
        *leading, columns = info.shape
        first, last = box.start[-1] // BLOCK, -(-box.stop[-1] // BLOCK)
        held = replace(info, shape=(*leading, columns // BLOCK, _BYTES))
        start, shape = (*box.start[:-1], first, 0), (*box.shape[:-1], last - first, _BYTES)
        return cls(scale, held, Box(start, shape), torch.empty(shape, dtype=torch.uint8), box, target)

    def dequantize(self, source: Path) -> None:
        """Writes the elements, one expert after the other: in float32 they take eight times the bytes."""
        exponents = self._read_exponents(source / self.scale.file)
        skipped = self.elements.start[-1] - self.box.start[-2] * BLOCK
        columns = slice(skipped, skipped + self.elements.shape[-1])
        for values, powers, target in zip(self.values, exponents, self.target, strict=True):
            target.copy_(dequantize(values, powers)[..., columns])

    def _read_exponents(self, path: Path) -> Tensor:
        """Reads the scales of the experts of the box, of which they are contiguous, and selects those of the box."""
        addressed, box = self.info.shape[:-1], Box(self.box.start[:-1], self.box.shape[:-1])
        name = self.scale.entry_name
        with untrusted_files.reading_untrusted(path, damaged_error):
            info = read_header(path).get(name)
            if info is None or info.dtype != PACKED_DTYPE or info.end - info.begin != math.prod(addressed):
                raise damaged_error(path, f"lacks {name} as a byte for each block")
            size = math.prod(addressed[1:])
            exponents = _read_values(path, info.begin + box.start[0] * size, box.shape[0] * size)
        return exponents.view(box.shape[0], *addressed[1:])[(slice(None), *box.slices()[1:])]
