"""`checkpoint verify` right after a save, for every kind of model that trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.checkpoint.inspect.verify_checkpoint import find_checkpoint, verify_checkpoint
from petatron.config.schema.model_identity import identity_differences, model_identity
from petatron.mesh.mesh import ParallelMesh
from petatron.train.python_run import load
from petatron.train.state.train_state import TrainState
from tests.longform import diagonal

TINY = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --kv-channels 4 --seq-length 8 --max-position-embeddings 8 --vocab-size 32"
RUN = "--mock-data --lr 1e-3 --train-iters 1 --device cpu --no-bf16 --no-fp16 --fp8-format none"
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
MOE = f"{LLAMA} --num-experts 4 --ffn-hidden-size 24"
KINDS = {
    "gpt, learned positions, tied": "",
    "gpt, untied, biases": "--untie-embeddings-and-output-weights",
    "gpt, no positions": "--position-embedding-type none",
    "gpt, rope, biases": "--position-embedding-type rope --rotary-percent 0.5",
    "gpt, rotary settings that nothing reads": "--rotary-base 500 --rope-scaling-factor 3 --yarn-beta-fast 9",
    "llama, tied": LLAMA,
    "llama, untied, grouped queries": f"{LLAMA} --untie-embeddings-and-output-weights --num-query-groups 2",
    "llama, heads of their own width": f"{LLAMA} --kv-channels 6 --num-attention-heads 3 --num-query-groups 3",
    "llama, biases": f"{LLAMA.replace(' --disable-bias-linear', '')}",
    "llama, scaled": f"{LLAMA} --use-rope-scaling --rope-scaling-factor 4 --original-max-position-embeddings 4",
    "llama, scaling settings that nothing reads": f"{LLAMA} --rope-scaling-factor 3 --original-max-position-embeddings 4",
    "llama, yarn": f"{LLAMA} --position-embedding-type yarn --rope-scaling-factor 4 --original-max-position-embeddings 4",
    "mistral, window": f"{LLAMA} --window-size 4",
    "qwen2, q, k, v biases": f"{LLAMA} --add-qkv-bias",
    "qwen2, window": f"{LLAMA} --add-qkv-bias --window-size 4",
    "qwen3, qk-norm": f"{LLAMA} --qk-layernorm",
    "gemma": f"{LLAMA} --activation geglu_tanh --apply-layernorm-1p --scale-embeddings",
    "squared relu": "--squared-relu --position-embedding-type rope --disable-bias-linear",
    "mixtral": MOE,
    "mixtral, experts of another width": f"{MOE} --moe-ffn-hidden-size 12",
    "mixtral, window": f"{MOE} --moe-ffn-hidden-size 12 --window-size 4",
    "mixtral, every layer named": f"{MOE} --moe-ffn-hidden-size 12 --moe-layer-freq [1]*2",
    "qwen2-moe, shared expert": f"{MOE} --moe-ffn-hidden-size 12 --add-qkv-bias --moe-shared-expert-intermediate-size 8 "
    "--moe-shared-expert-gate --moe-router-pre-softmax",
    "qwen3-moe": f"{MOE} --moe-ffn-hidden-size 12 --qk-layernorm",
    "qwen3-moe, some layers dense": f"{MOE} --moe-ffn-hidden-size 12 --qk-layernorm --moe-layer-freq [0,1]",
    "experts in some layers": f"{MOE} --moe-ffn-hidden-size 12 --moe-layer-freq 2",
    "shared expert without a gate": f"{MOE} --moe-ffn-hidden-size 12 --moe-shared-expert-intermediate-size 8",
    "expert bias": f"{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    "group-limited routing, latent": f"{MOE} --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-latent-size 8",
    "capacity": f"{MOE} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
    "one expert per token": f"{MOE} --moe-router-topk 1 --moe-router-pre-softmax",
    "gpt with experts": "--num-experts 4 --moe-ffn-hidden-size 12",
}
# One preset of each shape; the others of a family have other sizes.
PRESETS = ("gpt3-125m", "nemotron4-340b", "llama2-7b", "llama3.2-1b", "qwen2.5-7b", "qwen3-8b", "mixtral-8x7b")
SMALL_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 12"


def _findings(folder: Path, flags: str, preset: str | None = None) -> list[str]:
    argv = [*TINY.split(), *RUN.split(), *flags.split(), "--save", str(folder), "--no-save-optim"]
    TrainState.build(load(preset, argv, world_size=1), ParallelMesh.single()).save()
    return [finding.text for finding in verify_checkpoint(find_checkpoint(folder)).findings]


@diagonal(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_good(tmp_path: Path, kind: str):
    assert _findings(tmp_path / "run", KINDS[kind]) == []


@diagonal(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_small_model_of_a_preset_is_good(tmp_path: Path, preset: str):
    experts = SMALL_EXPERTS if preset.startswith("mixtral") else ""
    assert _findings(tmp_path / "run", f"--num-query-groups 2 --ffn-hidden-size 24 {experts}", preset) == []


def test_a_toy_that_names_the_kind_of_each_layer_and_looks_ahead_is_good(tmp_path: Path):
    """Layers of multi-token prediction are not among those that config.json names."""
    run = load("deepseek-v3.2", ["--toy", *RUN.split(), "--save", str(tmp_path), "--no-save-optim"], world_size=1)
    TrainState.build(run, ParallelMesh.single()).save()
    assert [finding.text for finding in verify_checkpoint(find_checkpoint(tmp_path)).findings] == []
    assert run.config.model.mtp_num_layers == 1


@pytest.mark.parametrize(
    ("kind", "change", "differing"),
    [
        ("mixtral", "--ffn-hidden-size 40", []),
        ("mixtral", "--moe-layer-freq [1]*2", []),
        ("mixtral", "--moe-ffn-hidden-size 40", ["moe_ffn_hidden_size"]),
        ("mixtral", "--moe-layer-freq 2", ["moe_layer_freq"]),
        ("experts in some layers", "--ffn-hidden-size 40", ["ffn_hidden_size"]),
        ("llama, tied", "--rope-scaling-factor 3 --rope-low-freq-factor 2 --yarn-mscale 3", []),
        ("llama, scaled", "--rope-scaling-factor 3", ["rope_scaling_factor"]),
        ("llama, tied", "--rotary-base 500", ["rotary_base"]),
        ("gpt, learned positions, tied", "--rotary-base 500 --rotary-percent 0.5", []),
    ],
)
def test_models_are_compared_by_what_they_use(kind: str, change: str, differing: list[str]):
    first, second = (
        load(None, [*TINY.split(), *RUN.split(), *KINDS[kind].split(), *more.split()], world_size=1).config
        for more in ("--moe-ffn-hidden-size 24" if "num-experts" in KINDS[kind] else "", change)
    )
    a, b = (model_identity(run.model, run.moe) for run in (first, second))
    if "--moe-ffn-hidden-size" not in change:
        b |= {"moe_ffn_hidden_size": 24} if "num_experts" in b else {}
    assert identity_differences(a, b) == differing


@pytest.mark.parametrize("strange", [[1], "2*", 10**30, None, "[1]*99999999"])
def test_settings_of_a_manifest_that_make_no_sense_are_only_different(strange: object):
    sane = {"num_experts": 2, "num_layers": 2, "moe_layer_freq": "1"}
    assert identity_differences(sane, sane | {"moe_layer_freq": strange}) == (
        [] if strange is None else ["moe_layer_freq"]
    )
    assert "num_layers" in identity_differences(sane, sane | {"num_layers": strange})
