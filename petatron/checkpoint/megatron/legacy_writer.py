"""Writing a Megatron checkpoint from logical tensors: weights and arguments, no optimizer.

Legacy files hold a rank's whole share, so a share is what must fit in memory; every rank fetches what it needs anew. The
distributed format is written weight by weight. The tracker is written last, so a write that fails leaves nothing that Megatron
would load.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError, ConfigError, Problem
from petatron.base.safe_files import publish
from petatron.checkpoint.megatron.arguments import write_arguments
from petatron.checkpoint.megatron.open_checkpoint import TRACKER
from petatron.checkpoint.megatron.torch_dist_writer import GlobalTensor, Part, save_tensors
from petatron.checkpoint.megatron.weight_layouts import cut, pack
from petatron.checkpoint.megatron.weight_names import (
    Weight,
    experts_in,
    layer_of,
    megatron_weights,
    transformer_engine_name,
    with_layer,
)
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.sharding.shard_spec import padded

Fetch = Callable[[str], Tensor]
_KEPT = 3  # q, k and v, or gate and up of all experts of a layer


@dataclass(frozen=True, slots=True)
class _Job:
    """What to write; `rows` is the vocabulary with its padding, `mixed` says which layers have experts."""

    model: ModelConfig
    moe: MoEConfig | None
    weights: tuple[Weight, ...]
    mixed: tuple[bool, ...]
    fetch: Fetch
    tp: int
    pp: int
    ep: int
    rows: int

    def whole(self, weight: Weight) -> Tensor:
        """A Megatron weight in full."""
        parts = [self.fetch(name) for name in weight.logical]
        if weight.expert is not None:
            parts = [part[weight.expert] for part in parts]
        for part in parts:
            if part.dim() != len(weight.shape) or part.shape[1:] != weight.shape[1:]:
                raise CheckpointError(
                    f"{weight.logical[0]} is {list(part.shape)}, which does not fit Megatron's {weight.name} of "
                    f"{list(weight.shape)}. Give the config that the weights belong to."
                )
        return pack(weight, parts, self.model, rows=self.rows)

    def their_name(self, name: str) -> str:
        layer = layer_of(name)
        return transformer_engine_name(name, mixed=layer is not None and self.mixed[layer])


def write_megatron(
    folder: Path,
    *,
    iteration: int,
    model: ModelConfig,
    moe: MoEConfig | None,
    fetch: Fetch,
    tp: int,
    pp: int,
    ep: int = 1,
    format: Literal["legacy", "torch_dist"] = "torch_dist",
) -> Path:
    """Write a step into a folder, move its tracker there, and return the step's own folder.

    `fetch` gives whole logical tensors by name; tp, pp and ep are the ranks that legacy files are for. Iteration 0 is written as
    a release, since Megatron has no step 0.
    """
    moe = moe if moe is not None and moe.num_experts is not None else None
    if problems := _layout_problems(model, moe, tp, pp, ep):
        raise ConfigError(problems)
    assert model.vocab_size is not None, "the config is not derived"
    rows = padded(model.vocab_size, model.make_vocab_size_divisible_by, tp)
    arguments = write_arguments(model, moe, tp=tp, pp=pp, ep=ep, padded=rows, iteration=iteration)
    step = folder / ("release" if iteration == 0 else f"iter_{iteration:07d}")
    if step.exists() and any(step.iterdir()):
        raise CheckpointError(f"{step} is already there. Remove it, or write to another folder.")
    weights, kept = megatron_weights(model, moe), _Kept(fetch)
    job = _Job(model, moe, weights, experts_in(model, moe), kept, tp, pp, ep, rows)
    common = {"args": arguments, "checkpoint_version": 3.0, "iteration": iteration}
    try:
        step.mkdir(parents=True, exist_ok=True)
        _write_legacy(step, job, common) if format == "legacy" else _write_dist(step, job, common)
        publish(folder / TRACKER, "release" if iteration == 0 else str(iteration))
    except OSError as error:
        raise CheckpointError(f"{step} cannot be written: {error}. Make room, or write to another folder.") from error
    return step


class _Kept:
    """Keeps the last few tensors, since the experts of a layer ask for the same ones one after another."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._last: OrderedDict[str, Tensor] = OrderedDict()

    def __call__(self, name: str) -> Tensor:
        if name not in self._last:
            while len(self._last) >= _KEPT:
                self._last.popitem(last=False)
            self._last[name] = self._fetch(name).detach().cpu()
        return self._last[name]


