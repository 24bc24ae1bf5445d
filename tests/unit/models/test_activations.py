"""The bytes kept for the backward pass: formula against what really stays in memory, for every kind of recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from petatron.config import RunConfig
from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.memory import MemoryConfig
from petatron.estimate.recompute_plan import RecomputePlan, plan_recompute
from petatron.kernels.registry import KernelContext
from petatron.layers.linear import Linear
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.mesh.rng import RandomStreams
from petatron.models.batch import Batch
from petatron.models.decoder import Decoder
from petatron.models.registry import model_spec
from petatron.parallel.activation_recompute import apply_recompute
from petatron.parallel.expert_parallel_token_dispatcher import apply_expert_parallel
from petatron.parallel.install_fp8_gemms import apply_fp8
from petatron.parallel.pipeline.weight_grad_queue import WeightGradQueue
from petatron.parallel.tensor_parallel import (
    ColumnParallelOp,
    apply_tensor_parallel,
    set_weight_grad_target,
    shard_params,
    shard_vocabulary,
)
from petatron.sharding.shard_spec import ModelParallelCoordinate
from petatron.validate import load_config
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.run_stage import run_stage
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
MLA = "--multi-latent-attention --kv-lora-rank 20 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"
MODELS = {
    "gpt": f"{BASE} --hidden-dropout 0",
    "gpt-dropout": BASE,
    "llama": LLAMA,
    "llama-gqa": f"{LLAMA} --num-query-groups 2 --micro-batch-size 1",
    "qwen3": f"{LLAMA} --num-query-groups 2 --qk-layernorm",
    "no-positions": f"{LLAMA} --position-embedding-type none --qk-layernorm --activation quick_gelu",
    "gpt-qk-norm": f"{BASE} --qk-layernorm --activation squared_relu",
    "relu": f"{BASE} --activation relu",
    "norm-without-weights": f"{LLAMA} --qk-l2-norm --num-query-groups 2",
    "neighboring-pairs": f"{LLAMA} --rotary-interleaved",
    "bounded-gates": f"{LLAMA} --activation quick_geglu --glu-linear-offset 1.0 --activation-func-clamp-value 0.5",
    "normed-embeddings": f"{BASE} --hidden-dropout 0 --embed-layernorm --no-norm-bias",
    "clipped": f"{LLAMA} --clip-qkv 0.5 --num-query-groups 2",
    "clipped-qk-norm": f"{LLAMA} --clip-qkv 0.5 --qk-layernorm",
    "clipped-gated": f"{LLAMA} --clip-qkv 0.5 --attention-output-gate",
    "mla": f"{LLAMA} {MLA} --q-lora-rank 12 --qk-layernorm",
    "mla-hidden-queries": f"{LLAMA} {MLA} --micro-batch-size 1",
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
    run: RunConfig, *, dtype: torch.dtype = torch.float32, stage: PipelineStage | None = None
) -> tuple[Decoder, RandomStreams]:
    """The whole model or a stage on one device, with weights that depend on their names only."""
    mesh, spec = ParallelMesh.single(), model_spec(run)
    model = built(run, stage).to(dtype)
    apply_tensor_parallel(model, spec.params(model.stage), mesh.tp, sequence_parallel=False, shared_generator=None)
    return filled(model), RandomStreams.seeded(run.train.seed, mesh)


def built(run: RunConfig, stage: PipelineStage | None = None) -> Decoder:
    """The whole model or a stage, as its spec makes it."""
    spec = model_spec(run)
    model = spec.build_stage(stage or spec.whole_model)
    assert isinstance(model, Decoder)
    return model


def plan_of(run: RunConfig, model: Decoder, memory: MemoryConfig, **counts: int) -> RecomputePlan:
    return plan_recompute(
        memory, model_spec(run), ActivationShape.from_config(run, device="cpu"), model.stage, **counts
    )


def recompute(
    run: RunConfig, model: Decoder, memory: MemoryConfig, streams: RandomStreams, **counts: int
) -> RecomputePlan:
    """Applies the plan of a config to a stage, and returns it."""
    plan = plan_of(run, model, memory, **counts)
    apply_recompute(model, plan, streams)
    return plan


def filled(model: Decoder) -> Decoder:
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        parameter.data.normal_(0.0, 0.2, generator=generator)
    return model.train()


def take_gradients(model: Decoder) -> list[Tensor]:
    """As in training: products write their weights' gradients to buffers, the last one in the forward pass."""
    buffers = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    queue = WeightGradQueue()
    queue.accumulate = lambda weight, write: write(buffers[weight], True)
    set_weight_grad_target(model, queue)
    return list(buffers.values())


