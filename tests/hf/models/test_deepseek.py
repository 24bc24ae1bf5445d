"""DeepSeek's config.json as published and what of it is refused, and its weights in FP8 by blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

import petatron
from petatron.base.errors import CheckpointError, ConfigError
from petatron.models.batch import Batch
from petatron.models.hf import family_name_of_config, from_hf_config, matching_family, to_hf_config
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from petatron.pretrained.saveable_model import Model
from petatron.train.build_run import build_model
from petatron.validate import load_config, resolve_config
from tests.dist import RankPool
from tests.hf.ours import logits_of
from tests.hf.test_config import derived
from tests.hf.zoo import build, truth

# The settings of deepseek-ai/DeepSeek-V3 that say what the model is.
PUBLISHED: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
    "initializer_range": 0.02, "tie_word_embeddings": False, "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip
V2 = {
    **PUBLISHED,
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "topk_method": "greedy",
}
TRAINING = {"init_method_std"}


def test_deepseek_v3_as_published_is_the_preset():
    run = resolve_config(preset="deepseek-v3", require_training=False)[0].config
    model, experts = from_hf_config(PUBLISHED)
    wanted = asdict(run.model) | asdict(run.moe) | {"moe_layer_freq": str([0] * 3 + [1] * 58)}
    assert {name: wanted[name] for name in model.keys() - TRAINING} == {
        name: model[name] for name in model.keys() - TRAINING
    }
    assert {name: wanted[name] for name in experts} == experts


def test_kimi_k2_is_a_deepseek_v3():
    kimi = {**PUBLISHED, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384}
    assert family_name_of_config(kimi) == "deepseek_v3"
    _, experts = from_hf_config(kimi)
    assert (
        experts["num_experts"] == 384 and experts["moe_router_num_groups"] is experts["moe_router_group_topk"] is None
    )


def test_deepseek_v2_ranks_groups_by_their_best_expert():
    limited = {**V2, "topk_method": "group_limited_greedy", "topk_group": 3, "num_experts_per_tok": 6}
    _, experts = from_hf_config(limited)
    assert (experts["moe_router_num_groups"], experts["moe_router_group_score_topk"]) == (8, 1)
    _, experts = from_hf_config(V2)
    assert experts["moe_router_group_topk"] is None and experts["moe_router_pre_softmax"]


UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "no shared expert": ({**PUBLISHED, "n_shared_experts": None}, "n_shared_experts None is not a positive whole number"),
    "no scale": ({**PUBLISHED, "routed_scaling_factor": 0}, "routed_scaling_factor 0 is not above 0"),
    "one expert": ({**PUBLISHED, "num_experts_per_tok": 1}, "num_experts_per_tok 1 with a normalized weight"),
    "groups": ({**PUBLISHED, "n_group": 7}, "n_group 7 does not divide the 256 experts"),
    "small groups": ({**PUBLISHED, "n_group": 256, "topk_group": 9}, "n_group 256 leaves groups of fewer than 2 experts"),
    "too few groups": ({**PUBLISHED, "n_group": 64, "topk_group": 1}, "topk_group 1 of 64 groups cannot give a token its 8"),
    "missing groups": ({**V2, "topk_method": "group_limited_greedy", "n_group": None}, "n_group is missing"),
    "method": ({**V2, "topk_method": "random"}, 'topk_method "random" is a way to choose experts'),
    "v3 method": ({**PUBLISHED, "topk_method": "greedy"}, "topk_method greedy is not noaux_tc"),
    "dense": ({**PUBLISHED, "first_k_dense_replace": 61}, "first_k_dense_replace 61 leaves no layer of 61 for the experts"),
    "sometimes": ({**PUBLISHED, "moe_layer_freq": 2}, "moe_layer_freq 2 is not 1"),
    "scores": ({**PUBLISHED, "scoring_func": "softmax"}, "scoring_func softmax is not sigmoid"),
    "not normalized": ({**PUBLISHED, "norm_topk_prob": False}, "norm_topk_prob False is not True"),
    "halves": ({**PUBLISHED, "rope_interleave": False}, "rope_interleave False is not True"),
    "epsilon": ({**PUBLISHED, "rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 is not 1e-06"),
    "biases": ({**PUBLISHED, "attention_bias": True}, "attention_bias True is not False"),
    "latent": ({**PUBLISHED, "kv_lora_rank": None}, "kv_lora_rank None is not a positive whole number"),
    "temperature": (
        {**PUBLISHED, "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}},
        "rope_scaling.mscale_all_dim 1.0 scales scores of latent attention",
    ),
    "other quantization": (
        {**PUBLISHED, "quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}},
        "only plain ones, FP8 by blocks and MXFP4 can be read",
    ),
    "no blocks": (
        {**PUBLISHED, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}},
        "only plain ones, FP8 by blocks and MXFP4 can be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_refused(case: str):
    config, message = UNREADABLE[case]
    with pytest.raises(ConfigError) as caught:
        from_hf_config(config)
    assert message in str(caught.value)


_LATENT = (
    "--multi-latent-attention --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm "
    "--norm-epsilon 1e-6 --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 24 --moe-router-dtype fp32 "
    "--moe-shared-expert-intermediate-size 48 "
)
_V2 = _LATENT + "--moe-router-pre-softmax "
_V3 = _LATENT + "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
WRITTEN = {
    _V2: ("deepseek_v2", {"n_shared_experts": 2, "topk_method": "greedy", "first_k_dense_replace": 0}),
    _V2 + "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-score-topk 1": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    _V3: ("deepseek_v3", {"routed_scaling_factor": 1.0, "n_group": 1, "q_lora_rank": None, "norm_topk_prob": True}),
    _V3 + "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-layer-freq [0,1]": (
        "deepseek_v3",
        {"topk_method": "noaux_tc", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    ),
}
UNWRITABLE = {
    "dense": (_V3.replace("--num-experts 8", "--num-experts 8 --moe-layer-freq [1,0]"), "--moe-layer-freq [1,0]"),
    "shared": (_V3.replace("intermediate-size 48", "intermediate-size 30"), "--moe-shared-expert-intermediate-size 30"),
    "group scores": (
        _V3 + "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-score-topk 1",
        "--moe-router-group-score-topk 1",
    ),
    "one expert": (_V3.replace("topk 4", "topk 1"), "--moe-router-topk 1"),
    "router": (_V3.replace("--moe-router-dtype fp32", ""), "--moe-router-dtype None"),
    "norms": (_V3.replace("--qk-layernorm", ""), "--qk-layernorm False"),
    "window": (_V3 + "--window-size 4", "--window-size 4"),
    "temperature": (
        _V3 + "--position-embedding-type yarn --mscale 0 --mscale-all-dim 0.5",
        "--yarn-mscale 0.0 cannot be written as a Hugging Face deepseek_v3 model, which has both mscales or neither",
    ),
}  # fmt: skip


@pytest.mark.parametrize("flags", WRITTEN)
def test_family_is_told_by_the_model(flags: str):
    family, keys = WRITTEN[flags]
    content = to_hf_config(derived(flags))
    assert content["model_type"] == family
    assert {key: content[key] for key in keys} == keys
    found, experts = from_hf_config(content)
    spec = derived(flags)
    assert spec.moe is not None and found["multi_latent_attention"]
    names = ("moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_intermediate_size")
    assert all(experts[name] == getattr(spec.moe, name) for name in names)


def test_a_temperature_of_the_rotation_alone_is_written_as_a_number():
    content = to_hf_config(derived(_V3 + "--position-embedding-type yarn --mscale 0.5 --rotary-scaling-factor 40"))
    rope = content["rope_parameters"]
    assert rope["attention_factor"] == pytest.approx(1.0 + 0.05 * math.log(40)) and "mscale_all_dim" not in rope
    assert from_hf_config(content)[0]["yarn_mscale"] == pytest.approx(0.5)


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_the_family_cannot_express_is_refused(case: str):
    flags, message = UNWRITABLE[case]
    with pytest.raises(ConfigError) as caught:
        to_hf_config(derived(flags))
    assert message in str(caught.value) and matching_family(derived(flags)) is None


BLOCK = (8, 16)


def quantized(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Saves a model with its matrices in FP8 by blocks; returns the dequantized weights too."""
    build("deepseek-v3").save_pretrained(folder)
    weights, scales, wide = load_file(folder / "model.safetensors"), {}, {}
    for name, value in weights.items():
        if value.dim() < 2 or "gate.weight" in name or "embed" in name or "lm_head" in name:
            wide[name] = weights[name] = value.bfloat16() if value.dim() == 2 else value
            continue
        rows, columns = (-(-size // each) for size, each in zip(value.shape, BLOCK))
        padded = torch.zeros(rows * BLOCK[0], columns * BLOCK[1])
        padded[: value.shape[0], : value.shape[1]] = value
        blocks = padded.view(rows, BLOCK[0], columns, BLOCK[1])
        scale = blocks.abs().amax(dim=(1, 3)) / 448 + 1e-9
        cast = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        back = (cast.float() * scale[:, None, :, None]).view(padded.shape)[: value.shape[0], : value.shape[1]]
        weights[name] = cast.view(padded.shape)[: value.shape[0], : value.shape[1]].contiguous()
        scales[f"{name}_scale_inv"], wide[name] = scale, back.contiguous()
    assert len(scales) > 20
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model-00001-of-00002.safetensors")
    save_file(scales, folder / "model-00002-of-00002.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, wide


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    return quantized(tmp_path_factory.mktemp("fp8"))


def test_weights_in_fp8_are_dequantized_in_every_layout(ranks: RankPool, fp8: tuple[Path, dict[str, Tensor]]):
    """Experts and heads on two ranks cut matrices inside blocks."""
    folder, wide = fp8
    model, tokens = build("deepseek-v3"), truth("deepseek-v3").tokens
    with torch.no_grad():
        held = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, value in wide.items():
            if ".experts." not in name:
                held[name].copy_(value)
        for layer in (1,):
            experts = model.model.layers[layer].mlp.experts
            for number in range(8):
                prefix = f"model.layers.{layer}.mlp.experts.{number}."
                fused = torch.cat((wide[f"{prefix}gate_proj.weight"], wide[f"{prefix}up_proj.weight"]))
                experts.gate_up_proj[number], experts.down_proj[number] = fused, wide[f"{prefix}down_proj.weight"]
        expected = model(tokens).logits
    found = [logits_of(str(folder), tokens, {}, "float32")]
    found += ranks.run(logits_of, 2, str(folder), tokens, {"tp": 2}, "float32")
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_conversion_writes_them_dequantized(fp8: tuple[Path, dict[str, Tensor]], tmp_path: Path):
    folder, wide = fp8
    convert(open_model_reader(folder), tmp_path / "plain", ConversionOptions(target_format="huggingface"))
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    written = load_file(tmp_path / "plain" / "model.safetensors")
    assert written.keys() == wide.keys()
    for name, value in wide.items():
        rounded = value if value.dim() < 2 else value.bfloat16()
        assert torch.equal(written[name], rounded), f"{name}: rounded once"


def _rename(name: str, to: str | None) -> Callable[[dict[str, Tensor]], None]:
    def change(scales: dict[str, Tensor]) -> None:
        value = scales.pop(name)
        if to is not None:
            scales[to] = value

    return change


DOWN = "model.layers.0.mlp.down_proj.weight"
SPOILT: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (_rename(f"{DOWN}_scale_inv", None), f"{DOWN} is in FP8 and has no {DOWN}_scale_inv"),
    "shape": (
        lambda scales: scales.update({f"{DOWN}_scale_inv": torch.ones(3, 3)}),
        f"{DOWN}_scale_inv is F32 [3, 3] there, and should be F32 [4, 3]",
    ),
    "dtype": (
        lambda scales: scales.update({f"{DOWN}_scale_inv": torch.ones(4, 3).half()}),
        f"{DOWN}_scale_inv is F16 [4, 3] there",
    ),
    "of a vector": (
        lambda scales: scales.update({"model.norm.weight_scale_inv": torch.ones(1)}),
        "model.norm.weight has scales and is no matrix in FP8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_scales_that_do_not_fit_are_named(fp8: tuple[Path, dict[str, Tensor]], tmp_path: Path, case: str):
    spoil, message = SPOILT[case]
    for file in fp8[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    scales = load_file(tmp_path / "model-00002-of-00002.safetensors")
    spoil(scales)
    save_file(scales, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError) as caught:
        petatron.from_pretrained(tmp_path)
    assert message in str(caught.value)


def test_fp8_without_a_word_in_the_config_is_refused(fp8: tuple[Path, dict[str, Tensor]], tmp_path: Path):
    for file in fp8[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="_scale_inv is not a tensor of this model"):
        open_model_reader(tmp_path)


_PREDICTING = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --mock-data --lr 1e-3 --train-iters 1 "
    "--hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights --q-lora-rank 20 --kv-lora-rank 12 "
    "--qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 7 --moe-layer-freq [0,1] --init-method-std 0.2 "
    f"--make-vocab-size-divisible-by 4 --micro-batch-size 2 --mtp-num-layers 2 {_V3}"
)


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    """A model with two depths of multi-token prediction, in its own folder."""
    run = load_config(_PREDICTING.split()).config
    model, folder = build_model(run, petatron.launch(run)), tmp_path_factory.mktemp("mtp") / "model"
    model.save_pretrained(folder)
    return folder, model


def test_depths_of_prediction_are_those_of_transformers(
    predicting: tuple[Path, Model], monkeypatch: pytest.MonkeyPatch
):
    """transformers loads them apart from the model, and by the number that DeepSeek-V3's layer has."""
    folder, model = predicting
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3" and config["num_nextn_predict_layers"] == 2
    pattern = [r"model\.layers\.[23]\..*"]
    monkeypatch.setattr(DeepseekV3PreTrainedModel, "_keys_to_ignore_on_load_unexpected", pattern)
    theirs, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    depths = MtpModel.from_pretrained(theirs)
    ids = torch.randint(60, (2, 17), generator=torch.Generator().manual_seed(5))
    mask, sums = torch.ones(2, 16), []
    with torch.no_grad():
        hidden = theirs.model(ids[:, :-1]).last_hidden_state
        for depth in range(3):
            count = 16 - depth
            if depth:
                ahead, positions = ids[:, depth : depth + count], torch.arange(count).expand(2, -1)
                hidden = depths.forward_layer(depth - 1, hidden[:, :count], positions, None, input_ids=ahead)
            logits = theirs.lm_head(hidden)
            labels = ids[:, depth + 1 :]
            sums.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum").double())
    ours, counts = model.evaluate_losses([Batch(ids[:, :-1], ids[:, 1:], mask)])
    assert counts.tolist() == [32, 30, 28]
    torch.testing.assert_close(ours, torch.stack(sums), rtol=1e-5, atol=1e-3)


def test_depths_come_back_and_copies_beside_them_are_skipped(predicting: tuple[Path, Model], tmp_path: Path):
    folder, model = predicting
    weights = load_file(folder / "model.safetensors")
    assert "model.layers.2.eh_proj.weight" in weights and "model.layers.3.mlp.gate.e_score_correction_bias" in weights
    weights["model.layers.2.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.3.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    again = dict(petatron.from_pretrained(tmp_path).module.named_parameters())
    assert all(torch.equal(again[name][: len(value)], value) for name, value in model.module.named_parameters())


def test_depths_that_transformers_left_out_are_not_missed(predicting: tuple[Path, Model], tmp_path: Path):
    theirs = AutoModelForCausalLM.from_pretrained(predicting[0])
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert 2 in (config.get("num_nextn_predict_layers"), config.get("num_mtp_layers")), "it still counts them"
    for source in (tmp_path, theirs):
        assert petatron.from_pretrained(source).spec.config.mtp_num_layers is None


def test_a_wrong_number_of_depths_is_refused():
    with pytest.raises(ConfigError, match="num_nextn_predict_layers -1 is not a whole number of layers"):
        from_hf_config({**PUBLISHED, "num_nextn_predict_layers": -1})
    assert from_hf_config({**PUBLISHED, "num_nextn_predict_layers": 0})[0]["mtp_num_layers"] is None
