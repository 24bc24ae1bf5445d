"""Checks the layers and experts that a file claims against what is stored, before anything is allocated for them.

A few bytes can say `num_layers: 1000000000`. Every layer has tensors of its own, so a model has no more layers than tensors; where every
expert is a tensor of its own, no more experts either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from petatron.base.errors import PetatronError
from petatron.base.untrusted_files import is_count
from petatron.config.schema.moe_layer_freq import MoELayerFreqError, parse_moe_layer_freq
from petatron.config.schema.sections.hybrid import EXPERTS

MAX_LAYERS = MAX_EXPERTS = MAX_HEADS = 100_000
MAX_WIDTH = 1 << 24
"""Far above any model."""


def check_counts(
    path: Path,
    refuse: Callable[[Path, str], PetatronError],
    model: Mapping[str, Any],
    moe: Mapping[str, Any],
    *,
    num_tensors: int,
    separate_experts: bool,
) -> None:
    """Raises the error that `refuse` returns if a file's settings (ModelConfig and MoEConfig values) claim more than is stored.

    separate_experts: whether each expert has tensors of its own.
    """
    for name in ("hidden_size", "kv_channels"):
        width = model.get(name)
        if width is not None and (not is_count(width) or width > MAX_WIDTH):
            raise refuse(path, f"says {_shown(width)} for {name}")
    layers, experts = model.get("num_layers", 1), moe.get("num_experts") or 1
    if not is_count(layers) or not is_count(experts):
        raise refuse(path, f"says {_shown(layers)} layers and {_shown(experts)} experts")
    if layers > min(MAX_LAYERS, num_tensors):
        raise refuse(path, f"says {_shown(layers)} layers, and {num_tensors:,} tensors are stored")
    expert_tensors = experts * _num_moe_layers(model, moe, layers) if separate_experts and moe else 0
    if experts > MAX_EXPERTS or expert_tensors > num_tensors:
        raise refuse(path, f"says {_shown(experts)} experts, and {num_tensors:,} tensors are stored")


def _num_moe_layers(model: Mapping[str, Any], moe: Mapping[str, Any], num_layers: int) -> int:
    hybrid = model.get("hybrid_layer_pattern")
    if isinstance(hybrid, str):
        return hybrid.count(EXPERTS)
    try:
        pattern = parse_moe_layer_freq(str(moe.get("moe_layer_freq", "1")))
    except MoELayerFreqError:  # building the config raises it
        return 1
    return -(-num_layers // max(pattern, 1)) if isinstance(pattern, int) else sum(bit == 1 for bit in pattern)


def _shown(count: object) -> str:
    return f"{count!r:.40}"