def measured(model: Decoder, batch: Batch, *, taken: bool = True, known: Sequence[Tensor] = (), **options: Any) -> int:
    buffers = take_gradients(model) if taken else []
    weights_SB = torch.rand(batch.labels.t().shape, dtype=torch.float64)
    parts = [batch.tokens, batch.labels, batch.loss_mask, weights_SB]
    rows = (batch.tokens.shape[1], batch.tokens.shape[0], model.config.hidden_size)

    def forward() -> Tensor:
        # What comes from the stage before is kept too, so it is made here.
        x_SBD = None if model.stage.has_embedding else torch.randn(rows, requires_grad=True)
        return run_stage(model, batch, x_SBD, loss_weights_SB=weights_SB, **options)

    return kept_bytes(forward, without=[*module_tensors(model), *buffers, *parts, *known])[0]


def module_tensors(model: Decoder) -> list[Tensor]:
    """Parameters, and the tables that modules have had since they were built."""
    leaves = (leaf for module in model.modules() for leaf in tree_leaves(vars(module)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def check(
    run: RunConfig,
    *,
    stage: PipelineStage | None = None,
    dtype: torch.dtype = torch.float32,
    kinds: Sequence[str] = tuple(RECOMPUTE),
) -> None:
    """These kinds of recompute keep what the formula says, and less than none."""
    shape, batch = ActivationShape.from_config(run, device="cpu"), batch_of(run)
    assert shape.element_bytes == dtype.itemsize
    found: dict[str, tuple[int, int]] = {}
    for name in kinds:
        model, streams = build(run, dtype=dtype, stage=stage)
        plan = recompute(run, model, RECOMPUTE[name], streams)
        found[name] = measured(model, batch), plan.saved_bytes
    _compare(found, without_effect="layernorm" if "layernorm" in kinds else None)


def _compare(found: dict[str, tuple[int, int]], *, without_effect: str | None) -> None:
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}
    idle = [name for name, (real, _) in found.items() if real >= found["nothing"][0]]
    assert idle == ["nothing", *([] if without_effect is None else [without_effect])], found


ALL_KINDS = ("gpt", "llama", "mla")
FEW_KINDS = ("nothing", "mlp", "attention", "uniform-2")


@diagonal(3)
@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        *((kind, RECOMPUTE if kind in ALL_KINDS else FEW_KINDS) for kind in MODELS),
        *(later(kind, RECOMPUTE) for kind in MODELS if kind not in ALL_KINDS),
    ],
)
def test_kept_bytes_are_those_of_the_formula(kind: str, kinds: Sequence[str]):
    check(run_of(MODELS[kind]), kinds=tuple(kinds))


@pytest.mark.parametrize(
    "adapter", ["lora --adapter-dropout 0.1", "dora", "ia3 --adapter-targets q_proj v_proj down_proj"]
)
def test_adapters_keep_what_the_formula_says(adapter: str):
    check(run_of(f"{MODELS['llama-gqa']} --adapter-rank 3 --adapter {adapter}"), kinds=FEW_KINDS)


@pytest.mark.parametrize(
    "flags",
    [
        "--position-embedding-type alibi --num-query-groups 2",
        "--no-rope-freq [0,1,0] --attention-temperature-scale 0.3",
    ],
)
@pytest.mark.parametrize("memory", ["nothing", "attention", "uniform-1"])
def test_attention_that_needs_positions(flags: str, memory: str):
    """What is recomputed keeps these too: one number of eight bytes for each of 16."""
    run = run_of(f"{LLAMA} {flags}")
    model, streams = build(run)
    plan = recompute(run, model, RECOMPUTE[memory], streams)
    assert measured(model, batch_of(run)) - plan.saved_bytes == (0 if memory == "nothing" else 8 * 16)


