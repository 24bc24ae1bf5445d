"""Prints the first lines of a run: model, data, length, layout, precision and memory, in plain words.

What a reader needs to see is an event for every console. Details (what each pipeline stage recomputes, the forecast by kind) are events
that only the log keeps. So are the versions and the device, in the first record.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from petatron.base.device import DeviceInfo
from petatron.base.format_text import abbreviate_names, count_with_noun
from petatron.base.version import __version__
from petatron.config import RunConfig
from petatron.config.layout_and_precision_text import precision_text
from petatron.config.parse_name_value import format_named_settings
from petatron.config.required_settings import known_vocab_size
from petatron.config.schema.objective_and_dataset_names import EXTERNAL, GPT_DATASET, NEXT_TOKEN
from petatron.config.schema.sections.mup import relative_width
from petatron.data.blended_dataset import parse_weighted_prefixes
from petatron.data.build_datasets import chosen_kind, chosen_kind_name
from petatron.data.external_loader import registered_dataloader
from petatron.data.tokenizer import Tokenizer
from petatron.estimate.flops import parameter_count
from petatron.estimate.memory.forecast import forecast_memory, format_gigabytes
from petatron.estimate.recompute_plan import RecomputePlan
from petatron.models.frozen_params import describe_frozen, frozen_params
from petatron.models.objective import build_objective
from petatron.models.registry import model_spec
from petatron.schedule.pipeline_plan import num_micro_batches
from petatron.train.build_run import RunLength
from petatron.train.global_batch_size import BatchSizeSchedule


class RunHeader:
    """What is known of a run before the first step; computed once, since a memory plan of a large model takes a while."""

    def __init__(self, run: RunConfig, device: DeviceInfo, plans: Sequence[RecomputePlan]) -> None:
        self._run, self._device, self._plans = run, device, plans
        forecasts = forecast_memory(run, device=device.kind, plans=plans)
        self._forecast = max(forecasts, key=lambda forecast: forecast.total)

    def lines(self, length: RunLength, tokenizer: Tokenizer | None) -> list[str]:
        """Returns the lines for people."""
        lines = {
            "model": _model(self._run),
            "data": _data(self._run, tokenizer),
            "length": _length(self._run, length),
            "layout": _layout(self._run, self._device),
            "precision": precision_text(self._run),
            "memory": self._memory(),
        }
        if self._run.train.objective not in (None, NEXT_TOKEN):
            lines["objective"] = _objective(self._run)
        if self._run.model.use_mup:
            lines["muP"] = _mup(self._run)
        if frozen := frozen_params(self._run):
            lines["trained"] = describe_frozen(model_spec(self._run), frozen)
        return [f"{name + ':':<11}{text}" for name, text in lines.items()]

    def details(self) -> list[str]:
        """Returns the lines for the log alone."""
        stages = [f"stage {number}: {plan.describe()}" for number, plan in enumerate(self._plans)]
        return [*stages, f"memory forecast: {self._forecast.describe()}"]

    def _memory(self) -> str:
        forecast, device = self._forecast, self._device
        owner = "the device" if device.kind == "cuda" else "this machine"
        state, rest = forecast.state.total, forecast.activations + forecast.logits
        parts = f"{format_gigabytes(state)} weights, gradients and optimizer; {format_gigabytes(rest)} activations"
        needed, total = format_gigabytes(forecast.total), format_gigabytes(device.memory_bytes)
        return f"{needed} GB per rank forecast ({parts}); {owner} has {total} GB{self._recompute()}"

    def _recompute(self) -> str:
        texts = dict.fromkeys(plan.describe_modules() for plan in self._plans if any(plan.modules))
        if len(texts) > 1:
            return "; recompute differs by pipeline stage, see the log"
        return "".join(f"; recompute: {text}" for text in texts)


def environment_versions(device: DeviceInfo) -> dict[str, str]:
    """Returns versions and device by name; nothing that tells who ran it, or where.

    >>> from petatron.base.device import detect_device
    >>> sorted(environment_versions(detect_device("cpu")))
    ['device', 'device memory', 'numpy', 'petatron', 'python', 'system', 'torch']
    """
    versions = {
        "petatron": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.name,
        "device memory": f"{device.memory_bytes / 1e9:.1f} GB",
    }
    if device.kind == "cuda" and torch.version.cuda is not None:
        versions["CUDA"] = torch.version.cuda
    return versions


def _model(run: RunConfig) -> str:
    model, moe = run.model, run.moe
    count = partial(parameter_count, model_spec(run))
    if moe.num_experts is None:
        size, experts = f"{count():,} parameters", ""
    else:
        size = f"{count():,} parameters, {count(active=True):,} of them active per token"
        experts = f", {moe.num_experts} experts of which a token uses {moe.moe_router_topk}"
    grouped = model.num_query_groups != model.num_attention_heads
    groups = f" ({count_with_noun(model.num_query_groups, 'kv head')})" if grouped else ""
    shape = f"{count_with_noun(model.num_layers, 'layer')} of width {model.hidden_size:,}"
    if model.hybrid_layer_pattern is not None:
        shape += f" ({model.hybrid_layer_pattern})"
    heads = f", {count_with_noun(model.num_attention_heads, 'head')}{groups}" if model.num_attention_heads else ""
    return f"{model.model_type}, {size}: {shape}{heads}{experts}"


def _mup(run: RunConfig) -> str:
    model = run.model
    factors = {
        "embeddings": model.embedding_multiplier,
        "logits": 1.0 / model.logits_scaling,
        "scores": model.softmax_scale,
    }
    told = ", ".join(f"{name} x {factor:g}" for name, factor in factors.items() if factor is not None)
    width = relative_width(model, model.hidden_size)
    return f"base width {model.mup_base_hidden_size or model.hidden_size:,}, of which this model has {width:g} times; {told}"


def _data(run: RunConfig, tokenizer: Tokenizer | None) -> str:
    prefixes = run.data.train_data_path or run.data.data_path
    if run.data.dataloader_type == EXTERNAL:
        source = f"external, {registered_dataloader().name}"
    elif run.rollout.rollout_prompts:
        rewarding = (*run.rollout.rewards, *(() if run.rollout.environment is None else (run.rollout.environment,)))
        rewards = f", rewarded for {', '.join(rewarding)}" if rewarding else ""
        source = f"answers to {abbreviate_names(run.rollout.rollout_prompts)}, drawn by the model{rewards}"
    elif run.data.mock_data:
        source = "made-up (--mock-data)"
    elif prefixes:
        source = abbreviate_names(parse_weighted_prefixes(prefixes)[1])
    else:
        source = f"as listed in {run.data.data_args_path}"
    ids = "no tokenizer" if tokenizer is None else f"{tokenizer.name}, {tokenizer.vocab_size:,} ids"
    padded = known_vocab_size(run.model)
    more = "" if tokenizer is None or padded == tokenizer.vocab_size else f" of the model's {padded:,}"
    return f"{source}{_dataset_kind(run)}; {ids}{more}"


def _dataset_kind(run: RunConfig) -> str:
    if run.data.dataloader_type == EXTERNAL or run.rollout.rollout_prompts:
        return ""
    name = chosen_kind_name(run)
    return (
        "" if name == GPT_DATASET else f", dataset {name}{format_named_settings(chosen_kind(run), changed_alone=True)}"
    )


def _objective(run: RunConfig) -> str:
    objective = build_objective(run)
    weights = [f"{loss.name} {loss.weight:g}" for loss in objective.losses if loss.weight != 1]
    weighted = f"; loss weights: {', '.join(weights)}" if weights else ""
    return f"{run.train.objective}{format_named_settings(objective)}{weighted}"


def _length(run: RunConfig, length: RunLength) -> str:
    iterations = count_with_noun(length.iterations, "iteration")
    if run.rollout.rollout_prompts:
        answers, settings = count_with_noun(run.train.global_batch_size, "answer"), run.rollout
        most = count_with_noun(settings.max_answer_tokens, "token")
        turns = (
            "" if settings.environment is None else f" in each of at most {count_with_noun(settings.max_turns, 'turn')}"
        )
        return f"{iterations} of {answers}, {settings.rollouts_per_prompt} to each prompt, of at most {most}{turns}"
    samples = BatchSizeSchedule.from_config(run).samples_after(length.iterations)
    tokens = count_with_noun(samples * run.model.seq_length, "token")
    batch, length_text = (
        count_with_noun(run.train.global_batch_size, "sample"),
        count_with_noun(run.model.seq_length, "token"),
    )
    return f"{iterations} of {batch} of {length_text}, {tokens} in all"


def _layout(run: RunConfig, device: DeviceInfo) -> str:
    ranks = run.parallel.world_size or 1
    what = f"{device.name} ({device.kind})" if device.kind == "cuda" else "cpu"
    batches = f"{count_with_noun(num_micro_batches(run), 'micro-batch', 'es')} of {run.train.micro_batch_size} per rank and step"
    if run.rollout.rollout_prompts:
        rows = count_with_noun(run.train.micro_batch_size, "row")
        batches = f"micro-batches of {rows} of {count_with_noun(run.model.seq_length, 'token')}, into which answers are packed"
    if drawing := run.rollout.rollout_ranks:
        batches = f"{batches}; {count_with_noun(drawing, 'rank')} of their own that draw"
    if ranks == 1:
        return f"one rank on {what}; {batches}"
    return f"{' x '.join(_parallel_sizes(run))}: {ranks:,} ranks on {what}; {batches}"


def _parallel_sizes(run: RunConfig) -> Iterator[str]:
    parallel = run.parallel
    with_sequence = " with sequence parallel" if parallel.sequence_parallel else ""
    strategy = parallel.data_parallel_sharding_strategy
    sharded = "" if strategy == "no_shard" else f" sharding {strategy}"
    sizes: Sequence[tuple[str, int, str]] = (
        ("tensor parallel", parallel.tensor_model_parallel_size, with_sequence),
        ("context parallel", parallel.context_parallel_size, ""),
        ("pipeline parallel", parallel.pipeline_model_parallel_size, f" ({parallel.pipeline_schedule})"),
        ("data parallel", parallel.data_parallel_size, sharded),
        ("expert parallel", parallel.expert_model_parallel_size, ""),
    )
    return (f"{name} {size}{more}" for name, size, more in sizes if size > 1)
