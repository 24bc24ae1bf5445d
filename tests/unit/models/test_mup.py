"""muP: factors, initial values and learning rates of every kind of parameter are those of Megatron's formulas, written out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import petatron
from petatron.config import RunConfig
from petatron.config.schema.sections.mup import relative_width
from petatron.layers.attention import AttentionSpec
from petatron.layers.mla import MlaSpec
from petatron.layers.spec.param_spec import ParamSpec
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.optimizer_groups import optimizer_group
from petatron.models.registry import model_spec
from petatron.sharding.initial_values import NormalValues
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.validate import load_config
from tests.longform import diagonal

WIDTH, STD, LAYERS = 4.0, 0.08, 2
SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --seq-length 16 --vocab-size 96 --mock-data "
    f"--train-iters 2 --lr 1e-2 --init-method-std {STD} --global-batch-size 2 --micro-batch-size 2 --num-workers 0 --eval-iters 0"
)
LLAMA = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
MUP = "--use-mup --mup-base-hidden-size 16"
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"
LATENT = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
)
MODELS = {
    "gpt": "--position-embedding-type learned_absolute",
    "untied": f"{LLAMA} {UNTIED} --qk-layernorm",
    "experts": f"{LLAMA} {EXPERTS}",
    "experts with biases": "--position-embedding-type rope --num-experts 4",
    "latent": f"{LLAMA} {LATENT} --mtp-num-layers 1",
    "hybrid": f"{LLAMA} --hybrid-layer-pattern M*-M --num-layers 4 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 8",
    "delta": f"{LLAMA} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8",
    "kimi": f"{LLAMA} --experimental-attention-variant kimi_delta_attention --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 2 --linear-key-head-dim 8 --linear-value-head-dim 8",
}
# Names of parameters that sum up over a width: all others are tables, biases, norms, and what a head or channel has one of.
MATRICES = (
    ".qkv.weight", ".out.weight", ".gate_up.weight", ".up.weight", ".down.weight", ".router.weight", ".shared_gate.weight",
    "_down.weight", "_up.weight", ".projection.weight", ".in_proj.weight", ".out_proj.weight", ".conv.weight",
)  # fmt: skip


def run_of(flags: str) -> RunConfig:
    return load_config(f"{SHAPE} {flags}".split(), world_size=1).config


def groups_of(flags: str) -> dict[str, GroupSpec]:
    run = run_of(flags)
    return {name: optimizer_group(run.optim, name, param) for name, param in model_spec(run).params().items()}


def is_matrix(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(MATRICES)


@pytest.mark.parametrize(
    ("flags", "embeddings", "logits", "scores"),
    [
        (MUP, 1.0, 4.0, 1 / 16),
        (f"{MUP} --mup-base-head-dim 4", 1.0, 4.0, 2 / 16),
        (f"{MUP} --mup-attn-scale-power 0.5", 1.0, 4.0, 1 / 4),
        (f"{MUP} --mup-embedding-mult 3 --mup-output-mult 0.5 --mup-width-mult 4", 3.0, 2.0, 1 / 16),
        ("--use-mup --mup-base-hidden-size 128", 1.0, 0.5, 1 / 16),
        ("--use-mup", 1.0, 1.0, 1 / 16),
        (f"{MUP} --kv-channels 8", 1.0, 4.0, 1 / 8),
        # What the model says of itself counts.
        (f"{MUP} --softmax-scale 0.3 --logits-scaling 7 --embedding-multiplier 5", 5.0, 7.0, 0.3),
        ("--mup-base-hidden-size 16 --mup-embedding-mult 3", 1.0, 1.0, None),
    ],
)
def test_factors_are_megatrons(flags: str, embeddings: float, logits: float, scores: float | None):
    """softmax_scale = sqrt(base head dim or 1) / head_dim**power; output_mult = 1 / width where it is 1."""
    model = run_of(f"{LLAMA} {flags}").model
    assert (model.embedding_multiplier, model.logits_scaling, model.softmax_scale) == (embeddings, logits, scores)


def test_latent_attention_keeps_the_factor_on_scores_of_its_own():
    plain, scaled = (run_of(f"{LLAMA} {LATENT} {flags}") for flags in ("", MUP))
    assert scaled.model.softmax_scale is None
    before, after = (model_spec(run).layers[0].mixer for run in (plain, scaled))
    assert isinstance(before, MlaSpec) and isinstance(after, MlaSpec) and before == after


def test_only_attention_layers_have_a_factor_on_scores():
    assert run_of(f"{MODELS['hybrid'].replace('M*-M', 'MM-M')} {MUP}").model.softmax_scale is None
    mixer = model_spec(run_of(f"{MODELS['hybrid']} {MUP}")).layers[1].mixer
    assert isinstance(mixer, AttentionSpec) and mixer.softmax_scale == 1 / 16


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_a_matrix_or_a_vector(model: str):
    """Learning rate and epsilon of matrices are divided by the width; their initial deviation by its root, projections into the residual
    stream besides by the root of twice the layers; those of everything else are as without muP."""
    plain, run = run_of(MODELS[model]), run_of(f"{MODELS[model]} {MUP}")
    before, after = model_spec(plain).params(), model_spec(run).params()
    assert before.keys() == after.keys() and relative_width(run.model, run.model.hidden_size) == WIDTH
    assert any(map(is_matrix, after)) and not all(map(is_matrix, after))
    for name, param in after.items():
        group = optimizer_group(run.optim, name, param)
        wanted = 1 / WIDTH if is_matrix(name) else 1.0
        assert (group.lr_scale, group.eps_scale) == (wanted, wanted), name
        assert group.weight_decay == optimizer_group(plain.optim, name, before[name]).weight_decay
        was = before[name].init
        if isinstance(was, NormalValues) and is_matrix(name) and ".conv." not in name:
            assert param.init == NormalValues(was.std / 2.0), name
        else:
            assert param.init == was, name
    branches = 2 * LAYERS if model != "hybrid" else 4
    last = next(param for name, param in after.items() if name.endswith(("mlp.down.weight", "experts.down.weight")))
    assert last.init == NormalValues(pytest.approx(STD / math.sqrt(branches) / math.sqrt(WIDTH)))  # pyright: ignore[reportArgumentType]


def test_an_output_head_of_its_own_starts_as_embeddings_do():
    params = model_spec(run_of(f"{LLAMA} {UNTIED} {MUP} --embedding-init-method-std 0.5")).params()
    assert params["head.weight"].init == params["embedding.weight"].init == NormalValues(0.5)
    plain = model_spec(run_of(f"{LLAMA} {UNTIED} --embedding-init-method-std 0.5")).params()
    assert plain["head.weight"].init == NormalValues(STD)


@pytest.mark.parametrize(
    ("optimizer", "matrix", "vector"),
    [
        ("adam", (0.25, 0.25), (1.0, 1.0)),
        ("sgd", (1.0, 1.0), (4.0, 1.0)),
        ("lion", (0.25, 1.0), (1.0, 1.0)),
        ("adafactor", (0.25, 1.0), (1.0, 1.0)),
        ("muon", (1.0, 1.0), (1.0, 1.0)),
        ("soap", (0.25, 1.0), (1.0, 1.0)),
    ],
)
def test_rates_of_every_optimizer(optimizer: str, matrix: tuple[float, float], vector: tuple[float, float]):
    groups = groups_of(f"{MODELS['experts']} {UNTIED} {MUP} --optimizer {optimizer}")
    found = {name: (group.lr_scale, group.eps_scale) for name, group in groups.items()}
    assert found["layers.0.attention.qkv.weight"] == found["layers.1.mlp.experts.down.weight"] == matrix
    names = ("embedding.weight", "head.weight", "norm.weight", "layers.0.mlp_norm.weight")
    assert {found[name] for name in names} == {vector}
    # Routers are matrices that muon and soap leave to adam.
    assert found["layers.0.mlp.router.weight"] == (matrix if optimizer not in ("muon", "soap") else (0.25, 0.25))


def test_decoupled_rate_is_not_scaled():
    groups = groups_of(f"{LLAMA} {UNTIED} {MUP} --optimizer sgd --decoupled-lr 1e-3")
    assert [groups[name].lr_scale for name in ("embedding.weight", "head.weight", "norm.weight")] == [1.0, 1.0, 4.0]


def test_a_base_model_trains_as_without_mup():
    """But for the factor on scores, which --mup-attn-scale-power 0.5 leaves as usual."""
    plain, base = groups_of(LLAMA), groups_of(f"{LLAMA} --use-mup --mup-attn-scale-power 0.5")
    assert plain == base
    first, second = (model_spec(run_of(flags)) for flags in (LLAMA, f"{LLAMA} --use-mup --mup-attn-scale-power 0.5"))
    assert first.params() == second.params()


def test_embeddings_are_multiplied_with_their_positions():
    """As Megatron does; a factor on the tokens alone would leave positions behind."""
    flags, tokens, made = f"{MODELS['gpt']} --hidden-dropout 0", torch.arange(8)[None], []
    for factor in ("", "--use-mup --mup-embedding-mult 3"):
        decoder = petatron.build_model(run_of(f"{flags} {factor}"), ParallelMesh.single()).module
        decoder.layers.clear()  # what is left is the norm of the embeddings, which divides by their size
        decoder.norm.eps = 0.5
        made.append(decoder)
    weights = [module.position.weight for module in made]
    assert torch.equal(*weights)
    plain, scaled = (decoder.hidden_states(Batch(tokens)) for decoder in made)
    x = made[0].embedding.weight[:8] + weights[0][:8]
    for factor, found in ((1.0, plain), (3.0, scaled)):
        wanted = torch.nn.functional.layer_norm(factor * x, (64,), eps=0.5)
        torch.testing.assert_close(found.squeeze(1), wanted)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--use-mup --optimizer muon", "--muon-scale-mode unit_rms_norm is muP's scale"),
        ("--use-mup --decoupled-lr 1e-3", "--use-mup does not scale it"),
        ("--mup-base-hidden-size 16", "--mup-base-hidden-size has no effect: it is for --use-mup"),
        (f"--use-mup --mup-base-head-dim 4 {LATENT}", "latent attention sets its own softmax scale"),
    ],
)
def test_what_has_another_effect_than_it_seems_is_told(flags: str, told: str):
    notices = load_config(f"{SHAPE} {LLAMA} {flags}".split(), world_size=1).notices
    assert any(told in notice for notice in notices), notices


def test_a_model_from_a_folder_keeps_its_factors(tmp_path: Path):
    """Only learning rates are those of muP then: with other factors its weights would mean something else."""
    run = run_of(LLAMA)
    petatron.save_checkpoint(str(tmp_path), step=1, model=petatron.build_model(run, ParallelMesh.single()))
    flags = f"--from {tmp_path} --mock-data --lr 1e-2 --train-iters 2 {MUP}".split()
    tuned = petatron.load(None, flags, world_size=1).config
    model = tuned.model
    assert (model.embedding_multiplier, model.logits_scaling, model.softmax_scale) == (1.0, 1.0, None)
    assert model.mup_width_mult == WIDTH


@diagonal(3)
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "lion", "adafactor", "muon", "soap"])
def test_every_optimizer_steps_with_the_rates_of_its_groups(optimizer: str):
    """A step from the same weights and gradients: what muP changes is the learning rate of each group, exactly."""
    found = []
    for scaled in (False, True):
        run = run_of(f"{LLAMA} {UNTIED} {MUP} --optimizer {optimizer} --weight-decay 0 --fp64 --adam-eps 1e-30")
        rule = None if scaled else lambda name, param: optimizer_group(run.optim, name, unscaled(param))  # noqa: B023
        model = petatron.build_model(run, ParallelMesh.single(), group_rule=rule)
        before = {name: weight.detach().clone() for name, weight in model.module.named_parameters()}
        model.train_step(next(petatron.build_loader(run, model.mesh)))
        petatron.build_optimizer(run, model).step()
        found.append({name: weight.detach() - before[name] for name, weight in model.module.named_parameters()})
    groups = groups_of(f"{LLAMA} {UNTIED} {MUP} --optimizer {optimizer}")
    for name, step in found[0].items():
        torch.testing.assert_close(found[1][name], step * groups[name].lr_scale, rtol=1e-6, atol=0)


def unscaled(param: ParamSpec) -> ParamSpec:
    return replace(param, fan_in_ratio=1.0, fan_out_ratio=1.0)