@pytest.mark.parametrize("flag", ["bf16", "fp64"])
def test_in_other_precisions(flag: str):
    check(
        run_of(f"{LLAMA} --num-query-groups 2 --qk-layernorm --{flag}"),
        dtype={"bf16": torch.bfloat16, "fp64": torch.float64}[flag],
        kinds=FEW_KINDS,
    )


@pytest.mark.parametrize(
    "stage", [PipelineStage((0,), True, False), PipelineStage((1, 2), False, False), PipelineStage((2,), False, True)]
)
def test_of_pipeline_stages(stage: PipelineStage):
    check(run_of(LLAMA), stage=stage)


def test_fused_attention_over_windows_keeps_no_more():
    """But for the bounds of each token: at 16 tokens, 4 heads and 2 rows the scores would be 8192 bytes a layer."""
    run = run_of(f"{LLAMA} --window-size 5")
    model, _ = build(run)
    assert 0 <= measured(model, batch_of(run)) - plan_of(run, model, MemoryConfig()).saved_bytes < 3 * 1024


@pytest.mark.parametrize("flag", ["", "--bf16"])
def test_autograd_keeps_the_gradient_of_the_last_weight(flag: str):
    """Where nobody takes it, as with fully sharded weights; in float32, padding included."""
    run = run_of(f"{LLAMA} {flag}")
    shape = replace(ActivationShape.from_config(run, device="cpu"), fully_sharded=True)
    model, _ = build(run, dtype=torch.bfloat16 if flag else torch.float32)
    assert model.head is not None and model.head.weight is not None
    model.head.weight = torch.nn.Parameter(torch.zeros(136, 32, dtype=model.head.weight.dtype))
    real = measured(model, batch_of(run), taken=False)
    assert real == plan_recompute(MemoryConfig(), model_spec(run), shape, model.stage).saved_bytes
    sharded = run_of(f"{LLAMA} --data-parallel-sharding-strategy optim_grads_params", world_size=2)
    assert (
        ActivationShape.from_config(sharded, device="cpu").fully_sharded
        and not ActivationShape.from_config(run, device="cpu").fully_sharded
    )


MIXTURES = {
    "plain": "",
    "gelu": "--activation gelu",
    "bias": "--add-bias-linear",
    "aux": "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1",
    "shared": "--moe-shared-expert-intermediate-size 40",
    "gated-shared": "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
    "wide-router": "--moe-router-dtype fp64",
    "wide-router-shared": "--moe-router-dtype fp64 --moe-shared-expert-intermediate-size 40",
    "jitter": "--moe-input-jitter-eps 0.1",
    "latent": "--moe-latent-size 8",
    "one-row": "--micro-batch-size 1 --global-batch-size 2",
}
SOME_EXPERTS = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-layer-freq 2"


def _measured_mixture(model: Decoder, batch: Batch) -> int:
    reports: dict[int, Tensor] = {}
    found = measured(model, batch, aux_loss_scale=torch.tensor(0.5), router_statistics=reports)
    return found - sum(report.nbytes for report in reports.values())


