"""torchtitan 0.3's Llama 3, trained as its own trainer does on one device: its files as published, in its fastest form.

Its recipe, from its `Trainer`, `parallelize_llama` and `llama3_8b`: weights in fp32, sharded (here over one rank) with a bf16 copy
gathered for the GEMMs and gradients reduced in fp32; each block and the loss compiled; queries, keys and values in one GEMM; head and
loss in chunks of the sequence, whose logits are never there all at once; the forward and backward passes captured in a CUDA graph;
AdamW fused, gradients clipped with foreach kernels and zeroed in place, as its graph needs. Activations are not recomputed, which its
trainer does unless told otherwise, since they fit.

Its language models attend by `flex_attention`, since its batches are of packed documents. Here a sequence is one document, so its
`ScaledDotProductAttention` computes the same by cuDNN's or FlashAttention's kernels; that is the default, and `--peer-attention flex`
takes the other.

0.3.0 is written for torch 2.13. Two workarounds let it run on 2.11, without effect on one rank: a stub of `DataParallelMeshDims`, a class
that names mesh axes, and separate FSDP groups for the last norm and the head: in one group, 2.11 frees the norm's weight before its
backward pass, since the head runs in the loss.
"""

from __future__ import annotations

import importlib
import math
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import Problem
from petatron.base.log import get_logger
from petatron.bench.peers import BenchSpec
from petatron.bench.peers.adamw import ClippedAdamW
from petatron.bench.peers.peer_source import PeerSource, read_imports
from petatron.bench.peers.process_group import process_group_size
from petatron.bench.peers.torchtitan_weights import load_torchtitan_weights
from petatron.config.required_settings import required
from petatron.models.batch import Batch
from petatron.optim.loss_scaler import compute_dtype

_MODULES = (
    "torchtitan.models.llama3.parallelize",
    "torchtitan.models.llama3.sharding",
    "torchtitan.components.loss",
    "torchtitan.components.quantization.float8",
    "torchtitan.distributed.cudagraph",
)
_MESH_DIMS = ("torch.distributed.fsdp", "DataParallelMeshDims")
_NUM_CHUNKS = 8  # its default
_log = get_logger(__name__)


def missing_needs(source: PeerSource) -> list[Problem]:
    """Returns which packages it needs that are not there, and which names torch lacks."""
    imports, problems = read_imports(source, _MODULES), []
    packages = imports.missing_packages(source.folder)
    if packages:
        fix = f"Unpack their wheels in {source.folder} too (pip download --no-deps {' '.join(packages)})."
        rule = f"lacks what {source} needs: {', '.join(packages)}"
        problems.append(Problem("--peer-path", str(source.folder), rule, fix))
    names = [name for name in imports.missing_torch_names() if name != ".".join(_MESH_DIMS)]
    if names:
        rule = f"needs another torch than {torch.__version__}, which has no {', '.join(names)}"
        fix = "Give --peer-path a folder with torchtitan 0.2.2, or install the torch that it was released for."
        problems.append(Problem("--against", str(source), rule, fix))
    return problems


