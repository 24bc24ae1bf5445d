"""Writes a Megatron checkpoint from logical tensors: weights and arguments; in the distributed format the state of a run, too.

Legacy files contain a rank's whole share, which must fit in memory; every rank fetches its tensors anew. The distributed format is
written weight by weight. The tracker is written last, so a failed write leaves nothing that Megatron would load.
"""

from __future__ import annotations

import io
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError, ConfigError, Problem
from petatron.base.safe_files import write_atomic
from petatron.checkpoint.megatron.arguments import arguments_from_config
from petatron.checkpoint.megatron.layer_kind_arguments import has_attention
from petatron.checkpoint.megatron.open_checkpoint import TRACKER_FILE, iteration_folder
from petatron.checkpoint.megatron.torch_dist_writer import GlobalTensor, LazyChunk, write_dist_tensors
from petatron.checkpoint.megatron.weight_layouts import fuse_logical, shard_weight
from petatron.checkpoint.megatron.weight_names import (
    LayerSpec,
    MegatronWeight,
    extra_state_modules,
    layer_index,
    local_name,
    megatron_weights,
    separate_parts,
    transformer_engine_name,
    with_layer,
)
from petatron.checkpoint.megatron.write_training_state import TrainingExport
from petatron.config.required_settings import known_vocab_size
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.sections.hybrid import MAMBA, MLP, all_symbols
from petatron.config.schema.sections.vocabulary import padded_rows
from petatron.models.model_spec import ModelSpec

FetchTensor = Callable[[str], Tensor]
_CACHED_TENSORS = 3  # q, k and v, or gate and up of all experts of a layer


@dataclass(frozen=True, slots=True)
class _MegatronExport:
    """What to write; `padded_vocab_size` includes the padding."""

    spec: ModelSpec
    weights: tuple[MegatronWeight, ...]
    fetch: FetchTensor
    tp: int
    pp: int
    ep: int
    padded_vocab_size: int
    layer_spec: LayerSpec

    def name(self, weight: MegatronWeight, *, stacked: bool) -> str:
        """Returns the name that Megatron's implementation has for a weight; stacked: in the distributed format."""
        if self.layer_spec == "te":
            return transformer_engine_name(weight, self.spec)
        return local_name(weight, self.spec, stacked=stacked)

    @property
    def num_local_experts(self) -> int:
        """The experts of a layer on one rank; 0 of a dense model."""
        return 0 if self.spec.moe is None else (self.spec.moe.num_experts or 0) // self.ep

    def full_weight(self, weight: MegatronWeight) -> Tensor:
        """Returns a Megatron weight, unsharded."""
        parts = [self.logical_part(weight, name) for name in weight.logical_names]
        return fuse_logical(weight, parts, self.spec.config, padded_vocab_size=self.padded_vocab_size)

    def logical_part(self, weight: MegatronWeight, name: str) -> Tensor:
        """Returns one of the logical tensors of a weight, or an expert of it."""
        tensor = self.fetch(name)
        part = tensor if weight.expert is None else tensor[weight.expert]
        if part.dim() != len(weight.shape) or part.shape[1:] != weight.shape[1:]:
            raise CheckpointError(
                f"{name} is {list(part.shape)}, which does not fit Megatron's {weight.name} of "
                f"{list(weight.shape)}. Give the config that the weights belong to."
            )
        return part


