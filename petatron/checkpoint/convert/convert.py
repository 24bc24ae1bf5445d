"""A model from one form into another, tensor by tensor, without ranks.

A converted model is written beside its place and moved there when all of it is on disk, so a folder that exists is complete. Into
the forms `petatron` and `huggingface` every tensor passes through one buffer of the size of the largest: that, and the few
blocks (or, from Megatron, the one logical tensor) that `open_model.py` reads with, is all the memory a conversion needs. Megatron's
legacy files hold the whole share of a rank, and so must memory when they are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from petatron.base.companion_files import read_companion, without_code
from petatron.base.errors import CheckpointError, ConfigError
from petatron.base.safe_files import remove
from petatron.checkpoint.convert.formats import Kind, config_text, open_draft
from petatron.checkpoint.convert.hf_folder import CONFIG
from petatron.checkpoint.convert.open_model import Source
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.disk import Disk, free_bytes
from petatron.checkpoint.files.manifest import RankTable, StoredBox, StoredTensor
from petatron.checkpoint.files.safetensors_file import DTYPE_CODES, file_parts
from petatron.checkpoint.megatron import write_megatron
from petatron.checkpoint.save.file_plan import FilePlan, Weight, file_table, plan_files
from petatron.checkpoint.save.rank_writer import index_document
from petatron.checkpoint.state import ROUTERS, WEIGHTS, Chunk
from petatron.config.schema.model_identity import identity
from petatron.models.hf import Entry, Region, folder_entries, model_config_json, to_hf_config
from petatron.sharding.boxes import Box

GENERATION = "generation_config.json"
SETTINGS = "config.yaml"
_ROUTER_FILE = step_folder.rank_file(0)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer to put beside the weights in place of the source's own; `end` is its end-of-document id."""

    files: Mapping[str, bytes]
    end: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """How a checkpoint for Megatron-LM is cut."""

    format: Literal["legacy", "torch_dist"] = "torch_dist"
    tp: int = 1
    pp: int = 1
    ep: int = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """A tensor that is about to be written, and how much was before it."""

    name: str
    done_bytes: int
    total_bytes: int


