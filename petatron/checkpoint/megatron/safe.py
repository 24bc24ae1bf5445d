"""Reading Megatron's pickles without running them. This is the only module of the package in which a pickle is opened.

A pickle is a program, and it may call whatever it can name. So nothing here can name anything but a fixed list, and what is on the
list is not the class of that name but an empty stand-in which remembers what it is given and does nothing. Files
of `torch.save` go through torch's own restricted loader (`weights_only`), the `.metadata` of a distributed checkpoint through
the unpickler below. What is not on the list stops the reading with the name of the class; there is no other way in.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from petatron.base.errors import CheckpointError
from petatron.models.hf.listing import some

_OLDEST_TORCH = (2, 10)

# What a Megatron run keeps beside its weights: its arguments with a few enums, random states, scales of FP8.
_BESIDE_WEIGHTS = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "megatron.core.enums.ModelType",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.Fp4Recipe",
    "megatron.model.enums.ModelType",
    "megatron.legacy.model.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.AttnType",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.enums.ModelType",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
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
# What the table of a distributed checkpoint is made of, over the versions of torch.
_METADATA = frozenset(
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
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class StandIn:
    """Takes the place of an object: keeps its arguments and its state, and can do nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


def require_safe_torch(version: str = torch.__version__) -> None:
    """Restricted loading had holes before 2.10."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < _OLDEST_TORCH:
        raise CheckpointError(
            f"torch {version} cannot read files of others safely: restricted loading has known holes before 2.10. "
            "Install torch 2.10 or newer to read Megatron checkpoints."
        )


def load_file(path: Path) -> dict[str, Any]:
    """A file of `torch.save` that holds a dictionary; its tensors stay on disk until they are used."""
    # A class of its own per name and per reading: a pickle may set attributes of a class it can name.
    allowed: list[Any] = [(type("StandIn", (StandIn,), {}), name) for name in _BESIDE_WEIGHTS]
    with safe_globals(allowed):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError:
            raise CheckpointError(_refusal(path, _unsafe_names(path))) from None
        except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
            raise CheckpointError(_damaged(path, error)) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} instead of a dictionary. Is it Megatron's?")
    return content


def load_blob(blob: bytes, path: Path) -> Tensor:
    """One tensor out of a file of a distributed checkpoint."""
    try:
        content = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(_refusal(path, _unsafe_names(io.BytesIO(blob)))) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(_damaged(path, error)) from None
    if not isinstance(content, Tensor):
        raise CheckpointError(f"{path} holds a {type(content).__name__} where its table has a tensor. {_COPY_AGAIN}")
    return content


def load_metadata(path: Path) -> StandIn:
    """The table of a distributed checkpoint, made of stand-ins."""
    try:
        table = _MetadataUnpickler(path).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
    ) as error:
        raise CheckpointError(_damaged(path, error)) from None
    if not isinstance(table, StandIn):
        raise CheckpointError(f"{path} holds a {type(table).__name__} instead of a checkpoint's table. {_COPY_AGAIN}")
    return table


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self._path = path
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _METADATA:
            return self._classes.setdefault(full, type("StandIn", (StandIn,), {}))
        if full == "torch.Size":
            return tuple
        if full in _DTYPES:
            return _DTYPES[full]
        if full in ("collections.OrderedDict", "builtins.set", "builtins.frozenset"):
            return {"OrderedDict": dict, "set": set, "frozenset": frozenset}[name]
        raise CheckpointError(_refusal(self._path, [full]))


_COPY_AGAIN = "Copy the checkpoint again from where it was written."


def _unsafe_names(file: Path | io.BytesIO) -> list[str]:
    try:
        return sorted(get_unsafe_globals_in_checkpoint(file))  # pyright: ignore[reportArgumentType]
    except Exception:  # this only words an error; a damaged file may raise anything
        return []


def _refusal(path: Path, names: list[str]) -> str:
    if not names:
        return f"{path} cannot be read, and nothing in it was run: it is damaged, or no file of tensors. {_COPY_AGAIN}"
    return (
        f"{path} was refused and nothing in it was run: it names {some(names)}, which may not be read from a checkpoint. "
        "If you trust it, load it where it was written and save it again with plain values in that place."
    )


def _damaged(path: Path, error: Exception) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{path} cannot be read: {first[:200]}. {_COPY_AGAIN}"
