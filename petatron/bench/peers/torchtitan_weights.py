"""Our initial weights under torchtitan's names.

Its rope pairs neighboring channels where ours pairs halves of a head, so rows of queries and keys are permuted. From 0.3 on, queries,
keys and values are one weight, in which each group of query heads is followed by its key head and its value head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from petatron.bench.peers import BenchSpec
from petatron.bench.peers.initial_weights import InitialWeights
from petatron.models.registry import model_spec

# Its names -> ours; {} is the layer.
_NAMES: Mapping[str, str] = {
    "tok_embeddings.weight": "embedding.weight",
    "norm.weight": "norm.weight",
    "output.weight": "head.weight",
    "lm_head.weight": "head.weight",
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
_FUSED = "attention.qkv_linear.wqkv.weight"


@torch.no_grad()
def load_torchtitan_weights(model: nn.Module, spec: BenchSpec) -> None:
    """Loads our initial weights into its model on one rank."""
    weights = InitialWeights(model_spec(spec.run), spec.device)
    for name, parameter in model.named_parameters():
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        target.copy_(_values(name.replace("_orig_mod.", ""), spec, weights))


def _values(name: str, spec: BenchSpec, weights: InitialWeights) -> Tensor:
    if not name.startswith("layers."):
        return weights[_NAMES[name]]
    layer, _, rest = name.removeprefix("layers.").partition(".")
    width = spec.run.model.kv_channels
    if rest == _FUSED:
        q, k, v = (weights[_NAMES[f"attention.w{part}.weight"].format(layer)] for part in "qkv")
        groups = spec.run.model.num_query_groups
        heads = [part.unflatten(0, (groups, -1)) for part in (_pair_neighbors(q, width), _pair_neighbors(k, width), v)]
        return torch.cat(heads, dim=1).flatten(0, 1)
    values = weights[_NAMES[rest].format(layer)]
    return _pair_neighbors(values, width) if rest in ("attention.wq.weight", "attention.wk.weight") else values


def _pair_neighbors(weight: Tensor, head_dim: int) -> Tensor:
    """Puts rows that are half a head apart beside each other."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