def _silent(_: Progress) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What to make of a source.

    dtype: of the weights; None keeps that of each tensor. Where a checkpoint has weights in the optimizer's precision too, a
    wide dtype is read from these.
    """

    to: Kind
    dtype: torch.dtype | None = None
    tokenizer: TokenizerFiles | None = None
    megatron: MegatronLayout = field(default_factory=MegatronLayout)


def convert(
    source: Source,
    target: Path,
    conversion: Conversion,
    *,
    disk: Disk | None = None,
    progress: Callable[[Progress], None] = _silent,
) -> None:
    """Write a source to a folder that does not exist yet, or is empty.

    `petatron` makes a folder of one step, from which a run starts with `--load --finetune`, and a config.yaml of the
    model's settings; `huggingface` the folder of a model; `megatron` one that a Megatron-LM run loads.
    """
    disk = disk or Disk()
    if conversion.to == "huggingface":
        _check_expressible(source)
    writer = _Writer(source, conversion, disk, progress)
    with _drafted(target, disk) as draft:
        _check_room(draft, writer.total_bytes)
        if conversion.to == "huggingface":
            writer.write_folder(draft)
        elif conversion.to == "petatron":
            writer.write_step(draft)
        else:
            writer.write_megatron(draft)


def _check_expressible(source: Source) -> None:
    """A folder that other programs open needs a family that has all of the model."""
    remedy = "Convert it with --to petatron instead; petatron.from_pretrained opens that."
    if source.routers:
        raise CheckpointError(
            f"{source.path} has expert biases, and the folder of a model has no place for them. {remedy}"
        )
    architecture = source.architecture
    try:
        to_hf_config(architecture.model, architecture.moe, architecture.experts_in)
    except ConfigError as error:
        lines = "\n".join(f"  {problem.where} {problem.found} {problem.rule}" for problem in error.problems)
        raise CheckpointError(
            f"{source.path} is a model that no Hugging Face family can express:\n{lines}\n{remedy}"
        ) from error


@contextmanager
def _drafted(target: Path, disk: Disk) -> Iterator[Path]:
    """A folder to write to, which takes its place at the end; removed when something goes wrong."""
    target = target.absolute()
    try:
        draft = open_draft(target)
        try:
            yield draft
            disk.sync_folder(draft)
            disk.rename(draft, target)
            disk.sync_folder(target.parent)
        except BaseException:
            with suppress(OSError):
                remove(draft)
            raise
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror or error}. Make room there or make it writable, or choose another place."
        ) from error


def _check_room(folder: Path, needed_bytes: int) -> None:
    free = free_bytes(folder)
    if free < needed_bytes:
        raise CheckpointError(
            f"the converted model has {needed_bytes / 1e9:.2f} GB, and the disk of {folder.parent} has {free / 1e9:.2f} GB left. "
            "Free space there, or choose another disk."
        )


class _Writer:
    """One conversion: the source's tensors in the dtypes they are to have, and how far it is."""

    def __init__(
        self, source: Source, conversion: Conversion, disk: Disk, progress: Callable[[Progress], None]
    ) -> None:
        self._source, self._conversion, self._disk, self._progress = source, conversion, disk, progress
        architecture = source.architecture
        self._entries = folder_entries(architecture.model, architecture.moe, architecture.experts_in)
        self._weights = _weights(source, self._entries, conversion.dtype)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._done_bytes = 0

    @property
    def total_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self._weights.values())

    def write_folder(self, folder: Path, prefix: str = "") -> RankTable:
        """The folder of a model; `prefix` is what its files are called in a manifest."""
        dtypes = {name: weight.dtype for name, weight in self._weights.items()}
        plans = plan_files(self._entries, dtypes, world_size=1)
        self._buffer = torch.empty(max(self._bytes(entry) for entry in self._entries), dtype=torch.uint8)
        stored = {prefix + plan.name: self._disk.write(folder / plan.name, self._parts(plan)) for plan in plans}
        documents = {**index_document(plans, dtypes), **self._documents()}
        for name, content in documents.items():
            stored[prefix + name] = self._disk.write(folder / name, [content])
        table = [row for plan in plans for row in file_table(plan, self._weights, prefix + plan.name)]
        return RankTable(stored, tuple(table), {})

    def write_step(self, folder: Path) -> None:
        """A folder of checkpoints with one step, and the settings of its model as a config file."""
        source, disk = self._source, self._disk
        step_folder.begin(folder, source.step, disk)
        draft = step_folder.make_draft(folder, source.step, disk)
        table = self.write_folder(draft / step_folder.MODEL, f"{step_folder.MODEL}/")
        if source.routers:
            routers = self._write_routers(draft)
            table = RankTable({**table.files, **routers.files}, (*table.entries, *routers.entries), {})
        model = identity(source.architecture.model, source.architecture.moe)
        facts = {"optimizer": None, "facts": {"converted_from": source.kind, "model": model}}
        written = step_folder.write_table(draft, 0, table, disk)
        step_folder.publish(folder, source.step, [written], facts=facts, layout="", disk=disk)
        disk.write(folder / SETTINGS, [config_text(source.values).encode()])

    def write_megatron(self, folder: Path) -> None:
        """A folder that a Megatron-LM run loads."""
        layout, architecture = self._conversion.megatron, self._source.architecture
        try:
            write_megatron(
                folder,
                iteration=self._source.step,
                model=architecture.model,
                moe=architecture.moe,
                fetch=self._fetch,
                tp=layout.tp,
                pp=layout.pp,
                ep=layout.ep,
                format=layout.format,
            )
        except CheckpointException as error:  # torch puts into it whatever `_fetch` raises, an interrupt included
            cause, _ = next(iter(error.failures.values()))
            raise cause from None

    def _fetch(self, name: str) -> Tensor:
        """A logical tensor in memory of its own."""
        if name not in self._weights:
            return self._router(ROUTERS + name)
        weight = self._weights[name]
        self._report(name, weight.num_bytes)
        tensor = torch.empty(weight.shape, dtype=weight.dtype)
        self._fill(name, [Chunk(WEIGHTS + name, weight.shape, (0,) * len(weight.shape), tensor)])
        return tensor

    def _fill(self, called: str, chunks: Sequence[Chunk]) -> None:
        """Read chunks; a value that its new dtype cannot hold is an error."""
        source = self._source
        source.fill(chunks)
        for chunk in chunks:
            stored = source.dtypes[chunk.key]
            if _may_overflow(stored, chunk.tensor.dtype) and not _all_finite(chunk.tensor):
                before = torch.empty(chunk.tensor.shape, dtype=stored)
                source.fill([replace(chunk, tensor=before)])
                _check_finite(called, before, chunk.tensor)

    def _parts(self, plan: FilePlan) -> Iterator[bytes | memoryview]:
        """The bytes of a file; each tensor overwrites the one before it in the buffer."""
        entries = sorted(plan.entries, key=lambda entry: -self._dtype(entry).itemsize)  # the order of `file_parts`
        like = {e.name: torch.empty(e.shape, dtype=self._dtype(e), device="meta") for e in entries}
        yield next(file_parts(like))  # the header, for which shapes are enough
        memory = memoryview(self._buffer.numpy())
        for entry in entries:
            size = self._bytes(entry)
            self._report(entry.name, size)
            values = self._buffer[:size].view(self._dtype(entry)).view(entry.shape)
            self._fill(entry.name, [_chunk(region, values, self._weights) for region in entry.regions])
            yield memory[:size]

    def _write_routers(self, draft: Path) -> RankTable:
        """What routers have learnt is small, and the same on every rank."""
        tensors = {f"{key}@0": self._router(key) for key in self._source.routers}
        stored = self._disk.write(draft / _ROUTER_FILE, file_parts(tensors))
        rows = []
        for key in self._source.routers:
            tensor = tensors[f"{key}@0"]
            box = StoredBox(_ROUTER_FILE, f"{key}@0", Box((0,), tuple(tensor.shape)), (0,))
            rows.append((key, StoredTensor(tuple(tensor.shape), DTYPE_CODES[tensor.dtype], (box,))))
        return RankTable({_ROUTER_FILE: stored}, tuple(rows), {})

    def _router(self, key: str) -> Tensor:
        shape = self._source.shapes[key]
        tensor = torch.empty(shape, dtype=self._source.dtypes[key])
        self._source.fill([Chunk(key, shape, (0,) * len(shape), tensor)])
        return tensor

    def _documents(self) -> dict[str, bytes]:
        source, tokenizer = self._source, self._conversion.tokenizer
        architecture = source.architecture
        dtype = str(_main_dtype(self._weights)).removeprefix("torch.")
        config = source.config or model_config_json(
            architecture.model, architecture.moe, architecture.experts_in, dtype
        )
        config = {**without_code(config), "dtype": dtype, "torch_dtype": dtype}
        kept = {name: path for name, path in source.companions.items() if tokenizer is None or name == GENERATION}
        documents = {name: read_companion(path, CheckpointError) for name, path in kept.items()}
        if tokenizer is not None:
            config |= {"eos_token_id": tokenizer.end}
            documents |= tokenizer.files
        if tokenizer is not None or GENERATION not in documents:
            ends = {key: config.get(key) for key in ("bos_token_id", "eos_token_id")}
            documents[GENERATION] = _json({"_from_model_config": True, **ends})
        return {CONFIG: _json(config), **documents}

    def _dtype(self, entry: Entry) -> torch.dtype:
        return self._weights[entry.regions[0].name].dtype

    def _bytes(self, entry: Entry) -> int:
        return math.prod(entry.shape) * self._dtype(entry).itemsize

    def _report(self, name: str, num_bytes: int) -> None:
        self._progress(Progress(name, self._done_bytes, self.total_bytes))
        self._done_bytes += num_bytes


