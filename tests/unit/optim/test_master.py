"""MixedPrecisionOptimizer against plain torch optimizers on an unsharded model."""

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from petatron.config.schema.optimizer import OptimizerConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.sharding.flat_buffer import FlatBufferOptions, FlatParamGroup, flatten_parameters
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shard, compute_placement
from tests.optimizer_groups import groups_of


def small_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def flatten(model: nn.Module, rule: str = "adam") -> list[FlatParamGroup]:
    placements = {
        n: compute_placement(n, tuple(p.shape), Shard(), ModelParallelCoordinate()) for n, p in model.named_parameters()
    }
    options, uses = FlatBufferOptions(bucket_size=10**9), Counter(model.parameters())
    groups = groups_of(model, rule=rule)
    return flatten_parameters([model], placements, groups, ParallelMesh.single(), options, grads_per_micro_batch=uses)


def collect(groups: list[FlatParamGroup], *, scale: float = 1.0) -> None:
    """Move autograd's gradients into the flat buffers, as the reduction does."""
    for group in groups:
        for slot in group.params:
            assert slot.parameter.grad is not None
            group.param_grad(slot).copy_(slot.parameter.grad * scale)
            slot.parameter.grad = None


def loss_of(model: nn.Module, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(4, 5, generator=generator).to(dtype), torch.randn(4, 3, generator=generator).to(dtype)
    return 3.0 * (model(x) - y).square().mean()  # large enough that clipping at 1 bites at first


def rates(step: int) -> tuple[float, float]:
    return 0.02 / step, 0.1 * step


def train_ours(
    config: OptimizerConfig, dtype: torch.dtype, steps: int, *, scale: float = 1.0
) -> tuple[nn.Module, list]:
    model = small_model(dtype)
    groups = flatten(model, config.optimizer)
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())
    norms = []
    for step in range(1, steps + 1):
        loss_of(model, step, dtype).backward()
        collect(groups, scale=scale)
        lr, weight_decay = rates(step)
        result = optimizer.step(lr=lr, weight_decay=weight_decay, loss_scale=scale)
        assert not result.skipped
        norms.append(float(result.grad_norm))
    return model, norms


def train_plain(make: Callable[[list[dict]], torch.optim.Optimizer], dtype: torch.dtype, steps: int, clip: float):
    model = small_model(dtype)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = make([{"params": matrices, "decay": True}, {"params": vectors, "decay": False}])
    norms = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss_of(model, step, dtype).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip if clip else float("inf"))))
        lr, weight_decay = rates(step)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, weight_decay if group["decay"] else 0.0
        optimizer.step()
    return model, norms


def assert_same(ours: nn.Module, theirs: nn.Module, tolerance: float) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_adam_equals_torch(dtype: torch.dtype, tolerance: float, clip: float):
    config = OptimizerConfig(lr=1.0, clip_grad=clip, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)
    ours, norms = train_ours(config, dtype, 12)
    theirs, expected = train_plain(
        lambda groups: torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.95), eps=1e-6, foreach=False), dtype, 12, clip
    )
    assert norms == pytest.approx(expected, rel=tolerance)
    assert max(norms) > 1.5, "clipping should matter in this test"
    assert_same(ours, theirs, tolerance)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_equals_torch(momentum: float):
    config = OptimizerConfig(optimizer="sgd", lr=1.0, sgd_momentum=momentum)
    ours, _ = train_ours(config, torch.float64, 8)
    theirs, _ = train_plain(lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=momentum), torch.float64, 8, 1.0)
    assert_same(ours, theirs, 1e-12)


def test_weight_decay_touches_only_matrices():
    model = small_model(torch.float32)
    before = copy.deepcopy(model)
    optimizer = MixedPrecisionOptimizer(
        OptimizerConfig(lr=0.5, weight_decay=0.2), flatten(model), ParallelMesh.single()
    )
    optimizer.step()  # zero gradients: only decay moves anything; rates come from the config
    for (name, now), then in zip(model.named_parameters(), before.parameters()):
        assert torch.equal(now, then * 0.9 if then.dim() > 1 else then), name


def test_loss_scale_is_undone_to_the_last_bit():
    config = OptimizerConfig(lr=1.0, clip_grad=1.0)
    plain, norms = train_ours(config, torch.float32, 5)
    scaled, scaled_norms = train_ours(config, torch.float32, 5, scale=1024.0)
    assert norms == scaled_norms
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters()))


