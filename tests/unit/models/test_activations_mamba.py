"""The bytes that scans and gated attention keep for the backward pass: formula against what really stays in memory."""

from __future__ import annotations

import pytest
import torch

from petatron.config.schema.memory import MemoryConfig
from tests.longform import diagonal, every_second
from tests.unit.models.test_activations import LLAMA, batch_of, build, measured, recompute, run_of

SIZES = "--mamba-state-dim 6 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-chunk-size 8"
MAMBA = f"{LLAMA} {SIZES} --hybrid-layer-pattern MMM"
DELTA = "--linear-key-head-dim 6 --linear-value-head-dim 5 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-chunk-size 8"
GATE = "--attention-output-gate --num-query-groups 2"
MODELS = {
    "mamba": MAMBA,
    "one row": f"{MAMBA} --micro-batch-size 1",
    "hybrid": f"{LLAMA} {SIZES} --hybrid-layer-pattern M*- --mamba-norm-groups 1",
}
FACTORS = (
    "--key-multiplier 0.5 --attention-out-multiplier 0.9 --ssm-multipliers 0.7 0.8 1.3 0.6 1.1 --ssm-out-multiplier 0.5"
)
MODELS |= {
    "parallel": f"{LLAMA} {SIZES} {FACTORS} --hybrid-layer-pattern P-P --mlp-multipliers 0.75 0.65 --mamba-gated-norm none",
    "norm then gate": f"{LLAMA} {SIZES} --hybrid-layer-pattern P-M --mamba-gated-norm norm_then_gate",
    "norm then gate, one row": f"{LLAMA} {SIZES} --hybrid-layer-pattern P-M --mamba-gated-norm norm_then_gate --micro-batch-size 1",
    "delta": f"{LLAMA} {DELTA} --hybrid-layer-pattern GGG",
    "delta, one row": f"{LLAMA} {DELTA} --hybrid-layer-pattern GGG --micro-batch-size 1",
    "next": f"{LLAMA} {DELTA} {GATE} --qk-layernorm --experimental-attention-variant gated_delta_net --linear-attention-freq 3",
    "gated, no positions": f"{LLAMA} {GATE} {DELTA} --position-embedding-type none --hybrid-layer-pattern G*-",
    "gated": f"{LLAMA} {DELTA} {GATE} --hybrid-layer-pattern G*-",
}
KIMI = "--experimental-attention-variant kimi_delta_attention --linear-attention-freq"
NO_ROPE = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 5 --v-head-dim 7 --position-embedding-type none"
MODELS |= {
    "kimi": f"{LLAMA} {DELTA} {NO_ROPE} {KIMI} 3 --qk-layernorm",
    "kimi, one row": f"{LLAMA} {DELTA} {NO_ROPE} {KIMI} [1,0,0] --micro-batch-size 1",
}
LIGHTNING = (
    "--experimental-attention-variant lightning_attention --linear-chunk-size 8 --norm-placement stream --lightning-stream-multiplier 1.4 "
    "--attention-stream-multiplier 1.3 --mlp-multipliers 1 0.9 --linear-attention-freq"
)
MODELS |= {
    "lightning": f"{LLAMA} {LIGHTNING} 3",
    "lightning, one row": f"{LLAMA} {LIGHTNING} [1,1,0] --micro-batch-size 1",
}
RECOMPUTE = {
    "nothing": MemoryConfig(),
    "mamba": MemoryConfig(recompute_granularity="selective", recompute_modules=("mamba", "delta")),
    "attention": MemoryConfig(recompute_granularity="selective", recompute_modules=("mamba", "delta", "attention")),
    "core": MemoryConfig(recompute_granularity="selective", recompute_modules=("mamba", "delta", "core_attn")),
    "uniform": MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "block": MemoryConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=2),
}


@diagonal(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", every_second(MODELS))
def test_kept_bytes_are_those_of_the_formula(kind: str, dtype: torch.dtype):
    run = run_of(MODELS[kind] + (" --bf16" if dtype == torch.bfloat16 else ""))
    found: dict[str, tuple[int, int]] = {}
    for name in RECOMPUTE if dtype == torch.float32 else ("nothing", "attention", "block"):
        model, streams = build(run, dtype=dtype)
        plan = recompute(run, model, RECOMPUTE[name], streams)
        found[name] = measured(model, batch_of(run)), plan.saved_bytes
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}
    idle = ["nothing", "mamba"] if "lightning" in kind and "mamba" in found else ["nothing"]
    assert [name for name, (real, _) in found.items() if real >= found["nothing"][0]] == idle
