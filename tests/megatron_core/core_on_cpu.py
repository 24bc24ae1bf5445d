"""Runs the published Megatron-Core on CPU, over gloo, in processes of its own: builds a model, saves it, loads what others wrote.

    python -m tests.megatron_core.core_on_cpu '[{"task": "save", "kind": "llama", "out": "FOLDER", ...}, ...]'

All jobs of a run have one layout. Every rank runs it with RANK and WORLD_SIZE set. Megatron-Core assumes CUDA in a few places, which are
replaced before it is imported. Only the last pipeline stage's first rank prints, a line of JSON for each job.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.megatron_core.models import BERTS, POSITIONS, VOCAB, arguments, layer_settings, model_settings


class Job(argparse.Namespace):
    """One run's task; every field that is not given has its default here."""

    task: str
    kind: str
    out: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    layers: int = 4
    width: int = 32
    format: str = "torch_dist"
    newer: bool = False  # as version 0.20 stores its arguments: as an object of the checkpoint, with an enum that 0.16 does not have
    strict: str = "assume_ok_unexpected"
    optimizer: str = "plain"  # of the tasks that train: plain, or distributed
    bf16: bool = False
    steps: int = 3  # before the checkpoint
    more_steps: int = 20  # after it
    tokens: str = "tokens.safetensors"  # [step, sample, position], one id more than the model reads


def pretend_cuda() -> None:
    """Replaces what asks for a CUDA device."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.FloatTensor = torch.FloatTensor
    plain_type = torch.Tensor.type
    torch.Tensor.type = lambda self, *a: (
        plain_type(self, *a) if a else plain_type(self).replace("torch.", "torch.cuda.")
    )
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(make: Any) -> Any:
    def made(*values: Any, **options: Any) -> Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*values, **options)

    return made


def start(job: Job) -> None:
    """Joins the ranks, and sets up Megatron's groups."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    pretend_cuda()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    parallel_state.initialize_model_parallel(job.tp, job.pp, expert_model_parallel_size=job.ep)
    filesystem_async._process_memory = lambda: 0  # it wants psutil
    moe_utils.te_general_gemm = None
    multi_latent_attention.TELinear = type("NoTransformerEngine", (), {})  # it asks for instances of None
    random.initialize_rng_tracker()
    type(random.get_cuda_rng_tracker()).fork = contextlib.contextmanager(lambda self, name=None: (yield))


def build(job: Job, seed: int) -> Any:
    """Returns this rank's part of a GPTModel in the local implementation, with norms and biases that are not their initial ones."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    values = layer_settings(job.kind, layers=job.layers, width=job.width)
    latent = bool(values.get("multi_latent_attention"))
    fused = ("bias_activation", "bias_dropout", "masked_softmax", "gradient_accumulation")
    plain = {f"{name}_fusion": False for name in fused} | {"apply_rope_fusion": False, "persist_layer_norm": False}
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **values,
        **plain,
        activation_func=torch.nn.functional.silu if values.get("gated_linear_unit") else torch.nn.functional.gelu,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        expert_model_parallel_size=job.ep,
        bf16=job.bf16,
        params_dtype=torch.bfloat16 if job.bf16 else torch.float32,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=values.get("num_moe_experts"),
        moe_grouped_gemm=False,
        normalization=values["normalization"],
        qk_layernorm=bool(values.get("qk_layernorm")),
        multi_latent_attention=latent,
    )
    if latent:
        sparse = values.get("experimental_attention_variant") == "dsa"
        spec.submodules.self_attention.submodules.core_attention = sparse_attention() if sparse else LatentCoreAttention
    stage = parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed + stage)
    part: dict[str, Any] = {"pre_process": stage == 0, "post_process": stage == job.pp - 1}
    if job.kind in BERTS:
        model = masked_language_model(config, BERTS[job.kind], part, model_settings(job.kind))
    else:
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            parallel_output=job.task in ("train", "resume"),  # the loss is computed of shards of the vocabulary
            **part,
            **model_settings(job.kind),
        )
    torch.manual_seed(seed + 10 + stage)  # what every tensor-parallel rank has must be the same on all of them
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                noise = torch.randn_like(weight) * 0.1
                weight.add_(noise) if "norm" in name and "weight" in name else weight.copy_(noise / 2)
            else:
                weight.mul_(5)  # initial weights are so small that hardly a layer matters
    return model.eval()


def masked_language_model(config: Any, with_order: bool, part: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Returns this rank's part of Megatron's BERT, with segments and their order or without."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    taken = {name: value for name, value in settings.items() if name != "rotary_base"}
    return BertModel(
        config=config,
        num_tokentypes=2 if with_order else 0,
        transformer_layer_spec=bert_layer_local_spec,
        add_binary_head=with_order,
        parallel_output=False,
        **part,
        **taken,
    )


def sparse_attention() -> Any:
    """Returns Megatron's module of sparse attention, with what it takes from Transformer Engine and a CUDA extension replaced.

    The published version rotates the last channels of the indexer's heads; here they are the first, as in later versions.
    """
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec

    class FirstChannels(dsa.DSAIndexer):
        def _apply_rope(self, x: Tensor, *args: Any) -> Tensor:
            width = self.qk_pos_emb_head_dim
            return super()._apply_rope(x.roll(-width, -1), *args).roll(width, -1)

    dsa.rotate_activation = hadamard
    parts = {"linear_wq_b": Duplicated, "linear_wk": Duplicated, "linear_weights_proj": Duplicated, "k_norm": KeyNorm}
    indexer = ModuleSpec(module=FirstChannels, submodules=dsa.DSAIndexerSubmodules(**parts))
    return ModuleSpec(module=dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer=indexer))


def hadamard(x: Tensor) -> Tensor:
    """Multiplies by the Hadamard matrix, divided by the root of its size: the definition of what a CUDA extension does in bf16."""
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < x.shape[-1]:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=x.dtype), matrix)
    return x @ matrix * x.shape[-1] ** -0.5


class Duplicated(torch.nn.Module):
    """Transformer Engine's linear with the same weight on every rank."""

    def __init__(self, width: int, rows: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, width, dtype=config.params_dtype))
        config.init_method(self.weight)

    def get_extra_state(self) -> Tensor:
        """What FP8 would keep."""
        return torch.empty(0)

    def set_extra_state(self, state: Any) -> None:
        """There is none."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


class KeyNorm(torch.nn.LayerNorm):
    """Layer norm, as Megatron builds one."""

    def __init__(self, *, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)


class LatentCoreAttention(torch.nn.Module):
    """Softmax attention with values of another width than keys, which Megatron-Core leaves to kernels of a GPU."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> Tensor:
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))  # [S, B, H, E] -> [B, H, S, E]
        scores = (query @ key.transpose(-1, -2) * self.scale).masked_fill(mask, float("-inf"))
        return (scores.softmax(-1) @ value).permute(2, 0, 1, 3).flatten(2)


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor | None:
    """Returns the logits on the last stage, None on others."""
    from megatron.core import parallel_state

    batch, length = tokens.shape
    positions = torch.arange(length).unsqueeze(0).expand(batch, length)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(length, batch, model.config.hidden_size)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    if hasattr(model, "add_binary_head"):
        types = torch.zeros_like(tokens) if model.add_binary_head else None
        out = model(tokens, torch.ones(batch, length), tokentype_ids=types)
        out = out[0] if isinstance(out, tuple) else out
    else:
        out = model(tokens, positions, mask)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return out[..., :VOCAB].contiguous()


