"""torchtitan's Llama 3, trained as its own trainer does on one device: compiled blocks, `fully_shard`, fused AdamW.

Only its source is needed, in a folder given by `--peer-path` (an unpacked wheel will do). Importing the package unmodified would
also import its data loading and command line, with libraries that a measurement does not need. So the package is copied into a
temporary folder, and in that copy the files that import those are emptied or reduced to the one name the model imports from
them. The model, its attention and its loss are as published.

Its recipe, from its `parallelize_llama` and `Trainer`: weights in fp32, sharded (here over one rank) with a bf16 copy gathered
for the GEMMs and gradients reduced in fp32; `torch.compile(fullgraph=True)` of each block and of the loss; float8 GEMMs by
torchao for every linear layer whose sizes allow it, but not the head; AdamW fused; gradients clipped with foreach kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from petatron.base.errors import Problem
from petatron.bench.peers import BenchSpec
from petatron.bench.peers.adamw import ClippedAdamW
from petatron.bench.peers.initial_weights import InitialWeights
from petatron.config.schema.layer_variants import variant_defaults
from petatron.config.schema.model import ModelConfig
from petatron.models.batch import Batch
from petatron.models.registry import model_spec

# Replacement content of these files in the copy. Only the last two matter to the model.
_STUBBED_FILES: Mapping[str, str] = {
    "__init__.py": "",
    "models/llama3/__init__.py": "",
    "protocols/__init__.py": "",
    "config/manager.py": "ConfigManager = None\n",
    "protocols/train_spec.py": "from torchtitan.protocols.model import ModelProtocol\n",
}
_RECIPES = ("tensorwise", "rowwise")
# Its names -> ours; {} is the layer.
_WEIGHT_NAMES: Mapping[str, str] = {
    "tok_embeddings.weight": "embedding.weight",
    "norm.weight": "norm.weight",
    "output.weight": "head.weight",
    "attention.wq.weight": "layers.{}.attention.q.weight",
    "attention.wk.weight": "layers.{}.attention.k.weight",
    "attention.wv.weight": "layers.{}.attention.v.weight",
    "attention.wo.weight": "layers.{}.attention.out.weight",
    "attention_norm.weight": "layers.{}.attention_norm.weight",
    "ffn_norm.weight": "layers.{}.mlp_norm.weight",
    "feed_forward.w1.weight": "layers.{}.mlp.gate.weight",
    "feed_forward.w2.weight": "layers.{}.mlp.down.weight",
    "feed_forward.w3.weight": "layers.{}.mlp.up.weight",
}


def problems(spec: BenchSpec) -> Sequence[Problem]:
    """Returns what its Llama does not support, and what its source is missing."""
    found = [
        Problem("--against", "torchtitan", f"has no {part}", "Compare with hf, or choose a Llama.")
        for part in _unsupported_features(spec)
    ]
    faults = list(_path_problems(spec))
    found += faults
    if not faults and _package_dir(spec, "torchtitan") is None:
        fix = "Give --peer-path the folder that holds torchtitan/, for instance an unpacked wheel."
        found.append(Problem("--against", "torchtitan", "needs its source", fix))
    if spec.fp8_recipe is not None:
        if spec.fp8_recipe not in _RECIPES:
            fix = f"Use {' or '.join(_RECIPES)}."
            found.append(Problem("--fp8-recipe", spec.fp8_recipe, "is no recipe of torchtitan's", fix))
        if not faults and _package_dir(spec, "torchao") is None and importlib.util.find_spec("torchao") is None:
            fix = "Give --peer-path a second time: the folder that holds torchao/."
            found.append(Problem("--against", "torchtitan", "needs torchao for FP8", fix))
    return found


def _unsupported_features(spec: BenchSpec) -> list[str]:
    model, heads = spec.run.model, spec.run.model.num_attention_heads
    parts = {
        "mixture of experts in its Llama": spec.run.moe.num_experts is not None,
        "layers of a hybrid": model.hybrid_layer_pattern is not None,
        "latent attention": model.multi_latent_attention,
        "normalised query and key heads": model.qk_layernorm,
        "head that shares the embedding": not model.untie_embeddings_and_output_weights,
        "head width other than hidden size / heads": model.kv_channels != model.hidden_size // max(heads, 1),
        "biases": model.add_bias_linear or model.add_qkv_bias,
        f"{model.activation} activation": model.activation != "swiglu",
        f"{model.normalization}": model.normalization != "RMSNorm",
        f"{model.position_embedding_type} positions": model.position_embedding_type != "rope",
        "sliding window": model.window_size is not None,
        "variants of layers": any(getattr(model, name) != plain for name, plain in variant_defaults().items()),
        "dropout": bool(model.hidden_dropout or model.attention_dropout),
    }
    return [name for name, there in parts.items() if there]


def _path_problems(spec: BenchSpec) -> Iterator[Problem]:
    """Finds wrong folders: missing ones, and those with an empty folder for a package that is nowhere else."""
    fix = "Give the folder that holds torchtitan/, for instance an unpacked wheel."
    for path in spec.peer_paths:
        if not path.is_dir():
            rule = "is not a folder" if path.exists() else "does not exist"
            yield Problem("--peer-path", str(path), rule, fix)
    for package in ("torchtitan",) if spec.fp8_recipe is None else ("torchtitan", "torchao"):
        if _package_dir(spec, package) is None:
            for place in (path / package for path in spec.peer_paths if (path / package).is_dir()):
                yield Problem("--peer-path", str(place), "has no Python package", fix.replace("torchtitan", package))


def _package_dir(spec: BenchSpec, package: str) -> Path | None:
    return next((path / package for path in spec.peer_paths if (path / package / "__init__.py").is_file()), None)


def build(spec: BenchSpec) -> TorchtitanContender:
    return TorchtitanContender(spec)


class TorchtitanContender:
    """Its model and recipe; the temporary copy of its source lives as long as this object."""

    def __init__(self, spec: BenchSpec) -> None:
        self._copy = tempfile.TemporaryDirectory(prefix="torchtitan-")
        load = _importer(spec, Path(self._copy.name))
        mesh = init_device_mesh(spec.device.type, (_process_group_size(spec.device),))
        with torch.device("meta"):
            model: Any = load("models.llama3.model.model").Transformer(_model_args(spec.run.model, load))
        if spec.fp8_recipe is not None:
            _convert_to_float8(model, spec.fp8_recipe, emulate=spec.device.type != "cuda")
        loss = load("components.loss").cross_entropy_loss
        if spec.compile:
            for name, block in model.layers.named_children():
                model.layers.register_module(name, torch.compile(block, fullgraph=True))
            loss = torch.compile(loss)
        _shard(model, mesh, reshard=not spec.keep_gathered)
        model.to_empty(device=spec.device)
        with torch.no_grad():
            model.init_weights(buffer_device=spec.device)  # also builds its rope table
            _load_initial_weights(model, spec)
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


def _importer(spec: BenchSpec, folder: Path) -> Callable[[str], Any]:
    """Returns a function that imports modules of a reduced copy of the package."""
    source = _package_dir(spec, "torchtitan")
    assert source is not None
    if "torchtitan" not in sys.modules:
        shutil.copytree(source, folder / "torchtitan", ignore=shutil.ignore_patterns("__pycache__", "experiments"))
        for name, text in _STUBBED_FILES.items():
            (folder / "torchtitan" / name).write_text(text)
        for path in [path for path in (folder / "torchtitan").rglob("*") if path.is_dir()]:
            (path / "__init__.py").touch()  # torch reads every module's __file__, which a namespace package lacks
        sys.path.insert(0, str(folder))
    torchao = _package_dir(spec, "torchao")
    if torchao is not None and str(torchao.parent) not in sys.path:
        sys.path.append(str(torchao.parent))
    return lambda name: importlib.import_module(f"torchtitan.{name}")


def _process_group_size(device: torch.device) -> int:
    """Returns the size of the process group, creating one of this process alone if there is none."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    return dist.get_world_size()


def _model_args(model: ModelConfig, load: Callable[[str], Any]) -> Any:
    module = load("models.llama3.model.args")
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


def _shard(model: Any, mesh: Any, *, reshard: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model.tok_embeddings, *model.layers.values()):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # Its backward begins with these, so they stay gathered.
    fully_shard([model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)


def _load_initial_weights(model: nn.Module, spec: BenchSpec) -> None:
    """Loads our initial weights under its names. Its rope pairs neighbours where ours pairs halves of a head, so rows are permuted."""
    config, initial_weights = spec.run.model, InitialWeights(model_spec(spec.run), spec.device)
    for name, parameter in model.named_parameters():
        name = name.replace("_orig_mod.", "")
        layer, _, rest = name.removeprefix("layers.").partition(".")
        ours = _WEIGHT_NAMES[rest].format(layer) if name.startswith("layers.") else _WEIGHT_NAMES[name]
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        values = initial_weights[ours]
        if rest in ("attention.wq.weight", "attention.wk.weight"):
            values = values.unflatten(0, (-1, 2, config.kv_channels // 2)).transpose(1, 2).flatten(0, 2)
        target.copy_(values)