def write_megatron(
    folder: Path,
    *,
    iteration: int,
    spec: ModelSpec,
    fetch: FetchTensor,
    tp: int,
    pp: int,
    ep: int = 1,
    format: Literal["legacy", "torch_dist"] = "torch_dist",
    layer_spec: LayerSpec = "te",
    training: TrainingExport | None = None,
) -> Path:
    """Writes a step into a folder, updates the tracker, and returns the step's own folder.

    `fetch` returns whole logical tensors by name; tp, pp and ep are the parallel sizes of legacy files; `layer_spec` is the implementation
    whose names the weights get. Iteration 0 is written as a release, since Megatron has no step 0. training: what a run continues with,
    which the distributed format has a place for.
    """
    assert training is None or (format == "torch_dist" and iteration > 0), (
        "legacy files tell the owner of state by order alone"
    )
    model, moe = spec.config, spec.moe
    if problems := _layout_problems(model, moe, (tp, pp, ep), format, layer_spec):
        raise ConfigError(problems)
    rows = padded_rows(known_vocab_size(model), model.make_vocab_size_divisible_by, tp)
    arguments = arguments_from_config(model, moe, tp=tp, pp=pp, ep=ep, padded_vocab_size=rows, iteration=iteration)
    if layer_spec == "local":
        arguments.transformer_impl, arguments.moe_grouped_gemm = "local", False
    step = folder / iteration_folder(iteration)
    if step.exists() and any(step.iterdir()):
        raise CheckpointError(f"{step} is already there. Remove it, or write to another folder.")
    weights = megatron_weights(spec)
    if layer_spec == "local":  # which shards the down-projections of latent attention
        weights = tuple(
            replace(weight, layout="column") if weight.layout == "whole_or_column" else weight for weight in weights
        )
    job = _MegatronExport(spec, weights, _FetchCache(fetch), tp, pp, ep, rows, layer_spec)
    common: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": iteration}
    if training is not None:
        vars(arguments).update(training.arguments())
        common |= training.common_state(_trained(weights), layer_spec, ep=ep)
    try:
        step.mkdir(parents=True, exist_ok=True)
        _write_legacy(step, job, common) if format == "legacy" else _write_torch_dist(step, job, common, training)
        write_atomic(folder / TRACKER_FILE, "release" if iteration == 0 else str(iteration))
    except OSError as error:
        raise CheckpointError(f"{step} cannot be written: {error}. Make room, or write to another folder.") from error
    return step


class _FetchCache:
    """Caches the last few tensors, since the experts of a layer request the same ones one after another."""

    def __init__(self, fetch: FetchTensor) -> None:
        self._fetch = fetch
        self._last: OrderedDict[str, Tensor] = OrderedDict()

    def __call__(self, name: str) -> Tensor:
        if name not in self._last:
            while len(self._last) >= _CACHED_TENSORS:
                self._last.popitem(last=False)
            self._last[name] = self._fetch(name).detach().cpu()
        return self._last[name]


def _layout_problems(
    model: ModelConfig,
    moe: MoEConfig | None,
    sizes: tuple[int, int, int],
    format: Literal["legacy", "torch_dist"],
    layer_spec: LayerSpec,
) -> list[Problem]:
    (tp, pp, ep), pattern = sizes, model.hybrid_layer_pattern
    flag = "--tensor-model-parallel-size"
    shared: list[tuple[str, int, str, int | None]] = [
        ("--pipeline-model-parallel-size", pp, "--num-layers", model.num_layers)
    ]
    if has_attention(model):
        latent = model.multi_latent_attention
        count = model.num_attention_heads if latent else model.num_query_groups
        shared.append((flag, tp, "--num-attention-heads" if latent else "--num-query-groups", count))
    symbols = all_symbols(model)
    if pattern is None or MLP in symbols:
        shared.append((flag, tp, "--ffn-hidden-size", model.ffn_hidden_size))
    if MAMBA in symbols:
        shared.append((flag, tp, "--mamba-num-heads", model.mamba_num_heads))
        shared.append((flag, tp, "--mamba-num-groups", model.mamba_num_groups))
    if moe is not None:
        shared += [
            (flag, tp, "--moe-ffn-hidden-size", moe.moe_ffn_hidden_size),
            (flag, tp, "the shared expert's", moe.moe_shared_expert_intermediate_size or tp),
            ("--expert-model-parallel-size", ep, "--num-experts", moe.num_experts),
        ]
    elif ep > 1:
        shared.append(("--expert-model-parallel-size", ep, "a model without experts:", 1))
    problems = [
        Problem(flag, str(size), f"does not divide {of} {count}", "Use 1, or a divisor.")
        for flag, size, of, count in shared
        if size < 1 or not count or count % size
    ]
    if model.mtp_num_layers and pp > 1 and format == "legacy":
        rule = "cannot be written beside --mtp-num-layers: which stage has copies of the embedding differs by Megatron's version"
        fix = "Use 1, or --megatron-format torch_dist."
        problems.append(Problem("--pipeline-model-parallel-size", str(pp), rule, fix))
    if layer_spec == "local" and pattern is not None:
        rule = "has no implementation of hybrids in Megatron"
        problems.append(Problem("--megatron-spec", "local", rule, "Use te."))
    return problems


