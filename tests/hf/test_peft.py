"""Adapters equal PEFT's on models of transformers: logits, loss, gradients, and the weights after a merge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from petatron.models.adapter_weights import adapted_weights
from petatron.models.hf import family_name_of_config, to_logical
from petatron.models.hf.peft_tensors import from_peft, to_peft
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec, without_adapters
from tests.dist import RankPool
from tests.hf.ours import assemble, compute, run_config
from tests.hf.zoo import BUILDERS, VOCABULARY

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, Any] = {
    "lora": peft.LoraConfig(r=4, lora_alpha=6, target_modules=LAYERS, init_lora_weights=False),
    "rslora": peft.LoraConfig(r=4, lora_alpha=6, target_modules=LAYERS, init_lora_weights=False, use_rslora=True),
    "dora": peft.LoraConfig(r=4, lora_alpha=6, target_modules=LAYERS, init_lora_weights=False, use_dora=True),
    "ia3": peft.IA3Config(target_modules=[*LAYERS[:3], "up_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "some": peft.LoraConfig(r=3, lora_alpha=6, target_modules=["v_proj", "up_proj"], init_lora_weights=False),
    "ranks": peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=LAYERS,
        init_lora_weights=False,
        rank_pattern={"q_proj": 5},
        alpha_pattern={"up_proj": 7},
    ),
}


@dataclass(frozen=True)
class PeftTruth:
    """What PEFT computes."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    tokens: Tensor
    logits: Tensor
    loss: float
    grads: dict[str, Tensor]
    merged: dict[str, Tensor]


class Rope(torch.nn.Module):
    """The rotary embedding of transformers with its frequencies, but angles in the precision of the model instead of float32."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        head_dim = config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.frequencies = 1.0 / config.rope_parameters["rope_theta"] ** exponents

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None] * self.frequencies.to(x.dtype)).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def in_float64(model: Any) -> Any:
    """Returns a model of transformers in float64, its norms and rope too, which transformers computes in float32."""
    model = model.double()
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    model.model.rotary_emb = Rope(model.config)
    return model


def truth(name: str, kind: str, dtype: torch.dtype = torch.float32) -> PeftTruth:
    torch.manual_seed(11)
    model = BUILDERS[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    if dtype == torch.float64:
        model = in_float64(model)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    adapted = peft.get_peft_model(model, KINDS[kind]).to(dtype)
    for key, parameter in adapted.named_parameters():
        if "ia3" in key:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        if "magnitude" in key:
            parameter.data.mul_(1.0 + 0.3 * torch.rand_like(parameter))
    tokens = torch.randint(VOCABULARY, (2, 24))
    adapted.eval()
    logits = adapted(tokens).logits
    labels = tokens.roll(-1, dims=1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    grads = {key.replace(".default", ""): p.grad for key, p in adapted.named_parameters() if p.requires_grad}
    tensors = {key: value.clone() for key, value in peft.get_peft_model_state_dict(adapted).items()}
    settings = {key: getattr(value, "value", value) for key, value in adapted.peft_config["default"].to_dict().items()}
    merged = adapted.merge_and_unload().state_dict()
    return PeftTruth(
        model.config.to_dict(), weights, tensors, settings, tokens, logits.detach(), loss.item(), grads, merged
    )


def flags(settings: dict[str, Any]) -> str:
    words = [
        f"--{name.replace('_', '-')} {' '.join(value) if isinstance(value, tuple) else value}"
        for name, value in settings.items()
    ]
    return " ".join(words)


BOUNDS = {torch.float32: 3e-6, torch.float64: 1e-12}
"""Of the largest element of a tensor."""


@pytest.mark.parametrize(
    ("layout", "world_size", "dtype"),
    [
        ("", 1, torch.float32),
        ("--fp64", 1, torch.float64),
        ("--tp 2 --sequence-parallel", 2, torch.float32),
        ("--fp64 --tp 2 --sequence-parallel", 2, torch.float64),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_peft(ranks: RankPool, kind: str, layout: str, world_size: int, dtype: torch.dtype, tmp_path: Path):
    true = truth("qwen2-qkv-bias", kind, dtype)
    base = model_spec(run_config(true.config, tmp_path))
    adapter = from_peft(base, true.settings, true.tensors, where="adapter")
    run = run_config(true.config, tmp_path, layout=f"{layout} {flags(dict(adapter.settings))}", world_size=world_size)
    spec = model_spec(run)
    family = family_name_of_config(true.config)
    logical = to_logical(family, true.weights, without_adapters(spec)) | dict(adapter.tensors)
    args = (run, logical, true.tokens, torch.ones_like(true.tokens), 2)
    parts = ranks.run(compute, world_size, *args) if world_size > 1 else [compute(*args)]
    for part in parts:
        check_equal({"logits": part.logits}, {"logits": true.logits}, dtype)
        assert part.loss == pytest.approx(true.loss, rel=BOUNDS[dtype])
    check_equal(merged(spec, logical), to_logical(family, true.merged, without_adapters(spec)), dtype)
    if kind == "ranks":  # padded
        return
    trained = [replace(part, grads=[pair for pair in part.grads if pair[1].device.type != "meta"]) for part in parts]
    _, grads = to_peft(spec, assemble(trained, dtype), base=None)
    check_equal(plain_names(grads), plain_names(true.grads), dtype)


def merged(spec: ModelSpec, logical: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the logical tensors of the model that the adapters are merged into."""
    tensors = {name: tensor for name, tensor in logical.items() if name in without_adapters(spec).logical_shapes()}
    for name, adapted in adapted_weights(spec).items():

        def read(name: str, slices: tuple[slice, ...]) -> Tensor:
            return logical[name][slices]

        tensors[name] = adapted.merged(read, (slice(None), slice(None)))
        if (bias := f"{name.removesuffix('weight')}bias") in tensors:
            tensors[bias] = adapted.merged_bias(read, slice(None))
    return tensors


def plain_names(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removesuffix(".weight"): grad for key, grad in grads.items()}


def check_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype == dtype, key
        difference = ((ours[key] - tensor).abs().max() / tensor.abs().max()).item()
        assert difference <= BOUNDS[dtype], f"{key}: {difference}"
