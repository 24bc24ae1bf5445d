"""Converts a model between formats, tensor by tensor, in one process.

The converted model is written to a temporary folder that is renamed when it is complete. To `petatron` and `huggingface`, a conversion
needs memory for one buffer of the largest tensor, and for the few blocks (or, from Megatron, the one logical tensor) that
`model_reader.py` reads with. Megatron's legacy files contain a rank's whole share, which must fit in memory when they are written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from petatron.base.errors import CheckpointError, ConfigError
from petatron.base.format_text import format_bytes
from petatron.base.model_companion_files import read_companion_file, strip_remote_code
from petatron.base.model_folder_file_names import CONFIG_FILE
from petatron.base.safe_files import remove_tree
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.digested_file_io import Disk, free_bytes
from petatron.checkpoint.files.manifest import METADATA_KEY, RankTable, StoredBox, StoredTensor
from petatron.checkpoint.files.safetensors_file import DTYPE_CODES, serialize_tensors
from petatron.checkpoint.megatron import OptimizerForm, TrainingExport
from petatron.checkpoint.megatron.write_checkpoint import write_megatron
from petatron.checkpoint.save.assign_files_to_ranks import (
    FilePlan,
    WeightSpec,
    entry_bytes,
    file_table_entries,
    plan_files,
)
from petatron.checkpoint.save.rank_writer import weight_index_file
from petatron.checkpoint.tensor_chunk import MASTER_PREFIX, ROUTER_PREFIX, Chunk, folder_tensor_key
from petatron.config.schema.model_identity import model_identity
from petatron.config.schema.sections.mup import relative_width
from petatron.models.hf import FolderEntry, build_config_json, folder_entries, to_hf_config
from petatron.pretrained.adapter_folder import write_adapter_folder
from petatron.pretrained.atomic_model_folder import create_tmp_folder
from petatron.pretrained.detect_model_format import ModelFormat
from petatron.pretrained.hf_folder_contents import json_bytes
from petatron.pretrained.merge_adapters import merge_adapters
from petatron.pretrained.model_reader import ModelReader
from petatron.pretrained.settings_as_config_file import config_yaml_text
from petatron.pretrained.stored_training_state import OPTIMIZER_STATE, TrainingState, fetch_float32
from petatron.sharding.boxes import Box

GENERATION_CONFIG_FILE = "generation_config.json"
CONFIG_YAML_FILE = "config.yaml"
_TRAINING_STATE = ("optimizer", "opt_param_scheduler", "lr_scheduler", OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Tokenizer files that replace the source's; `eod` is the end-of-document id."""

    files: Mapping[str, bytes]
    eod: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """The format and parallel sizes of a Megatron-LM checkpoint, and its layer implementation (TE or local)."""

    format: Literal["legacy", "torch_dist"] = "torch_dist"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    layer_spec: Literal["te", "local"] = "te"
    optimizer: OptimizerForm = "distributed"


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion: whether it has training state, and which state of the source it lacks."""

    has_training: bool
    left_behind: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConversionProgress:
    """The tensor about to be written, and the bytes written before it."""

    name: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """What to convert a source to.

    dtype: of the weights; None keeps each tensor's dtype. A wider dtype is read from master weights, if there are any.
    training: whether training state is converted, between Petatron and Megatron.
    merge: whether adapters are merged into the weights. base_model: what is written as the model that adapters are beside.
    """

    target_format: ModelFormat
    dtype: torch.dtype | None = None
    tokenizer: TokenizerFiles | None = None
    megatron: MegatronLayout = field(default_factory=MegatronLayout)
    training: bool = True
    merge: bool = False
    base_model: str | None = None

    def merges(self, source: ModelReader) -> bool:
        """Whether adapters are merged: where it is asked for, and where the target has no place for them."""
        return source.spec.config.adapter is not None and (self.merge or self.target_format != "petatron")


def convert(
    source: ModelReader,
    target: Path,
    options: ConversionOptions,
    *,
    disk: Disk | None = None,
    on_progress: Callable[[ConversionProgress], None] = lambda progress: None,
) -> Conversion:
    """Writes a source to a folder that does not exist yet, or is empty.

    `petatron` writes a folder with one step and a config.yaml. A run resumes from it with `--load` if the source is a Megatron run with
    optimizer state, and otherwise starts from it with `--from`. `huggingface` writes a model folder, `megatron` a Megatron checkpoint,
    `peft` adapters alone. Adapters are merged into weights that are written as `huggingface` or `megatron`.
    """
    disk = disk or Disk()
    if options.target_format == "peft":
        return _write_adapters(source, target, options, disk)
    source = merge_adapters(source) if options.merges(source) else source
    if options.target_format == "huggingface":
        _check_hf_family(source)
    training = source.open_training() if _takes_training(source, options) and source.open_training else None
    writer = _ConversionWriter(source, options, disk, on_progress, training)
    with _atomic_folder(target, disk) as tmp_folder:
        free = free_bytes(tmp_folder)
        if free < writer.total_bytes:
            raise CheckpointError(
                f"the converted model has {format_bytes(writer.total_bytes)}, and the disk of {tmp_folder.parent} has {format_bytes(free)} "
                "left. Free space there, or choose another disk."
            )
        if options.target_format == "huggingface":
            writer.write_model_folder(tmp_folder)
        elif options.target_format == "petatron":
            writer.write_step(tmp_folder)
        else:
            writer.write_megatron(tmp_folder)
    taken = () if training is None else _TRAINING_STATE
    return Conversion(training is not None, tuple(name for name in source.other_state if name not in taken))


def _write_adapters(source: ModelReader, target: Path, options: ConversionOptions, disk: Disk) -> Conversion:
    if source.spec.config.adapter is None:
        raise CheckpointError(f"{source.path} has no adapters. Use --to huggingface, which writes the whole model.")
    base = options.base_model or source.base_model
    if base is None:
        raise CheckpointError(
            f"{source.path} does not say which model its adapters are beside. Give its folder, or its name on the hub, with --base-model."
        )
    with _atomic_folder(target, disk) as tmp_folder:
        write_adapter_folder(source, tmp_folder, base=base, dtype=options.dtype, disk=disk)
    return Conversion(False, source.other_state)


def _takes_training(source: ModelReader, options: ConversionOptions) -> bool:
    """Whether training state is converted: between Petatron and Megatron, if it was asked for."""
    if not options.training or options.target_format == "huggingface" or source.step == 0:
        return False
    if options.target_format == "megatron":
        return options.megatron.format == "torch_dist"
    return source.format == "megatron"


def _check_hf_family(source: ModelReader) -> None:
    """Checks that a Hugging Face family can express the whole model."""
    remedy = "Convert it with --to petatron instead; petatron.from_pretrained opens that."
    try:
        to_hf_config(source.spec)
    except ConfigError as error:
        lines = "\n".join(f"  {problem.where} {problem.value} {problem.rule}" for problem in error.problems)
        raise CheckpointError(
            f"{source.path} is a model that no Hugging Face family can express:\n{lines}\n{remedy}"
        ) from error


@contextmanager
def _atomic_folder(target: Path, disk: Disk) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `target` at the end, or removed on error."""
    target = target.absolute()
    try:
        tmp_folder = create_tmp_folder(target)
        try:
            yield tmp_folder
            disk.sync_folder(tmp_folder)
            disk.rename(tmp_folder, target)
            disk.sync_folder(target.parent)
        except BaseException:
            with suppress(OSError):
                remove_tree(tmp_folder)
            raise
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror or error}. Make room there or make it writable, or choose another place."
        ) from error


