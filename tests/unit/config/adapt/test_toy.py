"""`--toy`: the structure of any preset, file or folder at a size that trains anywhere, and flags that win over it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

import petatron
from petatron.base.errors import ConfigError
from petatron.cli.main import main
from petatron.cli.train import read_checkpoint
from petatron.config import LoadedConfig, preset_names
from petatron.config.schema.attention_layer_freq import linear_layers, window_layers
from petatron.config.schema.moe_layer_freq import moe_layers
from petatron.estimate.flops import parameter_count
from petatron.mesh.mesh import ParallelMesh
from petatron.models.registry import model_spec
from petatron.validate import load_config
from petatron.verify.record_trace import record_steps
from tests.longform import diagonal

TRAIN = "--mock-data --train-iters 2 --lr 1e-3".split()
# One of each structure; the others differ from these in sizes and factors alone.
FAMILIES = (
    "deepseek-v3",
    "deepseek-v3.2",
    "falcon-h1-0.5b",
    "gemma3-1b",
    "gpt-oss-20b",
    "gpt3-125m",
    "kimi-linear-48b-a3b",
    "llama3.2-1b",
    "mamba2-130m",
    "minimax-text-01",
    "mixtral-8x7b",
    "nemotron-h-8b",
    "qwen3-next-80b-a3b",
)


def toy(preset: str, *flags: str) -> LoadedConfig:
    return load_config(["--toy", *TRAIN, *flags], preset=preset)


def train(preset: str, *, steps: int, flags: tuple[str, ...] = ()) -> list[float]:
    run = toy(preset, "--train-iters", str(steps), *flags).config
    return [step.loss for step in record_steps(run, ParallelMesh.single(), keep_tensors=lambda _: False)]


@diagonal(4)
@pytest.mark.parametrize("preset", FAMILIES)
def test_a_toy_trains_on_a_laptop(preset: str):
    (loss,) = train(preset, steps=1, flags=("--seq-length", "16", "--hidden-size", "64", "--vocab-size", "128"))
    assert 4 < loss < 8


@pytest.mark.slow
@pytest.mark.parametrize("preset", preset_names())
def test_every_toy_learns_at_its_own_size(preset: str):
    first, *_, last = train(preset, steps=4)
    assert last < first


@pytest.mark.parametrize("preset", preset_names())
def test_a_toy_has_the_structure_of_its_preset(preset: str):
    whole, small = load_config(TRAIN, preset=preset).config, toy(preset).config
    for section, sizes in (("model", _SIZES), ("moe", _EXPERT_SIZES)):
        ours, theirs = (getattr(config, section) for config in (small, whole))
        changed = {item.name for item in fields(ours) if getattr(ours, item.name) != getattr(theirs, item.name)}
        assert changed <= sizes, changed - sizes
    assert parameter_count(model_spec(small)) < 5e6
    assert _layer_kinds(small) == _layer_kinds(whole), "a kind of layer is missing"
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "ffn_hidden_size"):
        assert getattr(small.model, name) <= getattr(whole.model, name)
    shares = [
        (config.model.num_query_groups == config.model.num_attention_heads, config.model.num_query_groups == 1)
        for config in (small, whole)
    ]
    assert shares[0] == shares[1]


_SIZES = {
    "decoder_num_layers", "decoder_seq_length", "encoder_num_layers",
    "attention_chunk_size", "dsa_indexer_head_dim", "dsa_indexer_n_heads", "dsa_indexer_topk", "ffn_hidden_size", "hidden_size",
    "hybrid_layer_pattern", "kv_channels", "kv_lora_rank",
    "linear_attention_freq", "linear_chunk_size", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim", "mamba_chunk_size", "mamba_head_dim", "mamba_norm_groups", "mamba_num_groups", "mamba_num_heads",
    "mamba_state_dim", "max_position_embeddings", "num_attention_heads", "num_layers", "num_query_groups", "q_lora_rank",
    "image_token_id", "max_patches", "mrope_section", "projector_hidden_size", "vision_ffn_hidden_size", "vision_full_attention_layers",
    "vision_hidden_size", "vision_image_size", "vision_num_attention_heads", "vision_num_layers", "vision_patch_size",
    "qk_head_dim", "qk_pos_emb_head_dim", "seq_length", "v_head_dim", "vocab_size", "window_attn_skip_freq", "window_size",
}  # fmt: skip
_EXPERT_SIZES = {
    "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_group_topk", "moe_router_num_groups", "moe_router_topk",
    "moe_shared_expert_intermediate_size", "num_experts",
}  # fmt: skip


def _layer_kinds(config: petatron.RunConfig) -> set[tuple[object, ...]]:
    model = config.model
    layer_pattern = model.hybrid_layer_pattern or " " * model.num_layers
    return {*zip(layer_pattern, moe_layers(config), window_layers(model), linear_layers(model))}


def test_origins_tell_what_is_of_the_toy_and_what_of_the_preset():
    loaded = toy("deepseek-v3", "--num-experts", "4")
    assert str(loaded.origins["model.hidden_size"]) == "toy of preset deepseek-v3"
    assert str(loaded.origins["model.multi_latent_attention"]) == "preset deepseek-v3"
    assert str(loaded.origins["moe.num_experts"]) == "--num-experts"
    assert loaded.notices[0] == (
        "--toy shrinks the model of preset deepseek-v3 to 4 of 61 layers (its first 4 layers) and hidden size 128"
    )


def test_flags_win_and_other_sizes_follow():
    config = toy("deepseek-v3", *"--num-layers 8 --num-experts 4 --hidden-size 96 --seq-length 64".split()).config
    assert (config.model.num_layers, config.model.hidden_size, config.model.seq_length) == (8, 96, 64)
    assert config.moe.moe_layer_freq == "[0, 0, 0, 1, 1, 1, 1, 1]"
    assert (config.moe.num_experts, config.moe.moe_router_topk) == (4, 2), "a token's groups have 2 experts"
    assert toy("llama3-8b", "--num-attention-heads", "6", "--hidden-size", "96").config.model.num_query_groups == 3


@pytest.mark.parametrize(
    "flags",
    [
        "deepseek-v3 --tp 2 --pp 2 --ep 2 --dp 2",
        "nemotron-h-8b --pp 4 --tp 2",
        "qwen3-next-80b-a3b --tp 8",
        "kimi-linear-48b-a3b --cp 2 --tp 2",
        "minimax-text-01 --tp 2 --cp 2 --pp 2",
        "mamba2-130m --tp 8",
        "gpt-oss-20b --pp 4 --pipeline-schedule zb-v --global-batch-size 8",
    ],
)
def test_a_toy_splits_over_ranks(flags: str):
    preset, *words = flags.split()
    assert toy(preset, *words).config.parallel.world_size > 1


def test_a_toy_has_few_positions_for_generation_to_keep():
    assert (
        load_config([], preset="minimax-text-01", require_training=False).config.model.max_position_embeddings
        > 1_000_000
    )
    assert toy("minimax-text-01").config.model.max_position_embeddings == 2048
    assert toy("minimax-text-01", "--seq-length", "4096").config.model.max_position_embeddings == 4096
    assert toy("gpt3-125m").config.model.max_position_embeddings == 128


def test_a_vocabulary_is_that_of_the_tokenizer():
    assert toy("llama3-8b").config.model.vocab_size == 1024
    assert toy("llama3-8b", "--tokenizer-type", "ByteTokenizer").config.model.vocab_size is None


def test_without_a_model_there_is_nothing_to_shrink():
    with pytest.raises(
        ConfigError, match=r"1 problem.*\n  --toy shrinks a model, and neither a preset nor a file nor --from"
    ):
        load_config(["--toy", *TRAIN])


def test_a_model_as_it_is_and_a_toy_of_it_are_two_things():
    with pytest.raises(ConfigError, match=r"--toy cannot be combined with --use-checkpoint-args"):
        load_config(["--toy", "--use-checkpoint-args", "--load", "x", *TRAIN], preset="tiny-llama")
    with pytest.raises(ConfigError, match=r"1 problem.*\n  --from x is not known to this command"):
        load_config(["--toy", "--from", "x", *TRAIN])


def test_a_file_shrinks_with_its_pipeline(tmp_path: Path):
    text = (
        "num_layers: 12\nhidden_size: 512\nnum_attention_heads: 16\nseq_length: 1024\npipeline_model_parallel_size: 4\n"
    )
    text += "pipeline_model_parallel_layout: Etttt|ttt|ttt|ttL\nglobal_batch_size: 4\n"
    (tmp_path / "a.yaml").write_text(text)
    config = load_config(["--toy", *TRAIN], files=[tmp_path / "a.yaml"]).config
    assert (config.model.num_layers, config.parallel.pipeline_model_parallel_layout) == (4, "Et|t|t|tL")


def test_a_folder_gives_the_structure_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = (
        "train mixtral-8x7b --toy --num-layers 2 --hidden-size 32 --seq-length 16 --vocab-size 64 --mock-data --lr 1e-3"
    )
    words = [
        *flags.split(),
        *"--train-iters 1 --eval-iters 0 --num-workers 0 --live off --save".split(),
        str(tmp_path / "a"),
    ]
    assert main(words) == 0
    folder = next((tmp_path / "a").glob("step-*/model"))
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    loaded = load_config(
        ["--from", str(folder), "--toy", "--hidden-size", "16", *TRAIN], read_checkpoint=read_checkpoint
    )
    assert (loaded.config.model.hidden_size, loaded.config.model.num_layers, loaded.config.moe.num_experts) == (
        16,
        2,
        8,
    )
    assert loaded.config.checkpoint.pretrained_checkpoint is None, "weights are random"
    assert "the folder gives the structure alone, and weights are random" in loaded.notices[0]
    assert str(loaded.origins["moe.num_experts"]).startswith("checkpoint ")
    with pytest.raises(ConfigError, match="--hidden-size 16 contradicts --from"):
        load_config(["--from", str(folder), "--hidden-size", "16", *TRAIN], read_checkpoint=read_checkpoint)


def test_a_pattern_of_layers_is_cut_also_where_it_alone_says_how_many_there_are(tmp_path: Path):
    text = "model: {hybrid_layer_pattern: M-M*M-M-M*M-, hidden_size: 256, num_attention_heads: 4, seq_length: 64}\n"
    text += "memory: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 3}\n"
    (tmp_path / "hybrid.yaml").write_text(text)
    config = load_config(["--toy", *TRAIN], files=[tmp_path / "hybrid.yaml"]).config
    assert config.model.num_layers == len(config.model.hybrid_layer_pattern or "") == 5
    assert set(config.model.hybrid_layer_pattern or "") == set("M-*") and config.memory.recompute_num_layers == 3
