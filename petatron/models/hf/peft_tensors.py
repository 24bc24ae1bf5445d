"""Converts adapters to PEFT's names and settings, and back: the tensors of `adapter_model.safetensors`, and `adapter_config.json`.

PEFT has one A and one B for each module of a Hugging Face model. Where that is one of our logical tensors (q_proj), its adapter is the
same. Where it is several, fused (Phi-3's qkv_proj), each of ours has a block of rows of A and of columns of B, whose other elements are
zero, and the rank is as many times as large: B A is the same, and so is the scale, since alpha grows along. The other way, each gets all
of A and its rows of B, or its block if B has such blocks. Modules of several ranks and scales (`rank_pattern`, `alpha_pattern`) get the
largest rank and one scale: A has more rows, of zeros, and B the quotient of the scales.

R rank, D input width, O output width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.format_text import abbreviate_names
from petatron.layers.adapters.adapter import LORA_A, LORA_B, MAGNITUDE, SCALE
from petatron.layers.adapters.adapter_spec import AdapterSpec, scales_input
from petatron.models.adapter_targets import adapted_linears
from petatron.models.adapter_weights import AdaptedWeight, adapted_weights
from petatron.models.hf.config_json import matching_family
from petatron.models.hf.family import OWN_MODEL_TYPE
from petatron.models.hf.find_family import get_family
from petatron.models.hf.folder_entries import FolderEntry, family_entries, folder_entries
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import without_adapters

_PREFIX = "base_model.model."
_LEAVES = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector", SCALE: "ia3_l"}
_KINDS = {"LORA": "lora", "IA3": "ia3"}


def peft_entries(spec: ModelSpec, model_type: str | None = None) -> tuple[FolderEntry, ...]:
    """Returns the weights of a model without adapters, under the names that they have in memory in transformers, where PEFT sees them."""
    base = without_adapters(spec)
    family = matching_family(base) if model_type is None else None
    if model_type is not None and model_type != OWN_MODEL_TYPE:
        family = get_family(model_type)
    if family is None:
        return folder_entries(base, OWN_MODEL_TYPE)
    return family_entries(family, family.in_memory_mappings or family.mappings, base)


def to_peft(
    spec: ModelSpec, logical: Mapping[str, Tensor], *, base: str | None, model_type: str | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns adapter_config.json and the tensors of a model's adapters, from logical tensors; `base` names the model beside them."""
    adapted, adapter = _adapted_weights(spec)
    modules, inputs, tensors = dict[str, int](), list[str](), dict[str, Tensor]()
    for entry in peft_entries(spec, model_type):
        names = [name for name in dict.fromkeys(region.name for region in entry.regions) if name in adapted]
        if names:
            module = entry.name.removesuffix(".weight")
            modules[module] = len(names)
            if adapted[names[0]].input_scale is not None:
                inputs.append(module)
                tensors[f"{_PREFIX}{module}.{_LEAVES[SCALE]}"] = _parts_of(names[0], logical)[SCALE].unsqueeze(0)
                continue
            tensors |= {f"{_PREFIX}{module}.{leaf}": t for leaf, t in _module_tensors(entry, names, logical, adapter)}
    return _adapter_config(spec, adapter, modules, inputs, base, model_type), tensors


def _adapted_weights(spec: ModelSpec) -> tuple[dict[str, AdaptedWeight], AdapterSpec]:
    """Returns the logical weights with an adapter, and the adapter, which is the same for all of them but for targets."""
    linears = list(adapted_linears(spec))
    for name, weight, _, _ in linears:
        if weight.shard.ep is not None:
            raise CheckpointError(
                f"{name} has an adapter for each of its experts, which is not written as PEFT's yet. Merge it into the weights "
                "(`petatron checkpoint convert --to huggingface`)."
            )
    assert linears, "the model has no adapters"
    return adapted_weights(spec), linears[0][3]


def _row_ids(entry: FolderEntry) -> Iterator[tuple[str, slice, Tensor]]:
    """Yields the regions of a matrix by rows: the logical tensor, its rows, and the outputs of the module that they are."""
    for region in entry.regions:
        rows, columns = (entry.shape[1], entry.shape[0]) if region.transposed else entry.shape[:2]
        ids = torch.arange(rows).unsqueeze(1).expand(rows, columns)
        yield region.name, region.logical_slices()[0], region.view_in(ids.t() if region.transposed else ids)[:, 0]