class ChunkedTorchtitanContender:
    """Its model, loss and CUDA graph; the temporary copy of its source lives as long as this object."""

    def __init__(self, spec: BenchSpec, source: PeerSource) -> None:
        self._on_cuda, self._flex = spec.device.type == "cuda", spec.peer_attention == "flex"
        self._copy = tempfile.TemporaryDirectory(prefix="torchtitan-")
        source.make_importable()  # for what it needs
        source.copy_importable(Path(self._copy.name))
        load = _importer(spec, source)
        config = load("config")
        compile_config = config.CompileConfig(enable=spec.compile)
        parallelism = config.ParallelismConfig(fsdp_reshard_after_forward="never" if spec.keep_gathered else "default")
        load("distributed.utils").set_spmd_backend(parallelism.spmd_backend)
        parallel_dims = load("distributed").ParallelDims.from_config(parallelism, process_group_size(spec.device))
        with torch.device("meta"):
            model = _model_config(spec, load, enable_sp=parallelism.enable_sequence_parallel).build()
        dtype = str(compute_dtype(spec.run.precision)).removeprefix("torch.")
        load("models.llama3.parallelize").parallelize_llama(
            model,
            parallel_dims=parallel_dims,
            training=config.TrainingConfig(mixed_precision_param=dtype, seq_len=spec.run.model.seq_length),
            parallelism=parallelism,
            compile_config=compile_config,
            ac_config=None,
            dump_folder="",
        )
        model.to_empty(device=spec.device)
        with torch.no_grad():
            model.init_weights(buffer_device=None)  # also builds its rope tables
        load_torchtitan_weights(model, spec)
        self._model = model.train()
        self._loss = _chunked_loss(spec, model, compile_config, load)
        self._context: Callable[[], AbstractContextManager[None]] = load("distributed.utils").get_spmd_context(
            parallel_dims=parallel_dims
        )
        graphs = self._on_cuda and spec.peer_cuda_graphs
        self._forward_backward = self._run_passes
        if graphs:
            self._forward_backward = load("distributed.cudagraph").wrap_with_cuda_graph(self._run_passes)
        self._optimizer = ClippedAdamW(model, spec.run.optim, keep_grads=graphs)
        self._num_tokens = torch.tensor(spec.tokens, device=spec.device)
        self._positions = torch.arange(spec.run.model.seq_length, device=spec.device)

    def step(self, batch: Batch) -> Tensor:
        positions = self._positions.expand(batch.tokens.shape).contiguous()
        inputs: dict[str, Any] = {"positions": positions}
        if self._flex:
            inputs["attention_masks"] = self._model.get_attention_masks(positions=positions)
        loss = self._forward_backward(batch.tokens, batch.labels, self._num_tokens, inputs)
        self._optimizer.step()
        return loss.detach().clone()  # its graph writes the next loss in the same place

    def _run_passes(self, tokens: Tensor, labels: Tensor, num_tokens: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Its `Trainer`'s forward and backward passes."""
        # Its mesh is the calling thread's, as its backward pass must be.
        with torch.autograd.set_multithreading_enabled(False), self._context():
            hidden = self._model(tokens, **inputs)
            loss, _ = self._loss(hidden, labels, num_tokens, positions=inputs["positions"])
            del hidden
            loss.backward()
        return loss


build = ChunkedTorchtitanContender


def _importer(spec: BenchSpec, source: PeerSource) -> Callable[[str], Any]:
    """Returns a function that imports its modules, on the device of the run and with what torch lacks."""
    utils: Any = importlib.import_module("torchtitan.tools.utils")
    utils.device_type, utils.device_module = spec.device.type, getattr(torch, spec.device.type)
    place, name = importlib.import_module(_MESH_DIMS[0]), _MESH_DIMS[1]
    if hasattr(place, name):
        return lambda module: importlib.import_module(f"torchtitan.{module}")
    setattr(place, name, type(name, (), {}))
    try:
        modules = {module: importlib.import_module(module) for module in (*_MODULES, "torchtitan.distributed.fsdp")}
    finally:
        delattr(place, name)
    _log.info("%s: FSDP of torch %s takes its last norm and its head one by one", source, torch.__version__)
    sharding: Any = modules["torchtitan.distributed.fsdp"]
    sharding.fully_shard = _shard_one_by_one(sharding.fully_shard)
    return lambda module: importlib.import_module(f"torchtitan.{module}")


def _shard_one_by_one(fully_shard: Callable[..., Any]) -> Callable[..., Any]:
    def shard(modules: Any, **options: Any) -> None:
        for module in modules if isinstance(modules, list) else [modules]:
            fully_shard(module, **options)

    return shard


def _model_config(spec: BenchSpec, load: Callable[[str], Any], *, enable_sp: bool) -> Any:
    model, llama = spec.run.model, load("models.llama3")
    vocab_size = required("vocab_size", model.vocab_size)
    layers = llama._build_llama3_layers(
        n_layers=model.num_layers,
        dim=model.hidden_size,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_query_groups,
        hidden_dim=model.ffn_hidden_size,
        rope=llama.ComplexRoPE.Config(
            dim=model.kv_channels,
            max_seq_len=model.seq_length,
            theta=model.rotary_base,
            scaling="llama" if model.use_rope_scaling else "none",
            scaling_factor=model.rope_scaling_factor,
            low_freq_factor=model.rope_low_freq_factor,
            high_freq_factor=model.rope_high_freq_factor,
            original_max_position_embeddings=model.original_max_position_embeddings,
        ),
        attn_backend="flex",
    )
    config = llama.Llama3Model.Config(
        dim=model.hidden_size,
        vocab_size=vocab_size,
        tok_embeddings=llama.Embedding.Config(
            num_embeddings=vocab_size, embedding_dim=model.hidden_size, param_init=llama._EMBEDDING_INIT
        ),
        norm=llama.RMSNorm.Config(normalized_shape=model.hidden_size, param_init=llama._NORM_INIT),
        lm_head=llama.Linear.Config(
            in_features=model.hidden_size,
            out_features=vocab_size,
            param_init=llama._output_linear_init(model.hidden_size),
        ),
        layers=layers,
    )
    for norm in (config.norm, *(norm for layer in layers for norm in (layer.attention_norm, layer.ffn_norm))):
        norm.eps = model.norm_epsilon
    if spec.peer_attention == "sdpa":
        for layer in layers:
            layer.attention.inner_attention = load("models.common.attention").ScaledDotProductAttention.Config()
    if spec.fp8_recipe is not None:
        converter = load("components.quantization.float8").Float8LinearConverter.Config(
            recipe_name=spec.fp8_recipe,
            filter_fqns=["lm_head"],
            emulate=spec.device.type != "cuda",
            model_compile_enabled=spec.compile,
        )
        config = converter.build().convert(config)
    load("models.llama3.sharding").set_llama3_sharding_config(config, enable_sp=enable_sp)
    return config


def _chunked_loss(spec: BenchSpec, model: Any, compile_config: Any, load: Callable[[str], Any]) -> Any:
    """Its head and loss in chunks, as many as it takes by itself where these divide the sequence."""
    module = load("components.loss")
    inner = module.CrossEntropyLoss.Config(global_vocab_size=spec.run.model.vocab_size)
    chunks = math.gcd(_NUM_CHUNKS, spec.run.model.seq_length)
    loss = module.ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=inner).build(compile_config=compile_config)
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return loss
