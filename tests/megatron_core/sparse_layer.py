"""Runs Megatron-Core's own sparse attention on CPU, as published: one module's forward and backward with its indexer's loss.

    python -m tests.megatron_core.sparse_layer FOLDER

FOLDER/inputs.safetensors has queries, keys, values, the hidden state, the query latent, the indexer's weights and the gradient of the
output; FOLDER/settings.json the numbers. Output, loss and gradients go to FOLDER/outputs.safetensors.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.megatron_core.core_on_cpu import Duplicated, Job, KeyNorm, hadamard, start


def main() -> None:
    folder = Path(sys.argv[1])
    sys.path.append(os.environ["MEGATRON_CORE"])
    start(Job())
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    dsa.rotate_activation = hadamard  # a CUDA extension for bf16
    tensors, settings = load_file(folder / "inputs.safetensors"), json.loads((folder / "settings.json").read_text())
    config = MLATransformerConfig(
        **settings["config"], use_cpu_initialization=True, apply_rope_fusion=False, params_dtype=torch.float32
    )
    parts = {"linear_wq_b": Duplicated, "linear_wk": Duplicated, "linear_weights_proj": Duplicated, "k_norm": KeyNorm}
    indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=dsa.DSAIndexerSubmodules(**parts))
    attention = dsa.DSAttention(
        config,
        dsa.DSAttentionSubmodules(indexer=indexer),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=settings["scale"],
        pg_collection=SimpleNamespace(tp=dist.group.WORLD, cp=dist.group.WORLD),
    )
    attention.indexer.load_state_dict(
        {name[8:]: x for name, x in tensors.items() if name.startswith("indexer.")}, strict=False
    )
    names = ("query", "key", "value", "x", "qr")
    inputs = {name: tensors[name].requires_grad_() for name in names}
    out = attention.train()(**inputs, attention_mask=None, attn_mask_type=AttnMaskType.causal)
    out.backward(tensors["grad"])
    weights = dict(attention.indexer.named_parameters())
    grads = {name: x.grad for name, x in {**inputs, **weights}.items() if x.grad is not None}
    loss = dsa.DSAIndexerLossLoggingHelper.tracker["values"][0]
    save_file(
        {"out": out.detach(), "loss": loss.reshape(1), **{f"grad {name}": grad for name, grad in grads.items()}},
        folder / "outputs.safetensors",
    )
    os._exit(0)  # Megatron's own workers would not let it end


if __name__ == "__main__":
    main()
