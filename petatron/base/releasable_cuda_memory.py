"""Memory of a GPU that is given back for a while and taken again at the same address, so that CUDA graphs that read and write it stay.

An allocator frees an address with its memory. The driver has both apart: a range of addresses is reserved, memory is created, and mapped
into the range. `release` unmaps the memory and frees it; `take` creates new memory for the same addresses, with zeros. Tensors in the range
must not be touched in between.
"""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 512
"""Bytes; that of torch's own allocations."""
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_data", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _AccessDescription(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
_MAPS_MEMORY = 102
"""The attribute of a device that says whether addresses and memory are apart."""


def can_release_memory(device: torch.device) -> bool:
    """Whether a device has such memory: NVIDIA's GPUs, some virtual ones excepted.

    >>> can_release_memory(torch.device("cpu"))
    False
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    supported, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), index):
        return False
    return driver.cuDeviceGetAttribute(ctypes.byref(supported), _MAPS_MEMORY, handle) == 0 and bool(supported.value)


class ReleasableCudaMemory:
    """A range of bytes of a device, with memory from the start."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # the driver's calls need the context that this makes current
            self._driver = ctypes.CDLL("libcuda.so.1")
            location = _Location(_ON_DEVICE, index)
            self._properties = _AllocationProperties(type=_PINNED, location=location)
            self._access = _AccessDescription(location, _READ_AND_WRITE)
            granularity = ctypes.c_size_t()
            self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
            self._size = ctypes.c_size_t(-(-max(1, num_bytes) // granularity.value) * granularity.value)
            self._address = ctypes.c_uint64()
            nothing = ctypes.c_uint64(0)
            self._call(
                "cuMemAddressReserve", ctypes.byref(self._address), self._size, ctypes.c_size_t(0), nothing, nothing
            )
        self._handle: ctypes.c_uint64 | None = None
        self._used = 0
        try:
            self.take()
        except BaseException:
            self.close()
            raise

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the next bytes of the range as a tensor; its memory is that of the range, so it keeps nothing alive."""
        size = prod(shape) * dtype.itemsize
        assert self._used + size <= self._size.value, "the range is as large as what is put into it"
        start = self._address.value + self._used
        self._used += aligned_bytes(shape, dtype)
        if not size:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        return torch.as_tensor(_Bytes(start, size), device=self._device).view(dtype).view(shape)

    def take(self) -> None:
        """Takes memory again, with zeros; `torch.OutOfMemoryError` if there is not enough."""
        if self._handle is not None:
            return
        handle, nothing = ctypes.c_uint64(), ctypes.c_uint64(0)
        with torch.cuda.device(self._device):
            self._call("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(self._properties), nothing)
            try:
                self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), handle, nothing)
            except BaseException:
                self._call("cuMemRelease", handle)
                raise
            self._handle = handle
            access = ctypes.byref(self._access)
            self._call("cuMemSetAccess", self._address, self._size, access, ctypes.c_size_t(1))
        torch.as_tensor(_Bytes(self._address.value, self._size.value), device=self._device).zero_()

    def release(self) -> None:
        """Gives the memory back, and keeps the addresses."""
        if self._handle is None:
            return
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._call("cuMemUnmap", self._address, self._size)
            self._call("cuMemRelease", self._handle)
        self._handle = None

    def close(self) -> None:
        """Gives all of it back."""
        if not self._address.value:
            return
        self.release()
        with torch.cuda.device(self._device):
            self._call("cuMemAddressFree", self._address, self._size)
        self._address = ctypes.c_uint64(0)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{self._size.value:,} bytes are not free on {self._device}")
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name} failed with {code}: {(text.value or b'').decode()}")


def aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Returns the bytes that `zeros` takes from a range.

    >>> aligned_bytes((3, 100), torch.bfloat16)
    1024
    """
    return -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class _Bytes:
    """Memory as torch reads that of other libraries."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
