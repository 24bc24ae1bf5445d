"""Presets load, are the models they say they are, and pass every rule of this version that can apply to them."""

from __future__ import annotations

import shlex

import pytest

from petatron.config import RunConfig, preset_names
from petatron.config.derived_defaults import GATED_ACTIVATIONS
from petatron.config.presets import preset_summary
from petatron.config.schema.moe_layer_freq import moe_layers
from petatron.estimate.flops import parameter_count
from petatron.models.registry import model_spec
from petatron.validate import load_config, resolve_config

EXPECTED = shlex.split(
    "gpt3-125m gpt3-350m gpt3-760m gpt3-1.3b gpt3-2.7b gpt3-6.7b gpt3-13b gpt3-175b llama2-7b llama2-13b llama2-70b "
    "llama3-8b llama3-70b llama3-405b llama3.2-1b qwen2.5-7b qwen3-4b qwen3-8b mixtral-8x7b deepseek-v3 deepseek-v3.2 nemotron4-340b "
    "tiny-llama tiny-gpt llama-1b llama-8b-8layer mixtral-slice mamba2-130m mamba2-370m mamba2-780m mamba2-1.3b mamba2-2.7b "
    "nemotron-h-8b bamba-9b falcon-h1-0.5b qwen3-next-80b-a3b kimi-linear-48b-a3b minimax-text-01 gpt-oss-20b gpt-oss-120b "
    "llama-125m llama-350m qwen3-0.6b qwen3-30b-a3b gemma3-1b bert-base bert-large modernbert-base modernbert-large "
    "t5-small t5-base t5-large flan-t5-base mt5-small llava-7b qwen2.5-vl-7b"
)

# Parameters of the published models, in billions. The count below is exact for dense attention, so a wrong width,
# depth, vocabulary or tie shows.
PUBLISHED_BILLIONS = {
    "llama2-7b": 6.738, "llama2-13b": 13.016, "llama2-70b": 68.977,
    "llama3-8b": 8.030, "llama3-70b": 70.554, "llama3-405b": 405.853, "llama3.2-1b": 1.236,
    "qwen2.5-7b": 7.616, "qwen3-4b": 4.022, "qwen3-8b": 8.191, "mixtral-8x7b": 46.703,
    "gpt3-125m": 0.125, "gpt3-350m": 0.356, "gpt3-1.3b": 1.316, "gpt3-2.7b": 2.652, "gpt3-6.7b": 6.658, "gpt3-13b": 12.853,
    "gpt3-175b": 174.604,
}  # fmt: skip


# Exact, as transformers counts its own models of these shapes.
EXACT_PARAMETERS = {
    "mamba2-130m": 128_989_632, "mamba2-370m": 368_346_624, "mamba2-780m": 780_161_280, "mamba2-1.3b": 1_343_757_312,
    "mamba2-2.7b": 2_702_599_680, "nemotron-h-8b": 8_100_852_736, "bamba-9b": 9_780_235_392,
    "falcon-h1-0.5b": 521_411_104, "qwen3-0.6b": 596_049_920, "qwen3-30b-a3b": 30_532_122_624, "gemma3-1b": 999_885_952,
    "t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096,
    "llava-7b": 7_050_828_800, "qwen2.5-vl-7b": 8_292_166_656,
    "bert-base": 110_106_428, "bert-large": 336_226_108, "modernbert-base": 149_655_232, "modernbert-large": 395_881_664,
}  # fmt: skip


# transformers counts these with a tied output head, and ties it only where a folder has no other; the published folders have one.
EXACT_PARAMETERS |= {"flan-t5-base": 222_903_552 + 32128 * 768, "mt5-small": 172_119_424 + 250112 * 512}


@pytest.mark.parametrize("name", EXACT_PARAMETERS)
def test_preset_has_exactly_the_parameters_of_transformers(name: str):
    run = load_config([], preset=name, require_training=False).config
    assert parameter_count(model_spec(run)) == EXACT_PARAMETERS[name]


def billions(config: RunConfig) -> float:
    model = config.model
    assert model.kv_channels and model.num_query_groups and model.ffn_hidden_size and model.vocab_size
    query, kv = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    hidden, bias = model.hidden_size, int(model.add_bias_linear)
    matrices = 3 if model.activation in GATED_ACTIVATIONS else 2
    experts = config.moe.num_experts or 1
    mlp = experts * matrices * hidden * model.ffn_hidden_size + bias * (model.ffn_hidden_size + hidden)
    attention = hidden * (query + 2 * kv) + query * hidden + bias * hidden
    attention += (query + 2 * kv) * int(model.add_bias_linear or model.add_qkv_bias)
    attention += 2 * model.kv_channels * int(model.qk_layernorm)
    router = hidden * experts if config.moe.num_experts else 0
    norm = hidden * (2 if model.normalization == "LayerNorm" else 1)
    tables = model.vocab_size * hidden * (2 if model.untie_embeddings_and_output_weights else 1)
    if model.position_embedding_type == "learned_absolute":
        tables += model.seq_length * hidden
    return (model.num_layers * (mlp + attention + router + 2 * norm) + norm + tables) / 1e9


def test_the_promised_presets_exist():
    assert sorted(preset_names()) == sorted(EXPECTED)
    assert preset_names().index("gpt3-350m") < preset_names().index("gpt3-1.3b") < preset_names().index("gpt3-13b")


@pytest.mark.parametrize("name", EXPECTED)
def test_preset_loads_with_no_problem(name: str):
    loaded, problems = resolve_config(preset=name, require_training=False)
    assert problems == []
    published = 0.1 if name in ("bert-base", "bert-large") else 0
    assert loaded.config.model.hidden_dropout == loaded.config.model.attention_dropout == published
    assert len(preset_summary(name)) > 8


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_preset_has_the_published_number_of_parameters(name: str):
    config = resolve_config(preset=name)[0].config
    assert billions(config) == pytest.approx(PUBLISHED_BILLIONS[name], abs=6e-4)


def test_mixtral_and_deepseek_say_which_layers_are_mixtures():
    mixtral = resolve_config(preset="mixtral-8x7b", require_training=False)[0].config
    assert moe_layers(mixtral) == (True,) * 32
    deepseek = resolve_config(preset="deepseek-v3", require_training=False)[0].config
    assert moe_layers(deepseek) == (False,) * 3 + (True,) * 58


def test_tiny_presets_split_over_eight_ranks():
    for name in ("tiny-llama", "tiny-gpt"):
        for tp in (2, 4, 8):
            assert resolve_config(["--tp", str(tp), "--sp"], preset=name, require_training=False)[1] == []
