"""Rules and identity of variants of layers."""

from __future__ import annotations

import pytest

from petatron.base.errors import ConfigError
from petatron.config.schema.attention_layer_freq import no_rope_layers, window_layers
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.model_identity import identity_differences, model_identity, variant_defaults
from petatron.validate import load_config

BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear"
)

PROBLEMS = {
    "--clip-qkv 0": "--clip-qkv 0.0 is not above 0. Use a number above 0.",
    "--clip-qkv 2 --multi-latent-attention": "--clip-qkv 2.0 cannot be combined with --multi-latent-attention",
    "--window-attn-skip-freq 2": "--window-attn-skip-freq 2 says which layers have a window, but there is no --window-size",
    "--window-size 4 --window-attn-skip-freq 0": "--window-attn-skip-freq 0 is below 1",
    "--window-size 4 --window-attn-skip-freq some": "--window-attn-skip-freq some is neither a number nor a list",
    "--window-size 4 --window-attn-skip-freq [1,2,0,1]": "holds a number that is neither 0 nor 1",
    "--window-size 4 --window-attn-skip-freq [1]*3": "is a pattern of 3 layers, but --num-layers is 4",
    "--no-rope-freq 2 --position-embedding-type none": "--no-rope-freq 2 is about rotary positions",
    "--no-rope-freq 2 --multi-latent-attention": "--no-rope-freq 2 cannot be combined with --multi-latent-attention",
    "--rotary-base-local 100": "--rotary-base-local 100 is for layers with a window, but there is no --window-size",
    "--rotary-base-local 1 --window-size 4": "--rotary-base-local 1.0 is not above 1",
    "--rotary-seq-len-interpolation-factor 0.5": "--rotary-seq-len-interpolation-factor 0.5 is below 1",
    "--residual-branches parallel --norm-placement both": "--residual-branches parallel needs norms before the branches",
    "--qk-layernorm-scope projection": "--qk-layernorm-scope projection says what --qk-layernorm normalizes",
    "--qk-layernorm --qk-layernorm-scope projection --normalization LayerNorm": "is an RMSNorm, but --normalization is LayerNorm",
    "--embedding-multiplier 0": "--embedding-multiplier 0.0 is not above 0",
    "--embedding-multiplier 2 --scale-embeddings": "--embedding-multiplier 2 and --scale-embeddings are two factors",
    "--attention-in-multiplier 2 --qk-layernorm --add-qkv-bias": "2 cannot be combined with --qk-layernorm and biases of attention",
    "--attention-in-multiplier 2 --disable-bias-linear --norm-placement both": "cannot be combined with a norm after attention",
    "--key-multiplier 0.5 --clip-qkv 2": "--key-multiplier 0.5 cannot be combined with --clip-qkv",
    "--attn-logit-softcapping 0": "--attn-logit-softcapping 0.0 is not above 0",
    "--rotary-interleaved --position-embedding-type none": "--rotary-interleaved True is about rotary positions",
    "--softmax-type learnable --multi-latent-attention": "--softmax-type learnable cannot be combined with --multi-latent-attention",
    "--activation-func-clamp-value 0": "--activation-func-clamp-value 0.0 is not above 0",
    "--attention-chunk-size 0": "--attention-chunk-size 0 is below 1",
    "--attention-chunk-size 4 --position-embedding-type none": "--attention-chunk-size 4 is for layers with rotary positions",
    "--qk-l2-norm --position-embedding-type alibi": "--qk-l2-norm True is for layers with rotary positions",
    "--qk-l2-norm --qk-layernorm": "--qk-l2-norm and --qk-layernorm are two norms",
    "--attention-temperature-scale 0.1": "--attention-temperature-scale 0.1 is for layers without rotary positions, and all have them",
    "--attention-temperature-scale 0 --no-rope-freq 2": "--attention-temperature-scale 0.0 is not above 0",
    "--attention-temperature-floor 0": "--attention-temperature-floor 0 is below 1",
    "--attention-chunk-size 4 --multi-latent-attention": "--attention-chunk-size 4 cannot be combined with --multi-latent-attention",
    "--position-embedding-type alibi --max-position-embeddings 70000": "below 65,536, and --max-position-embeddings is 70,000",
    "--position-embedding-type alibi --attn-logit-softcapping 2": "alibi cannot be combined with --attn-logit-softcapping",
    "--position-embedding-type alibi --softmax-type learnable": "alibi cannot be combined with --softmax-type learnable",
    "--num-experts 4 --moe-apply-probs-on-input": "--moe-apply-probs-on-input is for one expert per token, but --moe-router-topk is 2",
    "--longrope-short-factor [1,1,1,1]": "--longrope-long-factor is missing, and LongRoPE has two lists of factors",
    "--longrope-short-factor [1,1,1] --longrope-long-factor [2,2,2,2]": "has 3 numbers, and a head has 4 rotary pairs",
    "--longrope-short-factor some --longrope-long-factor [2,2,2,2]": "--longrope-short-factor some is not a list of numbers",
    "--longrope-short-factor 7 --longrope-long-factor [2,2,2,2]": "--longrope-short-factor 7 is not a list of numbers",
    "--longrope-short-factor [0,1,1,1] --longrope-long-factor [2,2,2,2]": "holds something else than positive numbers",
    "--longrope-short-factor [1,1,1,1] --longrope-long-factor [2,2,2,2] --use-rope-scaling": "and another is set",
    "--longrope-short-factor [1,1,1,1] --longrope-long-factor [2,2,2,2] --position-embedding-type none": "is about rotary positions",
    "--longrope-attention-factor 0": "--longrope-attention-factor 0.0 is not above 0",
    "--rotary-seq-len-interpolation-factor 2 --use-rope-scaling": "is one way to scale rotary positions, and another is set",
}


