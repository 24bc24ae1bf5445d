"""Reads Megatron's pickles without executing them, and lists the names that may appear in them.

A pickle is a program that may call whatever it can name. Here nothing is called (`pickle_interpreter.py`), and a file that names
anything outside a fixed list is refused with the names. An allowed name stands not for its class but for an inert object, which
stores its arguments and does nothing.

Every version of Megatron adds enums to the arguments that it stores. Names of Megatron's own package are therefore allowed anywhere, and
among the arguments the enum members and plain containers of any package, except those of Python, torch and numpy: whoever names
`os.system` there is told so.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.format_text import abbreviate_names
from petatron.base.untrusted_files import open_regular_file, read_limited_bytes, reading_untrusted
from petatron.checkpoint.megatron.pickle_interpreter import GlobalName, InertObject, read_pickle
from petatron.checkpoint.megatron.torch_save_file import (
    CALLABLES_WITHOUT_TENSORS,
    DTYPES,
    call_allowed,
    read_torch_save,
)

_MAX_METADATA_BYTES = 1 << 30

# What a Megatron run saves besides its weights and objects of its own: arguments, RNG states, FP8 scales.
_NON_WEIGHT_STATE = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "signal.Signals",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "_io.BytesIO",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
)
# What else torch accepts from untrusted files; none of it is a weight of ours.
_OTHER_VALUES = (
    "_codecs.encode",
    *(
        f"{module}.{name}"
        for module in ("builtins", "__builtin__")  # by the protocol of the pickle
        for name in ("bytearray", "complex", "dict", "frozenset", "list", "set")
    ),
    "collections.Counter",
    "collections.defaultdict",
    "collections.deque",
    "datetime.datetime",
    "datetime.timedelta",
    "torch.Tensor",
    "torch.device",
    "torch.nn.parameter.Buffer",
    "torch.nn.parameter.Parameter",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_wrapper_subclass",
    "torch.storage.TypedStorage",
    *(
        f"torch.{name}Storage"
        for name in ("ComplexDouble", "ComplexFloat", "QInt32", "QInt8", "QUInt2x4", "QUInt4x2", "QUInt8")
    ),
    *(f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
)
# Classes in the metadata of a distributed checkpoint, over the versions of torch.
_METADATA = (
    [f"torch.distributed.checkpoint.metadata.{name}" for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )]
    + [f"torch.distributed.checkpoint.planner.{name}" for name in (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    )]
    + [
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
    ]
)  # fmt: skip
_ALLOWED_NAMES = frozenset((*_NON_WEIGHT_STATE, *_OTHER_VALUES, *_METADATA))
_ALLOWED_PACKAGE = "megatron."
_NEVER_OPAQUE = frozenset((*sys.stdlib_module_names, "__builtin__", "copy_reg", "commands", "torch", "numpy"))
_COPY_AGAIN = "Copy the checkpoint again from where it was written."


def megatron_file_error(path: Path, why: str) -> CheckpointError:
    """Returns the error for a file of a Megatron checkpoint that cannot be read."""
    return CheckpointError(f"{path} {why}. {_COPY_AGAIN}")


def load_torch_file(path: Path) -> dict[str, Any]:
    """Loads a `torch.save` file that contains a dictionary; its tensors are memory-mapped."""
    content = load_torch_object(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} instead of a dictionary. Is it Megatron's?")
    return content


def load_torch_object(path: Path) -> Any:
    """Loads a `torch.save` file; its tensors are memory-mapped."""
    with _allowlisted(path) as name, open_regular_file(path) as file:
        # Private pages: nothing is written to the file, but torch needs writable memory.
        memory = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, access=mmap.ACCESS_COPY)
        content = read_torch_save(torch.frombuffer(memory, dtype=torch.uint8), name)
        name.accept_opaque_arguments(content)
    return content


def load_common_state(blob: Tensor, path: Path) -> dict[str, Any]:
    """Loads the state that is not of tensors from an object of a distributed checkpoint: a list of one dictionary."""
    with _allowlisted(path) as name:
        content = read_torch_save(blob, name)
        content = content[0] if isinstance(content, list) and len(content) == 1 else content
        name.accept_opaque_arguments(content)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__} where its common state should be. {_COPY_AGAIN}"
        )
    return content


def load_tensor_blob(blob: Tensor, path: Path) -> Tensor:
    """Loads one tensor from bytes of a distributed checkpoint's file, as a view of them."""
    with _allowlisted(path) as name:
        content = read_torch_save(blob, name)
    if not isinstance(content, Tensor):
        raise CheckpointError(f"{path} holds a {type(content).__name__} where its table has a tensor. {_COPY_AGAIN}")
    return content


