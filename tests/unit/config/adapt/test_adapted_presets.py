"""Flags that win over a preset: fewer layers cut its patterns, and what a flag makes meaningless is left out, each with a notice."""

# ruff: noqa: E501  (a table of whole messages reads better unwrapped)

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.base.errors import ConfigError
from petatron.config.read_config_sources import with_vocab_size
from petatron.validate import load_config, resolve_config

TRAIN = "--mock-data --train-iters 2 --lr 1e-3".split()


@pytest.mark.parametrize(
    ("preset", "number", "how", "path", "value"),
    [
        ("nemotron-h-8b", 8, "its first 8 layers", "model.hybrid_layer_pattern", "M-M-M-M*"),
        ("nemotron-h-8b", 6, "its first 5 layers and one layer of the kind that these lack", "model.hybrid_layer_pattern", "M-M-M*"),
        ("falcon-h1-0.5b", 4, "its first 4 layers", "model.hybrid_layer_pattern", "P-P-"),
        ("deepseek-v3", 5, "its first 5 layers", "moe.moe_layer_freq", "[0, 0, 0, 1, 1]"),
        ("deepseek-v3", 2, "its first layer and one layer of the kind that these lack", "moe.moe_layer_freq", "[0, 1]"),
        ("deepseek-v3", 1, "the first of the most frequent 1 kind", "moe.moe_layer_freq", "[1]"),
        ("kimi-linear-48b-a3b", 8, "its first 8 layers", "model.linear_attention_freq", "[1, 1, 1, 0, 1, 1, 1, 0]"),
    ],
)  # fmt: skip
def test_fewer_layers_cut_patterns(preset: str, number: int, how: str, path: str, value: str):
    loaded = load_config(["--num-layers", str(number), *TRAIN], preset=preset)
    section, _, name = path.partition(".")
    assert getattr(getattr(loaded.config, section), name) == value
    assert str(loaded.origins[path]) == f"preset {preset}, cut to {number} layers"
    assert loaded.notices[0].startswith(f"--num-layers {number} cuts the layers of preset {preset} to {how}: ")
    assert value in loaded.notices[0]


def test_a_rule_for_any_number_of_layers_stays():
    loaded = load_config(["--num-layers", "4", *TRAIN], preset="gemma3-1b")
    assert loaded.config.model.window_attn_skip_freq == "6" and loaded.notices == ()


def test_a_file_is_cut_too_and_its_pipeline_layout(tmp_path: Path):
    text = "window_size: 8\nwindow_attn_skip_freq: '[1]*7+[0]'\npipeline_model_parallel_size: 2\n"
    (tmp_path / "a.yaml").write_text(f"{text}num_layers: 8\npipeline_model_parallel_layout: Ettttt|tttL\n")
    loaded = load_config(["--num-layers", "4", *TRAIN], preset="tiny-llama", files=[tmp_path / "a.yaml"])
    assert loaded.config.model.window_attn_skip_freq == "[1, 1, 1, 0]"
    assert loaded.config.parallel.pipeline_model_parallel_layout == "Ett|ttL"


def test_more_layers_than_a_pattern_has_are_refused_as_before():
    with pytest.raises(ConfigError, match="is a pattern of 61 layers, but --num-layers is 70"):
        load_config(["--num-layers", "70", *TRAIN], preset="deepseek-v3")


MEANINGLESS = [
    ("tiny-llama", "--multi-latent-attention", "--group-query-attention True, --num-query-groups 4"),
    ("gemma3-1b", "--multi-latent-attention", "--group-query-attention True, --num-query-groups 1, --kv-channels 256, --softmax-scale 0.0625"),
    ("llama3-8b", "--no-group-query-attention", "--num-query-groups 8"),
    ("llama3-8b", "--num-attention-heads 12 --hidden-size 768", "--num-query-groups 8, --group-query-attention True"),
    ("gpt-oss-20b", "--activation gelu", "--activation-func-clamp-value 7.0, --glu-linear-offset 1.0"),
    ("gpt-oss-20b", "--window-size none", "--window-attn-skip-freq 2"),
    ("gemma3-1b", "--position-embedding-type none", "--rotary-base-local 10000.0"),
    ("llama3.2-1b", "--position-embedding-type yarn", "--use-rope-scaling True"),
    ("qwen3-next-80b-a3b", "--experimental-attention-variant none", "--linear-attention-freq 4"),
    ("nemotron-h-8b", "--hybrid-layer-pattern M-*-", "--num-layers 52"),
    ("bamba-9b", "--no-is-hybrid-model", "--hybrid-layer-pattern M-M-M-M-M-M-M-M-M-*-M-M-M-M-M-M-M-M-*-M-M-M-M-M-M-M-M-*-M-M-M-M-"),
    ("deepseek-v3", "--moe-router-score-function softmax", "--moe-router-enable-expert-bias True"),
    ("deepseek-v3", "--moe-router-num-groups none", "--moe-router-group-topk 4"),
    ("qwen3-4b", "--qk-l2-norm", "--qk-layernorm True"),
    ("falcon-h1-0.5b", "--scale-embeddings", "--embedding-multiplier 5.656854249492381"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "flags", "dropped"), MEANINGLESS, ids=[f"{row[0]} {row[1]}" for row in MEANINGLESS])
def test_a_typed_flag_wins_over_what_it_makes_meaningless(preset: str, flags: str, dropped: str):
    loaded = load_config([*flags.split(), *TRAIN], preset=preset)
    flag = flags.split()[0]
    told = f"{flag} makes values of preset {preset} meaningless, which are left out: {dropped}"
    assert told in loaded.notices


def test_what_is_typed_or_in_a_file_is_never_left_out(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("num_query_groups: 4\ngroup_query_attention: true\n")
    words = ["--multi-latent-attention", *TRAIN]
    assert resolve_config(words, preset="tiny-llama", files=[tmp_path / "a.yaml"])[1]
    assert resolve_config([*words, "--group-query-attention"], preset="tiny-llama")[1]


def test_heads_with_groups_of_their_own_leave_the_preset_alone():
    assert (
        load_config([*"--num-attention-heads 2 --num-query-groups 1".split(), *TRAIN], preset="tiny-llama").notices
        == ()
    )


def test_a_tokenizer_wins_over_a_smaller_vocabulary_of_a_preset():
    loaded = with_vocab_size(load_config(TRAIN, preset="llama2-7b"), 50257, "the tokenizer t.json")
    assert loaded.config.model.vocab_size == 50257
    assert (
        loaded.notices[-1]
        == "the 50257 ids of the tokenizer t.json take the place of --vocab-size 32000 (preset llama2-7b)"
    )
    with pytest.raises(ConfigError, match="--vocab-size 32 is smaller than the 50257 ids"):
        with_vocab_size(load_config([*TRAIN, "--vocab-size", "32"], preset="llama2-7b"), 50257, "the tokenizer t.json")
