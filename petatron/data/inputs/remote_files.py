"""Files behind addresses such as s3://bucket/key, read through fsspec, which is an extra and imported only here.

What a server says of a file is its word for it: sizes and versions tell whether a file has changed, nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from petatron.base.errors import DataError, PetatronError
from petatron.base.terminal_escape import printable

_BLOCK_BYTES = 1 << 23
_VERSIONS = (
    "ETag",
    "etag",
    "checksum",
    "blob_id",
    "md5Hash",
    "generation",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
    "created",
)
"""What file systems call that which changes with a file's content, the most exact first."""
_PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}


def remote_state(path: str) -> tuple[int | None, str]:
    """Returns size and version of a file."""
    with _asking(path):
        system, inner = _file_system(path)
        system.invalidate_cache()
        return _state(system.info(inner))


def is_web_page(path: str) -> bool:
    """Whether its server may send nothing but the whole file, and lists no folders."""
    return path.startswith(("http://", "https://"))


def open_remote(path: str, *, in_order: bool) -> BinaryIO:
    """Opens a file; what its server breaks off is an OSError while it is read. in_order: it is read from its beginning to its end."""
    with _asking(path):
        system, inner = _file_system(path)
        block_bytes = 0 if in_order and is_web_page(path) else _BLOCK_BYTES
        return _RemoteFile(path, system.open(inner, "rb", block_size=block_bytes))  # type: ignore[return-value]


def read_remote_range(path: str, start: int, stop: int) -> bytes:
    """Returns what a server sends for bytes `start` to `stop` of a file, which may be another number of bytes."""
    with _asking(path):
        system, inner = _file_system(path)
        return bytes(system.cat_file(inner, start=start, end=stop))


def expand_remote(path: str) -> list[tuple[str, tuple[int | None, str]]]:
    """Returns the files that an address names, as a pattern, a folder or a file, in the order of their names."""
    with _asking(path):
        system, inner = _file_system(path)
        if any(character in inner for character in "*[") and not is_web_page(path):
            infos = system.glob(inner, detail=True)
        elif not is_web_page(path) and system.isdir(inner):
            infos = system.find(inner, detail=True)
        else:
            return [(path, _state(system.info(inner)))]
        files = sorted(name for name, info in infos.items() if info.get("type") != "directory")
        return [(system.unstrip_protocol(name), _state(infos[name])) for name in files]


def _state(info: Mapping[str, Any]) -> tuple[int | None, str]:
    size = info.get("size")
    version = next((info[name] for name in _VERSIONS if info.get(name) is not None), "")
    # Some systems tell a time as an object of one file, and as a number in a list of them.
    moment = getattr(version, "timestamp", None)
    return (size if isinstance(size, int) else None), str(moment() if callable(moment) else version)


def _file_system(path: str) -> tuple[Any, str]:
    try:
        fsspec: Any = importlib.import_module("fsspec")
    except ImportError as error:
        raise DataError(
            f"{path} is read through fsspec, which is not installed: pip install 'petatron[remote]'."
        ) from error
    return fsspec.core.url_to_fs(path)


@contextmanager
def _asking(path: str) -> Iterator[None]:
    """Turns whatever a file system raises into one error; their libraries have no common one."""
    try:
        yield
    except PetatronError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist. Check the address.") from error
    except ImportError as error:
        protocol = path.partition("://")[0]
        package = _PACKAGES.get(protocol, "the package of this file system")
        raise DataError(f"{path} cannot be read: {protocol}:// needs {package}: pip install {package}.") from error
    except Exception as error:
        said = printable(str(error).strip().partition("\n")[0] or type(error).__name__, max_chars=200)
        raise DataError(f"{path} cannot be read: {said}. Check the address, and your access to it.") from error


class _RemoteFile:
    """A remote file whose failures are OSError, as those of a local one are."""

    def __init__(self, path: str, file: Any) -> None:
        self.name, self._file = path, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size)
        except (OSError, EOFError):
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def __enter__(self) -> _RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
