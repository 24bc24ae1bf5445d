"""gpt-oss: its published config.json, the presets at full size, and its weights in MXFP4."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import FP4_VALUES

import petatron
from petatron.base.errors import CheckpointError, ConfigError
from petatron.checkpoint.load.dequantize import dequantize
from petatron.cli.main import main
from petatron.estimate.flops import parameter_count
from petatron.models.hf import from_hf_config, matching_family, to_hf_config
from petatron.models.registry import model_spec
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from petatron.validate import load_config
from tests.dist import RankPool
from tests.hf.ours import weights_of
from tests.hf.variant_zoo import SHAPE
from tests.longform import later

# The settings of openai/gpt-oss-20b that say what the model is.
PUBLISHED: dict[str, Any] = {
    "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True,
    "vocab_size": 201088, "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
}  # fmt: skip
SIZES = {"gpt-oss-20b": (24, 32, 20.91), "gpt-oss-120b": (36, 128, 116.83)}
TRAINING = "--mock-data --lr 1e-3 --train-iters 10 --bf16 --use-distributed-optimizer --global-batch-size 64".split()


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_is_the_published_model(name: str):
    layers, experts, billions = SIZES[name]
    spec = model_spec(load_config([], preset=name, require_training=False).config)
    config = GptOssConfig(num_hidden_layers=layers, num_local_experts=experts)
    with torch.device("meta"):
        theirs = sum(math.prod(parameter.shape) for parameter in GptOssForCausalLM(config).parameters())
    assert parameter_count(spec) == theirs and round(theirs / 1e9, 2) == billions
    content = to_hf_config(spec)
    assert content["model_type"] == "gpt_oss"
    published = {**PUBLISHED, "num_hidden_layers": layers, "num_local_experts": experts}
    published["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    assert from_hf_config(published) == from_hf_config(content)


@pytest.mark.parametrize("name", SIZES)
def test_its_memory_is_planned(name: str, capsys: pytest.CaptureFixture[str]):
    layout = "--tp 4 --ep 8 --pp 2 --etp 1 --world-size 64".split()
    assert main(["plan", "memory", name, *layout, *TRAINING]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:2].strip().isdigit()]
    assert [int(row[0]) for row in rows] == [0, 1]


def test_another_gain_of_the_gate_is_refused():
    with pytest.raises(ConfigError, match=r"swiglu_alpha 1\.5 is not 1\.702"):
        from_hf_config({**PUBLISHED, "swiglu_alpha": 1.5})


def test_a_model_without_a_clamp_is_no_gpt_oss():
    unclamped = load_config([], preset="gpt-oss-20b", require_training=False).config
    spec = model_spec(unclamped)
    assert matching_family(spec) is not None
    flags = ["--moe-router-linear-bias", "--vocab-size", "256", "--num-experts", "4"]
    spec = model_spec(load_config(flags, preset="tiny-llama", require_training=False).config)
    with pytest.raises(ConfigError, match="moe-router-linear-bias True cannot be written"):
        to_hf_config(spec)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns bytes and scales of a matrix of experts [expert, in, out], in blocks of 32 along `in`."""
    blocks = values.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).log2().floor().int() - 2
    scaled = blocks / (2.0**exponents).unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def experts_of(weights: dict[str, Tensor]) -> list[str]:
    return [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]


