"""Safetensors files: their header, and their bytes one tensor at a time.

8 bytes of header length, a JSON header of name -> dtype, shape and byte range, then the tensors' bytes. The header is padded,
and wider dtypes come first, so that every tensor starts at a multiple of its element size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.untrusted_files import is_count, open_regular_file
from petatron.sharding.shard_spec import Shape

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
MAX_DIMS = 64
"""The most dimensions of a tensor in a file, torch's limit."""
MAX_HEADER_BYTES = 100_000_000
"""The longest header that the format allows."""
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file, stored in bytes `begin` to `end`."""

    dtype: str
    shape: Shape
    begin: int
    end: int


def dtype_code(name: str, tensor: Tensor) -> str:
    """Returns safetensors' code for a tensor's dtype."""
    if tensor.dtype not in DTYPE_CODES:
        raise CheckpointError(
            f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold. Save it as {torch.float32}."
        )
    return DTYPE_CODES[tensor.dtype]


def serialize_tensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a file, one tensor at a time, so that a save needs host memory for one tensor only."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": dtype_code(name, tensor), "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.numel():
            yield tensor_bytes(tensor)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns the elements of a tensor in order, without a copy where possible."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy())


def read_header(path: Path, *, aligned: bool = False) -> dict[str, TensorInfo]:
    """Reads the tensors of a file; ValueError tells what is wrong with it. Nothing in the file is trusted before it is checked.

    aligned: every tensor must begin at a multiple of its element size, as in the files of a checkpoint, whose blocks are read as elements.
    """
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its header would be {length} bytes long")
        try:
            content = json.loads(file.read(length))
        except (UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"its header is no text: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("its header is no table")
    slots = {name: _tensor_info(name, value, 8 + length, size) for name, value in content.items() if name != _METADATA}
    at = 8 + length
    for name, slot in sorted(slots.items(), key=lambda item: (item[1].begin, item[1].end)):
        if slot.begin != at:
            raise ValueError(f"{name} begins at byte {slot.begin} where what is before it ends at {at}")
        if aligned and slot.begin % DTYPES[slot.dtype].itemsize:
            raise ValueError(f"{name} begins at byte {slot.begin}, which is no multiple of its element size")
        at = slot.end
    if at != size:
        raise ValueError(f"its tensors end at byte {at} of {size}")
    return slots


def _tensor_info(name: str, value: Any, data_offset: int, size: int) -> TensorInfo:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if len(
            shape
        ) <= MAX_DIMS and all(map(is_count, (*shape, begin, end))):
            if dtype not in DTYPES:
                raise ValueError(f"{name} has the dtype {dtype!r}, which cannot be read")
            itemsize = DTYPES[dtype].itemsize
            if not begin <= end <= size - data_offset or end - begin != math.prod(shape) * itemsize:
                raise ValueError(f"{name} does not lie inside it")
            return TensorInfo(dtype, tuple(shape), data_offset + begin, data_offset + end)
    raise ValueError(f"its header misstates {name}")