@pytest.mark.parametrize("flags", PROBLEMS)
def test_what_cannot_be_is_said(flags: str):
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE.split(), *flags.split()], require_training=False)
    assert PROBLEMS[flags] in str(caught.value)


@pytest.mark.parametrize("flag", ["--activation-func-clamp-value 7", "--glu-linear-offset 1"])
def test_bounds_of_gates_need_gates(flag: str):
    ungated = BASE.replace("--swiglu", "--activation gelu")
    with pytest.raises(ConfigError, match=f"{flag} is about gated activations, but --activation is gelu"):
        load_config([*ungated.split(), *flag.split()], require_training=False)


def test_an_rms_norm_has_no_bias_to_leave_out():
    notices = load_config([*BASE.split(), "--no-norm-bias"], require_training=False).notices
    assert [notice for notice in notices if "norm-bias" in notice] == [
        "--no-norm-bias has no effect: an RMSNorm has no bias"
    ]


def test_a_number_marks_every_nth_layer_and_a_list_each():
    config = ModelConfig(num_layers=4, window_size=8, window_attn_skip_freq="2", no_rope_freq="3")
    assert window_layers(config) == (True, False, True, False)
    assert no_rope_layers(config) == (False, False, True, False)
    config = ModelConfig(num_layers=3, window_size=8, window_attn_skip_freq="[1]*2+[0]", no_rope_freq="[0,1,1]")
    assert window_layers(config) == (True, True, False) and no_rope_layers(config) == (False, True, True)
    assert window_layers(ModelConfig(num_layers=2)) == (False, False)


def test_a_pattern_that_does_not_fit_is_an_error():
    with pytest.raises(ConfigError, match="is a pattern of 2 layers"):
        window_layers(ModelConfig(num_layers=3, window_size=8, window_attn_skip_freq="[1,0]"))


def test_a_plain_model_has_the_identity_it_always_had():
    identity = model_identity(ModelConfig(num_layers=2), None)
    assert not identity.keys() & variant_defaults().keys()


def test_variants_tell_models_apart_and_spellings_do_not():
    plain = ModelConfig(num_layers=4, window_size=8, position_embedding_type="rope")
    varied = ModelConfig(num_layers=4, window_size=8, position_embedding_type="rope", window_attn_skip_freq="2")
    listed = ModelConfig(num_layers=4, window_size=8, position_embedding_type="rope", window_attn_skip_freq="[1,0]*2")
    first, second, third = (model_identity(model, None) for model in (plain, varied, listed))
    assert identity_differences(first, second) == identity_differences(second, first) == ["window_attn_skip_freq"]
    assert identity_differences(second, third) == []


def test_models_of_different_depth_do_not_differ_in_patterns_that_neither_has():
    first, second = (model_identity(ModelConfig(num_layers=layers), None) for layers in (2, 3))
    assert identity_differences(first, second) == ["num_layers"]
