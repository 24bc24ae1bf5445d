"""A mixer defined outside of the package trains, saves, resumes and is estimated like those inside it, with no other edit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.estimate.flops import model_flops_per_token, parameter_count
from petatron.estimate.memory.forecast import largest_forecast
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.models.registry import model_spec, register_model
from petatron.train.build_run import build_model
from petatron.verify.compare_traces import Tolerances, compare_traces
from petatron.verify.record_trace import StepTrace
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.outside.gated_linear_attention import GatedLinearAttentionSpec, decoder_spec
from tests.parity.harness import check_traces, tiny_run, train, train_recorded
from tests.parity.models.fp8_linears import check_fp8_linears
from tests.parity.state.resharding import Life, check_resume, live

HYBRID = "--model-type hybrid --num-layers 4"
BOUNDS = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-9)


def train_hybrid(run: RunConfig) -> tuple[list[StepTrace], list[CommEvent]]:
    """On one rank, which imports this module and with it the hybrid."""
    return train_recorded(run)


def train_hybrid_steps(run: RunConfig) -> list[StepTrace]:
    return train(run)


def live_hybrid(run: RunConfig) -> Life:
    return live(run)


def hybrid_run(flags: str = "", *, world_size: int = 1, dtype: str = "float64"):
    return tiny_run(f"{HYBRID} {flags}", world_size=world_size, dtype=dtype)


@pytest.fixture(scope="module")
def alone():
    return train(hybrid_run())


@diagonal(3)
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        later("--tp 2 --sequence-parallel", 2),
        ("--tp 4 --micro-batch-size 4", 4),
        ("--pp 2", 2),
        ("--pp 2 --num-layers-per-virtual-pipeline-stage 1", 2),
        ("--dp 2 --use-distributed-optimizer", 2),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
        (
            "--tp 2 --sequence-parallel --recompute-granularity selective --recompute-modules attention mlp --micro-batch-size 4",
            2,
        ),
        ("--tp 2 --pp 2 --sequence-parallel --cpu-offloading-num-layers 1", 4),
    ],
)
def test_every_layout_trains_the_same_hybrid(ranks: RankPool, alone, layout: str, world_size: int):
    check_traces(ranks, hybrid_run(layout, world_size=world_size), alone, BOUNDS, train_rank=train_hybrid)


def test_it_is_another_model_than_attention_alone(alone):
    verdict = compare_traces([alone], [train(tiny_run("--num-layers 4", dtype="float64"))], BOUNDS)
    assert not verdict.agrees


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["--pp 2", later("--dp 2 --data-parallel-sharding-strategy optim_grads_params")])
def test_its_linears_run_in_fp8(ranks: RankPool, layout: str):
    weights = ("layers.1.gla.inputs.weight", "layers.1.gla.out.weight")
    check_fp8_linears(ranks, HYBRID, weights, layout=layout, train_rank=train_hybrid_steps)


@pytest.mark.matrix
def test_a_checkpoint_is_resumed_in_another_layout(ranks: RankPool, tmp_path: Path):
    layout = "--pp 2 --dp 2 --use-distributed-optimizer"
    tensors = ("layers.1.gla.decay_bias",)
    check_resume(ranks, tmp_path, HYBRID, layout, world_size=4, tensors=tensors, live_rank=live_hybrid)


def test_estimates_add_it_up():
    run, plain = hybrid_run(dtype="float32"), tiny_run("--num-layers 4")
    spec, other = model_spec(run), model_spec(plain)
    mixers = [layer.mixer for layer in spec.layers]
    gla = mixers[1]
    assert isinstance(gla, GatedLinearAttentionSpec)
    assert [type(mixer) is GatedLinearAttentionSpec for mixer in mixers] == [False, True, False, True]
    own = sum(param.num_elements for param in gla.params().values())
    attention = mixers[0]
    assert attention is not None
    theirs = sum(param.num_elements for param in attention.params().values())
    assert parameter_count(spec) == parameter_count(other) + 2 * (own - theirs)
    gemms = 6 * sum(param.num_elements for name, param in gla.params().items() if name != "decay_bias")
    expected = gemms + gla.mixing_flops(16, causal=True) / 16
    per_layer = model_flops_per_token(spec) - model_flops_per_token(other)
    attention_flops = 6 * theirs + attention.mixing_flops(16, causal=True) / 16
    assert per_layer == pytest.approx(2 * (expected - attention_flops))
    assert largest_forecast(run, device="cpu").activations > 0


def test_context_parallelism_is_refused_before_anything_is_built():
    run = hybrid_run("--cp 2", world_size=2)
    with pytest.raises(
        ConfigError, match=r"no way of it suits all layers of this model: attention \(zigzag\), gla \(whole\)"
    ):
        build_model(run, ParallelMesh.single(torch.device("cpu")))


def test_an_unknown_model_is_named_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"--model-type hybird is not a registered model.*Did you mean hybrid"):
        model_spec(tiny_run("--model-type hybird"))


def test_a_name_is_registered_once():
    with pytest.raises(ConfigError, match="--model-type hybrid is registered already"):
        register_model("hybrid", decoder_spec)
