"""What is written for Megatron has its names and layouts, and reads back as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.base.errors import CheckpointError, ConfigError
from petatron.checkpoint.megatron import open_megatron
from petatron.checkpoint.megatron.weight_layouts import extract_logical, fuse_logical, shard_weight, unshard
from petatron.checkpoint.megatron.weight_names import MegatronWeight, logical_shapes_with_router_bias, megatron_weights
from petatron.checkpoint.megatron.write_checkpoint import write_megatron
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.models.registry import spec_from_config
from tests.longform import diagonal
from tests.unit.checkpoint.megatron.megatron_files import Case, rank_chunk, truth

LLAMA = ModelConfig(
    num_layers=4, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, group_query_attention=True, num_query_groups=2,
    kv_channels=4, seq_length=12, max_position_embeddings=12, position_embedding_type="rope", normalization="RMSNorm",
    activation="swiglu", add_bias_linear=False, untie_embeddings_and_output_weights=True, vocab_size=50,
    make_vocab_size_divisible_by=8,
)  # fmt: skip
GPT = replace(
    LLAMA, group_query_attention=False, num_query_groups=4, position_embedding_type="learned_absolute", activation="gelu_tanh",
    normalization="LayerNorm", add_bias_linear=True, untie_embeddings_and_output_weights=False, qk_layernorm=True,
)  # fmt: skip
MOE = MoEConfig(
    num_experts=4, moe_ffn_hidden_size=8, moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True,
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_latent_size=12,
)  # fmt: skip
LATENT = replace(
    LLAMA, group_query_attention=False, num_query_groups=4, multi_latent_attention=True, q_lora_rank=6, kv_lora_rank=10,
    qk_head_dim=5, qk_pos_emb_head_dim=4, v_head_dim=3, kv_channels=9, qk_layernorm=True,
)  # fmt: skip
HYBRID_SIZES = {"hybrid_layer_pattern": "MMMM", "mamba_num_groups": 2, "mamba_num_heads": 8, "mamba_norm_groups": 2}
YARN = {
    "rope_scaling_factor": 4.0, "yarn_mscale": 0.7, "yarn_mscale_all_dim": 0.9, "original_max_position_embeddings": 6,
    "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0,
}  # fmt: skip
HYBRID = replace(
    LLAMA, hybrid_layer_pattern="M*-M", is_hybrid_model=True, mamba_state_dim=3, mamba_head_dim=4, mamba_num_groups=2,
    mamba_num_heads=6, mamba_norm_groups=2, activation="squared_relu", position_embedding_type="none",
)  # fmt: skip
MODELS: dict[str, tuple[ModelConfig, MoEConfig | None]] = {
    "llama": (LLAMA, None),
    "gpt": (GPT, None),
    "gpt with exact gelu": (replace(GPT, activation="gelu"), None),
    "window": (replace(LLAMA, window_size=8, activation="squared_relu"), None),
    "layers that differ": (
        replace(LLAMA, window_size=8, window_attn_skip_freq="[1, 0, 1, 0]", no_rope_freq="2", rotary_interleaved=True),
        None,
    ),
    "experts": (LLAMA, replace(MOE, moe_grouped_gemm=False)),
    "experts in one product": (LLAMA, MOE),
    "experts in some layers": (LLAMA, replace(MOE, moe_layer_freq="([0]*1+[1]*3)")),
    "experts with biases": (replace(GPT, activation="gelu"), MOE),
    "latents": (LATENT, None),
    "latents without one of queries, yarn, experts": (
        replace(LATENT, q_lora_rank=None, position_embedding_type="yarn", **YARN),
        replace(MOE, moe_latent_size=None, moe_layer_freq="([0]*1+[1]*3)"),
    ),
    "hybrid": (HYBRID, None),
    "hybrid with experts, LayerNorm and biases": (
        replace(
            HYBRID, hybrid_layer_pattern="EM*M", normalization="LayerNorm", add_bias_linear=True, activation="gelu"
        ),
        replace(MOE, moe_grouped_gemm=False, moe_latent_size=None),
    ),
    "Mamba-2 alone": (replace(HYBRID, hybrid_layer_pattern="MMMM", untie_embeddings_and_output_weights=False), None),
}
PREDICTIONS: dict[str, tuple[ModelConfig, MoEConfig | None]] = {
    "predictions": (replace(LLAMA, mtp_num_layers=2, mtp_loss_scaling_factor=0.3), None),
    "predictions of one depth's weights": (replace(LLAMA, mtp_num_layers=3, mtp_use_repeated_layer=True), None),
    "predictions of a hybrid": (replace(HYBRID, mtp_num_layers=2, mtp_hybrid_override_pattern="M*-"), None),
    "predictions of a hybrid with experts, one depth's weights": (
        replace(HYBRID, mtp_num_layers=2, mtp_hybrid_override_pattern="*E", mtp_use_repeated_layer=True),
        replace(MOE, moe_grouped_gemm=False, moe_latent_size=None),
    ),
    "predictions, latents, experts, tied": (
        replace(LATENT, mtp_num_layers=1, untie_embeddings_and_output_weights=False),
        replace(MOE, moe_latent_size=None, moe_layer_freq="([0]*1+[1]*3)"),
    ),
}
LAYOUTS: list[tuple[Literal["legacy", "torch_dist"], int, int]] = [
    ("legacy", 1, 1),
    ("legacy", 2, 2),
    ("torch_dist", 2, 2),
]


def values_of(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {
        name: torch.randn(shape, generator=generator)
        for name, shape in logical_shapes_with_router_bias(spec_from_config(model, moe)).items()
    }
    return {name: value if "expert_bias" in name else value.bfloat16() for name, value in made.items()}


@diagonal(3)
@pytest.mark.parametrize("format, tp, pp", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(tmp_path: Path, name: str, format: Literal["legacy", "torch_dist"], tp: int, pp: int):
    check_round_trip(tmp_path, *MODELS[name], (format, tp, pp))


@pytest.mark.parametrize("layout", [("legacy", 2, 1), ("torch_dist", 2, 2)], ids=str)
@pytest.mark.parametrize("name", PREDICTIONS)
def test_predictions_go_along(tmp_path: Path, name: str, layout: Any):
    check_round_trip(tmp_path, *PREDICTIONS[name], layout)


def check_round_trip(
    tmp_path: Path, model: ModelConfig, moe: MoEConfig | None, layout: tuple[Literal["legacy", "torch_dist"], int, int]
) -> None:
    format, tp, pp = layout
    tensors = values_of(model, moe)
    ep = 2 if moe is not None and tp > 1 else 1
    fetch = tensors.__getitem__
    write_megatron(
        tmp_path, iteration=7, spec=spec_from_config(model, moe), fetch=fetch, tp=tp, pp=pp, ep=ep, format=format
    )
    found = open_megatron(tmp_path)
    assert found.iteration == 7
    assert found.tensors.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found.tensors[key].dtype == tensor.dtype
        assert torch.equal(found.tensors[key].load(), tensor), key
    again = ModelConfig(**found.model)
    assert again == replace(model, group_query_attention=model.num_query_groups != model.num_attention_heads)
    if moe is not None:
        pattern = {"moe_layer_freq": "[0, 1, 1, 1]"} if moe.moe_layer_freq != "1" else {}
        assert MoEConfig(**found.moe) == replace(moe, **pattern)


@pytest.mark.parametrize("tied", [False, True])
def test_legacy_files_are_those_of_a_megatron_rank(tmp_path: Path, tied: bool):
    """Compared with the loops over heads and ranks that the reading tests are made of."""
    case = Case(layers=4, groups=2, tp=2, pp=2, tied=tied)
    model = replace(LLAMA, untie_embeddings_and_output_weights=not tied)
    values = truth(case)
    step = write_megatron(
        tmp_path, iteration=3, spec=spec_from_config(model, None), fetch=values.__getitem__, tp=2, pp=2, format="legacy"
    )
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    for tp in range(2):
        for pp in range(2):
            file = step / f"mp_rank_{tp:02d}_{pp:03d}" / "model_optim_rng.pt"
            content = torch.load(file, weights_only=False)
            expected = {k: v for k, v in rank_chunk(case, values, tp, pp, 0).items() if isinstance(v, Tensor)}
            assert {name for name, value in content["model"].items() if value is not None} == expected.keys()
            modules = ("self_attention.linear_qkv", "self_attention.core_attention", "mlp.linear_fc2")
            assert all(f"decoder.layers.1.{module}._extra_state" in content["model"] for module in modules)
            for name, tensor in expected.items():
                wanted = tensor
                if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                    rows = min(len(tensor), 50 - tp * len(tensor))  # padding is zero here
                    wanted = torch.cat([tensor[:rows], torch.zeros(len(tensor) - rows, 16)])
                assert torch.equal(content["model"][name], wanted), name
            assert content["args"].padded_vocab_size == 64 and content["checkpoint_version"] == 3.0


def test_torch_dist_has_the_names_of_megatron(tmp_path: Path):
    tensors = values_of(LLAMA, MOE)
    step = write_megatron(
        tmp_path,
        iteration=0,
        spec=spec_from_config(LLAMA, MOE),
        fetch=tensors.__getitem__,
        tp=1,
        pp=1,
        format="torch_dist",
    )
    assert step.name == "release" and (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads((step / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    metadata = torch.distributed.checkpoint.FileSystemReader(step).read_metadata()
    stored = metadata.state_dict_metadata.items()
    shapes = {name: tuple(facts.size) for name, facts in stored if "_extra_state" not in name}
    empty = {name for name, _ in stored if "_extra_state" in name}
    attention = [f"self_attention.{module}" for module in ("linear_qkv", "linear_proj", "core_attention")]
    mlp = [f"mlp.{module}" for n in (1, 2) for module in (f"shared_experts.linear_fc{n}", f"fc{n}_latent_proj")]
    places = [(f"{module}", f"{layer}_4") for module in (*attention, *mlp, "pre_mlp_layernorm") for layer in range(4)]
    experts = [(layer, expert) for layer in range(4) for expert in range(4)]
    places += [
        (f"mlp.experts.experts.linear_fc{n}", f"{layer}.{expert}_4.4") for n in (1, 2) for layer, expert in experts
    ]
    expected = {f"decoder.layers.{module}._extra_state/shard_{place}" for module, place in places}
    assert empty == {*expected, "decoder.final_layernorm._extra_state/shard_0_1"}
    assert shapes["decoder.layers.self_attention.linear_qkv.weight"] == (4, 32, 16)
    assert shapes["decoder.layers.self_attention.linear_qkv.layer_norm_weight"] == (4, 16)
    assert shapes["decoder.layers.pre_mlp_layernorm.weight"] == (4, 16)
    assert shapes["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == (4, 4, 16, 12)
    assert shapes["decoder.layers.mlp.shared_experts.gate_weight"] == (4, 1, 16)
    assert shapes["embedding.word_embeddings.weight"] == (56, 16)


def test_megatron_has_no_local_layers_for_hybrids(tmp_path: Path):
    fetch = values_of(HYBRID, None).__getitem__
    with pytest.raises(ConfigError, match="--megatron-spec local has no implementation of hybrids"):
        write_megatron(
            tmp_path, iteration=1, spec=spec_from_config(HYBRID), fetch=fetch, tp=1, pp=1, layer_spec="local"
        )


def test_tensors_are_fetched_as_they_are_written(tmp_path: Path):
    """No more than the tensors of one product are asked for between two writes, and experts are not fetched one by one."""
    tensors, asked = values_of(LLAMA, MOE), []

    def fetch(name: str) -> Tensor:
        asked.append(name)
        return tensors[name]

    write_megatron(
        tmp_path, iteration=1, spec=spec_from_config(LLAMA, MOE), fetch=fetch, tp=1, pp=1, format="torch_dist"
    )
    assert set(asked) == set(tensors)
    assert max(asked.count(name) for name in tensors) <= 2


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_layouts_undo_each_other(data: st.DataObject):
    tp = data.draw(st.sampled_from([1, 2, 4]))
    groups = tp * data.draw(st.integers(1, 3))
    heads = groups * data.draw(st.integers(1, 3))
    width = data.draw(st.integers(1, 3))
    model = replace(LLAMA, num_attention_heads=heads, num_query_groups=groups, kv_channels=width)
    q, k, v = (torch.randn(rows * width, 5) for rows in (heads, groups, groups))
    qkv = MegatronWeight("qkv", "qkv", ("q", "k", "v"), ((heads + 2 * groups) * width, 5))
    whole = fuse_logical(qkv, (q, k, v), model, padded_vocab_size=0)
    again = unshard("qkv", [shard_weight(qkv, whole, tp=tp, tp_rank=rank) for rank in range(tp)])
    assert all(torch.equal(extract_logical(qkv, again, part, model), tensor) for part, tensor in enumerate((q, k, v)))
    gate, up = torch.randn(3 * tp, 5), torch.randn(2 * tp, 5)
    gated = MegatronWeight("fc1", "sections", ("gate", "up"), (5 * tp, 5), rows=(3 * tp, 2 * tp))
    shards = [
        shard_weight(gated, fuse_logical(gated, (gate, up), model, padded_vocab_size=0), tp=tp, tp_rank=rank)
        for rank in range(tp)
    ]
    assert torch.equal(shards[0][:3], gate[:3]) and torch.equal(shards[-1][3:], up[-2:])
    assert torch.equal(extract_logical(gated, unshard("sections", shards, gated.rows), 1, model), up)


def test_every_logical_tensor_is_in_one_weight():
    for model, moe in MODELS.values():
        names = [
            (name, weight.expert)
            for weight in megatron_weights(spec_from_config(model, moe))
            for name in weight.logical_names
        ]
        assert len(names) == len(set(names))
        assert {name for name, _ in names} == logical_shapes_with_router_bias(spec_from_config(model, moe)).keys()


@pytest.mark.parametrize(
    "changes, sizes, words",
    [
        ({}, {"tp": 4}, "--tensor-model-parallel-size 4 does not divide --num-query-groups 2"),
        ({}, {"pp": 3}, "--pipeline-model-parallel-size 3 does not divide --num-layers 4"),
        ({}, {"ep": 2}, "a model without experts"),
        ({"activation": "geglu"}, {}, "--activation geglu has no argument in Megatron"),
        ({"norm_placement": "both"}, {}, "--norm-placement both has no argument in Megatron"),
        ({"position_embedding_type": "yarn"}, {}, "yarn"),
        (
            {"mtp_num_layers": 1},
            {"pp": 2},
            "--pipeline-model-parallel-size 2 cannot be written beside --mtp-num-layers",
        ),
        ({"multi_latent_attention": True, "position_embedding_type": "none"}, {}, "latent attention is always rotary"),
        (
            {"multi_latent_attention": True, "yarn_correction_range_round_to_int": False},
            {},
            "--no-yarn-correction-range-round-to-int has no argument in Megatron for latent attention",
        ),
        ({"hybrid_layer_pattern": "GG*-"}, {}, "--hybrid-layer-pattern GG*- has gated delta nets, whose weights the"),
        (HYBRID_SIZES, {"tp": 4}, "--tensor-model-parallel-size 4 does not divide --mamba-num-groups 2"),
        ({**HYBRID_SIZES, "mamba_norm_groups": 1}, {}, "--mamba-norm-groups 1 is not --mamba-num-groups 2, as always"),
        ({"use_rope_scaling": True, "rope_low_freq_factor": 2.0}, {}, "--rope-low-freq-factor 2 is fixed to 1"),
    ],
)
def test_what_megatron_cannot_hold(tmp_path: Path, changes: dict[str, Any], sizes: dict[str, int], words: str):
    with pytest.raises(ConfigError) as caught:
        write_megatron(
            tmp_path / "out",
            iteration=1,
            spec=spec_from_config(replace(LLAMA, **changes)),
            fetch=lambda name: torch.ones(1),
            **{"tp": 1, "pp": 1, **sizes},
            format="legacy",
        )
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_failures_move_no_tracker(tmp_path: Path):
    tensors = values_of(LLAMA, None)

    def write(fetch: Any) -> None:
        write_megatron(
            tmp_path, iteration=1, spec=spec_from_config(LLAMA, None), fetch=fetch, tp=1, pp=1, format="legacy"
        )

    with pytest.raises(CheckpointError, match=r"embedding\.weight is \[3\], which does not fit"):
        write(lambda name: torch.ones(3))
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()
    with pytest.raises(CheckpointError, match="iter_0000001 is already there"):
        write(tensors.__getitem__)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_megatron(
            file,
            iteration=1,
            spec=spec_from_config(LLAMA, None),
            fetch=tensors.__getitem__,
            tp=1,
            pp=1,
            format="legacy",
        )
