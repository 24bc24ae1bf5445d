"""The bytes kept for the backward pass: formula against what really stays in memory, for every kind of recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.config import RunConfig, load_config
from petatron.config.layer_pattern import moe_layers
from petatron.config.schema import MemoryConfig
from petatron.config.stages import Stage
from petatron.mesh.layout import Layout
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import RandomStreams
from petatron.mesh.spec import TensorSplit
from petatron.models.activations import ActivationShape
from petatron.models.base import Batch
from petatron.models.decoder import Decoder, shards
from petatron.models.recompute_plan import plan_recompute
from petatron.parallel.recompute import apply_recompute
from petatron.parallel.tensor import connect, split_vocabulary, split_weights
from tests.dist import RankPool
from tests.unit.models.kept import kept_bytes

BASE = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 131 --mock-data "
    "--make-vocab-size-divisible-by 8 --attention-dropout 0 --train-iters 1 --lr 1e-3 --micro-batch-size 2 "
    "--global-batch-size 4 --ffn-hidden-size 48 "
)
LLAMA = (
    f"{BASE} --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 "
)
MODELS = {
    "gpt": f"{BASE} --hidden-dropout 0",
    "gpt-dropout": BASE,
    "llama": LLAMA,
    "llama-gqa": f"{LLAMA} --num-query-groups 2 --micro-batch-size 1",
    "qwen3": f"{LLAMA} --num-query-groups 2 --qk-layernorm",
    "no-positions": f"{LLAMA} --position-embedding-type none --qk-layernorm --activation quick_gelu",
    "gpt-qk-norm": f"{BASE} --qk-layernorm --activation squared_relu",
    "relu": f"{BASE} --activation relu",
}
RECOMPUTE = {
    "nothing": MemoryConfig(),
    "core_attn": MemoryConfig(recompute_granularity="selective"),
    "layernorm": MemoryConfig(recompute_granularity="selective", recompute_modules=("layernorm",)),
    "mlp": MemoryConfig(recompute_granularity="selective", recompute_modules=("mlp",)),
    "attention": MemoryConfig(recompute_granularity="selective", recompute_modules=("attention", "core_attn")),
    "three": MemoryConfig(recompute_granularity="selective", recompute_modules=("core_attn", "mlp", "layernorm")),
    "all": MemoryConfig(recompute_granularity="selective", recompute_modules=("attention", "mlp", "layernorm")),
    "uniform-1": MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "uniform-2": MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    "block-2": MemoryConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=2),
}


SELECTIVE = RECOMPUTE["core_attn"]


def run_of(flags: str, *, world_size: int = 1) -> RunConfig:
    return load_config(flags.split(), world_size=world_size).config


def batch_of(run: RunConfig) -> Batch:
    torch.manual_seed(5)
    assert run.model.vocab_size is not None
    text = torch.randint(0, run.model.vocab_size, (run.train.micro_batch_size, run.model.seq_length + 1))
    return Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), torch.ones(text.shape[0], text.shape[1] - 1))


def build(
    run: RunConfig, *, dtype: torch.dtype = torch.float32, stage: Stage | None = None
) -> tuple[Decoder, RandomStreams]:
    """The whole model or a stage on one device, with weights that depend on their names only."""
    mesh = ParallelMesh.single()
    with_experts = run.moe.num_experts is not None
    model = Decoder(run.model, run.moe if with_experts else None, experts_in=moe_layers(run), stage=stage).to(dtype)
    return filled(model), RandomStreams.start(run.train.seed, mesh)


def filled(model: Decoder) -> Decoder:
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        parameter.data.normal_(0.0, 0.2, generator=generator)
    return model.train()


def measured(model: Decoder, batch: Batch, **options: Any) -> int:
    parts = [batch.tokens, batch.labels, batch.loss_mask]
    rows = (batch.tokens.shape[1], batch.tokens.shape[0], model.config.hidden_size)

    def forward() -> Tensor:
        # What comes from the stage before is kept too, so it is made here.
        x_SBD = None if model.stage.embedding else torch.randn(rows, requires_grad=True)
        return model(batch, x_SBD, **options)

    return kept_bytes(forward, without=[*model.parameters(), *parts])[0]


def check(run: RunConfig, *, stage: Stage | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Every kind of recompute keeps what the formula says, and less than none."""
    shape, batch = ActivationShape.of(run, device="cpu"), batch_of(run)
    assert shape.element == dtype.itemsize
    found: dict[str, tuple[int, int]] = {}
    for name, memory in RECOMPUTE.items():
        model, streams = build(run, dtype=dtype, stage=stage)
        apply_recompute(model, memory, streams, shape=shape)
        found[name] = measured(model, batch), plan_recompute(memory, shape, model.stage).kept_bytes
    _compare(found)


