"""Formats a parallel layout and a precision for messages, from the settings of a config, a checkpoint or a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.format_text import count_with_noun
from petatron.config.schema.parallel import weights_are_replicated
from petatron.config.schema.precision import PrecisionConfig
from petatron.config.schema.run import RunConfig

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}


def layout_text(parallel: Mapping[str, Any]) -> str:
    """Describes the settings of a layout: `tp 2, dp 2, optim sharded, 4 ranks`."""
    parts = [
        f"{short} {size}" for short, name in _SIZES.items() if isinstance(size := parallel.get(name), int) and size > 1
    ]
    sharding = parallel.get("data_parallel_sharding_strategy")
    parts += [f"{sharding} sharded"] if sharding not in (None, "no_shard") else []
    ranks = parallel.get("world_size")
    return ", ".join([*parts, count_with_noun(ranks if isinstance(ranks, int) and ranks > 0 else 1, "rank")])


def precision_name(precision: PrecisionConfig) -> str:
    """Returns the short name of the compute dtype; FP8 is not part of it."""
    return next((name for name in ("bf16", "fp16", "fp64") if getattr(precision, name)), "fp32")


def precision_text(run: RunConfig) -> str:
    """Describes the precision of a run, with all that is in FP8.

    >>> precision_text(RunConfig(precision=PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_output_head_backward=True)))
    "bf16, fp32 master weights, GEMMs in FP8 hybrid (tensorwise), those of the output head's backward too"
    """
    precision = run.precision
    name = precision_name(precision)
    parts = [name] if name in ("fp32", "fp64") else [name, "fp32 master weights"]
    if precision.fp8_format is not None:
        parts.append(f"GEMMs in FP8 {precision.fp8_format} ({precision.fp8_recipe})")
        parts += ["those of the output head's backward too"] if precision.fp8_output_head_backward else []
        if precision.first_last_layers_bf16:
            first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
            parts.append(f"not in the first {first} and last {count_with_noun(last, 'layer')}")
        gathers = precision.fp8_param_gather and weights_are_replicated(run)
        parts += ["weights all-gathered in FP8"] if gathers else []
    return ", ".join(parts)
