"""Megatron's arguments and weights of sparse attention, both ways, and versions whose indexers are others."""

from __future__ import annotations

from typing import Any

import pytest

from petatron.checkpoint.megatron.arguments import arguments_from_config, config_from_arguments
from petatron.checkpoint.megatron.weight_names import extra_state_modules, megatron_weights
from petatron.config.schema.sections.sparse_attention import SPARSE_ATTENTION_FIELDS
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.unit.checkpoint.megatron.test_megatron_kinds import latent_arguments

SPARSE: dict[str, Any] = {
    "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 7,
    "dsa_indexer_loss_coeff": 0.25, "dsa_indexer_use_sparse_loss": True, "dsa_indexer_rope_interleaved": True,
    "dsa_indexer_k_norm_epsilon": 1e-4, "dsa_indexer_rotate_activation": False, "dsa_indexer_scoring_relu": False,
}  # fmt: skip


def read(**more: Any) -> tuple[dict[str, Any], list[str]]:
    arguments = vars(latent_arguments(1, **{**SPARSE, **more}))
    model, _, problems = config_from_arguments({name: x for name, x in arguments.items() if x != "left out"}, None)
    return model, [str(problem) for problem in problems]


def test_arguments_are_the_settings():
    model, problems = read(attention_dropout=0.1, dsa_indexer_topk_freq=1)
    assert not problems and {name: model[name] for name in SPARSE} == SPARSE
    assert set(SPARSE_ATTENTION_FIELDS) < set(SPARSE)
    assert model["attention_dropout"] == 0.0, "Megatron's sparse attention drops nothing"


def test_versions_that_rotate_other_channels_are_refused():
    _, [problem] = read(dsa_indexer_rope_interleaved="left out")
    assert "--dsa-indexer-rope-interleaved" in problem and "rotates the last channels" in problem


def test_layers_that_share_an_indexer_are_refused():
    _, [problem] = read(dsa_indexer_topk_freq=4)
    assert "--dsa-indexer-topk-freq 4" in problem and "share the choice" in problem


def test_another_variant_is_refused():
    _, [problem] = read(experimental_attention_variant="gated_delta_net")
    assert "--experimental-attention-variant gated_delta_net" in problem


def written() -> tuple[Any, Any]:
    flags = [text for name, value in SPARSE.items() for text in (f"--{name.replace('_', '-')}", str(value).lower())]
    base = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --attention-dropout 0 --swiglu "
        "--normalization RMSNorm --disable-bias-linear --multi-latent-attention --qk-pos-emb-head-dim 8 --q-lora-rank 12 --qk-layernorm "
        "--position-embedding-type rope --untie-embeddings-and-output-weights"
    )
    run = load_config([*base.split(), *flags], require_training=False).config
    sizes = {"tp": 1, "pp": 1, "ep": 1, "padded_vocab_size": 128, "iteration": 3}
    return run, arguments_from_config(run.model, None, **sizes)


def test_what_is_written_is_read_as_the_same_model():
    run, arguments = written()
    model, _, problems = config_from_arguments(vars(arguments), None)
    assert not problems and {name: model[name] for name in SPARSE} == {
        name: getattr(run.model, name) for name in SPARSE
    }


def test_weights_of_an_indexer_are_whole_on_every_rank():
    run, _ = written()
    indexer = "decoder.layers.1.self_attention.core_attention.indexer"
    found = {w.name: (w.layout, w.shape) for w in megatron_weights(model_spec(run)) if w.name.startswith(indexer)}
    assert found == {
        f"{indexer}.linear_wq_b.weight": ("whole", (48, 12)),
        f"{indexer}.linear_wk.weight": ("whole", (16, 32)),
        f"{indexer}.linear_weights_proj.weight": ("whole", (3, 32)),
        f"{indexer}.k_norm.weight": ("whole", (16,)),
        f"{indexer}.k_norm.bias": ("whole", (16,)),
    }
    assert extra_state_modules(f"{indexer}.k_norm.weight", "te") == (f"{indexer}.k_norm",)


@pytest.mark.parametrize("pair", [("dsa_indexer_head_dim", 24), ("dsa_indexer_head_dim", 1)])
def test_sizes_are_checked_as_those_of_flags(pair: tuple[str, int]):
    _, problems = read(**dict([pair]), dsa_indexer_rotate_activation=True)
    assert any("--dsa-indexer-head-dim" in problem for problem in problems)