def _num_outputs(entry: FolderEntry) -> int:
    return entry.shape[1] if entry.regions[0].transposed else entry.shape[0]


def _module_tensors(
    entry: FolderEntry, names: Sequence[str], logical: Mapping[str, Tensor], adapter: AdapterSpec
) -> Iterator[tuple[str, Tensor]]:
    parts = {name: _parts_of(name, logical) for name in names}
    first = parts[names[0]]
    if len(names) < len({region.name for region in entry.regions}) and MAGNITUDE in first:
        raise CheckpointError(
            f"{entry.name} is one matrix in Hugging Face's model, and DoRA is on a part of it ({abbreviate_names(list(names))}), which "
            "PEFT cannot have. Train with all of it in --adapter-targets."
        )
    vector = next((leaf for leaf in (SCALE, MAGNITUDE) if leaf in first), None)
    if vector is not None:
        values = first[vector].new_ones(_num_outputs(entry))
        for name, rows, ids in _row_ids(entry):
            if name in parts:
                values[ids] = parts[name][vector][rows]
        yield _LEAVES[vector], values.unsqueeze(1) if vector == SCALE else values
    if LORA_A in first:
        b = first[LORA_B].new_zeros(_num_outputs(entry), adapter.rank * len(names))
        for name, rows, ids in _row_ids(entry):
            if name in parts:
                block = slice(names.index(name) * adapter.rank, (names.index(name) + 1) * adapter.rank)
                b[ids, block] = parts[name][LORA_B][rows]
        yield _LEAVES[LORA_A], torch.cat([parts[name][LORA_A] for name in names])
        yield _LEAVES[LORA_B], b


def _parts_of(name: str, logical: Mapping[str, Tensor]) -> dict[str, Tensor]:
    module = name.removesuffix(".weight")
    return {leaf: logical[f"{module}.{leaf}"] for leaf in _LEAVES if f"{module}.{leaf}" in logical}


def _adapter_config(
    spec: ModelSpec,
    adapter: AdapterSpec,
    modules: Mapping[str, int],
    inputs: Sequence[str],
    base: str | None,
    model_type: str | None,
) -> dict[str, Any]:
    entries = {e.name.removesuffix(".weight"): e for e in peft_entries(spec, model_type) if len(e.shape) == 2}
    shared = {
        "base_model_name_or_path": base,
        "task_type": "SEQ_CLS" if spec.config.pooling is not None else "CAUSAL_LM",
        "target_modules": _short_names([*modules], inputs, entries)[0],
        "fan_in_fan_out": any(entries[module].regions[0].transposed for module in modules),
        "modules_to_save": None,
        "inference_mode": True,
        "bias": "none",
    }
    if adapter.kind == "ia3":
        del shared["bias"]
        return {"peft_type": "IA3", **shared, "feedforward_modules": _short_names([*modules], inputs, entries)[1]}
    rslora = adapter.kind == "rslora"
    fused = {module: count for module, count in modules.items() if count > 1}
    return {
        "peft_type": "LORA",
        **shared,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": rslora,
        "use_dora": adapter.kind == "dora",
        "rank_pattern": {module: count * adapter.rank for module, count in fused.items()},
        "alpha_pattern": {
            module: adapter.alpha * (math.sqrt(count) if rslora else count) for module, count in fused.items()
        },
    }


