"""Device facts, FLOPs and parameters, and the doctor that prints them."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from petatron.base import device
from petatron.base.errors import ConfigError
from petatron.cli import doctor
from petatron.config.schema.model import ModelConfig
from petatron.estimate.flops import flops_formula, head_gemm_elements, model_flops_per_token, parameter_count
from petatron.models.batch import Batch
from petatron.models.registry import spec_from_config
from tests.run_stage import run_stage

GPT = ModelConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    seq_length=32,
    max_position_embeddings=48,
    embedding_init_method_std=0.02,
    vocab_size=1000,
)
LLAMA = dataclasses.replace(
    GPT,
    ffn_hidden_size=192,
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_published_peaks(name: str, tflops: float) -> None:
    peaks = device.peak_flops(name)
    assert peaks is not None and peaks["bfloat16"] == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA RTX A1000", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA Next 9000"],
)
def test_a_peak_is_never_guessed(name: str) -> None:
    assert device.peak_flops(name) is None


def test_formats_a_device_lacks_have_no_peak() -> None:
    volta = device.peak_flops("Tesla V100-SXM2-32GB")
    assert volta is not None and volta["float16"] == 125e12 and "bfloat16" not in volta and "float8" not in volta


def test_cpu_facts() -> None:
    facts = device.detect_device("cpu")
    assert facts.kind == "cpu" and facts.name and facts.memory_bytes > 1e8
    assert facts.peak_flops is None and facts.peak("bfloat16") is None
    assert device.peak_memory_bytes("cpu") > 1e6


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    properties = types.SimpleNamespace(name=name, total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def test_cuda_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, "NVIDIA H200", 4)
    facts = device.detect_device("auto", local_rank=3)
    assert (facts.kind, facts.memory_bytes, facts.reason) == ("cuda", 80 * 10**9, "CUDA device 3 of 4")
    assert facts.peak("bfloat16") == pytest.approx(989.4e12)
    with pytest.raises(ConfigError, match="no device for local rank 4: 4 are visible"):
        device.detect_device("cuda", local_rank=4)
    pretend_cuda(monkeypatch, "NVIDIA Next 9000", 1)
    unknown = device.detect_device("cuda", local_rank=4)  # bound to its own device by the launcher
    assert unknown.peak_flops is None and "not in the table" in unknown.reason


def test_cuda_asked_for_but_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, "", 0)
    assert device.detect_device("auto").reason == "no CUDA device is visible; no MFU"
    with pytest.raises(ConfigError, match="--device cuda needs a CUDA device"):
        device.detect_device("cuda")


@pytest.mark.parametrize(
    "model",
    [
        GPT,
        LLAMA,
        dataclasses.replace(LLAMA, qk_layernorm=True, kv_channels=24),
        dataclasses.replace(LLAMA, add_qkv_bias=True, untie_embeddings_and_output_weights=False),
        dataclasses.replace(GPT, qk_layernorm=True, activation="geglu", position_embedding_type="none"),
        dataclasses.replace(GPT, num_query_groups=1, untie_embeddings_and_output_weights=True),
    ],
)
def test_parameter_count_is_what_the_model_has(model: ModelConfig) -> None:
    spec = spec_from_config(model)
    with torch.device("meta"):
        built = spec.build_stage(spec.whole_model)
    assert parameter_count(spec) == sum(parameter.numel() for parameter in built.parameters())


def test_known_sizes() -> None:
    llama3_8b = spec_from_config(
        dataclasses.replace(
            LLAMA,
            num_layers=32,
            hidden_size=4096,
            ffn_hidden_size=14336,
            num_attention_heads=32,
            num_query_groups=8,
            kv_channels=128,
            seq_length=8192,
            vocab_size=128256,
        )
    )
    assert parameter_count(llama3_8b) == 8_030_261_248
    # 6 per multiplying parameter (all but the embedding and the norms) plus causal attention over 8192 tokens.
    multiplying = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    expected = 6 * multiplying + 12 * 32 * 4096 * 8192 / 2
    assert model_flops_per_token(llama3_8b) == pytest.approx(expected, rel=1e-12)
    assert model_flops_per_token(llama3_8b, causal=False) == expected + 12 * 32 * 4096 * 8192 / 2


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_flops_are_what_torch_counts(model: ModelConfig) -> None:
    model = dataclasses.replace(model, vocab_size=1024, hidden_dropout=0.0, attention_dropout=0.0)
    tokens = torch.zeros(3, 32, dtype=torch.long)
    spec = spec_from_config(model)
    built = spec.build_stage(spec.whole_model)
    # The math backend multiplies masked pairs too, which is the full convention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run_stage(built, Batch(tokens, tokens, torch.ones(3, 32)), loss_weights_SB=torch.ones(32, 3)).sum().backward()
    assert counter.get_total_flops() == 3 * 32 * model_flops_per_token(spec, causal=False)


def test_flops_scale_with_the_padding() -> None:
    spec = spec_from_config(GPT)
    assert head_gemm_elements(spec) == 64 * 1024
    assert head_gemm_elements(spec, tp_size=3) == 64 * 1152
    more = model_flops_per_token(spec, tp_size=3) - model_flops_per_token(spec)
    assert more == 6 * 64 * (1152 - 1024)


def test_a_window_saves_attention() -> None:
    full = model_flops_per_token(spec_from_config(GPT))
    assert model_flops_per_token(spec_from_config(dataclasses.replace(GPT, window_size=32))) == full
    half = model_flops_per_token(spec_from_config(dataclasses.replace(GPT, window_size=8)))
    # 8 x 32 - 8^2/2 = 224 pairs instead of 512
    assert full - half == 12 * 2 * 64 * (512 - 224) / 32


def test_the_formula_names_its_convention() -> None:
    assert "s^2/2" in flops_formula() and "s^2/2" not in flops_formula(causal=False)


def test_doctor_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("wandb", "rich"):
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "torch          1.2.3" in out and "wandb          not installed" in out
    assert (
        "log      the live terminal view, TensorBoard, Weights & Biases and PNG pictures of curves (missing: rich, wandb)"
        in out
    )
    assert "gloo yes" in out and "math" in out and "single (rank 0 of 1)" in out
    assert "Problems" not in out


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["kind"] == "cpu" and "math" in found["devices"][0]["attention"]
    assert found["versions"]["torch"] and found["cores"] >= 1


def test_doctor_tells_how_experts_and_weight_gradients_are_multiplied(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main([])
    out = capsys.readouterr().out
    assert "expert GEMMs: one expert after the other; not one kernel: the device is no GPU" in out
    assert (
        "weight gradients: accumulated by a GEMM of operands cast to float32; not one kernel: the device is no" in out
    )
    gemms, experts, gradients = doctor._gemm_kernels("cuda", torch.bfloat16)
    assert gemms == "GEMMs and attention: bfloat16"
    assert experts.startswith("expert GEMMs: one kernel for all experts;")
    assert gradients.startswith("weight gradients: accumulated in float32 by the GEMM that computes them;")
    _, experts, _ = doctor._gemm_kernels("cuda", torch.float16)
    assert experts == "expert GEMMs: one expert after the other; not one kernel: it takes bfloat16"


def test_doctor_reports_problems_instead_of_failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def refuse(*, dir: str) -> None:
        raise PermissionError(dir)

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "1")
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "Started by: unclear" in out and "WORLD_SIZE" in out
    assert "Cannot write in" in out and "All extras are installed." in out


def test_what_does_not_run_is_not_listed() -> None:
    def refuse() -> None:
        raise RuntimeError("no kernel")

    assert not doctor._succeeds(refuse)
    assert doctor._succeeds(lambda: None)
