"""With `--megatron-defaults` flags mean what they mean to Megatron, also where ours alone would mean something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.config.schema.fields import flatten_config
from petatron.validate import resolve_config

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --mock-data "
    "--micro-batch-size 1 --train-iters 4 --lr 1e-3"
).split()
LATENT = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"


@pytest.mark.parametrize(
    ("flags", "path", "there", "here"),
    [
        ("", "model.activation", "gelu_tanh", "gelu"),
        ("--no-bias-gelu-fusion", "model.activation", "gelu", "gelu"),
        ("--disable-bias-linear", "model.activation", "gelu", "gelu"),
        ("--activation relu", "model.activation", "relu", "relu"),
        ("--num-query-groups 2", "model.num_query_groups", 4, 2),
        ("--group-query-attention --num-query-groups 2", "model.num_query_groups", 2, 2),
        ("--position-embedding-type yarn", "model.rope_scaling_factor", 1.0, 8.0),
        ("--position-embedding-type yarn", "model.original_max_position_embeddings", 4096, 8192),
        ("--position-embedding-type yarn --rotary-percent 0.5", "model.rotary_percent", 1.0, 0.5),
        ("--model-type bert", "model.prediction_activation", "gelu", None),
        ("--model-type bert --openai-gelu", "model.prediction_activation", None, None),
        ("--model-type bert --no-bias-gelu-fusion", "model.prediction_activation", None, None),
        (f"{LATENT} --position-embedding-type none", "model.position_embedding_type", "rope", "none"),
        (
            f"{LATENT} --position-embedding-type rope --rope-scaling-factor 4",
            "model.position_embedding_type",
            "rope",
            "yarn",
        ),
        (f"{LATENT} --position-embedding-type yarn --yarn-beta-fast 16", "model.yarn_beta_fast", 32.0, 16.0),
    ],
)
def test_a_flag_means_what_it_means_to_megatron(flags: str, path: str, there: object, here: object):
    values = []
    for defaults in (["--megatron-defaults"], []):
        loaded, problems = resolve_config([*defaults, *BASE, *flags.split()])
        assert problems == []
        values.append(flatten_config(loaded.config)[path])
    assert values == [there, here]


def test_the_vocabulary_of_a_bert_has_lower_case_pieces(tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("\n".join("[PAD] [UNK] [CLS] [SEP] [MASK] a b".split()))
    flags = [*BASE, "--model-type", "bert", "--vocab-file", str(tmp_path / "vocab.txt")]
    kinds = {
        defaults: resolve_config([*defaults, *flags, *more])[0].config.tokenizer.tokenizer_type
        for defaults, more in ((("--megatron-defaults",), ()), ((), ("--tokenizer-type", "BertWordPieceCase")))
    }
    assert list(kinds.values()) == ["BertWordPieceLowerCase", "BertWordPieceCase"]


def test_sparse_attention_has_no_dropout():
    flags = f"{LATENT} --position-embedding-type rope --experimental-attention-variant dsa --q-lora-rank 16 --dsa-indexer-head-dim 16"
    for dropout in ([], ["--attention-dropout", "0.2"]):
        loaded, problems = resolve_config(["--megatron-defaults", *BASE, *flags.split(), *dropout])
        assert problems == [] and loaded.config.model.attention_dropout == 0.0
    assert "--attention-dropout 0.2 (sparse attention drops no weights, as in Megatron)" in loaded.notices[0]
    _, problems = resolve_config([*BASE, *flags.split(), "--attention-dropout", "0.2"])
    assert [problem.where for problem in problems] == ["--attention-dropout"]


def test_a_preset_keeps_its_activation_and_heads():
    flags = "--megatron-defaults --preset llama3-8b --toy --no-bias-gelu-fusion --mock-data --lr 1e-3 --train-iters 1"
    model = resolve_config(flags.split())[0].config.model
    assert model.activation == "swiglu" and model.group_query_attention


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--rope-type rope --position-embedding-type rope --rotary-percent 0.5",
            "--rotary-percent 0.5 would rotate less than the rotary part of latent attention's heads, which is not in this version. "
            "Leave it out.",
        ),
        (
            "--rope-type rope --position-embedding-type rope --rotary-scaling-factor 4 --mscale-all-dim 0.7",
            "--mscale-all-dim 0.7 would scale attention's scores without YaRN, which is not in this version. Leave it out.",
        ),
    ],
)
def test_a_rotation_that_is_not_here_is_refused(flags: str, problem: str):
    _, problems = resolve_config(["--megatron-defaults", *BASE, *LATENT.split(), *flags.split()])
    assert [str(told) for told in problems] == [problem]


def test_flags_that_are_not_read_are_told():
    notices = resolve_config(["--megatron-defaults", *BASE, "--num-query-groups", "2", "--rotary-scaling-factor", "4"])[
        0
    ].notices
    assert "--num-query-groups 2 (it is for --group-query-attention)" in notices[0]
    assert "--rotary-scaling-factor 4.0 (YaRN and latent attention alone read it, as in Megatron)" in notices[0]


def test_latent_attention_has_no_bias_to_add():
    loaded, problems = resolve_config([*BASE, *LATENT.split(), "--position-embedding-type", "rope", "--add-qkv-bias"])
    assert problems == []
    assert any(notice.startswith("--add-qkv-bias has no effect") for notice in loaded.notices)
