"""Frozen parameters: which they are, what is said of them, and what they save in bytes and FLOPs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import petatron
from petatron.base.errors import ConfigError, TrainError
from petatron.config import RunConfig
from petatron.config.pipeline_stages import pipeline_stages
from petatron.estimate.flops import model_flops_per_token
from petatron.estimate.memory.forecast import forecast_memory, recompute_plans
from petatron.estimate.state_bytes import local_element_counts, state_bytes
from petatron.mesh.mesh import ParallelMesh
from petatron.models.decoder import LM_LOSS
from petatron.models.decoder_spec import DecoderSpec
from petatron.models.frozen_params import _find_frozen, describe_frozen, frozen_params
from petatron.models.registry import model_spec
from petatron.parallel.data.gradient_reduction import GradientReducer
from petatron.train.build_run import build_loader, build_model, build_optimizer
from tests.longform import diagonal
from tests.meta_device_rank import fake_rank
from tests.unit.models.kept import kept_bytes

BASE = (
    "--mock-data --lr 1e-3 --train-iters 1 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 "
    "--vocab-size 144 --make-vocab-size-divisible-by 8 --seq-length 16 --num-workers 0"
)
UNTIED = "--untie-embeddings-and-output-weights"
LAST_TWO = "--freeze embedding.* layers.[01].*"


def run_of(flags: str, *, world_size: int = 1) -> RunConfig:
    return petatron.load("tiny-llama", f"{BASE} {flags}".split(), world_size=world_size).config


def problems_of(flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        frozen_params(run_of(flags))
    return str(error.value)


def test_patterns_name_logical_tensors_or_parameters():
    by_tensor, by_parameter = (
        frozen_params(run_of(f"{UNTIED} --freeze {pattern}"))
        for pattern in ("layers.*.attention.[qkv].weight", "*.qkv.*")
    )
    assert by_tensor.names == by_parameter.names == {f"layers.{index}.attention.qkv.weight" for index in range(4)}
    assert not by_tensor.notices and not by_parameter.notices


def test_only_some_parameters_are_trained():
    frozen, spec = (
        frozen_params(run_of(f"{UNTIED} --train-only layers.3.* --freeze *norm*")),
        model_spec(run_of(UNTIED)),
    )
    trained = spec.params().keys() - frozen.names
    assert trained == {f"layers.3.{name}" for name in spec.layers[3].params() if "norm" not in name}
    assert frozen.first_backward_layer == 3


@pytest.mark.parametrize(("flags", "end"), [("--freeze embedding.*", "head"), ("--freeze head.*", "embedding")])
def test_both_ends_of_a_tied_embedding_are_frozen(flags: str, end: str):
    run = run_of(f"--no-untie-embeddings-and-output-weights {flags}")
    frozen = frozen_params(run)
    assert frozen.names == {"embedding.weight", "head.weight"}
    assert f"{end}.weight is frozen too" in describe_frozen(model_spec(run), frozen)


def test_the_rest_of_a_fused_parameter_is_frozen_and_named():
    frozen = frozen_params(run_of(f"{UNTIED} --freeze layers.2.attention.q.weight"))
    assert frozen.names == {"layers.2.attention.qkv.weight"}
    assert frozen.notices == (
        "layers.2.attention.k.weight and layers.2.attention.v.weight are frozen too, as one tensor with "
        "layers.2.attention.q.weight",
    )


def test_every_problem_is_told_at_once():
    said = problems_of("--freeze layers.9.* embedding --train-only heat.weight")
    assert said.startswith("3 problems")
    assert '--freeze embedding matches no parameter of this model. Give "embedding.*"' in said
    assert "--train-only heat.weight matches no parameter of this model. Close names: head.weight" in said
    assert "--freeze layers.9.* matches no parameter" in said and "Close names: layers." in said


def test_something_must_be_trained():
    assert "--freeze * leaves none of the model's" in problems_of("--freeze *")


def test_optimizer_settings_without_effect_are_refused():
    assert "--optimizer muon would update nothing" in problems_of("--optimizer muon --train-only *norm*")
    said = problems_of(f"{UNTIED} --decoupled-lr 1e-4 --freeze embedding.* head.*")
    assert "--decoupled-lr 0.0001 is the learning rate of the embedding and the output head" in said


def test_spec_may_declare_a_parameter_that_is_never_trained():
    spec = model_spec(run_of(UNTIED))
    layer = spec.layers[0]

    class Declared(type(layer)):
        def params(self):
            return {name: replace(param, trainable="norm" not in name) for name, param in super().params().items()}

    values = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
    assert isinstance(spec, DecoderSpec)
    declared = replace(spec, layers=(Declared(**values), *spec.layers[1:]))
    frozen = _find_frozen(declared, (), (), run_of(UNTIED).optim)
    assert frozen.names == {"layers.0.attention_norm.weight", "layers.0.mlp_norm.weight"}


@diagonal(2)
@pytest.mark.parametrize(
    ("flags", "world_size", "rank", "pipeline_rank"),
    [
        ("", 1, 0, 0),
        ("--dp 4 --use-distributed-optimizer", 4, 1, 0),
        ("--tp 2 --sequence-parallel", 2, 1, 0),
        ("--pp 2 --global-batch-size 4", 2, 0, 0),
        ("--pp 2 --global-batch-size 4", 2, 1, 1),
        ("--num-experts 4 --dp 2 --ep 2 --freeze *.experts.*", 2, 1, 0),
        ("--optimizer muon", 1, 0, 0),
        ("--optimizer soap", 1, 0, 0),
        ("--optimizer adafactor --tp 2", 2, 1, 0),
    ],
)
def test_state_bytes_are_those_of_the_buffers(flags: str, world_size: int, rank: int, pipeline_rank: int):
    run = run_of(f"{UNTIED} --bf16 {LAST_TWO} {flags}", world_size=world_size)
    with fake_rank(run, rank) as model:
        groups = model.param_groups
        weights = sum(group.flat_weights.numel() for group in groups)  # pyright: ignore[reportAttributeAccessIssue]
        trained = [group for group in groups if group.spec.trainable]
        gradients = sum(grads.flat.numel() for group in trained for grads in group.bucket_grads)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer = build_optimizer(run, model)
        master = sum(view.numel() for _, _, view in optimizer.master_weights())
        moments = sum(view.numel() for _, _, _, view in optimizer.moments())
    stages = pipeline_stages(run)
    found = state_bytes(run, [stages[pipeline_rank]])
    assert found.weights == pytest.approx(2 * weights, rel=0.02)
    assert found.gradients == pytest.approx(4 * gradients, rel=0.02)
    assert found.master_weights == pytest.approx(4 * master, rel=0.02)
    assert found.moments == pytest.approx(4 * moments, rel=0.02)
    assert weights > gradients or pipeline_rank == 1


def test_fully_sharded_state_is_that_of_what_is_trained():
    flags = f"{UNTIED} --bf16 --data-parallel-sharding-strategy optim_grads_params"
    free, frozen = run_of(flags, world_size=2), run_of(f"{flags} {LAST_TWO}", world_size=2)
    whole, trained = (local_element_counts(frozen, trained=only) for only in (False, True))
    found, before = state_bytes(frozen), state_bytes(free)
    assert found.master_weights == 2 * trained.dense and before.master_weights == 2 * whole.dense
    assert found.weights - before.weights == whole.dense - trained.dense, (
        "shards of frozen weights, two bytes for each, over two"
    )
    assert found.moments == 4 * trained.dense


def test_model_flops_count_what_is_computed():
    spec, free = model_spec(run_of(UNTIED)), run_of(UNTIED)
    layer = sum(param.num_elements for param in spec.layers[0].params().values() if param.is_gemm)
    head, mixing = 144 * 32, sum(branch.mixing_flops(16, causal=True) for branch in spec.layers[0].branches) / 16
    assert model_flops_per_token(spec) == 4 * (6 * layer + mixing) + 6 * head

    def flops(flags: str) -> float:
        return model_flops_per_token(spec, frozen=frozen_params(run_of(f"{UNTIED} {flags}")))

    assert flops(LAST_TWO) == pytest.approx(2 * (2 * layer + mixing / 3) + 2 * (6 * layer + mixing) + 6 * head)
    assert flops("--train-only embedding.*") == pytest.approx(4 * (4 * layer + mixing) + 4 * head)
    assert flops("--train-only head.*") == pytest.approx(4 * (2 * layer + mixing / 3) + 4 * head)
    assert flops("--train-only norm.*") == pytest.approx(4 * (2 * layer + mixing / 3) + 4 * head)
    assert free.train.freeze == ()


@pytest.mark.parametrize(
    "memory",
    [
        "",
        "--recompute-granularity selective --recompute-modules mlp",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ],
)
def test_layers_below_save_nothing(memory: str):
    """The plan's bytes are those that a forward pass keeps, and are fewer than half of those of the whole model."""
    flags = f"{UNTIED} --global-batch-size 2 --micro-batch-size 2 {memory}"
    run = run_of(f"{flags} {LAST_TWO}")
    model = build_model(run, ParallelMesh.single())
    [batch], module = next(build_loader(run, model.mesh)), model.module.train()
    model.gradient_reducer.start_step(1)
    weights = {LM_LOSS: torch.rand(batch.labels.t().shape, dtype=torch.float64)}
    parts = [batch.tokens, batch.labels, batch.loss_mask, *weights.values(), *model.module.parameters()]
    parts += [grads.flat for group in model.param_groups for grads in group.bucket_grads]  # pyright: ignore[reportAttributeAccessIssue]
    kept, _ = kept_bytes(lambda: module(batch, {}, loss_weights=weights).losses[LM_LOSS], without=parts)
    [plan], [free] = recompute_plans(run, device="cpu"), recompute_plans(run_of(flags), device="cpu")
    assert plan.num_without_backward == 2 and not any(plan.modules[:2])
    assert kept == plan.saved_bytes < free.saved_bytes


