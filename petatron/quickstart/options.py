"""The quickstart's model and options; separate from its stages, so that help imports no library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A LLaMA in miniature: 1.7 million parameters, which two idle cores train on a million tokens in about two minutes. What counts
# in so short a run is the number of steps and the variety of each batch: hence few layers and short samples. Weights start
# larger than in a large model, since their standard deviation should scale with 1/sqrt(width).
MODEL: Mapping[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 128,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.04,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartOptions:
    """Options of the quickstart; the last fields are for tests."""

    out: str = "runs/quickstart"
    """Output folder."""
    tensor_parallel: int = 2
    """Ranks that share the model."""
    steps: int | None = None
    """Training iterations; None: as many as fit into the time."""
    minutes: float = 3.0
    """Time for everything; training stops early enough for it even if steps are left."""
    fresh: bool = False
    """Redo all stages."""
    corpus_bytes: int = 10_000_000
    min_files: int = 200
    vocab_size: int = 4096
    batch_size: int = 8
    new_tokens: int = 110
    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)
