"""A layout in words, from its settings: those of a config, of a checkpoint or of a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.text import count_with_noun

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}


def layout_text(parallel: Mapping[str, Any]) -> str:
    """Describes the settings of a layout: `tp 2, dp 2, optim sharded, 4 ranks`."""
    words = [
        f"{short} {size}" for short, name in _SIZES.items() if isinstance(size := parallel.get(name), int) and size > 1
    ]
    sharding = parallel.get("data_parallel_sharding_strategy")
    words += [f"{sharding} sharded"] if sharding not in (None, "no_shard") else []
    ranks = parallel.get("world_size")
    return ", ".join([*words, count_with_noun(ranks if isinstance(ranks, int) and ranks > 0 else 1, "rank")])