def load_dist_metadata(path: Path) -> InertObject:
    """Loads the metadata of a distributed checkpoint as inert objects."""
    with _allowlisted(path) as name:
        table = read_pickle(read_limited_bytes(path, _MAX_METADATA_BYTES), _MetadataResolver(name))
    if not isinstance(table, InertObject):
        raise CheckpointError(f"{path} holds a {type(table).__name__} instead of a checkpoint's table. {_COPY_AGAIN}")
    return table


class _MetadataResolver:
    """Resolves the names in a distributed checkpoint's metadata; see `PickleResolver`."""

    def __init__(self, name: Callable[[str], Any]) -> None:
        self._name = name

    def find_class(self, full: str) -> Any:
        if full in CALLABLES_WITHOUT_TENSORS:
            return GlobalName(full)
        return DTYPES[full] if full in DTYPES else self._name(full)

    call = staticmethod(call_allowed)

    def persistent_load(self, identity: Any) -> Any:
        raise ValueError("it refers to a storage, and a table has none")


class _NameCheck:
    """Resolves names to stand-ins, and collects those that are not allowed."""

    def __init__(self) -> None:
        self._known: dict[str, GlobalName] = {}
        self.refused: set[str] = set()

    def __call__(self, full: str) -> GlobalName:
        if full not in self._known:
            self._known[full] = GlobalName(full)
            if full not in _ALLOWED_NAMES and not full.startswith(_ALLOWED_PACKAGE):
                self.refused.add(full)
        return self._known[full]

    def accept_opaque_arguments(self, content: Any) -> None:
        """Allows the names of enum members and plain containers among the arguments of a run."""
        if self.refused:
            self.refused -= _opaque_argument_names(content)


def _opaque_argument_names(content: Any) -> set[str]:
    """Looks into every value once, however often it is referenced."""
    arguments = content.get("args") if isinstance(content, dict) else None
    values: list[Any] = [arguments.fields] if isinstance(arguments, InertObject) else []
    seen: set[int] = set()
    names: set[str] = set()
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list | tuple):
            values.extend(value)
        elif isinstance(value, dict):
            values.extend(value.values())
        elif isinstance(value, InertObject) and _is_enum_or_container(value):
            names.add(value.name)
            values.append(value.fields)
    return {name for name in names if name.partition(".")[0] not in _NEVER_OPAQUE}


def _is_enum_or_container(value: InertObject) -> bool:
    """An enum member is its class called with a scalar; a container its class called with nothing, filled afterwards."""
    made_of = value.arguments
    return (
        type(made_of) is tuple
        and len(made_of) <= 1
        and all(isinstance(part, bool | int | float | str) for part in made_of)
    )


@contextmanager
def _allowlisted(path: Path) -> Iterator[_NameCheck]:
    """Yields the resolver of names while a file is read; at the end, names that are not allowed are one error."""
    check = _NameCheck()
    try:
        with reading_untrusted(path, megatron_file_error):
            yield check
    except CheckpointError:
        if not check.refused:
            raise
    if check.refused:
        raise CheckpointError(
            f"{path} was refused and nothing in it was run: it names {abbreviate_names(check.refused)}, which may not be read "
            "from a checkpoint. If you trust it, load it where it was written and save it again with plain values in that place."
        )
