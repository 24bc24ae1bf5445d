"""Opens a model on disk in any of four formats: reads its config at once, and its logical tensors on demand.

    petatron      a folder of steps, one step, or the `model/` of one
    huggingface   config.json and safetensors
    megatron      a checkpoint of Megatron-LM, see docs/megatron-checkpoints.md
    peft          a folder of adapters, which names the model beside which they are, in any of these formats

Opening reads headers only, checks every name and shape, and reports all problems at once. `ModelReader.fill` reads values into boxes of
logical tensors in the caller's memory. It needs a few blocks of 8 MiB for the first two formats, one whole logical tensor for the third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from petatron.base.errors import CheckpointError, ConfigError, PetatronError, Problem, raise_problems
from petatron.base.format_text import abbreviate_names
from petatron.base.model_companion_files import find_companion_files
from petatron.base.model_folder_file_names import CONFIG_FILE
from petatron.base.untrusted_files import reading_untrusted
from petatron.checkpoint.files import step_folder, step_list
from petatron.checkpoint.files.manifest import Manifest
from petatron.checkpoint.files.safetensors_file import DTYPES
from petatron.checkpoint.huggingface.folder_as_checkpoint import HuggingFaceFolder, folder_manifest, model_folder_error
from petatron.checkpoint.inspect.summarize_checkpoint import run_config, run_metadata
from petatron.checkpoint.load import reshard_reads
from petatron.checkpoint.load.stored_box_lookup import StoredBoxLookup, wants_full_precision
from petatron.checkpoint.load.weights_from_average import read_manifest_with_weights
from petatron.checkpoint.megatron import MegatronCheckpoint, open_megatron
from petatron.checkpoint.tensor_chunk import ROUTER_PREFIX, WEIGHT_PREFIX, Chunk, folder_tensor_key, folder_tensor_name
from petatron.models.hf import folder_shapes
from petatron.models.hf.check_claimed_counts import check_counts
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec
from petatron.pretrained.adapter_folder import open_adapter_folder
from petatron.pretrained.detect_model_format import (
    ModelFormat,
    detect_format,
    reject_pickle_weights,
    weights_kind_problems,
)
from petatron.pretrained.model_reader_fields import ModelReader
from petatron.pretrained.open_step import open_step, stored_mup
from petatron.pretrained.settings_as_config_file import config_sections, load_config_sections
from petatron.pretrained.stored_training_state import (
    has_training_state,
    manifest_training_state,
    megatron_training_state,
    state_besides_weights,
)


def open_model_reader(
    path: Path,
    *,
    model_format: ModelFormat | None = None,
    step: int | None = None,
    vocab_size: int | None = None,
    weights: str | None = None,
) -> ModelReader:
    """Opens a model for reading; the format is detected if it is not given.

    `step` selects a step of a run. `vocab_size` is for Megatron checkpoints, which may record only the padded size. `weights` is a kind
    of state to read in place of the weights, such as `ema`.
    """
    model_kind = model_format or detect_format(path)
    problems: list[Problem] = []
    if vocab_size is not None and model_kind != "megatron":
        rule = f"is known for a {model_kind} model, whose settings say it"
        problems.append(Problem("--vocab-size", str(vocab_size), rule, "Leave it out."))
    if step is not None and model_kind in ("huggingface", "peft"):
        problems.append(
            Problem("--step", str(step), "chooses among steps, and a model's folder has none", "Leave it out.")
        )
    problems += weights_kind_problems(weights, model_kind)
    raise_problems(problems)
    with reading_untrusted(path, _source_error):
        if model_kind == "petatron":
            source = _open_petatron(step_list.resolve_step(path, step), weights)
        elif model_kind == "huggingface":
            source = _open_huggingface(path)
        elif model_kind == "peft":
            source = open_adapter_folder(path, open_model_reader)
        else:
            source = _open_megatron(path if step is None else path / f"iter_{step:07d}", vocab_size)

    def fill(chunks: Sequence[Chunk]) -> None:
        with reading_untrusted(source.path, _source_error):
            source.fill(chunks)

    return replace(source, fill=fill)


def _source_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} {why}. Copy it again from where it was made.")


def _open_huggingface(path: Path) -> ModelReader:
    reject_pickle_weights(path)
    folder = HuggingFaceFolder(path)
    settings = folder.checked_settings()
    with folder.naming_config():
        values, spec = _resolve_spec(*settings)
    return _manifest_reader("huggingface", path, folder, folder_manifest(folder, spec), values, spec)


def _open_petatron(step: Path, weights: str | None) -> ModelReader:
    manifest = step_folder.read_manifest(step) if weights is None else read_manifest_with_weights(step, weights)
    folder = open_step(step, manifest)
    settings = folder.settings()
    num_tensors = sum(key.startswith(WEIGHT_PREFIX) for key in manifest.tensors)
    check_counts(folder.config_file, model_folder_error, *settings, num_tensors=num_tensors, separate_experts=False)
    with folder.naming_config():
        values, spec = _resolve_spec({**settings[0], **stored_mup(step, manifest)}, settings[1])
    _check_weights(step, manifest, spec)
    source = _manifest_reader("petatron", step, folder, manifest, values, spec)
    trains = weights is None and has_training_state(manifest)
    names = [key.removeprefix(WEIGHT_PREFIX) for key in source.shapes if key.startswith(WEIGHT_PREFIX)]
    return replace(
        source,
        other_state=tuple(state_besides_weights(manifest)),
        base_model=run_config(run_metadata(manifest)).get("checkpoint", {}).get("pretrained_checkpoint"),
        open_training=(lambda: manifest_training_state(step, manifest, names, source.fill)) if trains else None,
    )


def _check_weights(step: Path, manifest: Manifest, spec: ModelSpec) -> None:
    """Checks that the checkpoint has the weights of the model that its config.json describes, with their shapes."""
    shapes = folder_shapes(spec)
    there = {folder_tensor_name(key): tensor.shape for key, tensor in manifest.tensors.items()}
    wrong = [name for name, shape in shapes.items() if there.get(name) != shape]
    if wrong:
        raise CheckpointError(
            f"{step} is not a checkpoint of the model that its {step_folder.MODEL_FOLDER}/{CONFIG_FILE} "
            f"describes: {abbreviate_names(wrong)} are missing or "
            "have another shape. Restore it from a copy."
        )


def _manifest_reader(
    model_format: ModelFormat,
    path: Path,
    folder: HuggingFaceFolder,
    manifest: Manifest,
    sections: Mapping[str, Mapping[str, Any]],
    spec: ModelSpec,
) -> ModelReader:
    directory = StoredBoxLookup.from_tensors(path, manifest.tensors)

    def fill(chunks: Sequence[Chunk]) -> None:
        lookups = [
            directory.lookup(chunk.key, chunk.box, full_precision=wants_full_precision(chunk))[:2] for chunk in chunks
        ]
        plan = reshard_reads.plan_reads(path, chunks, lookups, strict=False)
        assert not plan.missing_keys, f"{plan.missing_keys} were not looked for"
        reshard_reads.execute_reads(path, plan, manifest.files)

    kept = {key: tensor for key, tensor in manifest.tensors.items() if key.startswith((WEIGHT_PREFIX, ROUTER_PREFIX))}
    return ModelReader(
        format=model_format,
        path=path,
        step=manifest.step,
        config_sections=sections,
        spec=spec,
        config_json=folder.config,
        companion_files=find_companion_files(folder.path, CheckpointError),
        shapes={key: tensor.shape for key, tensor in kept.items()},
        dtypes={key: DTYPES[tensor.dtype] for key, tensor in kept.items()},
        fill=fill,
    )


def _open_megatron(path: Path, vocab_size: int | None) -> ModelReader:
    checkpoint = open_megatron(path) if vocab_size is None else _open_with_vocab_size(path, vocab_size)
    values, spec = _resolve_spec(checkpoint.model, checkpoint.moe)
    opener = checkpoint.open_training
    keys = {folder_tensor_key(name): tensor for name, tensor in checkpoint.tensors.items()}
    # The experts of a layer are parts of one tensor, and are read one after another.
    last: dict[str, Tensor] = {}

    def fill(chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.name not in last:
                last.clear()  # free the previous one first
                last[chunk.name] = checkpoint.tensors[chunk.name].load()
            chunk.tensor.copy_(last[chunk.name][chunk.box.slices()])

    return ModelReader(
        format="megatron",
        path=path,
        step=checkpoint.iteration,
        config_sections=values,
        spec=spec,
        config_json=None,
        companion_files={},
        shapes={key: tensor.shape for key, tensor in keys.items()},
        dtypes={key: tensor.dtype for key, tensor in keys.items()},
        fill=fill,
        other_state=checkpoint.other_state,
        open_training=None if opener is None else lambda: megatron_training_state(opener(), values),
        tokenizer=checkpoint.tokenizer,
    )


def _open_with_vocab_size(path: Path, vocab_size: int) -> MegatronCheckpoint:
    """Prefers the checkpoint's own vocabulary size; uses the given one if it cannot be opened without."""
    try:
        checkpoint = open_megatron(path)
    except PetatronError:
        return open_megatron(path, vocab_size=vocab_size)
    known = checkpoint.model["vocab_size"]
    if known != vocab_size:
        rule = f"contradicts the checkpoint, whose arguments say {known}"
        raise ConfigError([Problem("--vocab-size", str(vocab_size), rule, "Leave it out.")])
    return checkpoint


def _resolve_spec(
    model: Mapping[str, Any], moe_values: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], ModelSpec]:
    sections = config_sections(model, moe_values)
    run = load_config_sections(sections).config
    if run.model.vocab_size is None:
        rule = "is not known: the model's settings do not say it"
        raise ConfigError([Problem("--vocab-size", "", rule, "Give the number of token ids of its tokenizer.")])
    return sections, model_spec(run)