def _weights(source: Source, entries: Sequence[Entry], dtype: torch.dtype | None) -> dict[str, Weight]:
    """Every logical weight in the dtype it is to have; what is fused in one entry has the dtype of its first part."""
    weights: dict[str, Weight] = {}
    for entry in entries:
        kept = dtype or source.dtypes[WEIGHTS + entry.regions[0].name]
        for region in entry.regions:
            weights.setdefault(region.name, Weight(source.shapes[WEIGHTS + region.name], kept))
    return weights


def _chunk(region: Region, values: Tensor, weights: Mapping[str, Weight]) -> Chunk:
    """A region of an entry's memory, seen as the box of the logical tensor that it is."""
    part = values[region.entry_slices()]
    part = part.transpose(-2, -1) if region.transposed else part
    while part.dim() < len(region.shape):
        part = part.unsqueeze(0)
    return Chunk(WEIGHTS + region.name, weights[region.name].shape, region.start, part)


def _may_overflow(before: torch.dtype, after: torch.dtype) -> bool:
    return before.is_floating_point and torch.finfo(after).max < torch.finfo(before).max


def _all_finite(values: Tensor) -> bool:
    """Without memory of the tensor's size, which `isfinite` would need several times."""
    return not values.numel() or all(bound.isfinite() for bound in values.aminmax())


def _check_finite(name: str, before: Tensor, after: Tensor) -> None:
    lost = before[before.isfinite() & ~after.isfinite()]
    if lost.numel():
        dtype = str(after.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} has values up to {lost.abs().max().item():.4g}, and {dtype} ends at {torch.finfo(after.dtype).max:.4g}: "
            "they would become infinite. Use a wider --dtype, bf16 or fp32, or leave it out."
        )


def _main_dtype(weights: Mapping[str, Weight]) -> torch.dtype:
    """The dtype that most of the model has."""
    sizes: dict[torch.dtype, int] = {}
    for weight in weights.values():
        sizes[weight.dtype] = sizes.get(weight.dtype, 0) + math.prod(weight.shape)
    return max(sizes, key=lambda dtype: sizes[dtype])


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
