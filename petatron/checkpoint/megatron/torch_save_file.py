"""Reads `torch.save` files: a zip archive of uncompressed members, one of them a pickle, the others the bytes of storages.

Archives are read here and not by `zipfile`: members are used in place, and a directory cannot claim what is not in the file. Files from
before torch 1.6 are a row of pickles (a magic number, a version, the machine, the value, the order of storages), then the storages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from petatron.base.untrusted_files import is_count
from petatron.checkpoint.megatron.pickle_interpreter import GlobalName, InertObject, read_pickle, read_pickle_at

DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.storage.UntypedStorage": torch.uint8,
}
_MAX_DIMS = 64
_MAX_ARGUMENTS = 16
_MAX_KEY_CHARS = 64
_MAX_DIRECTORY_BYTES = 64 << 20
_MAX_PICKLE_BYTES = 256 << 20
_EOCD, _EOCD64, _EOCD64_LOCATOR, _CENTRAL_HEADER, _LOCAL_HEADER = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_MAX_COMMENT_BYTES = 0xFFFF
_OLD_MAGIC, _OLD_VERSION, _OLD_BEGIN = 0x1950A86A20F9469CFC6C, 1001, b"\x80\x02\x8a\x0a"
_IN_ZIP64_EXTRA = 0xFFFFFFFF


def read_torch_save(data: Tensor, find_class: Callable[[str], Any]) -> Any:
    """Returns the value of a `torch.save` file, given as bytes in memory; its tensors are views of them.

    `find_class` resolves names other than those of tensors and dtypes.
    """
    if data[: len(_OLD_BEGIN)].numpy().tobytes() == _OLD_BEGIN:
        return _read_old_format(data, find_class)
    members = _zip_members(data.numpy())
    pickles = [member for member in members if member.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("it is no file of torch.save")
    begin, end = members[pickles[0]]
    if end - begin > _MAX_PICKLE_BYTES:
        raise ValueError(f"its pickle has {end - begin:,} bytes")
    folder = pickles[0].removesuffix("data.pkl")
    order = members.get(f"{folder}byteorder")
    if order is not None and data[order[0] : order[1]].numpy().tobytes() != b"little":
        raise ValueError("it was written on a machine with another byte order")
    return read_pickle(data[begin:end].numpy().tobytes(), _TensorResolver(data, members, f"{folder}data/", find_class))


def _read_old_format(data: Tensor, find_class: Callable[[str], Any]) -> Any:
    """Reads the value twice: where storages begin is known only after it."""
    head = data[:_MAX_PICKLE_BYTES].numpy().tobytes()
    first = _OldFormatResolver(data, None, find_class)
    magic, at = read_pickle_at(head, 0, first)
    version, at = read_pickle_at(head, at, first)
    if magic != _OLD_MAGIC or version != _OLD_VERSION:
        raise ValueError("it is no file of torch.save")
    machine, at = read_pickle_at(head, at, first)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise ValueError("it was written on a machine with another byte order")
    _, end = read_pickle_at(head, at, first)
    keys, end = read_pickle_at(head, end, first)
    if not isinstance(keys, list):
        raise ValueError("it has no storages")
    members: dict[str, tuple[int, int]] = {}
    for key in keys:
        if key not in first.dtypes:
            raise ValueError("it has a storage that none of its tensors is in")
        (count,) = struct.unpack("<q", data[end : end + 8].numpy().tobytes())
        begin, end = end + 8, end + 8 + count * first.dtypes[key].itemsize
        if count < 0 or end > len(data) or key in members:
            raise ValueError("a storage in it is cut short")
        members[key] = (begin, end)
    return read_pickle_at(head, at, _OldFormatResolver(data, members, find_class))[0]


class _TensorResolver:
    """Rebuilds the tensors of a pickle; see `PickleResolver`."""

    def __init__(
        self, memory: Tensor, members: Mapping[str, tuple[int, int]], folder: str, name: Callable[[str], Any]
    ) -> None:
        self._memory, self._members, self._folder, self._name = memory, members, folder, name

    def find_class(self, full: str) -> Any:
        if full in _CALLABLES or full in _STORAGES:
            return GlobalName(full)
        return DTYPES[full] if full in DTYPES else self._name(full)

    def call(self, name: GlobalName, arguments: Any) -> Any:
        return call_allowed(name, arguments)

    def persistent_load(self, identity: Any) -> Any:
        """Returns the bytes of a storage, and the dtype it was saved with."""
        kind, storage, key, *_ = _checked_arguments(identity)
        if kind != "storage" or type(storage) is not GlobalName or storage.full not in _STORAGES:
            return InertObject("storage", ())
        if type(key) is not str or len(key) > _MAX_KEY_CHARS:
            raise ValueError("a storage in it has no name")
        begin, end = self._members[f"{self._folder}{key}"]
        return _Storage(self._memory[begin:end], _STORAGES[storage.full])


class _OldFormatResolver(_TensorResolver):
    """Records the dtypes of storages; loads them if their places are known. Those that begin between two elements are copied, each once."""

    def __init__(
        self, memory: Tensor, members: Mapping[str, tuple[int, int]] | None, name: Callable[[str], Any]
    ) -> None:
        super().__init__(memory, members or {}, "", name)
        self.dtypes: dict[str, torch.dtype] = {}
        self._places_known = members is not None
        self._copies: dict[str, _Storage] = {}

    def persistent_load(self, identity: Any) -> Any:
        kind, storage, key, *_ = _checked_arguments(identity)
        if (
            kind != "storage"
            or type(storage) is not GlobalName
            or storage.full not in _STORAGES
            or type(key) is not str
        ):
            raise ValueError("a storage in it is of an unknown kind")
        self.dtypes[key] = _STORAGES[storage.full]
        if not self._places_known:
            return InertObject("storage", ())
        if key not in self._copies:
            storage = super().persistent_load(identity)
            aligned = (
                storage.memory
                if storage.memory.storage_offset() % storage.dtype.itemsize == 0
                else storage.memory.clone()
            )
            self._copies[key] = _Storage(aligned, storage.dtype)
        return self._copies[key]


class _Storage:
    __slots__ = ("dtype", "memory")

    def __init__(self, memory: Tensor, dtype: torch.dtype) -> None:
        self.memory, self.dtype = memory, dtype

    def view(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """Returns a tensor in this storage, with every element inside it."""
        _check_shape(shape)
        _check_shape(strides)
        elements = self.memory.numel() // dtype.itemsize
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if not is_count(offset) or (0 not in shape and last >= elements):
            raise ValueError("a tensor in it is larger than its storage")
        memory = self.memory[: elements * dtype.itemsize]
        if memory.storage_offset() % dtype.itemsize:
            raise ValueError("a storage in it does not begin at a multiple of its element size, as torch.save does it")
        flat = memory.view(dtype)
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        return flat.as_strided(shape, strides, flat.storage_offset() + offset)


def _checked_arguments(arguments: Any) -> tuple[Any, ...]:
    """Returns the arguments of a call; the callee checks each."""
    if type(arguments) is not tuple or len(arguments) > _MAX_ARGUMENTS:
        raise ValueError("a call in it has no arguments, or too many")
    return arguments


def _check_shape(shape: Any) -> None:
    if type(shape) is not tuple or len(shape) > _MAX_DIMS or not all(map(is_count, shape)):
        raise ValueError("a tensor in it has a shape that is none")


def _torch_size(shape: Any = ()) -> Any:
    """Returns the shape unchanged: its user checks it."""
    return shape


def _rebuild_tensor_v2(storage: Any, offset: int, shape: Any, strides: Any, *_: Any) -> Any:
    return (
        storage.view(storage.dtype, offset, shape, strides) if type(storage) is _Storage else InertObject("tensor", ())
    )


def _rebuild_tensor_v3(
    storage: Any, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> Any:
    plain = type(storage) is _Storage and isinstance(dtype, torch.dtype)
    return storage.view(dtype, offset, shape, strides) if plain else InertObject("tensor", ())


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type_v2(rebuild: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    plain = type(rebuild) is GlobalName and rebuild.full in _REBUILDS
    return _CALLABLES[rebuild.full](*_checked_arguments(arguments)) if plain else InertObject("tensor", ())


def _ordered_dict(*items: Any) -> Any:
    return InertObject("collections.OrderedDict", items) if items else {}


_REBUILDS = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
}
_CALLABLES: Mapping[str, Callable[..., Any]] = {
    **_REBUILDS,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type_v2,
    "torch.Size": _torch_size,
    "collections.OrderedDict": _ordered_dict,
}
CALLABLES_WITHOUT_TENSORS = ("torch.Size", "collections.OrderedDict")


def call_allowed(name: GlobalName, arguments: Any) -> Any:
    """Returns the result of calling a name: a tensor, a shape, a dictionary, or an inert object."""
    call = _CALLABLES.get(name.full)
    return InertObject(name.full, arguments) if call is None else call(*_checked_arguments(arguments))


def _zip_members(data: Any) -> dict[str, tuple[int, int]]:
    """Returns the byte ranges of an archive's members; ValueError if one is compressed or is not in the file."""
    begin, size = _central_directory_range(data)
    if size > _MAX_DIRECTORY_BYTES or begin + size > len(data):
        raise ValueError("the directory of its archive is not in it")
    table = data[begin : begin + size].tobytes()
    members: dict[str, tuple[int, int]] = {}
    at = 0
    while at < size:
        if table[at : at + 4] != _CENTRAL_HEADER:
            raise ValueError("the directory of its archive is damaged")
        flags, method = struct.unpack_from("<HH", table, at + 8)
        packed, unpacked, name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<IIHHH", table, at + 20)
        (local,) = struct.unpack_from("<I", table, at + 42)
        after = at + 46 + name_bytes
        name = table[at + 46 : after].decode()
        unpacked, packed, local = _zip64_values(table[after : after + extra_bytes], [unpacked, packed, local])
        if method != 0 or flags & 1 or packed != unpacked:
            raise ValueError(f"{name[:80]!r} in it is compressed or encrypted, which torch.save does not do")
        if name in members or local + 30 > len(data):
            raise ValueError(f"{name[:80]!r} is in it twice, or not at all")
        head = data[local : local + 30].tobytes()
        first = local + 30 + sum(struct.unpack_from("<HH", head, 26))
        if head[:4] != _LOCAL_HEADER or first + unpacked > len(data):
            raise ValueError(f"{name[:80]!r} is not where its archive says")
        members[name] = (first, first + unpacked)
        at = after + extra_bytes + comment_bytes
    return members