def as_transformers_reads(packed: Tensor, scales: Tensor) -> Tensor:
    """The definition, element by element: the low half of a byte first."""
    numbers = torch.tensor(FP4_VALUES)
    elements = torch.stack((numbers[(packed & 15).int()], numbers[(packed >> 4).int()]), -1).flatten(-2)
    return (elements * 2.0 ** (scales.float() - 127).unsqueeze(-1)).flatten(-2).transpose(1, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in MXFP4, its scales in a second file, and the same numbers in bfloat16."""
    torch.manual_seed(3)
    changes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = GptOssForCausalLM(GptOssConfig(**{**SHAPE, **changes, "sliding_window": 5}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    packed, plain = (tmp_path_factory.mktemp(name) for name in ("packed", "plain"))
    model.bfloat16().save_pretrained(plain)
    weights = load_file(plain / "model.safetensors")
    scales: dict[str, Tensor] = {}
    stored = dict(weights)
    for name in experts_of(weights):
        stored[f"{name}_blocks"], scales[f"{name}_scales"] = quantize(stored.pop(name).float())
        weights[name] = (
            as_transformers_reads(stored[f"{name}_blocks"], scales[f"{name}_scales"]).bfloat16().contiguous()
        )
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model-00001-of-00002.safetensors")
    save_file(scales, packed / "model-00002-of-00002.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = PUBLISHED["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], value) for name, value in second.items())


def test_weights_in_mxfp4_are_read_as_the_numbers_they_are(folders: tuple[Path, Path]):
    packed, plain = folders
    ours = petatron.from_pretrained(packed, dtype="float32").module.eval()
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    assert same(weights_of(str(packed), {}), weights_of(str(plain), {}))
    tokens = torch.randint(SHAPE["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


LAYOUTS = [{"tp": 2}, later({"dp_shard": 2, "ep": 2})]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_reads_its_part(ranks: RankPool, folders: tuple[Path, Path], layout: dict[str, int]):
    """Two ranks cut the 96 channels of an expert inside a block of 32."""
    packed, plain = (ranks.run(weights_of, 2, str(folder), layout) for folder in folders)
    assert all(map(same, packed, plain))


def test_a_conversion_writes_bfloat16_that_transformers_opens(folders: tuple[Path, Path], tmp_path: Path):
    packed, plain = folders
    convert(open_model_reader(packed), tmp_path / "out", ConversionOptions(target_format="huggingface"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert same(load_file(tmp_path / "out" / "model.safetensors"), load_file(plain / "model.safetensors"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_every_code_and_scale():
    codes = torch.arange(256, dtype=torch.uint8).view(-1, 16)
    exponents = torch.arange(100, 116, dtype=torch.uint8)
    found = dequantize(codes, exponents)
    low, high = (torch.tensor(FP4_VALUES)[part.int()] for part in (codes & 15, codes >> 4))
    wanted = torch.stack((low, high), -1).flatten(-2) * (2.0 ** (torch.arange(100, 116) - 127)).unsqueeze(-1)
    assert torch.equal(found, wanted.flatten())


GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
SPOILT: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda found: found.pop(f"{GATE_UP}_scales"), f"{GATE_UP} is missing"),
    "shape": (
        lambda found: found.update({f"{GATE_UP}_scales": found[f"{GATE_UP}_scales"][:, :, :1].clone()}),
        f"{GATE_UP}_scales is U8 [4, 192, 1] there, and should be U8 [4, 192, 2]",
    ),
    "dtype": (
        lambda found: found.update({f"{GATE_UP}_scales": found[f"{GATE_UP}_scales"].float()}),
        f"{GATE_UP}_scales is F32 [4, 192, 2] there",
    ),
    "of a vector": (
        lambda found: found.update({"model.norm_blocks": torch.ones(1), "model.norm_scales": torch.ones(1)}),
        "model.norm is not a tensor of this model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_scales_that_do_not_fit_are_named(folders: tuple[Path, Path], tmp_path: Path, case: str):
    spoil, message = SPOILT[case]
    for file in folders[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    second = tmp_path / "model-00002-of-00002.safetensors"
    scales = load_file(second)
    spoil(scales)
    save_file(scales, second)
    with pytest.raises(CheckpointError) as caught:
        petatron.from_pretrained(tmp_path)
    assert message in str(caught.value)


def test_mxfp4_without_a_word_in_the_config_is_refused(folders: tuple[Path, Path], tmp_path: Path):
    for file in folders[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="_blocks is not a tensor of this model"):
        open_model_reader(tmp_path)
