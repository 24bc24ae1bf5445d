"""torchtitan 0.2's Llama 3, trained as its own trainer does on one device: compiled blocks, `fully_shard`, fused AdamW.

Only its source is needed. Importing the package unmodified would
also import its data loading and command line, with libraries that a measurement does not need. So the package is copied into a
temporary folder, and in that copy the files that import those are emptied or reduced to the one name the model imports from
them. The model, its attention and its loss are as published.

Its recipe, from its `parallelize_llama` and `Trainer`: weights in fp32, sharded (here over one rank) with a bf16 copy gathered
for the GEMMs and gradients reduced in fp32; `torch.compile(fullgraph=True)` of each block and of the loss; float8 GEMMs by
torchao for every linear layer whose sizes allow it, but not the head; AdamW fused; gradients clipped with foreach kernels.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from petatron.bench.peers import BenchSpec
from petatron.bench.peers.adamw import ClippedAdamW
from petatron.bench.peers.peer_source import PeerSource
from petatron.bench.peers.process_group import process_group_size
from petatron.bench.peers.torchtitan_weights import load_torchtitan_weights
from petatron.config.schema.model import ModelConfig
from petatron.models.batch import Batch
from petatron.optim.loss_scaler import compute_dtype

# Replacement content of these files in the copy. Only the last two matter to the model.
_STUBBED_FILES: Mapping[str, str] = {
    "__init__.py": "",
    "models/llama3/__init__.py": "",
    "protocols/__init__.py": "",
    "config/manager.py": "ConfigManager = None\n",
    "protocols/train_spec.py": "from torchtitan.protocols.model import ModelProtocol\n",
}


def _load(name: str) -> Any:
    return importlib.import_module(f"torchtitan.{name}")


class TorchtitanContender:
    """Its model and recipe; the temporary copy of its source lives as long as this object."""

    def __init__(self, spec: BenchSpec, source: PeerSource) -> None:
        self._copy = tempfile.TemporaryDirectory(prefix="torchtitan-")
        source.copy_importable(Path(self._copy.name), _STUBBED_FILES)
        mesh = init_device_mesh(spec.device.type, (process_group_size(spec.device),))
        with torch.device("meta"):
            model: Any = _load("models.llama3.model.model").Transformer(_model_args(spec.run.model))
        if spec.fp8_recipe is not None:
            _convert_to_float8(model, spec.fp8_recipe, emulate=spec.device.type != "cuda")
        loss = _load("components.loss").cross_entropy_loss
        if spec.compile:
            for name, block in model.layers.named_children():
                model.layers.register_module(name, torch.compile(block, fullgraph=True))
            loss = torch.compile(loss)
        _shard(model, mesh, compute_dtype(spec.run.precision), reshard=not spec.keep_gathered)
        model.to_empty(device=spec.device)
        with torch.no_grad():
            model.init_weights(buffer_device=spec.device)  # also builds its rope table
        load_torchtitan_weights(model, spec)
        self._model, self._loss = model.train(), loss
        self._optimizer = ClippedAdamW(model, spec.run.optim)
        self._tokens = spec.tokens

    def step(self, batch: Batch) -> Tensor:
        logits = self._model(batch.tokens)
        loss = self._loss(logits, batch.labels) / self._tokens
        del logits  # as its trainer does: the backward pass frees them
        loss.backward()
        self._optimizer.step()
        return loss.detach()


build = TorchtitanContender


def _model_args(model: ModelConfig) -> Any:
    module = _load("models.llama3.model.args")
    # Its MLP width is 8/3 of the hidden size times a factor, rounded up to a multiple: half of ours rounds up to ours.
    factor = 0.5 * model.ffn_hidden_size / int(8 * model.hidden_size / 3)
    return module.TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_query_groups,
        vocab_size=model.vocab_size,
        multiple_of=model.ffn_hidden_size,
        ffn_dim_multiplier=factor,
        norm_eps=model.norm_epsilon,
        rope_theta=model.rotary_base,
        # Its frequencies are always scaled; a factor of 1 leaves them unchanged.
        rope_scaling_args=module.RoPEScalingArgs(
            scaling_factor=model.rope_scaling_factor if model.use_rope_scaling else 1.0,
            low_freq_factor=model.rope_low_freq_factor,
            high_freq_factor=model.rope_high_freq_factor,
            original_max_position_embeddings=model.original_max_position_embeddings,
        ),
        max_seq_len=model.seq_length,
    )


def _convert_to_float8(model: nn.Module, recipe: str, *, emulate: bool) -> None:
    float8 = importlib.import_module("torchao.float8")
    if emulate:
        config = float8.Float8LinearConfig(emulate=True)
    else:
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
    if recipe == "rowwise":  # its own workaround for https://github.com/pytorch/pytorch/issues/150859
        inductor: Any = importlib.import_module("torch._inductor.config")
        inductor.emulate_precision_casts = True

    def wanted(module: nn.Module, name: str) -> bool:
        sized = isinstance(module, nn.Linear) and all(size % 16 == 0 for size in module.weight.shape)
        return sized and "output" not in name

    float8.convert_to_float8_training(model, config=config, module_filter_fn=wanted)


def _shard(model: Any, mesh: Any, dtype: torch.dtype, *, reshard: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (model.tok_embeddings, *model.layers.values()):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # Its backward begins with these, so they stay gathered.
    fully_shard([model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