@diagonal(3)
@pytest.mark.parametrize("kind", MIXTURES)
def test_of_mixtures_up_to_what_routing_keeps(kind: str):
    """The formula leaves out indices, weights and scores: a few numbers per token, choice and expert."""
    run = run_of(f"{SOME_EXPERTS} {MIXTURES[kind]}")
    shape, batch = ActivationShape.from_config(run, device="cpu"), batch_of(run)
    assert model_spec(run).moe_layers == (0, 2)
    left_out: dict[str, int] = {}
    found: dict[str, int] = {}
    for modules in ("moe_act", "mlp", "layernorm", "shared_experts", "layernorm shared_experts", "moe"):
        model, streams = build(run)
        memory = replace(SELECTIVE, recompute_modules=tuple(modules.split()))
        plan = recompute(run, model, memory, streams)
        found[modules] = _measured_mixture(model, batch)
        left_out[modules] = found[modules] - plan.saved_bytes
    of_whole = left_out.pop("moe")
    assert max(left_out.values()) - min(left_out.values()) < 16, f"whatever is recomputed: {left_out}"
    assert 0 <= of_whole <= min(left_out.values()) <= 2 * (shape.tokens * (2 * 40 + 4 * 24) + 4 * 32 * 8)
    own_copy = kind in ("wide-router", "wide-router-shared", "jitter")
    assert found["moe"] < found["layernorm"] <= found["moe_act"]
    assert (found["layernorm"] == found["moe_act"]) == own_copy


@diagonal(3)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("experts", [False, True])
def test_in_eight_bits(recipe: str, experts: bool):
    """Operands in eight bits and their scales, exactly, and what tensorwise casts keep; with experts up to what routing keeps."""
    width = {"blockwise": 128, "mxfp8": 64}.get(recipe, 48)
    flags = f"{SOME_EXPERTS} --moe-shared-expert-intermediate-size {width}" if experts else LLAMA
    sizes = f"--ffn-hidden-size {width} --hidden-size {128 if recipe == 'blockwise' else 32} --seq-length 64"
    run = run_of(f"{flags} {sizes} --bf16 --fp8-format hybrid --fp8-recipe {recipe}")
    batch = batch_of(run)
    situation = KernelContext.of(torch.device("cpu"), torch.bfloat16, allow_compile=False)
    more: set[int] = set()
    for name in ("nothing", "core_attn", "mlp", "attention", *(() if experts else ("uniform-1",))):
        model, streams = build(run, dtype=torch.bfloat16)
        gemms = apply_fp8(
            [model], run.precision, situation, num_layers=run.model.num_layers, cache_weights=False
        ).linears
        assert gemms
        plan = recompute(run, model, RECOMPUTE[name], streams)
        more.add(_measured_mixture(model, batch) - plan.saved_bytes)
    assert len(more) == 1
    # A weight has its scale and the guess at its next; an input has a guess where no amax is noted: the attention's output.
    scales = 2 * len(gemms) + run.model.num_layers if recipe == "tensorwise" else 0
    assert 0 < more.pop() < 2 * 128 * 90 if experts else more == {4 * scales}


def _measure_on_rank(flags: str, names: list[str]) -> dict[str, tuple[int, int]]:
    run = run_of(flags, world_size=dist.get_world_size())
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    sequence, batch = run.parallel.sequence_parallel, batch_of(run)
    found: dict[str, tuple[int, int]] = {}
    for name in names:
        streams = RandomStreams.seeded(run.train.seed, mesh)
        model, table = built(run), model_spec(run).params()
        shard_params(model, table, ModelParallelCoordinate.from_mesh(mesh, sequence_parallel=sequence))
        apply_tensor_parallel(model, table, mesh.tp, sequence_parallel=sequence, shared_generator=streams.tp_shared)
        shard_vocabulary(model, table, mesh.tp)
        plan = recompute(run, filled(model), RECOMPUTE[name], streams)
        found[name] = measured(model, batch), plan.saved_bytes
    return found


@diagonal(2)
@pytest.mark.parametrize(
    ("kind", "sequence"),
    [
        ("gpt-dropout", ""),
        ("qwen3", "--sequence-parallel"),
        later("qwen3", ""),
        later("gpt-dropout", "--sequence-parallel"),
    ],
)
def test_split_over_tensor_parallel_ranks(ranks: RankPool, kind: str, sequence: str):
    flags = f"{MODELS[kind]} --num-query-groups 2 --vocab-size 128 --tp 2 {sequence}"
    for found in ranks.run(_measure_on_rank, 2, flags, list(RECOMPUTE)):
        _compare(found, without_effect="layernorm")