def _short_names(
    modules: Sequence[str], inputs: Sequence[str], entries: Mapping[str, FolderEntry]
) -> tuple[list[str], list[str]]:
    """Returns the last names of modules, and of those whose inputs are scaled, where these name no others, else whole names of all."""
    lists = []
    for names, among in ((modules, list(entries)), (inputs, modules)):
        last = {name.rpartition(".")[2] for name in names}
        if {name for name in among if name.rpartition(".")[2] in last} != set(names):
            return sorted(modules), sorted(inputs)
        lists.append(sorted(last))
    return lists[0], lists[1]


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """Adapters read from PEFT's files: the settings of a model that has them, by field name, and their logical tensors."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def from_peft(
    base: ModelSpec,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    where: str,
    model_type: str | None = None,
) -> PeftAdapter:
    """Returns the adapters of PEFT's files beside a model; `CheckpointError`, naming `where`, for those that it cannot have."""
    _refuse_unsupported(config, where)
    entries = {entry.name.removesuffix(".weight"): entry for entry in peft_entries(base, model_type)}
    modules: dict[str, dict[str, Tensor]] = {}
    unknown: list[str] = []
    for key, tensor in tensors.items():
        module, leaf = _split_key(key)
        if module in entries and leaf is not None and len(entries[module].shape) == 2:
            modules.setdefault(module, {})[leaf] = tensor
        else:
            unknown.append(key)
    if unknown or not modules:
        named = abbreviate_names(unknown) if unknown else "nothing"
        raise CheckpointError(
            f"{where} has {named} beside what this model has linears for. Give the model that the adapter was trained on."
        )
    wrong = [f"{m}.{leaf}" for m, parts in modules.items() for leaf in _wrong_shapes(entries[m], parts)]
    if wrong:
        raise CheckpointError(
            f"{where}: {abbreviate_names(wrong)} have other shapes than the model's linears. Give the model that the adapter was trained "
            "on."
        )
    kind = _kind(config)
    if kind == "ia3":
        _check_scales(base, entries, modules, where)
        logical = {k: t for module, parts in modules.items() for k, t in _logical_scales(entries[module], parts)}
        settings: dict[str, Any] = {"adapter": kind}
    else:
        settings, logical = _logical_low_rank(kind, config, entries, modules)
    return PeftAdapter(settings | {"adapter_targets": _target_patterns(base, logical)}, logical)


def _kind(config: Mapping[str, Any]) -> str:
    kind = _KINDS[str(config["peft_type"])]
    if kind == "lora" and config.get("use_dora"):
        return "dora"
    return "rslora" if kind == "lora" and config.get("use_rslora") else kind


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("peft_type")
    if kind not in _KINDS:
        raise CheckpointError(
            f"{where} is an adapter of the kind {kind}. LoRA, rsLoRA, DoRA and IA3 are read; merge others with PEFT."
        )
    given = {
        "bias": config.get("bias", "none") != "none",
        "modules_to_save": bool(config.get("modules_to_save")),
        "lora_bias": bool(config.get("lora_bias")),
        "use_dora with use_rslora": bool(config.get("use_dora") and config.get("use_rslora")),
        "trainable_token_indices": bool(config.get("trainable_token_indices")),
        "target_parameters": bool(config.get("target_parameters")),
    }
    if refused := [name for name, is_given in given.items() if is_given]:
        raise CheckpointError(
            f"{where} has {abbreviate_names(refused)}, which is not read. Merge the adapter with PEFT (merge_and_unload), and take that "
            "model."
        )


def _split_key(key: str) -> tuple[str, str | None]:
    """Returns the module of a tensor of PEFT's, and our name of it."""
    for leaf, suffix in _LEAVES.items():
        for form in (suffix, f"{suffix}.weight"):
            if key.endswith(f".{form}"):
                return key.removeprefix(_PREFIX).removesuffix(f".{form}"), leaf
    return key, None


def _wrong_shapes(entry: FolderEntry, parts: Mapping[str, Tensor]) -> Iterator[str]:
    outputs, inputs = _num_outputs(entry), math.prod(entry.shape) // _num_outputs(entry)
    rank = len(parts[LORA_A]) if LORA_A in parts else 0
    expected = {
        LORA_A: [(rank, inputs)],
        LORA_B: [(outputs, rank)],
        MAGNITUDE: [(outputs,)],
        SCALE: [(outputs, 1), (1, inputs)],
    }
    yield from (leaf for leaf, tensor in parts.items() if tuple(tensor.shape) not in expected[leaf])


