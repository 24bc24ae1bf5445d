"""Tiny transformers models with random weights, one per thing the decoder must get right, and what they compute.

Biases and norm weights are random too: as transformers initializes them (zeros and ones) a forgotten one would not show.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.hf.variant_zoo import SHAPE as _SHAPE
from tests.hf.variant_zoo import VARIANT_BUILDERS, VOCABULARY
from tests.longform import later

SEQUENCE, BATCH, NEW_TOKENS = 24, 2, 6
# A short original context, so that the scaling is felt within the sequence.
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0}
_LLAMA3 |= {"original_max_position_embeddings": 16}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}


def _gpt2(**changes: Any) -> Any:
    base = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    base |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**base, **changes}))


def _llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_SHAPE, "head_dim": 16, **changes}))


def _mistral(**changes: Any) -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**{**_SHAPE, **changes}))


def _qwen2(**changes: Any) -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**_SHAPE, **changes}))


def _gemma(**changes: Any) -> Any:
    base = {**_SHAPE, "head_dim": 16, "pad_token_id": None, **changes}  # a padding token would have no gradient
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**base))


def _qwen3(**changes: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**_SHAPE, "head_dim": 20, **changes}))


def _mixtral(**changes: Any) -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**_SHAPE, **experts, **changes}))


_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _qwen2_moe(**changes: Any) -> Any:
    base = {**_SHAPE, **_QWEN_EXPERTS, "shared_expert_intermediate_size": 28, **changes}
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**base))


def _qwen3_moe(**changes: Any) -> Any:
    base = {**_SHAPE, **_QWEN_EXPERTS, "head_dim": 20, **changes}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**base))


_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}


def _deepseek_v2(**changes: Any) -> Any:
    base = {**_SHAPE, **_DEEPSEEK, "num_experts_per_tok": 3, **changes}
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**base))


def _deepseek_v3(**changes: Any) -> Any:
    routing = {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    base = {**_SHAPE, **_DEEPSEEK, **routing, "num_mtp_layers": 0, **changes}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**base))


def _sparse(family: str, **changes: Any) -> Any:
    routing = {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    indexer = {"index_n_heads": 8, "index_head_dim": 8, "index_topk": 5}
    base = {**_SHAPE, **_DEEPSEEK, **routing, **indexer, **changes}
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**base))


_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}

BUILDERS: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "gpt2-relu-untied": lambda: _gpt2(activation_function="relu", n_inner=56, tie_word_embeddings=False),
    "llama-gqa": _llama,
    "llama-mha-tied": lambda: _llama(num_key_value_heads=4, head_dim=8, tie_word_embeddings=True),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama3-scaling": lambda: _llama(rope_parameters=dict(_LLAMA3)),
    "llama-yarn": lambda: _llama(rope_parameters=dict(_YARN)),
    "llama-yarn-mscale": lambda: _llama(rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 0.4}),
    "llama-yarn-attention-factor": lambda: _llama(rope_parameters={**_YARN, "attention_factor": 1.3, "beta_fast": 8}),
    "mistral-window": lambda: _mistral(sliding_window=5),
    "llama-linear": lambda: _llama(rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}),
    "qwen2-qkv-bias": _qwen2,
    "qwen2-last-layers-window": lambda: _qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "gemma": _gemma,
    "gemma-mqa-untied": lambda: _gemma(num_key_value_heads=1, tie_word_embeddings=False),
    "qwen3-head-norm": lambda: _qwen3(tie_word_embeddings=True),
    "qwen3-window": lambda: _qwen3(use_sliding_window=True, sliding_window=7, max_window_layers=0),
    "mixtral": _mixtral,
    "mixtral-window-tied": lambda: _mixtral(sliding_window=5, tie_word_embeddings=True, num_experts_per_tok=3),
    "qwen2-moe": _qwen2_moe,
    "qwen2-moe-dense-layer": lambda: _qwen2_moe(mlp_only_layers=[0], norm_topk_prob=True, qkv_bias=False),
    "qwen3-moe": _qwen3_moe,
    "qwen3-moe-every-second": lambda: _qwen3_moe(decoder_sparse_step=2, norm_topk_prob=True, tie_word_embeddings=True),
}
BUILDERS |= {
    "deepseek-v2-lite": lambda: _deepseek_v2(q_lora_rank=None),
    "deepseek-v2-groups": lambda: _deepseek_v2(
        **_GROUPS, rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
    ),
    "deepseek-v3": lambda: _deepseek_v3(rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.3}),
    "deepseek-v3-ungrouped": lambda: _deepseek_v3(
        n_group=1, topk_group=1, first_k_dense_replace=0, num_experts_per_tok=3
    ),
}
BUILDERS |= {
    "deepseek-v32": lambda: _sparse(
        "DeepseekV32", n_group=4, topk_group=2, rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.3}
    ),
    "glm-moe-dsa": lambda: _sparse("GlmMoeDsa"),
}
# A softmax over the one expert of a token is 1: such a model can be used and converted, though its router could not be trained.
ONE_EXPERT: dict[str, Callable[[], Any]] = {
    "mixtral-one-expert": lambda: _mixtral(num_experts_per_tok=1),
    "qwen3-moe-one-expert": lambda: _qwen3_moe(num_experts_per_tok=1, norm_topk_prob=True),
}
ONE_BY_ONE = ("falcon-h1-norm-then-gate", "falcon-h1-gate-then-norm")
"""transformers mixes the sequences of a batch where it decodes with Falcon-H1's norm; without a cache, or one by one, it does not."""
OTHER_SEEDS = {"nemotron": 2000, "qwen3-next-moe": 1000}
"""Added to the seed: the first weights amplified rounding, so that on some CPUs both sides were 8e-5 from the logits in float64."""
SLOPES = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Tensors in files of MiniMax that transformers makes anew of its config where they are missing."""
PLAIN = tuple(BUILDERS)
"""The models that every test has in every form; of the variants most forms are later."""
BUILDERS |= VARIANT_BUILDERS
MIXED = [name for name in BUILDERS if any(word in name for word in ("moe", "mixtral", "gpt-oss", "deepseek", "llama4"))]
DENSE = [name for name in BUILDERS if name not in MIXED]
ONE_OF_EACH_FAMILY = (
    *("gpt2", "llama-gqa", "mistral-window", "ministral-alternating", "smollm3", "qwen2-qkv-bias", "qwen3-head-norm"),
    *("gemma", "gemma2", "gemma3", "olmo2", "olmo3", "granite", "phi3", "glm", "glm4", "starcoder2", "nemotron"),
    *(
        "gpt-neox",
        "bloom",
        "mpt",
        "mixtral",
        "qwen2-moe",
        "qwen3-moe",
        "qwen3-next-moe",
        "kimi-linear-moe",
        "minimax-moe",
        "olmoe-moe",
    ),
    *("granite-moe", "gpt-oss", "llama4-moe", "deepseek-v2-lite", "deepseek-v3", "glm4-moe", "mamba2", "bamba"),
    *("deepseek-v32", "glm-moe-dsa"),
    *("nemotron-h-moe", "falcon-h1", "granite-hybrid"),
)
"""One of each family."""
ZOO = [name if name in ONE_OF_EACH_FAMILY else later(name) for name in BUILDERS]
"""One of each family in the default suite, their variants later."""


@dataclass(frozen=True, slots=True)
class Truth:
    """A Hugging Face model as plain values: its files, an input, and what transformers makes of it."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    tokens: Tensor
    counted: Tensor
    logits: Tensor
    greedy: Tensor
    loss: float
    grads: dict[str, Tensor]