def _layout_problems(model: ModelConfig, moe: MoEConfig | None, tp: int, pp: int, ep: int) -> list[Problem]:
    shared = [
        ("--tensor-model-parallel-size", tp, "--num-query-groups", model.num_query_groups),
        ("--tensor-model-parallel-size", tp, "--ffn-hidden-size", model.ffn_hidden_size),
        ("--pipeline-model-parallel-size", pp, "--num-layers", model.num_layers),
    ]
    if moe is not None:
        shared += [
            ("--tensor-model-parallel-size", tp, "--moe-ffn-hidden-size", moe.moe_ffn_hidden_size),
            ("--tensor-model-parallel-size", tp, "the shared expert's", moe.moe_shared_expert_intermediate_size or tp),
            ("--expert-model-parallel-size", ep, "--num-experts", moe.num_experts),
        ]
    elif ep > 1:
        shared.append(("--expert-model-parallel-size", ep, "a model without experts:", 1))
    return [
        Problem(flag, str(size), f"does not divide {of} {whole}", "Use 1, or a divisor.")
        for flag, size, of, whole in shared
        if size < 1 or not whole or whole % size
    ]


def _write_legacy(step: Path, job: _Job, common: dict[str, Any]) -> None:
    for pp in range(job.pp):
        for tp in range(job.tp):
            for ep in range(job.ep):
                name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if job.pp > 1 else "") + (f"_{ep:03d}" if job.ep > 1 else "")
                (step / name).mkdir()
                share = {**common, "model": _share(job, tp, pp, ep)}
                torch.save(share, step / name / "model_optim_rng.pt")


def _share(job: _Job, tp: int, pp: int, ep: int) -> dict[str, Tensor]:
    """One rank's weights, with layers and experts counted from 0."""
    layers = job.model.num_layers // job.pp
    share: dict[str, Tensor] = {}
    for weight in job.weights:
        layer = layer_of(weight.name)
        names = _names_on_stage(job, weight.name, pp) if layer is None else [weight.name]
        here = layer is None or layer // layers == pp
        if not here or not names or (weight.expert is not None and weight.expert // _local_experts(job) != ep):
            continue
        shard = cut(weight.kind, job.whole(weight), tp=job.tp, rank=tp)
        for name in names:
            local = name if layer is None else with_layer(job.their_name(name), layer - pp * layers)
            share[_local_expert_name(job, local, weight.expert)] = shard
    return share


def _names_on_stage(job: _Job, name: str, pp: int) -> list[str]:
    """What an end of the model is called on a pipeline rank; a tied head is a copy of the embedding on the last one."""
    first, last = pp == 0, pp == job.pp - 1
    if name == "embedding.word_embeddings.weight":
        copied = last and not first and not job.model.untie_embeddings_and_output_weights
        return ([name] if first else []) + (["output_layer.weight"] if copied else [])
    return [name] if (first if name.startswith("embedding.") else last) else []


def _local_experts(job: _Job) -> int:
    assert job.moe is not None and job.moe.num_experts is not None
    return job.moe.num_experts // job.ep


def _local_expert_name(job: _Job, name: str, expert: int | None) -> str:
    """Experts in one grouped product are numbered parameters, others are modules."""
    if expert is None or job.moe is None:
        return name
    local = expert % _local_experts(job)
    before, _, after = name.partition(f".experts.{expert}.")
    return (
        f"{before}.experts.{after}{local}"
        if job.moe.moe_grouped_gemm
        else f"{before}.experts.local_experts.{local}.{after}"
    )


def _write_dist(step: Path, job: _Job, common: dict[str, Any]) -> None:
    save_tensors(step, _globals(job))
    torch.save(common, step / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backends |= {"common_backend": "torch", "common_backend_version": 1}
    publish(step / "metadata.json", json.dumps(backends))


def _globals(job: _Job) -> list[GlobalTensor]:
    """Weights of one name over all layers and experts are one tensor, unless the layers differ."""
    alike = len(set(job.mixed)) < 2
    grouped: dict[str, list[tuple[tuple[int, ...], Weight]]] = {}
    for weight in job.weights:
        layer = layer_of(weight.name)
        name, lead = job.their_name(weight.name), ()
        if layer is not None and alike:
            name, lead = name.replace(f"decoder.layers.{layer}.", "decoder.layers.", 1), (layer,)
        if weight.expert is not None:
            name, lead = name.replace(f".experts.{weight.expert}.", ".experts.experts."), (*lead, weight.expert)
        grouped.setdefault(name, []).append((lead, weight))
    return [_global(job, name, members) for name, members in grouped.items()]


def _global(job: _Job, name: str, members: Sequence[tuple[tuple[int, ...], Weight]]) -> GlobalTensor:
    last, weight = members[-1]
    inner = (job.rows, *weight.shape[1:]) if weight.kind == "vocabulary" else weight.shape
    parts = tuple(Part(lead, lambda weight=member: job.whole(weight)) for lead, member in members)
    return GlobalTensor(name, (*(index + 1 for index in last), *inner), len(last), parts)