def _central_directory_range(data: Any) -> tuple[int, int]:
    tail_at = max(0, len(data) - _MAX_COMMENT_BYTES - 22)
    tail = data[tail_at:].tobytes()
    at = tail.rfind(_EOCD)
    if at < 0 or at + 22 > len(tail):
        raise ValueError("it is no file of torch.save, or cut short")
    size, begin = struct.unpack_from("<II", tail, at + 12)
    if at >= 20 and tail[at - 20 : at - 16] == _EOCD64_LOCATOR:
        (wide_at,) = struct.unpack_from("<Q", tail, at - 12)
        wide = data[wide_at : wide_at + 56].tobytes() if wide_at < len(data) else b""
        if wide[:4] != _EOCD64 or len(wide) < 56:
            raise ValueError("the directory of its archive is not in it")
        size, begin = struct.unpack_from("<QQ", wide, 40)
    return begin, size


def _zip64_values(extra: bytes, values: list[int]) -> list[int]:
    """Reads values of more than 32 bits from the extra field with id 1, in their order."""
    at = 0
    while at + 4 <= len(extra):
        number, length = struct.unpack_from("<HH", extra, at)
        if number == 1:
            wide = [x[0] for x in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])]
            return [wide.pop(0) if value == _IN_ZIP64_EXTRA and wide else value for value in values]
        at += 4 + length
    return values
