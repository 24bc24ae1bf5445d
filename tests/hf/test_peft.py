"""Adapters equal PEFT's on models of transformers: logits, loss, gradients, and the weights after a merge."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from petatron.models.hf import family_name_of_config, to_logical
from petatron.models.hf.peft_tensors import from_peft, to_peft
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


def truth(name: str, kind: str) -> PeftTruth:
    torch.manual_seed(11)
    model = BUILDERS[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    adapted = peft.get_peft_model(model, KINDS[kind])
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


@pytest.mark.parametrize(("layout", "world_size"), [("", 1), ("--tp 2 --sequence-parallel", 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_peft(ranks: RankPool, kind: str, layout: str, world_size: int, tmp_path: Path):
    true = truth("qwen2-qkv-bias", kind)
    base = model_spec(run_config(true.config, tmp_path))
    adapter = from_peft(base, true.settings, true.tensors, where="adapter")
    run = run_config(true.config, tmp_path, layout=f"{layout} {flags(dict(adapter.settings))}", world_size=world_size)
    spec = model_spec(run)
    logical = to_logical(family_name_of_config(true.config), true.weights, without_adapters(spec)) | dict(
        adapter.tensors
    )
    args = (run, logical, true.tokens, torch.ones_like(true.tokens), 2)
    parts = ranks.run(compute, world_size, *args) if world_size > 1 else [compute(*args)]
    for part in parts:
        torch.testing.assert_close(part.logits, true.logits, rtol=0, atol=2e-5)
        assert part.loss == pytest.approx(true.loss, rel=1e-6)
    if kind == "ranks":  # padded
        return
    trained = [replace(part, grads=[pair for pair in part.grads if pair[1].device.type != "meta"]) for part in parts]
    _, grads = to_peft(spec, assemble(trained), base=None)
    check_gradients(grads, true.grads)


def check_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    ours, theirs = ({key.removesuffix(".weight"): grad for key, grad in grads.items()} for grads in (ours, theirs))
    assert ours.keys() == theirs.keys()
    for key, grad in theirs.items():
        bound = 1e-6 + 2e-5 * grad.abs().max().item()
        torch.testing.assert_close(ours[key], grad, rtol=1e-4, atol=bound, msg=lambda text, key=key: f"{key}: {text}")
