"""Variants of layers train the same model in every layout, and generate with the cache what the whole pass says."""

from __future__ import annotations

import pytest
import torch

from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.mesh import ParallelMesh
from petatron.models.decoder import Decoder
from petatron.train.build_run import build_model
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout, check_part_of_model, tiny_run

MODELS = {
    "windows and positions by layer": (
        "--num-layers 4 --window-size 5 --window-attn-skip-freq 2 --no-rope-freq [0,1,0,0] --rotary-base-local 100 "
        "--rotary-seq-len-interpolation-factor 3"
    ),
    "norms on outputs and projections": "--norm-placement output --qk-layernorm --qk-layernorm-scope projection --num-query-groups 2",
    "norms on both sides, caps, scales": (
        "--norm-placement both --attn-logit-softcapping 0.7 --final-logit-softcapping 0.9 --softmax-scale 0.6 "
        "--embedding-multiplier 3 --residual-multiplier 0.4 --logits-scaling 0.3 --qk-layernorm --num-query-groups 2"
    ),
    "parallel branches": "--residual-branches parallel --normalization LayerNorm --rotary-percent 0.5 --add-bias-linear",
    "one norm for parallel branches": "--residual-branches parallel_shared_norm --rotary-interleaved --qk-layernorm",
    "learned sinks": "--softmax-type learnable --num-query-groups 2 --window-size 5 --window-attn-skip-freq 2",
    "sinks of zero, capped": "--softmax-type off-by-one --attn-logit-softcapping 0.5 --rotary-interleaved",
    "chunks, temperature and norms without weights": (
        "--num-layers 4 --attention-chunk-size 5 --no-rope-freq [0,1,0,0] --attention-temperature-scale 0.3 "
        "--attention-temperature-floor 3 --qk-l2-norm --rotary-interleaved --num-query-groups 2"
    ),
    "linear biases": "--position-embedding-type alibi --num-query-groups 2 --softmax-scale 0.6",
    "linear biases in a window": "--position-embedding-type alibi --num-attention-heads 6 --kv-channels 8 --window-size 7",
    "normed embeddings": (
        "--position-embedding-type alibi --embed-layernorm --normalization LayerNorm --add-bias-linear --activation gelu_tanh"
    ),
    "no biases at all, clipped": (
        "--position-embedding-type alibi --normalization LayerNorm --no-norm-bias --clip-qkv 0.2 --activation gelu"
    ),
}
PLAIN = {
    "windows and positions by layer": "--num-layers 4 --window-size 5",
    "norms on outputs and projections": "--norm-placement output --qk-layernorm --num-query-groups 2",
    "norms on both sides, caps, scales": "--norm-placement both --qk-layernorm --num-query-groups 2",
    "parallel branches": "--normalization LayerNorm --rotary-percent 0.5 --add-bias-linear",
    "one norm for parallel branches": "--residual-branches parallel_shared_norm --qk-layernorm",
    "learned sinks": "--num-query-groups 2 --window-size 5 --window-attn-skip-freq 2",
    "sinks of zero, capped": "--attn-logit-softcapping 0.5 --rotary-interleaved",
    "chunks, temperature and norms without weights": "--num-layers 4 --no-rope-freq [0,1,0,0] --rotary-interleaved --num-query-groups 2",
    "linear biases": "--position-embedding-type none --num-query-groups 2 --softmax-scale 0.6",
    "linear biases in a window": "--position-embedding-type none --num-attention-heads 6 --kv-channels 8 --window-size 7",
    "normed embeddings": "--position-embedding-type alibi --normalization LayerNorm --add-bias-linear --activation gelu_tanh",
    "no biases at all, clipped": "--position-embedding-type alibi --normalization LayerNorm --no-norm-bias --activation gelu",
}
"""The model without its variants, or without one of them."""
LAYOUTS = {
    "tp2-sp": ("--tp 2 --sequence-parallel", 2),
    "cp2": ("--cp 2", 2),
    "tp2": ("--tp 2", 2),
    "cp2-gather": ("--cp 2 --cp-comm-type all_gather", 2),
    "cp2-a2a": ("--cp 2 --cp-comm-type a2a", 2),
    "pp2": ("--pp 2", 2),
    "tp2-cp2": ("--tp 2 --cp 2 --sequence-parallel", 4),
    "fsdp": ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
    "recompute": ("--tp 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2),
    "selective": ("--tp 2 --sequence-parallel --recompute-granularity selective --recompute-modules attention mlp", 2),
    "cp2-documents": ("--cp 2 --reset-attention-mask --reset-position-ids", 2),
}
AT_ONCE = ("tp2-sp", "cp2")


def flags_of(model: str, layout: str) -> tuple[str, str, int]:
    """Flags of the model and of the layout, and its ranks; documents belong to both, so that one process has them too."""
    flags, world_size = LAYOUTS[layout]
    documents = "--reset-attention-mask --reset-position-ids"
    return f"{MODELS[model]} {documents}" if documents in flags else MODELS[model], flags, world_size


@diagonal(5)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (model, layout) if layout == AT_ONCE[at % 2] else later(model, layout)
        for at, model in enumerate(MODELS)
        for layout in LAYOUTS
    ],
)
def test_every_layout_trains_the_same_model(ranks: RankPool, model: str, layout: str):
    model_flags, layout_flags, world_size = flags_of(model, layout)
    check_layout(ranks, layout_flags, model_flags, world_size=world_size)


@diagonal(3)
@pytest.mark.parametrize("model", MODELS)
def test_the_variant_is_part_of_the_model(model: str):
    check_part_of_model(MODELS[model], PLAIN[model])


@diagonal(2)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_of_the_cache_are_those_of_the_whole_pass(model: str):
    run = tiny_run(f"{MODELS[model]} --init-method-std 0.5", dtype="float64")
    built = build_model(run, ParallelMesh.single(torch.device("cpu")))
    assert isinstance(built.module, Decoder)
    built.module.eval()
    prompts = [[5, 9, 2, 77, 31, 8, 100], [3, 1, 4], [11] * 9]
    engine = Engine(built, options=EngineOptions(page_size=4, max_step_tokens=6))
    answers = engine.complete_on_all_ranks(prompts, SamplingParams(max_new_tokens=6, temperature=0.0))
    for prompt, [answer] in zip(prompts, answers):
        grown = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                grown.append(int(built.module.logits(torch.tensor([grown]))[0, -1].argmax()))
        assert answer.ids == grown[len(prompt) :]
