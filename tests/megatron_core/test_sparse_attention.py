"""One layer of sparse attention with its indexer's loss, forward and backward, equals Megatron-Core's own module as published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from petatron.layers.forward_context import ForwardContext, RopeCosSin
from petatron.layers.rope import RotaryEmbedding
from petatron.layers.sparse_mla import INDEXER_LOSS, SparseLatentAttention
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.megatron_core.run_core import ROOT, WHEEL

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not WHEEL.is_dir(), reason=f"{WHEEL} has no megatron-core: make megatron-core fetches it"),
]
S, B, D, H, NOPE, ROTARY, V, Q_RANK = 16, 2, 32, 4, 6, 4, 7, 12
HEADS, WIDTH = 8, 16
FLAGS = (
    f"--num-layers 2 --hidden-size {D} --num-attention-heads {H} --seq-length {S} --vocab-size 90 --normalization RMSNorm "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --multi-latent-attention --kv-lora-rank 10 "
    f"--q-lora-rank {Q_RANK} --qk-head-dim {NOPE} --qk-pos-emb-head-dim {ROTARY} --v-head-dim {V} --qk-layernorm "
    f"--position-embedding-type rope --experimental-attention-variant dsa --dsa-indexer-n-heads {HEADS} "
    f"--dsa-indexer-head-dim {WIDTH} --dsa-indexer-loss-coeff 0.3 --dsa-indexer-rope-interleaved"
)


def layer_of(flags: str) -> SparseLatentAttention:
    run = load_config([*FLAGS.split(), *flags.split()], require_training=False).config
    module = model_spec(run).layers[0].branches[0].build(0).double()
    assert isinstance(module, SparseLatentAttention)
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return module.float().double()  # as the other program has them, which computes in float32


def rotary_last(x: Tensor) -> Tensor:
    """The published version rotates the last channels of a head, ours (as later versions) the first: along the first dimension."""
    return x.unflatten(0, (-1, WIDTH)).roll(-ROTARY, 1).flatten(0, 1)


@pytest.mark.parametrize("topk", [5, S], ids=["some", "all"])
@pytest.mark.parametrize("sparse_loss", [False, True], ids=["dense loss", "sparse loss"])
def test_a_layer_equals_megatron_cores(tmp_path: Path, topk: int, sparse_loss: bool):
    flags = f"--dsa-indexer-topk {topk}" + " --dsa-indexer-use-sparse-loss" * sparse_loss
    layer = layer_of(flags)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(S, B, D, dtype=torch.float64, generator=draw).float().double().requires_grad_()
    grad = torch.randn(S, B, H * V, dtype=torch.float64, generator=draw)
    rope = layer.spec.rope
    assert rope is not None
    cos_sin = RotaryEmbedding(rope)(torch.arange(S), torch.float64)
    context = ForwardContext({rope: cos_sin}, aux_loss_scale=torch.ones((), dtype=torch.float64))

    with torch.no_grad():
        q_latent = layer._query_latent(x)
        query = layer._query_heads(q_latent, cos_sin)
        key, value = layer._keys_and_values(*layer._latents(x), cos_sin)
    indexer = {name: parameter.detach() for name, parameter in layer.indexer.named_parameters()}
    theirs = {"q_up": "linear_wq_b", "k": "linear_wk", "k_norm": "k_norm", "head_weights": "linear_weights_proj"}
    renamed = {f"{theirs[name.split('.')[0]]}.{name.split('.')[1]}": name for name in indexer}
    turned = {
        name: indexer[own] if own.startswith("head") else rotary_last(indexer[own]) for name, own in renamed.items()
    }
    inputs = {"query": query, "key": key, "value": value, "x": x.detach(), "qr": getattr(q_latent, "value", q_latent)}
    inputs |= {"grad": grad, **{f"indexer.{name}": weight for name, weight in turned.items()}}
    save_file({name: tensor.float().contiguous() for name, tensor in inputs.items()}, tmp_path / "inputs.safetensors")
    config = {
        "num_layers": 2, "hidden_size": D, "num_attention_heads": H, "multi_latent_attention": True, "q_lora_rank": Q_RANK,
        "kv_lora_rank": 10, "qk_head_dim": NOPE, "qk_pos_emb_head_dim": ROTARY, "v_head_dim": V, "rope_type": "rope",
        "rotary_base": 10000, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": HEADS, "dsa_indexer_head_dim": WIDTH,
        "dsa_indexer_topk": topk, "dsa_indexer_loss_coeff": 0.3, "dsa_indexer_use_sparse_loss": sparse_loss,
        "layernorm_epsilon": 1e-5,
    }  # fmt: skip
    (tmp_path / "settings.json").write_text(json.dumps({"config": config, "scale": (NOPE + ROTARY) ** -0.5}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEGATRON_CORE": str(WHEEL), "RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(23456 + os.getpid() % 20000), "LOCAL_RANK": "0"}
    program = [sys.executable, "-m", "tests.megatron_core.sparse_layer", str(tmp_path)]
    done = subprocess.run(program, env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    true = load_file(tmp_path / "outputs.safetensors")

    # What goes into the output projection, whose place the identity takes.
    caught: list[Tensor] = []
    layer.out.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0]))
    y = layer(x, context)
    torch.testing.assert_close(caught[0], true["out"].double(), rtol=0, atol=5e-6)
    assert float(context.router_statistics[INDEXER_LOSS, 0]) == pytest.approx(float(true["loss"]), rel=1e-6)
    assert float(true["loss"]) > 0.01
    torch.autograd.backward([caught[0], y], [grad, torch.zeros_like(y)])
    for name, own in renamed.items():
        found = layer.indexer.get_parameter(own).grad
        assert found is not None
        expected = true[f"grad {name}"].double()
        found = found if own.startswith("head") else rotary_last(found)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6, msg=lambda text, own=own: f"{own}: {text}")
    assert "grad x" not in true and "grad qr" not in true  # its indexer passes no gradient on, either
    check_attention_grads(layer, layer_of(flags), true, x, cos_sin)


def check_attention_grads(
    layer: SparseLatentAttention, fresh: SparseLatentAttention, true: dict[str, Tensor], x: Tensor, cos_sin: RopeCosSin
) -> None:
    """Compares gradients of the weights of attention: Megatron's, of queries, keys and values, go on through the same projections."""
    q = fresh._query_heads(fresh._query_latent(x), cos_sin)
    k, v = fresh._keys_and_values(*fresh._latents(x), cos_sin)
    torch.autograd.backward([q, k, v], [true[f"grad {name}"].double() for name in ("query", "key", "value")])
    expected = {name: p.grad for name, p in fresh.named_parameters() if p.grad is not None}
    assert {"q_up.weight", "kv_up.weight", "kv_down.weight", "q_norm.weight"} <= expected.keys()
    for name, wanted in expected.items():
        found = layer.get_parameter(name).grad
        assert found is not None and wanted is not None
        bound = 5e-6 * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=bound, msg=lambda text, name=name: f"{name}: {text}")