def build(name: str) -> Any:
    """The model in evaluation mode; the same weights every time."""
    torch.manual_seed(sum(name.encode()) + OTHER_SEEDS.get(name, 0))
    model = (BUILDERS | ONE_EXPERT)[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return model


def continued(model: Any, name: str, prompts: Tensor) -> Tensor:
    """Greedy continuations by transformers, which no id ends: a folder that a run saved has the end of the run's tokenizer."""
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    batches = prompts.split(1 if name in ONE_BY_ONE else len(prompts))
    return torch.cat([model.generate(each, attention_mask=torch.ones_like(each), **options) for each in batches])


def saved(model: Any) -> dict[str, Tensor]:
    """What transformers writes into the model's file, which is not what it has in memory: no tied head, single experts.

    Dense layers of Kimi-Linear are named as in published folders (`tests/hf/models/test_kimi_linear.py` has transformers' own names).
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    return weights_of(tensors)


def weights_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those tensors of a file that are weights: MiniMax's files also have its slopes, and tables made of them."""
    dense = re.compile(r"\bblock_sparse_moe(?=\.(gate|up|down)_proj\.)")
    return {dense.sub("mlp", name): tensor for name, tensor in tensors.items() if not name.endswith(SLOPES)}


@cache
def truth(name: str) -> Truth:
    model = build(name)
    weights = saved(model)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits = model(tokens).logits
        greedy = continued(model, name, tokens[:, :8])
    labels = tokens.clone()
    labels[0, 3:6] = -100
    loss = model(tokens, labels=labels).loss
    loss.backward()
    # transformers does not train indexers.
    grads = {
        key: torch.zeros_like(value) if value.grad is None and ".indexer." in key else value.grad
        for key, value in model.named_parameters()
    }
    biases = {key: buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")}
    grads |= {key: torch.zeros_like(buffer) for key, buffer in biases.items()}
    # transformers shifts the labels itself; ours come shifted, with the last position and the ignored ones left out.
    counted = torch.cat((labels[:, 1:] >= 0, torch.zeros(BATCH, 1, dtype=torch.bool)), dim=1)
    config = copy.deepcopy(model.config.to_dict())
    return Truth(config, weights, tokens, counted, logits, greedy, loss.item(), grads)