class _ConversionWriter:
    """Runs one conversion: the source's tensors in their target dtypes, and its progress."""

    def __init__(
        self,
        source: ModelReader,
        options: ConversionOptions,
        disk: Disk,
        on_progress: Callable[[ConversionProgress], None],
        training: TrainingState | None,
    ) -> None:
        self._source, self._options, self._disk, self._on_progress = source, options, disk, on_progress
        self._training = training
        # A Hugging Face folder keeps its config.json, so tensor names stay those of its family.
        model_type = None if source.config_json is None else str(source.config_json.get("model_type"))
        self._entries = folder_entries(source.spec, model_type)
        self._weights = _weight_specs(source, self._entries, options.dtype)
        self._dtypes = {name: weight.dtype for name, weight in self._weights.items()}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._done_bytes = 0

    @property
    def total_bytes(self) -> int:
        return sum(weight.num_bytes for weight in (*self._weights.values(), *self._state_specs().values()))

    def _state_specs(self) -> dict[str, WeightSpec]:
        """Returns the optimizer's tensors by key; Megatron's distributed optimizer has master weights of float32 weights too."""
        shapes = {} if self._training is None else dict(self._training.shapes)
        if shapes and self._options.target_format == "megatron" and self._options.megatron.optimizer == "distributed":
            moments = [key for key in shapes if key.startswith("exp_avg/")]
            shapes |= {key.replace("exp_avg/", MASTER_PREFIX, 1): shapes[key] for key in moments}
        return {key: WeightSpec(shape, torch.float32) for key, shape in shapes.items()}

    def write_model_folder(self, folder: Path, prefix: str = "") -> RankTable:
        """Writes a model folder; `prefix` is the path of its files in a manifest."""
        plans = plan_files(self._entries, self._dtypes, world_size=1)
        largest = max(entry_bytes(entry, self._dtypes) for entry in self._entries)
        self._buffer = torch.empty(largest, dtype=torch.uint8)
        stored = {prefix + plan.name: self._disk.write(folder / plan.name, self._file_bytes(plan)) for plan in plans}
        documents = {**weight_index_file(plans, self._dtypes), **self._aux_files()}
        for name, content in documents.items():
            stored[prefix + name] = self._disk.write(folder / name, [content])
        table = [row for plan in plans for row in file_table_entries(plan, self._weights, prefix + plan.name)]
        return RankTable(stored, tuple(table), {})

    def write_step(self, folder: Path) -> None:
        """Writes a checkpoint folder with one step, and its model's settings as a config file."""
        source, disk = self._source, self._disk
        step_folder.begin_step(folder, source.step, disk)
        tmp_step = step_folder.make_tmp_step(folder, source.step, disk)
        table = self.write_model_folder(tmp_step / step_folder.MODEL_FOLDER, f"{step_folder.MODEL_FOLDER}/")
        sections = source.config_sections
        if self._training is None:
            model = model_identity(source.spec.config, source.spec.moe)
            document = {"optimizer": None, METADATA_KEY: {"converted_from": source.format, "model": model}}
        else:
            table = self._write_state(tmp_step, table)
            document = self._training.document(source.format)
            sections = {**sections, **self._training.given}
        written = step_folder.write_table(tmp_step, 0, table, disk)
        step_folder.publish_step(folder, source.step, [written], metadata=document, layout="", disk=disk)
        disk.write(folder / CONFIG_YAML_FILE, [config_yaml_text(sections).encode()])

    def _write_state(self, tmp_step: Path, table: RankTable) -> RankTable:
        """Writes the tensors of the optimizer into one file, one after another, and adds them to the table."""
        path, specs = step_folder.rank_file_path(0), self._state_specs()
        stored = self._disk.write(tmp_step / path, self._state_bytes(specs))
        rows = [
            (
                key,
                StoredTensor(
                    spec.shape, DTYPE_CODES[spec.dtype], (StoredBox(path, key, Box(start, spec.shape), start),)
                ),
            )
            for key, spec in specs.items()
            for start in [(0,) * len(spec.shape)]
        ]
        return RankTable({**table.files, path: stored}, (*table.entries, *rows), {})

    def _state_bytes(self, specs: Mapping[str, WeightSpec]) -> Iterator[bytes | memoryview]:
        assert self._training is not None, "only the state of a run has such tensors"
        like = {key: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for key, spec in specs.items()}
        yield next(serialize_tensors(like))  # the header, for which shapes are enough
        for key, spec in specs.items():
            self._report_progress(key, spec.num_bytes)
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
            self._training.fill([Chunk(key, spec.shape, (0,) * len(spec.shape), tensor)])
            yield memoryview(tensor.flatten().view(torch.uint8).numpy())

    def write_megatron(self, folder: Path) -> None:
        """Writes a folder that a Megatron-LM run loads."""
        layout, spec = self._options.megatron, self._source.spec
        try:
            write_megatron(
                folder,
                iteration=self._source.step,
                spec=spec,
                fetch=self._fetch,
                tp=layout.tp,
                pp=layout.pp,
                ep=layout.ep,
                format=layout.format,
                layer_spec=layout.layer_spec,
                training=None if self._training is None else self._training_export(self._training),
            )
        except CheckpointException as error:  # torch wraps whatever `_fetch` raises, an interrupt included
            cause, _ = next(iter(error.failures.values()))
            raise cause from None

    def _training_export(self, state: TrainingState) -> TrainingExport:
        def fetch(kind: str, name: str) -> Tensor:
            shape = self._weights[name].shape
            self._report_progress(f"{kind}/{name}", math.prod(shape) * 4)
            return fetch_float32(state, self._source.fill, kind, name, shape)

        return TrainingExport(
            fetch=fetch,
            updates=state.updates,
            sections=state.sections,
            progress=state.progress,
            loss_scale=state.loss_scale,
            form=self._options.megatron.optimizer,
            width=relative_width(self._source.spec.config, self._source.spec.config.hidden_size),
        )

    def _fetch(self, name: str) -> Tensor:
        """Reads a logical tensor into its own memory."""
        weight = self._weights[name]
        self._report_progress(name, weight.num_bytes)
        tensor = torch.empty(weight.shape, dtype=weight.dtype)
        self._fill(name, [Chunk(folder_tensor_key(name), weight.shape, (0,) * len(weight.shape), tensor)])
        return tensor

    def _fill(self, name: str, chunks: Sequence[Chunk]) -> None:
        """Reads chunks; raises for a value that overflows in the new dtype."""
        source = self._source
        source.fill(chunks)
        for chunk in chunks:
            stored, after = source.dtypes[chunk.key], chunk.tensor
            may_overflow = stored.is_floating_point and torch.finfo(after.dtype).max < torch.finfo(stored).max
            # In bounded memory: `isfinite` would need several times the tensor's size.
            if not may_overflow or not after.numel() or all(bound.isfinite() for bound in after.aminmax()):
                continue
            before = torch.empty(after.shape, dtype=stored)
            source.fill([replace(chunk, tensor=before)])
            lost = before[before.isfinite() & ~after.isfinite()]
            if lost.numel():
                dtype = str(after.dtype).removeprefix("torch.")
                raise CheckpointError(
                    f"{name} has values up to {lost.abs().max().item():.4g}, and {dtype} ends at {torch.finfo(after.dtype).max:.4g}: "
                    "they would become infinite. Use a wider --dtype, bf16 or fp32, or leave it out."
                )

    def _file_bytes(self, file_plan: FilePlan) -> Iterator[bytes | memoryview]:
        """Yields the bytes of a file; each tensor overwrites the one before it in the buffer."""
        entries = [(entry, self._dtypes[entry.regions[0].name]) for entry in file_plan.entries]
        entries.sort(key=lambda pair: -pair[1].itemsize)  # the order of `serialize_tensors`
        like = {entry.name: torch.empty(entry.shape, dtype=dtype, device="meta") for entry, dtype in entries}
        yield next(serialize_tensors(like))  # the header, for which shapes are enough
        memory = memoryview(self._buffer.numpy())
        for entry, dtype in entries:
            size = math.prod(entry.shape) * dtype.itemsize
            self._report_progress(entry.name, size)
            values = self._buffer[:size].view(dtype).view(entry.shape)
            chunks = [
                Chunk(folder_tensor_key(part.name), self._weights[part.name].shape, part.start, part.view_in(values))
                for part in entry.regions
            ]
            self._fill(entry.name, chunks)
            yield memory[:size]

    def _aux_files(self) -> dict[str, bytes]:
        source, tokenizer = self._source, self._options.tokenizer
        sizes: Counter[torch.dtype] = Counter()
        for weight in self._weights.values():
            sizes[weight.dtype] += math.prod(weight.shape)
        dtype = str(sizes.most_common(1)[0][0]).removeprefix("torch.")  # the dtype of most of the model
        config = source.config_json or build_config_json(source.spec, dtype)
        config = {**strip_remote_code(config), "dtype": dtype, "torch_dtype": dtype}
        config.pop("quantization_config", None)  # quantized weights are read dequantized
        kept = {
            name: path
            for name, path in source.companion_files.items()
            if tokenizer is None or name == GENERATION_CONFIG_FILE
        }
        documents = {name: read_companion_file(path, CheckpointError) for name, path in kept.items()}
        if tokenizer is not None:
            config |= {"eos_token_id": tokenizer.eod}
            documents |= tokenizer.files
        if tokenizer is not None or GENERATION_CONFIG_FILE not in documents:
            ends = {key: config.get(key) for key in ("bos_token_id", "eos_token_id")}
            documents[GENERATION_CONFIG_FILE] = json_bytes({"_from_model_config": True, **ends})
        return {CONFIG_FILE: json_bytes(config), **documents}

    def _report_progress(self, name: str, num_bytes: int) -> None:
        self._on_progress(ConversionProgress(name, self._done_bytes, self.total_bytes))
        self._done_bytes += num_bytes


def _weight_specs(
    source: ModelReader, entries: Sequence[FolderEntry], dtype: torch.dtype | None
) -> dict[str, WeightSpec]:
    """Returns every logical weight with its target dtype; tensors fused in one entry have the dtype of the first.

    Expert biases keep their dtype: they accumulate small steps.
    """
    weights: dict[str, WeightSpec] = {}
    for entry in entries:
        key = folder_tensor_key(entry.regions[0].name)
        kept = source.dtypes[key] if dtype is None or key.startswith(ROUTER_PREFIX) else dtype
        for region in entry.regions:
            weights.setdefault(region.name, WeightSpec(source.shapes[folder_tensor_key(region.name)], kept))
    return weights
