"""Puts adapters beside the weights that `--adapter-targets` names, in the specs of a model's layers.

A target is a linear, or one section of a fused one. A pattern matches it by its name here (`layers.0.attention.q`), by the end of that
(`attention.q`, `q`), or by the end of the name that Hugging Face models and PEFT have for it (`self_attn.q_proj`, `q_proj`); any part may
be a glob. Routers, convolutions, embeddings and heads have no adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from petatron.base.errors import ConfigError, Problem
from petatron.base.format_text import abbreviate_names
from petatron.config.required_settings import required
from petatron.config.schema.model import ModelConfig
from petatron.layers.adapters.adapter_spec import AdapterSpec, AdapterTarget
from petatron.layers.spec.param_spec import ParamSpec
from petatron.layers.transformer_layer import LayerSpec
from petatron.models.model_spec import ModelSpec

ALL_LINEAR = "all-linear"
_KINDS_OF_EXPERTS = ("lora", "rslora")
"""The kinds of adapters that experts may have, as in PEFT."""
_IA3_TARGETS = ("k_proj", "v_proj", "down_proj")
_OTHER_NAMES = {
    "q": ("q_proj", "query", "wq"),
    "k": ("k_proj", "key", "wk"),
    "v": ("v_proj", "value", "wv"),
    "out": ("o_proj", "out_proj", "dense", "wo"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "fc1", "c_fc", "w3"),
    "down": ("down_proj", "fc2", "w2"),
    "gate_up": ("gate_up_proj",),
    "q_down": ("q_a_proj",),
    "q_up": ("q_b_proj", "q_proj"),
    "kv_down": ("kv_a_proj_with_mqa",),
    "kv_up": ("kv_b_proj",),
}
"""The names that linears have in PEFT's usual models, by their last names here."""
_OTHER_PARENTS = {
    "attention": ("self_attn", "attn"),
    "mlp": ("mlp", "feed_forward"),
    "shared": ("shared_experts", "shared_expert"),
}

SpecT = TypeVar("SpecT", bound=ModelSpec)


def with_adapters(spec: SpecT) -> SpecT:
    """Returns a model with the adapters of its config; `ConfigError` for a target that matches nothing.

    >>> from petatron.models.registry import model_spec
    >>> from petatron.validate import load_config
    >>> flags = ["--vocab-size", "256", "--adapter", "lora", "--adapter-targets", "q_proj", "down"]
    >>> run = load_config(flags, preset="tiny-llama", require_training=False).config
    >>> [name for name in model_spec(run).logical_shapes() if name.startswith("layers.0") and "lora" in name]
    ['layers.0.attention.q.lora_a', 'layers.0.attention.q.lora_b', 'layers.0.mlp.down.lora_a', 'layers.0.mlp.down.lora_b']
    """
    config = spec.config
    if config.adapter is None:
        return spec
    patterns = config.adapter_targets or (_IA3_TARGETS if config.adapter == "ia3" else (ALL_LINEAR,))
    unmatched, layers = set(patterns), list[LayerSpec]()
    for index, layer in enumerate(spec.layers):
        names = _adaptable_names(layer, has_experts=config.adapter in _KINDS_OF_EXPERTS)
        chosen = {
            name: matching
            for name, linear in names.items()
            if (matching := [p for p in patterns if p == ALL_LINEAR or _matches(f"layers.{index}.{name}", p)])
        }
        unmatched -= {pattern for matching in chosen.values() for pattern in matching}
        targets = _by_linear([names[name] for name in chosen])
        layers.append(replace(layer, adapter=_adapter_spec(config, targets) if targets else None))
    if unmatched and config.adapter_targets:
        raise ConfigError([_unmatched(pattern, spec.layers, config) for pattern in sorted(unmatched)])
    return replace(spec, layers=tuple(layers))  # pyright: ignore[reportCallIssue, reportArgumentType]


def adapted_linears(spec: ModelSpec) -> Iterator[tuple[str, ParamSpec, AdapterTarget, AdapterSpec]]:
    """Yields every linear with an adapter: its name in the model, its weight, what of it is adapted, and the adapter."""
    for index, layer in enumerate(spec.layers):
        if layer.adapter is not None:
            params = layer.params()
            for target in layer.adapter.targets:
                name = f"layers.{index}.{target.linear}"
                yield name, params[f"{target.linear}.weight"], target, layer.adapter


def _adapter_spec(config: ModelConfig, targets: tuple[AdapterTarget, ...]) -> AdapterSpec:
    return AdapterSpec(
        kind=required("adapter", config.adapter),
        rank=config.adapter_rank,
        alpha=config.adapter_alpha,
        dropout=config.adapter_dropout,
        targets=targets,
    )


def _adaptable_names(layer: LayerSpec, *, has_experts: bool) -> dict[str, AdapterTarget]:
    """Returns what may have an adapter in a layer, by name: a section of a fused weight by that of its logical tensor."""
    names: dict[str, AdapterTarget] = {}
    without = {f"{branch.name}.{linear}.weight" for branch in layer.branches for linear in branch.without_adapters}
    for name, param in layer.params().items():
        is_linear = name.endswith(".weight") and param.is_gemm and param.role == "hidden_matrix"
        if not is_linear or name in without or (param.shard.ep is not None and not has_experts):
            continue
        linear = name.removesuffix(".weight")
        if param.shard.ep is not None or not param.shard.sections:
            names[linear] = AdapterTarget(linear)
            continue
        for section in param.shard.sections:
            parent = linear.rpartition(".")[0]
            names[f"{parent}.{section.name}"] = AdapterTarget(linear, (section.name,))
    return names


def _by_linear(targets: Sequence[AdapterTarget]) -> tuple[AdapterTarget, ...]:
    """Joins the sections of each linear."""
    sections: dict[str, tuple[str, ...]] = {}
    for target in targets:
        sections[target.linear] = sections.get(target.linear, ()) + target.sections
    return tuple(AdapterTarget(linear, names) for linear, names in sections.items())


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(alias, pattern) or fnmatchcase(alias, f"*.{pattern}") for alias in _aliases(name))


def _aliases(name: str) -> Iterator[str]:
    """Yields the names of a linear here and in PEFT's usual models.

    >>> list(_aliases("layers.0.mlp.down"))[:3]
    ['layers.0.mlp.down', 'layers.0.mlp.down_proj', 'layers.0.feed_forward.down_proj']
    """
    yield name
    parent, _, leaf = name.rpartition(".")
    above, _, owner = parent.rpartition(".")
    parents = [f"{above}.{other}" for other in _OTHER_PARENTS.get(owner, (owner,))]
    yield from (f"{other}.{last}" for last in _OTHER_NAMES.get(leaf, ()) for other in parents)
    if owner == "experts":
        yield parent


def _unmatched(pattern: str, layers: Sequence[LayerSpec], config: ModelConfig) -> Problem:
    has_experts = config.adapter in _KINDS_OF_EXPERTS
    linears = (name for layer in layers for name in _adaptable_names(layer, has_experts=has_experts))
    names = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    rule = f"matches no linear of a layer of this model that --adapter {config.adapter} may be beside"
    fix = f"Use {ALL_LINEAR}, or of {abbreviate_names(names)}." if names else "This model has no linears with adapters."
    return Problem("--adapter-targets", pattern, rule, fix)