def stored_arguments(job: Job) -> argparse.Namespace:
    """Returns a run's arguments, with some of the objects that they hold."""
    from megatron.core import enums
    from megatron.core.transformer import enums as layer_enums

    sizes = {"layers": job.layers, "width": job.width}
    kept = argparse.Namespace(**arguments(job.kind, job.tp, job.pp, job.ep, **sizes))
    kept.params_dtype, kept.exit_signal = torch.float32, signal.SIGTERM
    kept.model_type, kept.attention_backend = enums.ModelType.encoder_or_decoder, layer_enums.AttnBackend.auto
    if job.newer:
        scope = Enum("InferenceCudaGraphScope", ["none", "block"], module=layer_enums.__name__)
        layer_enums.InferenceCudaGraphScope = scope
        kept.inference_cuda_graph_scope = scope.block
    return kept


def rank_folder(job: Job, step: Path) -> Path:
    """Returns the folder of this rank's legacy file."""
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if job.pp > 1 else ""
    return step / (name + (f"_{parallel_state.get_expert_model_parallel_rank():03d}" if job.ep > 1 else ""))


def save(job: Job) -> dict[str, Any]:
    """Saves a model and the logits that it has of some tokens."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    model, step = build(job, seed=1), Path(job.out) / "iter_0000010"
    common: dict[str, Any] = {"args": stored_arguments(job), "checkpoint_version": 3.0, "iteration": 10}
    step.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if job.format == "legacy":
        folder = rank_folder(job, step)
        folder.mkdir(exist_ok=True)
        torch.save({**common, "model": model.state_dict_for_save_checkpoint()}, folder / "model_optim_rng.pt")
    else:
        state: dict[str, Any] = {"model": model.sharded_state_dict()}
        replica = dist.get_rank()
        state |= {"common": ShardedObject("common_state", common, (1,), (0,), replica)} if job.newer else common
        dist_checkpointing.save(state, str(step))
        if job.newer and dist.get_rank() == 0:
            (step / "common.pt").unlink()
    (Path(job.out) / "latest_checkpointed_iteration.txt").write_text("10")
    tokens = torch.randint(0, VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(3))
    out = logits(model, tokens)
    if out is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
        save_file({"tokens": tokens, "logits": out}, Path(job.out) / "reference.safetensors")
    return {"saved": job.out}


def load(job: Job) -> dict[str, Any]:
    """Loads a checkpoint into a model of other weights as a run does it, and returns how far its logits are from the reference's."""
    from megatron.core import dist_checkpointing

    model, (step,) = build(job, seed=99), Path(job.out).glob("iter_*")
    if job.format == "legacy":
        content = torch.load(rank_folder(job, step) / "model_optim_rng.pt", weights_only=False)
        model.load_state_dict(content["model"], strict=True)
    else:
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(step), strict=job.strict)
        model.load_state_dict(state["model"], strict=True)
    reference = load_file(Path(job.out) / "reference.safetensors")
    out = logits(model, reference["tokens"])
    return {"difference": None if out is None else (out - reference["logits"]).abs().max().item()}


def main() -> None:
    jobs = [Job(**values) for values in json.loads(sys.argv[1])]
    sys.path.append(os.environ["MEGATRON_CORE"])
    start(jobs[0])
    from megatron.core import parallel_state

    from tests.megatron_core.training_on_cpu import resume, train

    for job in jobs:
        result = {"save": save, "load": load, "train": train, "resume": resume}[job.task](job)
        speaks = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0
        if parallel_state.is_pipeline_last_stage() and speaks:
            print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # Megatron's own workers would not let it end


if __name__ == "__main__":
    main()