def _write_legacy(step: Path, export: _MegatronExport, common: dict[str, Any]) -> None:
    for pp in range(export.pp):
        for tp in range(export.tp):
            for ep in range(export.ep):
                name = (
                    f"mp_rank_{tp:02d}"
                    + (f"_{pp:03d}" if export.pp > 1 else "")
                    + (f"_{ep:03d}" if export.ep > 1 else "")
                )
                (step / name).mkdir()
                share = {**common, "model": _rank_state_dict(export, tp, pp, ep)}
                torch.save(share, step / name / "model_optim_rng.pt")


def _rank_state_dict(export: _MegatronExport, tp: int, pp: int, ep: int) -> dict[str, Tensor | None]:
    """Returns one rank's weights, with layers and experts numbered from 0, and their empty extra state."""
    layers = export.spec.config.num_layers // export.pp
    share: dict[str, Tensor | None] = {"output_layer._extra_state": None} if pp == export.pp - 1 else {}
    for weight in export.weights:
        layer = layer_index(weight.name)
        named = export.name(weight, stacked=False)
        names = _names_on_stage(export, named, pp) if layer is None else [named]
        here = layer is None or layer // layers == pp
        if not here or not names or (weight.expert is not None and weight.expert // export.num_local_experts != ep):
            continue
        shard = shard_weight(weight, export.full_weight(weight), tp=export.tp, tp_rank=tp)
        for name in names:
            local = name if layer is None else with_layer(name, layer - pp * layers)
            stored = _local_expert_name(export, local, weight.expert)
            share[stored] = shard
            modules = extra_state_modules(re.sub(r"(weight|bias)\d+$", r"\1", stored), export.layer_spec)
            share |= {f"{module}._extra_state": None for module in modules}
    return share


def _names_on_stage(export: _MegatronExport, name: str, pp: int) -> list[str]:
    """Returns the names of an embedding or head weight on a pipeline rank; a tied head is a copy of the embedding on the last."""
    first, last = pp == 0, pp == export.pp - 1
    if name == "embedding.word_embeddings.weight":
        copied = last and not first and not export.spec.config.untie_embeddings_and_output_weights
        return ([name] if first else []) + (["output_layer.weight"] if copied else [])
    return [name] if (first if name.startswith("embedding.") else last) else []


def _local_expert_name(export: _MegatronExport, name: str, expert: int | None) -> str:
    """Experts of a grouped GEMM are numbered parameters, others are modules."""
    if expert is None or export.spec.moe is None:
        return name
    local = expert % export.num_local_experts
    before, _, after = name.partition(f".experts.{expert}.")
    return (
        f"{before}.experts.{after}{local}"
        if export.spec.moe.moe_grouped_gemm and export.layer_spec == "te"
        else f"{before}.experts.local_experts.{local}.{after}"
    )


def _trained(weights: tuple[MegatronWeight, ...]) -> tuple[MegatronWeight, ...]:
    """Returns the weights that an optimizer updates."""
    return tuple(weight for weight in weights if not weight.name.endswith(".expert_bias"))


def _write_torch_dist(
    step: Path, export: _MegatronExport, common: dict[str, Any], training: TrainingExport | None
) -> None:
    tensors, objects = _global_state(export)
    if training is not None:
        for kind, name in training.tensor_names.items():
            fetch = _FetchCache(partial(training.fetch, kind))
            of_kind, _ = _global_state(replace(export, weights=_trained(export.weights), fetch=fetch))
            tensors += [replace(tensor, name=f"optimizer.state.{name}.{tensor.name}") for tensor in of_kind]
    write_dist_tensors(step, tensors, objects)
    torch.save(common, step / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backends |= {"common_backend": "torch", "common_backend_version": 1}
    write_atomic(step / "metadata.json", json.dumps(backends))


def _global_state(export: _MegatronExport) -> tuple[list[GlobalTensor], dict[str, bytes]]:
    """Stacks weights of one name over all layers and experts into one tensor, unless the layers differ; returns extra state, too."""
    decoder_layers = export.spec.layers[: export.spec.config.num_layers]
    with_experts = [layer for layer in export.spec.moe_layers if layer < len(decoder_layers)]
    alike = len(with_experts) in (0, len(decoder_layers)) and export.spec.config.hybrid_layer_pattern is None
    grouped: dict[str, list[tuple[tuple[int, ...], MegatronWeight]]] = {}
    unstacked: list[GlobalTensor] = []
    for weight in export.weights:
        layer = layer_index(weight.name)
        name, lead = export.name(weight, stacked=True), ()
        if layer is not None and alike:
            name, lead = name.replace(f"decoder.layers.{layer}.", "decoder.layers.", 1), (layer,)
        if weight.expert is not None:
            name, lead = name.replace(f".experts.{weight.expert}.", ".experts.experts."), (*lead, weight.expert)
        if parts := separate_parts(weight):
            unstacked += [_part_tensor(export, name, weight, index, part) for index, part in enumerate(parts)]
        else:
            grouped.setdefault(name, []).append((lead, weight))
    stacked = {tensor.name: [()] for tensor in unstacked}
    stacked |= {name: [lead for lead, _ in members] for name, members in grouped.items()}
    tensors = [*unstacked, *(_global_tensor(export, name, members) for name, members in grouped.items())]
    return tensors, _empty_extra_state(stacked, export.layer_spec)


def _empty_extra_state(stacked: Mapping[str, Sequence[tuple[int, ...]]], layer_spec: LayerSpec) -> dict[str, bytes]:
    """Returns an object for each layer and expert of a module, which Megatron's loader asks for; `stacked` has the leading indices."""
    nothing = io.BytesIO()
    torch.save([None], nothing)
    objects: dict[str, bytes] = {}
    for name, leads in stacked.items():
        sizes = ".".join(str(index + 1) for index in leads[-1]) or "1"
        for module in extra_state_modules(name, layer_spec):
            for lead in leads:
                at = ".".join(map(str, lead)) or "0"
                objects[f"{module}._extra_state/shard_{at}_{sizes}"] = nothing.getvalue()
    return objects


def _part_tensor(export: _MegatronExport, name: str, weight: MegatronWeight, index: int, part: str) -> GlobalTensor:
    """Returns the tensor of one of the parts that a weight is stored in."""
    logical, shape = weight.logical_names[index], (weight.rows[index], *weight.shape[1:])
    return GlobalTensor(f"{name}.{part}", shape, 0, (LazyChunk((), lambda: export.logical_part(weight, logical)),))


def _global_tensor(
    export: _MegatronExport, name: str, members: Sequence[tuple[tuple[int, ...], MegatronWeight]]
) -> GlobalTensor:
    last, weight = members[-1]
    inner = (export.padded_vocab_size, *weight.shape[1:]) if weight.layout == "vocabulary" else weight.shape
    parts = tuple(LazyChunk(lead, lambda weight=member: export.full_weight(weight)) for lead, member in members)
    return GlobalTensor(name, (*(index + 1 for index in last), *inner), len(last), parts)