def _check_scales(
    base: ModelSpec, entries: Mapping[str, FolderEntry], modules: Mapping[str, Mapping[str, Tensor]], where: str
) -> None:
    """Raises where PEFT scales the inputs of a linear whose outputs are scaled here, or the other way."""
    of_inputs = {name for name, param in base.params().items() if scales_input(param)}
    other = [m for m, parts in modules.items() if (len(parts[SCALE]) == 1) != (entries[m].regions[0].name in of_inputs)]
    if other:
        raise CheckpointError(
            f"{where} scales the inputs of {abbreviate_names(other)} where outputs are scaled here, or the other way. Inputs are those of "
            "down_proj and o_proj (feedforward_modules); merge this adapter with PEFT (merge_and_unload)."
        )


def _logical_scales(entry: FolderEntry, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    scale = parts[SCALE]
    for name in dict.fromkeys(region.name for region in entry.regions):
        module = name.removesuffix(".weight")
        ids = [ids for logical, _, ids in _row_ids(entry) if logical == name]
        yield f"{module}.{SCALE}", scale[0] if scale.shape[0] == 1 else scale[torch.cat(ids), 0]


def _logical_low_rank(
    kind: str,
    config: Mapping[str, Any],
    entries: Mapping[str, FolderEntry],
    modules: Mapping[str, Mapping[str, Tensor]],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    low_rank: dict[str, tuple[Tensor, Tensor, float]] = {}
    logical: dict[str, Tensor] = {}
    for module, parts in modules.items():
        scale = _scale(kind, config, module, len(parts[LORA_A]))
        for name, a, b, ids in _low_rank_of_entry(entries[module], parts[LORA_A], parts[LORA_B]):
            low_rank[name.removesuffix(".weight")] = a, b, scale
            if MAGNITUDE in parts:
                logical[f"{name.removesuffix('.weight')}.{MAGNITUDE}"] = parts[MAGNITUDE][ids]
    rank = max(len(a) for a, _, _ in low_rank.values())
    scale = max(scale for _, _, scale in low_rank.values())
    for module, (a, b, its_scale) in low_rank.items():
        missing = rank - len(a)
        logical[f"{module}.{LORA_A}"] = torch.nn.functional.pad(a, (0, 0, 0, missing))
        wide = torch.nn.functional.pad(b, (0, missing))
        logical[f"{module}.{LORA_B}"] = wide if its_scale == scale else wide * (its_scale / scale)
    alpha = scale * (math.sqrt(rank) if kind == "rslora" else rank)
    dropout = float(config.get("lora_dropout") or 0.0)
    return {"adapter": kind, "adapter_rank": rank, "adapter_alpha": alpha, "adapter_dropout": dropout}, logical


def _low_rank_of_entry(entry: FolderEntry, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yields A and B of each logical tensor of a module, and its outputs: the block that is its own, if B has such blocks."""
    names = list(dict.fromkeys(region.name for region in entry.regions))
    rank = len(a) // len(names)
    for number, name in enumerate(names):
        regions = [(rows.start, ids) for logical, rows, ids in _row_ids(entry) if logical == name]
        ids = torch.cat([ids for _, ids in sorted(regions, key=lambda region: region[0])])
        rows_of_b, block = b[ids], slice(number * rank, (number + 1) * rank)
        outside = rows_of_b.clone()
        outside[:, block] = 0
        is_block = len(names) > 1 and len(a) % len(names) == 0 and not outside.any()
        yield name, a[block] if is_block else a, rows_of_b[:, block] if is_block else rows_of_b, ids


def _scale(kind: str, config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = float(_pattern_value(config.get("alpha_pattern"), module, config.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if kind == "rslora" else rank)


def _pattern_value(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Returns what a pattern of PEFT's says of a module: a regular expression of the end of its name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _target_patterns(base: ModelSpec, logical: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Returns patterns of exactly the linears that have adapters: without the layer where all layers have the same ones."""
    adapted = {name.rpartition(".")[0] for name in logical}
    weights = {name.removesuffix(".weight") for name in base.logical_shapes()}
    ends = {re.sub(r"^layers\.\d+\.", "", name) for name in adapted}
    meant = {name for name in weights if re.sub(r"^layers\.\d+\.", "", name) in ends}
    return tuple(sorted(ends if meant == adapted else adapted))