@pytest.mark.parametrize("rule", ["adam", "sgd"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_gradient_leaves_everything_as_it_was(rule: str, bad: float, dtype: torch.dtype):
    model = small_model(dtype)
    groups = flatten(model, rule)
    optimizer = MixedPrecisionOptimizer(OptimizerConfig(optimizer=rule, lr=0.1), groups, ParallelMesh.single())  # type: ignore[arg-type]

    def step(number: int, spoil: float | None) -> Tensor:
        loss_of(model, number, dtype).backward()
        collect(groups)
        if spoil is not None:
            groups[-1].grads()[0][3] = spoil
        return optimizer.step().skipped

    def everything() -> list[Tensor]:
        return [g.flat_weights.clone() for g in groups] + [view.clone() for _, _, _, view in optimizer.moments()]

    assert not step(1, None)
    weights, facts = everything(), optimizer.scalar_state()
    assert step(2, bad)
    assert all(torch.equal(a, b) for a, b in zip(weights, everything()))
    assert optimizer.scalar_state() == facts == ({"updates": 1.0} if rule == "adam" else {})
    assert not step(3, None)
    after_skip = everything()
    assert not any(torch.equal(a, b) for a, b in zip(weights[: len(groups)], after_skip))

    model = small_model(dtype)
    groups = flatten(model, rule)
    optimizer = MixedPrecisionOptimizer(OptimizerConfig(optimizer=rule, lr=0.1), groups, ParallelMesh.single())  # type: ignore[arg-type]
    step(1, None), step(3, None)
    assert all(torch.equal(a, b) for a, b in zip(after_skip, everything())), "the bad step left a trace"


def test_small_updates_add_up_in_the_master_weights():
    """1 - 0.0001 rounds to 1 in bfloat16; a hundred of them must not."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    groups = flatten(model, "sgd")
    config = OptimizerConfig(optimizer="sgd", lr=1e-4, sgd_momentum=0.0, clip_grad=0.0)
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())
    lost = torch.ones(4, dtype=torch.bfloat16)
    for _ in range(100):
        groups[0].grads()[0].fill_(1.0)
        optimizer.step()
        lost -= 1e-4
    [(_, _, master)] = optimizer.master_weights()
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full((4,), 0.99), rtol=1e-5, atol=0)
    assert torch.equal(model.weight.detach(), master.bfloat16()) and not model.weight.eq(1.0).any()
    assert lost.eq(1.0).all(), "this test needs updates that bfloat16 loses"


def test_masters_are_the_weights_where_nothing_is_narrower():
    groups = flatten(small_model(torch.float32))
    optimizer = MixedPrecisionOptimizer(OptimizerConfig(lr=1.0), groups, ParallelMesh.single())
    assert {kind for kind, _, _, _ in optimizer.moments()} == {"exp_avg", "exp_avg_sq"}
    own = {view.data_ptr() for group in groups for _, view in group_tensor_shards(group, group.weights())}
    assert {view.data_ptr() for _, _, view in optimizer.master_weights()} == own


def test_loaded_master_weights_reach_the_model():
    model = small_model(torch.bfloat16)
    groups = flatten(model)
    optimizer = MixedPrecisionOptimizer(OptimizerConfig(lr=1.0), groups, ParallelMesh.single())
    for _, _, view in optimizer.master_weights():
        view.fill_(0.5)
    optimizer.copy_master_to_model_weights()
    assert all(parameter.eq(0.5).all() for parameter in model.parameters())


def test_restored_facts_continue_the_bias_correction():
    def one_step(updates: float) -> Tensor:
        groups = flatten(small_model(torch.float32))
        optimizer = MixedPrecisionOptimizer(OptimizerConfig(lr=0.1), groups, ParallelMesh.single())
        optimizer.load_scalar_state({"updates": updates})
        groups[0].grads()[0].fill_(1.0)
        optimizer.step()
        assert optimizer.scalar_state() == {"updates": updates + 1.0}
        return groups[0].flat_weights.clone()

    assert not torch.equal(one_step(0.0), one_step(1000.0))


def test_zeros_and_weight_norm():
    model = small_model(torch.float32)
    groups = flatten(model)
    optimizer = MixedPrecisionOptimizer(OptimizerConfig(lr=1.0), groups, ParallelMesh.single())
    for group in groups:
        group.grads()[0].fill_(1.0)
    groups[0].grads()[0][:6] = 0.0
    groups[1].grads()[0][2] = 0.0
    assert int(optimizer.count_zero_grads()) == 7
    expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm()
    torch.testing.assert_close(optimizer.weight_norm(), expected)


def test_gradients_in_bfloat16_are_taken_as_they_are():
    values = torch.randn(1000).bfloat16()
    found = []
    for grad_dtype in (None, torch.bfloat16):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(10, 100, dtype=torch.bfloat16))
        placements = {"weight": compute_placement("weight", (10, 100), Shard(), ModelParallelCoordinate())}
        options, uses = FlatBufferOptions(bucket_size=1, grad_dtype=grad_dtype), Counter(model.parameters())
        mesh = ParallelMesh.single()
        [group] = flatten_parameters([model], placements, groups_of(model), mesh, options, grads_per_micro_batch=uses)
        [grads] = group.grads()
        assert grads.dtype == (grad_dtype or torch.float32)
        grads.copy_(values)
        optimizer = MixedPrecisionOptimizer(OptimizerConfig(lr=0.1, clip_grad=0.5), [group], mesh)
        result = optimizer.step()
        assert result.grad_norm.dtype == torch.float32
        assert torch.equal(grads, values.to(grads.dtype)), "gradients are only read"
        found.append((float(result.grad_norm), next(view.clone() for _, _, view in optimizer.master_weights())))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=1e-7)