def _compare(found: dict[str, tuple[int, int]]) -> None:
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}
    assert all(real < found["nothing"][0] for name, (real, _) in found.items() if name != "nothing"), found


@pytest.mark.parametrize("kind", MODELS)
def test_kept_bytes_are_those_of_the_formula(kind: str):
    check(run_of(MODELS[kind]))


@pytest.mark.parametrize("flag", ["bf16", "fp64"])
def test_in_other_precisions(flag: str):
    check(
        run_of(f"{LLAMA} --num-query-groups 2 --qk-layernorm --{flag}"),
        dtype={"bf16": torch.bfloat16, "fp64": torch.float64}[flag],
    )


@pytest.mark.parametrize("stage", [Stage((0,), True, False), Stage((1, 2), False, False), Stage((2,), False, True)])
def test_of_pipeline_stages(stage: Stage):
    check(run_of(LLAMA), stage=stage)


def test_fused_attention_over_windows_keeps_no_more():
    """But for the bounds of each token: at 16 tokens, 4 heads and 2 rows the scores would be 8192 bytes a layer."""
    run = run_of(f"{LLAMA} --window-size 5")
    shape, (model, _) = ActivationShape.of(run, device="cpu"), build(run)
    assert (
        0 <= measured(model, batch_of(run)) - plan_recompute(MemoryConfig(), shape, model.stage).kept_bytes < 3 * 1024
    )


MIXTURES = {
    "plain": "",
    "gelu": "--activation gelu",
    "aux": "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1",
    "shared": "--moe-shared-expert-intermediate-size 40",
    "gated-shared": "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
    "wide-router": "--moe-router-dtype fp64",
    "wide-router-shared": "--moe-router-dtype fp64 --moe-shared-expert-intermediate-size 40",
    "latent": "--moe-latent-size 8",
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_of_mixtures_up_to_what_routing_keeps(kind: str):
    """The formula leaves out indices, weights and scores: a few numbers per token, choice and expert."""
    run = run_of(
        f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-layer-freq 2 {MIXTURES[kind]}"
    )
    shape, batch = ActivationShape.of(run, device="cpu"), batch_of(run)
    assert shape.mixed == (True, False, True)
    left_out: dict[str, int] = {}
    found: dict[str, int] = {}
    for modules in ("mlp", "layernorm", "moe_act", "shared_experts", "moe_act layernorm shared_experts", "moe"):
        model, streams = build(run)
        memory = replace(SELECTIVE, recompute_modules=tuple(modules.split()))
        apply_recompute(model, memory, streams, shape=shape)
        reports: dict[int, Tensor] = {}
        found[modules] = measured(model, batch, extra_loss_scale=torch.tensor(0.5), reports=reports)
        found[modules] -= sum(report.nbytes for report in reports.values())
        left_out[modules] = found[modules] - plan_recompute(memory, shape, model.stage).kept_bytes
    of_whole = left_out.pop("moe")
    assert max(left_out.values()) - min(left_out.values()) < 16, f"whatever is recomputed: {left_out}"
    assert 0 <= of_whole <= min(left_out.values()) <= 2 * (shape.tokens * (2 * 40 + 4 * 24) + 4 * 32 * 8)
    assert found["moe"] < found["moe_act"] > found["moe_act layernorm shared_experts"]


def _measure_on_rank(flags: str, names: list[str]) -> dict[str, tuple[int, int]]:
    run = run_of(flags, world_size=dist.get_world_size())
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    sequence = run.parallel.sequence_parallel
    shape, batch = ActivationShape.of(run, device="cpu"), batch_of(run)
    found: dict[str, tuple[int, int]] = {}
    for name in names:
        streams = RandomStreams.start(run.train.seed, mesh)
        model, table = Decoder(run.model), shards(run.model)
        split_weights(model, table, TensorSplit(tp_size=mesh.tp.size, tp_rank=mesh.tp.rank, sequence_parallel=sequence))
        connect(model, table, mesh.tp, sequence=sequence, shared=streams.shared)
        split_vocabulary(model, table, mesh.tp)
        apply_recompute(filled(model), RECOMPUTE[name], streams, shape=shape)
        found[name] = measured(model, batch), plan_recompute(RECOMPUTE[name], shape, model.stage).kept_bytes
    return found


@pytest.mark.parametrize("sequence", ["", "--sequence-parallel"])
@pytest.mark.parametrize("kind", ["gpt-dropout", "qwen3"])
def test_split_over_tensor_parallel_ranks(ranks: RankPool, kind: str, sequence: str):
    flags = f"{MODELS[kind]} --num-query-groups 2 --vocab-size 128 --tp 2 {sequence}"
    for found in ranks.run(_measure_on_rank, 2, flags, list(RECOMPUTE)):
        _compare(found)