@diagonal(2)
@pytest.mark.parametrize(
    ("queries", "sequence"),
    [
        ("--q-lora-rank 12 --qk-layernorm", "--sequence-parallel"),
        ("", ""),
        later("--q-lora-rank 12 --qk-layernorm", ""),
        later("", "--sequence-parallel"),
    ],
)
def test_latent_attention_over_tensor_parallel_ranks(ranks: RankPool, queries: str, sequence: str):
    flags = f"{LLAMA} {MLA} {queries} --vocab-size 128 --tp 2 {sequence}"
    for found in ranks.run(_measure_on_rank, 2, flags, list(RECOMPUTE)):
        _compare(found, without_effect="layernorm")


def _measure_both_ways(flags: str) -> tuple[int, int]:
    """What is kept as training does it, and if products kept what they gather."""
    run = run_of(flags, world_size=dist.get_world_size())
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    found: list[int] = []
    for regather in (True, False):
        model, table = built(run), model_spec(run).params()
        shard_params(model, table, ModelParallelCoordinate.from_mesh(mesh, sequence_parallel=True))
        apply_tensor_parallel(model, table, mesh.tp, sequence_parallel=True, shared_generator=None)
        shard_vocabulary(model, table, mesh.tp)
        for module in filled(model).modules():
            if isinstance(module, Linear) and isinstance(module.linear_op, ColumnParallelOp) and not regather:
                module.linear_op = replace(module.linear_op, regather=False)
        found.append(measured(model, batch_of(run)))
    return found[0], found[1]


@pytest.mark.parametrize("tp", [2, later(4)])
def test_gathered_inputs_are_not_kept(ranks: RankPool, tp: int):
    """They would be two per layer of all tokens, however many ranks share the rest."""
    flags = f"{LLAMA} --vocab-size 128 --tp {tp} --sequence-parallel"
    for found, kept in ranks.run(_measure_both_ways, tp, flags):
        assert kept - found == 3 * 2 * (2 * 16 * 32 * 4)


def _measure_experts_on_rank(flags: str, asked: list[str]) -> list[int]:
    """What is kept beyond the formula, for everything that is asked to be recomputed."""
    run = run_of(flags, world_size=dist.get_world_size())
    mesh, sequence = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank()), run.parallel.sequence_parallel
    batch, table = batch_of(run), model_spec(run).params()
    split = ModelParallelCoordinate.from_mesh(mesh, sequence_parallel=sequence)
    more: list[int] = []
    for modules in asked:
        memory = replace(SELECTIVE, recompute_modules=tuple(modules.split()))
        model = built(run)
        shard_params(model, table, split)
        apply_tensor_parallel(model, table, mesh.tp, sequence_parallel=sequence, shared_generator=None)
        shard_vocabulary(model, table, mesh.tp)
        apply_expert_parallel(filled(model), mesh, run.moe)
        plan = recompute(run, model, memory, RandomStreams.seeded(run.train.seed, mesh))
        more.append(_measured_mixture(model, batch) - plan.saved_bytes)
    return more


@diagonal(3)
@pytest.mark.parametrize(
    "layout",
    [
        "--ep 2 --moe-token-dispatcher-type alltoall",
        "--ep 2 --moe-token-dispatcher-type allgather",
        "--tp 2 --sequence-parallel --ep 2 --expert-tensor-parallel-size 1",
        "--tp 2 --sequence-parallel --expert-tensor-parallel-size 2",
    ],
)
def test_mixtures_over_ranks(ranks: RankPool, layout: str):
    """Of both ranks together, since experts share the rows unevenly; up to what routing and dispatch keep."""
    flags = f"{SOME_EXPERTS} --moe-shared-expert-intermediate-size 40 --vocab-size 128 {layout}"
    asked = ["mlp", "layernorm", "layernorm shared_experts", "attention shared_experts", "layernorm attention mlp"]
    more = [sum(each) for each in zip(*ranks.run(_measure_experts_on_rank, 2, flags, asked), strict=True)]
    tokens = 32 if "--tp" in layout else 64
    hidden = 2 * tokens * 32 * 4  # of every token in both mixtures: less than the smallest mistake there could be
    assert len(set(more)) == 1 and 0 <= more[0] < hidden, more
