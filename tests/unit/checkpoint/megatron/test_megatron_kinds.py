"""Megatron's files of latent attention, multi-token prediction and Mamba-2 hybrids, put together by hand, rank by rank.

Nothing here shares code with the readers and writers: names, shapes and cuts are written out.
"""

from __future__ import annotations

import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.checkpoint.megatron import MegatronCheckpoint, open_megatron
from petatron.checkpoint.megatron.write_checkpoint import write_megatron
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.models.registry import spec_from_config
from tests.unit.checkpoint.megatron.megatron_files import DistFile

WIDTH, VOCAB, FFN, HEADS, EXPERTS = 8, 12, 6, 4, 2
Q_RANK, KV_RANK, NOPE, ROTARY, VALUE = 6, 4, 3, 2, 5
MAMBA_HEADS, MAMBA_WIDTH, GROUPS, STATE = 4, 3, 2, 5


def arguments(tp: int, **more: Any) -> Namespace:
    common = {
        "num_layers": 2, "hidden_size": WIDTH, "ffn_hidden_size": FFN, "num_attention_heads": HEADS, "group_query_attention": False,
        "num_query_groups": 1, "seq_length": 16, "max_position_embeddings": 16, "normalization": "RMSNorm", "norm_epsilon": 1e-6,
        "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "make_vocab_size_divisible_by": 2, "vocab_size": VOCAB,
        "padded_vocab_size": VOCAB, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    return Namespace(**{**common, **more})


def latent_arguments(tp: int, **more: Any) -> Namespace:
    sizes = {
        "multi_latent_attention": True, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_head_dim": NOPE, "qk_pos_emb_head_dim": ROTARY,
        "v_head_dim": VALUE, "qk_layernorm": True, "swiglu": True, "position_embedding_type": "rope", "rotary_scaling_factor": 40.0,
        "mscale": 0.7, "mscale_all_dim": 0.7, "rope_type": None, "num_experts": EXPERTS, "moe_ffn_hidden_size": FFN, "moe_router_topk": 1,
        "moe_layer_freq": [0, 1], "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.2,
    }  # fmt: skip
    return arguments(tp, **{**sizes, **more})


def hybrid_arguments(tp: int, **more: Any) -> Namespace:
    sizes = {
        "num_layers": 3, "hybrid_override_pattern": "M*-", "is_hybrid_model": True, "mamba_state_dim": STATE, "mamba_head_dim": MAMBA_WIDTH,
        "mamba_num_groups": GROUPS, "mamba_num_heads": MAMBA_HEADS, "squared_relu": True, "position_embedding_type": "none",
        "kv_channels": 2,
    }  # fmt: skip
    return arguments(tp, **{**sizes, **more})


def drawn(name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def latent_truth() -> dict[str, Tensor]:
    """Our tensors: a dense layer, one with experts, and a depth of multi-token prediction after them."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (VOCAB, WIDTH),
        "head.weight": (VOCAB, WIDTH),
        "norm.weight": (WIDTH,),
    }
    for layer in range(3):
        at = f"layers.{layer}"
        shapes |= {
            f"{at}.attention_norm.weight": (WIDTH,), f"{at}.mlp_norm.weight": (WIDTH,),
            f"{at}.attention.q_down.weight": (Q_RANK, WIDTH), f"{at}.attention.q_norm.weight": (Q_RANK,),
            f"{at}.attention.q_up.weight": (HEADS * (NOPE + ROTARY), Q_RANK),
            f"{at}.attention.kv_down.weight": (KV_RANK + ROTARY, WIDTH), f"{at}.attention.kv_norm.weight": (KV_RANK,),
            f"{at}.attention.kv_up.weight": (HEADS * (NOPE + VALUE), KV_RANK), f"{at}.attention.out.weight": (WIDTH, HEADS * VALUE),
        }  # fmt: skip
        lead = () if layer == 0 else (EXPERTS,)
        mlp = f"{at}.mlp" if layer == 0 else f"{at}.mlp.experts"
        shapes |= {f"{mlp}.{side}.weight": (*lead, FFN, WIDTH) for side in ("gate", "up")}
        shapes[f"{mlp}.down.weight"] = (*lead, WIDTH, FFN)
        shapes |= {} if layer == 0 else {f"{at}.mlp.router.weight": (EXPERTS, WIDTH)}
    shapes |= {f"layers.2.{name}.weight": (WIDTH,) for name in ("embedding_norm", "hidden_norm", "norm")}
    shapes["layers.2.projection.weight"] = (WIDTH, 2 * WIDTH)
    return {name: drawn(name, *shape) for name, shape in shapes.items()}


def rows(tensor: Tensor, rank: int, tp: int) -> Tensor:
    size = tensor.shape[0] // tp
    return tensor[rank * size : (rank + 1) * size].clone()


def columns(tensor: Tensor, rank: int, tp: int) -> Tensor:
    return rows(tensor.t(), rank, tp).t().contiguous()


def latent_layer(
    t: dict[str, Tensor], layer: int, rank: int, tp: int, *, fused: bool, cut_downs: bool
) -> dict[str, Tensor]:
    """A layer on one rank; fused: norms of latents are parts of the projections after them; cut_downs: as older versions do."""
    at, attention = f"layers.{layer}", f"layers.{layer}.attention"
    down = (lambda tensor: rows(tensor, rank, tp)) if cut_downs else (lambda tensor: tensor)
    q_norm, kv_norm = "linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight"
    mine = {
        "input_layernorm.weight": t[f"{at}.attention_norm.weight"],
        "self_attention.linear_q_down_proj.weight": down(t[f"{attention}.q_down.weight"]),
        f"self_attention.{q_norm if fused else 'q_layernorm.weight'}": t[f"{attention}.q_norm.weight"],
        "self_attention.linear_q_up_proj.weight": rows(t[f"{attention}.q_up.weight"], rank, tp),
        "self_attention.linear_kv_down_proj.weight": down(t[f"{attention}.kv_down.weight"]),
        f"self_attention.{kv_norm if fused else 'kv_layernorm.weight'}": t[f"{attention}.kv_norm.weight"],
        "self_attention.linear_kv_up_proj.weight": rows(t[f"{attention}.kv_up.weight"], rank, tp),
        "self_attention.linear_proj.weight": columns(t[f"{attention}.out.weight"], rank, tp),
    }
    if layer == 0:
        gate, up = (rows(t[f"{at}.mlp.{side}.weight"], rank, tp) for side in ("gate", "up"))
        norm = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
        return mine | {
            norm: t[f"{at}.mlp_norm.weight"],
            "mlp.linear_fc1.weight": torch.cat((gate, up)),
            "mlp.linear_fc2.weight": columns(t[f"{at}.mlp.down.weight"], rank, tp),
        }
    mine |= {
        "pre_mlp_layernorm.weight": t[f"{at}.mlp_norm.weight"],
        "mlp.router.weight": t[f"{at}.mlp.router.weight"],
    }
    for expert in range(EXPERTS):
        gate, up = (rows(t[f"{at}.mlp.experts.{side}.weight"][expert], rank, tp) for side in ("gate", "up"))
        mine[f"mlp.experts.linear_fc1.weight{expert}"] = torch.cat((gate, up))
        mine[f"mlp.experts.linear_fc2.weight{expert}"] = columns(t[f"{at}.mlp.experts.down.weight"][expert], rank, tp)
    return mine


def latent_rank(rank: int, tp: int, *, inner: str = "transformer_layer", **kinds: bool) -> dict[str, Tensor]:
    """The state dict of a rank; inner: what a depth calls its layer."""
    t = latent_truth()
    state = {
        "embedding.word_embeddings.weight": rows(t["embedding.weight"], rank, tp),
        "decoder.final_layernorm.weight": t["norm.weight"],
        "output_layer.weight": rows(t["head.weight"], rank, tp),
        "mtp.layers.0.enorm.weight": t["layers.2.embedding_norm.weight"],
        "mtp.layers.0.hnorm.weight": t["layers.2.hidden_norm.weight"],
        "mtp.layers.0.eh_proj.weight": rows(t["layers.2.projection.weight"], rank, tp),
        "mtp.layers.0.final_layernorm.weight": t["layers.2.norm.weight"],
    }
    for layer, prefix in enumerate(("decoder.layers.0", "decoder.layers.1", f"mtp.layers.0.{inner}")):
        state |= {f"{prefix}.{name}": x for name, x in latent_layer(t, layer, rank, tp, **kinds).items()}
    return state


PARTS = {
    "z": MAMBA_HEADS * MAMBA_WIDTH,
    "x": MAMBA_HEADS * MAMBA_WIDTH,
    "B": GROUPS * STATE,
    "C": GROUPS * STATE,
    "dt": MAMBA_HEADS,
}


def hybrid_truth() -> dict[str, Tensor]:
    """Our tensors: Mamba-2, attention, an MLP."""
    inner = MAMBA_HEADS * MAMBA_WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (VOCAB, WIDTH), "head.weight": (VOCAB, WIDTH), "norm.weight": (WIDTH,),
        "layers.0.mamba_norm.weight": (WIDTH,), "layers.1.attention_norm.weight": (WIDTH,), "layers.2.mlp_norm.weight": (WIDTH,),
        **{f"layers.0.mamba.{name}": (MAMBA_HEADS,) for name in ("A_log", "dt_bias", "D")},
        **{f"layers.0.mamba.in_{part}.weight": (size, WIDTH) for part, size in PARTS.items()},
        **{f"layers.0.mamba.conv_{part}.weight": (PARTS[part], 1, 4) for part in "xBC"},
        **{f"layers.0.mamba.conv_{part}.bias": (PARTS[part],) for part in "xBC"},
        "layers.0.mamba.norm.weight": (inner,), "layers.0.mamba.out_proj.weight": (WIDTH, inner),
        **{f"layers.1.attention.{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")},
        "layers.2.mlp.up.weight": (FFN, WIDTH), "layers.2.mlp.down.weight": (WIDTH, FFN),
    }  # fmt: skip
    return {name: drawn(name, *shape) for name, shape in shapes.items()}


def hybrid_rank(rank: int, tp: int, *, fused: bool, conv: str = "conv1d.") -> dict[str, Tensor]:
    """The state dict of a rank; fused: norms are parts of the projections after them; conv: how the convolution's names begin."""
    t, mixer = hybrid_truth(), "decoder.layers.0.mixer"
    qkv = [rows(t[f"layers.1.attention.{name}.weight"], rank, tp).unflatten(0, (HEADS // tp, 2)) for name in "qkv"]
    return {
        "embedding.word_embeddings.weight": rows(t["embedding.weight"], rank, tp),
        "output_layer.weight": rows(t["head.weight"], rank, tp),
        "decoder.final_norm.weight": t["norm.weight"],
        f"{mixer}.in_proj.layer_norm_weight" if fused else "decoder.layers.0.norm.weight": t["layers.0.mamba_norm.weight"],
        **{f"{mixer}.{name}": rows(t[f"layers.0.mamba.{name}"], rank, tp) for name in ("A_log", "dt_bias", "D")},
        f"{mixer}.in_proj.weight": torch.cat([rows(t[f"layers.0.mamba.in_{part}.weight"], rank, tp) for part in PARTS]),
        **{
            f"{mixer}.{conv}{leaf}": torch.cat([rows(t[f"layers.0.mamba.conv_{part}.{leaf}"], rank, tp) for part in "xBC"])
            for leaf in ("weight", "bias")
        },
        f"{mixer}.norm.weight": rows(t["layers.0.mamba.norm.weight"], rank, tp),
        f"{mixer}.out_proj.weight": columns(t["layers.0.mamba.out_proj.weight"], rank, tp),
        f"decoder.layers.1.{'self_attention.linear_qkv.layer_norm_' if fused else 'input_layernorm.'}weight": t[
            "layers.1.attention_norm.weight"
        ],
        "decoder.layers.1.self_attention.linear_qkv.weight": torch.stack(qkv, dim=1).flatten(0, 2),
        "decoder.layers.1.self_attention.linear_proj.weight": columns(t["layers.1.attention.out.weight"], rank, tp),
        f"decoder.layers.2.{'mlp.linear_fc1.layer_norm_' if fused else 'pre_mlp_layernorm.'}weight": t["layers.2.mlp_norm.weight"],
        "decoder.layers.2.mlp.linear_fc1.weight": rows(t["layers.2.mlp.up.weight"], rank, tp),
        "decoder.layers.2.mlp.linear_fc2.weight": columns(t["layers.2.mlp.down.weight"], rank, tp),
    }  # fmt: skip


def write_ranks(folder: Path, args: Namespace, ranks: list[dict[str, Tensor]]) -> Path:
    for rank, state in enumerate(ranks):
        (folder / f"mp_rank_{rank:02d}").mkdir(parents=True)
        content = {"args": args, "checkpoint_version": 3.0, "iteration": 5, "model": state}
        torch.save(content, folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    return folder


def check(found: MegatronCheckpoint, expected: dict[str, Tensor]) -> None:
    assert found.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found.tensors[name].load(), tensor), name


@pytest.mark.parametrize(
    ("tp", "kinds"),
    [
        (1, {"fused": True, "cut_downs": False}),
        (2, {"fused": True, "cut_downs": False}),
        (2, {"fused": False, "cut_downs": True}),
        (2, {"fused": True, "cut_downs": True, "inner": "mtp_model_layer"}),
    ],
    ids=str,
)
def test_ranks_with_latents_and_predictions(tmp_path: Path, tp: int, kinds: dict[str, Any]):
    ranks = [latent_rank(rank, tp, **kinds) for rank in range(tp)]
    found = open_megatron(write_ranks(tmp_path / "step", latent_arguments(tp), ranks))
    check(found, latent_truth())
    model = ModelConfig(**found.model)
    assert (model.position_embedding_type, model.rope_scaling_factor) == ("yarn", 40.0), (
        "latent attention takes it by itself"
    )
    assert (model.yarn_mscale, model.yarn_mscale_all_dim, model.original_max_position_embeddings) == (0.7, 0.7, 4096)
    assert (model.mtp_num_layers, model.mtp_loss_scaling_factor, model.kv_channels) == (1, 0.2, NOPE + ROTARY)
    assert MoEConfig(**found.moe).moe_layer_freq == "[0, 1]"


def test_a_learned_table_beside_latents(tmp_path: Path):
    """Megatron's default where no positions are named, in both directions."""
    table, sizes = drawn("table", 16, WIDTH), {"mtp_num_layers": None, "max_position_embeddings": 16}
    state = {
        name: x for name, x in latent_rank(0, 1, fused=True, cut_downs=False).items() if not name.startswith("mtp")
    }
    state |= {"embedding.position_embeddings.weight": table}
    args = latent_arguments(1, position_embedding_type="learned_absolute", add_position_embedding=True, **sizes)
    opened = open_megatron(write_ranks(tmp_path / "theirs", args, [state]))
    assert opened.model["learned_position_table"] and opened.model["position_embedding_type"] == "yarn"
    tensors = {name: x for name, x in latent_truth().items() if not name.startswith("layers.2")} | {
        "position.weight": table
    }
    check(opened, tensors)
    spec = spec_from_config(ModelConfig(**opened.model), MoEConfig(**opened.moe))
    step = write_megatron(
        tmp_path / "ours", iteration=5, spec=spec, fetch=tensors.__getitem__, tp=1, pp=1, format="legacy"
    )
    written = torch.load(step / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    assert torch.equal(written["model"]["embedding.position_embeddings.weight"], table)
    found = written["args"]
    assert (found.position_embedding_type, found.rope_type, found.add_position_embedding) == (
        "learned_absolute",
        "yarn",
        True,
    )


@pytest.mark.parametrize(("rope_type", "factor"), [("rope", 40.0), (None, 1.0), ("yarn", 1.0)])
def test_latents_with_plain_rotary_positions(tmp_path: Path, rope_type: str | None, factor: float):
    """YaRN with a factor of 1 is that, too."""
    args = latent_arguments(1, rope_type=rope_type, rotary_scaling_factor=factor, mscale_all_dim=0.0)
    step = write_ranks(tmp_path / "step", args, [latent_rank(0, 1, fused=True, cut_downs=False)])
    assert open_megatron(step).model["position_embedding_type"] == "rope"


def test_the_ranks_that_are_written(tmp_path: Path):
    """Those above, with the names of Transformer Engine and whole down-projections."""
    truth, args = latent_truth(), latent_arguments(2)
    opened = open_megatron(
        write_ranks(tmp_path / "theirs", args, [latent_rank(rank, 2, fused=True, cut_downs=False) for rank in range(2)])
    )
    spec = spec_from_config(ModelConfig(**opened.model), MoEConfig(**opened.moe))
    step = write_megatron(
        tmp_path / "ours", iteration=5, spec=spec, fetch=truth.__getitem__, tp=2, pp=1, format="legacy"
    )
    for rank in range(2):
        written = torch.load(step / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", weights_only=False)
        expected = latent_rank(rank, 2, fused=True, cut_downs=False)
        assert {name for name, value in written["model"].items() if value is not None} == expected.keys()
        assert all(torch.equal(written["model"][name], tensor) for name, tensor in expected.items())
        found = written["args"]
        assert (found.rope_type, found.rotary_scaling_factor, found.mscale, found.mscale_all_dim) == (
            "yarn",
            40.0,
            0.7,
            0.7,
        )
        assert found.multi_latent_attention and found.q_lora_rank == Q_RANK and found.mtp_num_layers == 1


@pytest.mark.parametrize(
    ("tp", "kinds"),
    [(1, {"fused": True}), (2, {"fused": True}), (2, {"fused": False}), (2, {"fused": True, "conv": "conv1d_"})],
    ids=str,
)
def test_ranks_of_a_hybrid(tmp_path: Path, tp: int, kinds: dict[str, Any]):
    ranks = [hybrid_rank(rank, tp, **kinds) for rank in range(tp)]
    found = open_megatron(write_ranks(tmp_path / "step", hybrid_arguments(tp), ranks))
    check(found, hybrid_truth())
    model = ModelConfig(**found.model)
    assert (model.hybrid_layer_pattern, model.num_layers, model.mamba_norm_groups) == ("M*-", 3, GROUPS)


@pytest.mark.parametrize(
    "more",
    [
        {"hybrid_override_pattern": None, "hybrid_layer_pattern": "M|*-"},
        {"hybrid_override_pattern": None, "hybrid_attention_ratio": 1 / 3, "hybrid_mlp_ratio": 1 / 3},
    ],
    ids=["stages in the pattern", "ratios"],
)
def test_patterns_in_other_spellings(tmp_path: Path, more: dict[str, Any]):
    args = hybrid_arguments(1, **more)
    step = write_ranks(tmp_path / "step", args, [hybrid_rank(0, 1, fused=True)])
    assert open_megatron(step).model["hybrid_layer_pattern"] == "M*-"


def depth_of_hybrid(prefix: str) -> dict[str, Tensor]:
    """The names of one depth with the layers -*, which newer versions of Megatron have for hybrids."""
    inner = f"{prefix}.mtp_model_layer.layers"
    return {
        f"{prefix}.enorm.weight": drawn(f"{prefix} enorm", WIDTH), f"{prefix}.hnorm.weight": drawn(f"{prefix} hnorm", WIDTH),
        f"{prefix}.eh_proj.weight": drawn(f"{prefix} eh_proj", WIDTH, 2 * WIDTH),
        f"{inner}.0.mlp.linear_fc1.layer_norm_weight": drawn(f"{prefix} mlp norm", WIDTH),
        f"{inner}.0.mlp.linear_fc1.weight": drawn(f"{prefix} up", FFN, WIDTH),
        f"{inner}.0.mlp.linear_fc2.weight": drawn(f"{prefix} down", WIDTH, FFN),
        f"{inner}.1.self_attention.linear_qkv.layer_norm_weight": drawn(f"{prefix} attention norm", WIDTH),
        f"{inner}.1.self_attention.linear_qkv.weight": drawn(f"{prefix} qkv", 3 * WIDTH, WIDTH),
        f"{inner}.1.self_attention.linear_proj.weight": drawn(f"{prefix} out", WIDTH, WIDTH),
        f"{prefix}.final_layernorm.weight": drawn(f"{prefix} norm", WIDTH),
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        {"hybrid_override_pattern": None, "hybrid_layer_pattern": "M*-/-*/-*", "mtp_num_layers": 2},
        {"mtp_hybrid_override_pattern": "-*", "mtp_num_layers": 2},
        {"hybrid_layer_pattern": "M*-/-*/-*/-*", "mtp_num_layers": 3, "mtp_use_repeated_layer": True},
    ],
    ids=["in the pattern", "an argument of its own", "one depth's weights"],
)
def test_depths_of_a_hybrid(tmp_path: Path, arguments: dict[str, Any]):
    repeated = "mtp_use_repeated_layer" in arguments
    prefixes = [f"mtp.layers.{depth}" for depth in range(1 if repeated else 2)]
    theirs = [depth_of_hybrid(prefix) for prefix in prefixes]
    state = hybrid_rank(0, 1, fused=True) | {name: value for depth in theirs for name, value in depth.items()}
    found = open_megatron(write_ranks(tmp_path / "step", hybrid_arguments(1, **arguments), [state]))
    model = ModelConfig(**found.model)
    assert (model.hybrid_layer_pattern, model.mtp_hybrid_override_pattern) == ("M*-", "-*")
    assert (model.mtp_num_layers, model.mtp_use_repeated_layer) == (arguments["mtp_num_layers"], repeated)
    assert len(found.tensors) == len(hybrid_truth()) + len(prefixes) * 12
    for number, (prefix, values) in enumerate(zip(prefixes, theirs, strict=True)):
        first, last = 3 + 2 * number, 4 + 2 * number
        for ours, name in (
            (f"layers.{first}.embedding_norm", "enorm"),
            (f"layers.{first}.hidden_norm", "hnorm"),
            (f"layers.{first}.projection", "eh_proj"),
            (f"layers.{first}.mlp.up", "mtp_model_layer.layers.0.mlp.linear_fc1"),
            (f"layers.{last}.attention.out", "mtp_model_layer.layers.1.self_attention.linear_proj"),
            (f"layers.{last}.norm", "final_layernorm"),
        ):
            assert torch.equal(found.tensors[f"{ours}.weight"].load(), values[f"{prefix}.{name}.weight"]), ours
        norm = values[f"{prefix}.mtp_model_layer.layers.1.self_attention.linear_qkv.layer_norm_weight"]
        assert torch.equal(found.tensors[f"layers.{last}.attention_norm.weight"].load(), norm)


def dist_hybrid(folder: Path, *, without: str = "") -> Path:
    """The distributed format: a tensor for each layer, and one for each part of a mixer's fused weights."""
    made, state, t = DistFile(folder), hybrid_rank(0, 1, fused=True), hybrid_truth()
    mixer = "decoder.layers.0.mixer"
    for name in (f"{mixer}.in_proj.weight", f"{mixer}.conv1d.weight", f"{mixer}.conv1d.bias"):
        del state[name]
    state |= {f"{mixer}.in_proj.weight.{part}": t[f"layers.0.mamba.in_{part}.weight"] for part in PARTS}
    for leaf in ("weight", "bias"):
        state |= {f"{mixer}.conv1d.{leaf}.{part}": t[f"layers.0.mamba.conv_{part}.{leaf}"] for part in "xBC"}
    for name, tensor in state.items():
        if name != without:
            made.add(name, tuple(tensor.shape), [((0,) * tensor.dim(), tensor)])
    return made.finish(hybrid_arguments(1))


def test_a_hybrid_in_the_distributed_format(tmp_path: Path):
    check(open_megatron(dist_hybrid(tmp_path / "theirs")), hybrid_truth())


def test_a_part_of_a_mixer_that_is_missing(tmp_path: Path):
    step = dist_hybrid(tmp_path / "theirs", without="decoder.layers.0.mixer.in_proj.weight.dt")
    with pytest.raises(
        CheckpointError, match=r"mixer\.in_proj\.weight is \[44, 8\], but the arguments make it \[48, 8\]"
    ):
        open_megatron(step)


@pytest.mark.parametrize("format", ["legacy", "torch_dist"])
def test_the_hybrid_that_is_written(tmp_path: Path, format: Any):
    theirs = dist_hybrid(tmp_path / "theirs")
    spec = spec_from_config(ModelConfig(**open_megatron(theirs).model))
    fetch = hybrid_truth().__getitem__
    step = write_megatron(tmp_path / "ours", iteration=5, spec=spec, fetch=fetch, tp=2, pp=1, format=format)
    if format == "torch_dist":
        ours, other = (torch.distributed.checkpoint.FileSystemReader(each).read_metadata() for each in (step, theirs))
        shapes = [
            {name: tuple(facts.size) for name, facts in each.state_dict_metadata.items() if "_extra_state" not in name}
            for each in (ours, other)
        ]
        assert shapes[0] == shapes[1]
        return
    for rank in range(2):
        written = torch.load(step / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", weights_only=False)
        expected = hybrid_rank(rank, 2, fused=True)
        assert {name for name, value in written["model"].items() if value is not None} == expected.keys()
        assert all(torch.equal(written["model"][name], tensor) for name, tensor in expected.items())
        assert written["args"].hybrid_override_pattern == written["args"].hybrid_layer_pattern == "M*-"


def test_depths_that_a_checkpoint_claims_and_lacks(tmp_path: Path):
    args = latent_arguments(1, mtp_num_layers=9_000)
    step = write_ranks(tmp_path / "step", args, [latent_rank(0, 1, fused=True, cut_downs=False)])
    with pytest.raises(CheckpointError, match="says 9002 layers, and"):
        open_megatron(step)