def test_forecast_of_a_frozen_first_stage_has_weights_alone():
    flags = f"{UNTIED} --bf16 --pp 2 --global-batch-size 4"
    first, last = forecast_memory(run_of(f"{flags} {LAST_TWO}", world_size=2), device="cuda")
    assert (first.state.gradients, first.state.optimizer, first.activations, first.logits) == (0, 0, 0, 0)
    assert first.workspace > 0
    assert last == forecast_memory(run_of(flags, world_size=2), device="cuda")[1]


def test_model_that_is_only_read_is_frozen_and_cannot_be_trained():
    run = run_of("")
    model = build_model(run, ParallelMesh.single(), gradients=False)
    assert not any(group.spec.trainable for group in model.param_groups)
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    with pytest.raises(TrainError, match="opened with gradients=False: it is frozen as a whole"):
        model.train_step(next(build_loader(run, model.mesh)))


def test_frozen_parameter_cannot_be_trained_later():
    run = run_of(f"{UNTIED} {LAST_TWO}")
    model = build_model(run, ParallelMesh.single())
    model.module.get_parameter("layers.0.mlp.down.weight").requires_grad_(True)
    with pytest.raises(TrainError, match=r"layers.0.mlp.down.weight requires a gradient, and has no memory for one"):
        model.train_step(next(build_loader(run, model.mesh)))


def test_parameter_that_is_frozen_later_holds_up_no_reduction():
    """With overlap, all buckets but the last are on their way when the backward pass ends; frozen ones with zeros."""
    run = run_of(f"{UNTIED} --overlap-grad-reduce --ddp-bucket-size 3000")
    model = build_model(run, ParallelMesh.single())
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_("layers.3." not in name)
    reducer, started = model.gradient_reducer, []
    assert isinstance(reducer, GradientReducer)
    finish = reducer.finish_grad_sync

    def count_then_finish() -> None:
        started.extend(send.num_pending for send in reducer._reductions)
        finish()

    reducer.finish_grad_sync = count_then_finish
    for grads in (grads for group in model.param_groups for grads in group.grads()):
        grads.fill_(1.0)
    model.train_step(next(build_loader(run, model.mesh)))
    assert len(started) > 4 and set(started) == {-1}
    frozen = [main.main_grad for main in reducer._main_grads.values() if not main.parameter.requires_grad]
    assert frozen and not any(grad.any() for grad in frozen)
