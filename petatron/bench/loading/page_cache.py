"""The page cache as a measurement needs it: files dropped from it or read into it, and a count of what is there."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

_READ_BYTES = 8 << 20
_ATTEMPTS = 5
_WAIT_S = 0.05  # for reads ahead that are on their way


def drop_from_page_cache(paths: Iterable[Path]) -> float | None:
    """Drops the content of files that are on disk, and returns which share of it is still cached; None where the system cannot tell."""
    paths = list(paths)
    if not hasattr(os, "posix_fadvise"):
        return None
    share: float | None = None
    for _ in range(_ATTEMPTS):
        for path in paths:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        share = cached_share(paths)
        if not share:
            break
        time.sleep(_WAIT_S)
    return share


def read_into_page_cache(paths: Iterable[Path]) -> None:
    buffer = bytearray(_READ_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cached_share(paths: Iterable[Path]) -> float | None:
    """Returns which share of the pages of files is in the page cache; None where the system does not tell (mincore)."""
    pages: list[int] = []
    try:
        for path in paths:
            pages.extend(_cached_pages(path))
    except (OSError, AttributeError):  # a file system without mmap, or a system without mincore
        return None
    return sum(pages) / len(pages) if pages else 0.0


def _cached_pages(path: Path) -> bytes:
    """Returns for each page of a file whether it is cached, as 1 or 0."""
    size = path.stat().st_size
    if not size:
        return b""
    library = ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    # Private and writable: ctypes takes the address of writable memory only, and nothing is written.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = library.mincore(address, ctypes.c_size_t(size), pages)
        code = ctypes.get_errno()
        del first  # the mapping cannot be closed before
    if failed:
        raise OSError(code, os.strerror(code))
    return bytes(page & 1 for page in pages)
