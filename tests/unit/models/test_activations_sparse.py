"""The bytes that sparse latent attention and its indexer keep for backward, and what estimates count of them."""

from __future__ import annotations

import re

import pytest
import torch

from petatron.estimate.flops import flops_formula, model_flops_per_token
from petatron.kernels.attention.sparse_latent_attention import hadamard_rotation
from petatron.layers.sparse_mla import SparseMlaSpec
from petatron.models.registry import model_spec
from tests.unit.models.test_activations import LLAMA, MLA, RECOMPUTE, batch_of, build, measured, recompute, run_of

DSA = f"{LLAMA} {MLA} --experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8"
LEARNS = "--dsa-indexer-loss-coeff 1"


@pytest.mark.parametrize(
    "flags",
    [
        "--q-lora-rank 12 --qk-layernorm --dsa-indexer-topk 6",
        f"--q-lora-rank 12 --qk-layernorm --dsa-indexer-topk 6 {LEARNS}",
        f"--q-lora-rank 12 --dsa-indexer-topk 6 --dsa-indexer-use-sparse-loss {LEARNS} --disable-dsa-indexer-rotate-activation",
        f"--qk-layernorm --dsa-indexer-topk 16 {LEARNS}",
    ],
)
def test_kept_bytes_are_those_of_the_formula(flags: str):
    run = run_of(f"{DSA} {flags}")
    batch = batch_of(run)
    hadamard_rotation(torch.ones(8))  # its matrix is made once
    found = {}
    for name, memory in RECOMPUTE.items():
        model, streams = build(run)
        plan = recompute(run, model, memory, streams)
        found[name] = measured(model, batch, aux_loss_scale=torch.ones(())) - plan.saved_bytes
    logged = 8 * 3 if "loss" in flags else 0  # one number for each layer's log, which regions hold with their arguments
    assert found == {name: 0 if name in ("nothing", "core_attn", "layernorm") else logged for name in RECOMPUTE}


def test_flops_are_counted_by_hand():
    """16 tokens, of which a query keeps 6: 78 of 128 pairs (s k - k^2 / 2), 4 heads of 12 + 6 channels, an indexer of 3 x 8."""

    def mixing(flags: str) -> float:
        mixer = model_spec(run_of(f"{DSA} --dsa-indexer-topk 6 {flags}")).layers[0].mixer
        assert isinstance(mixer, SparseMlaSpec)
        return mixer.mixing_flops(16, causal=True)

    attention, score, weight = 6 * 4 * (12 + 6), 2 * 3 * 8, 2 * 4 * 12
    assert mixing("") == attention * 78 + score * 128
    assert mixing(LEARNS) == attention * 78 + score * 128 + (weight + 3 * score) * 128
    assert mixing(f"{LEARNS} --dsa-indexer-use-sparse-loss") == attention * 78 + score * 128 + (weight + 3 * score) * 78
    assert mixing("--dsa-indexer-topk 16") == attention * 128


def test_a_model_counts_the_projections_of_its_indexers():
    """3 layers with queries of 12 and weights and keys of the hidden size 32; 6 operations per weight and token."""
    flags = "--q-lora-rank 12 --dsa-indexer-topk 16"
    plain = run_of(f"{LLAMA} {MLA} --q-lora-rank 12")
    more = model_flops_per_token(model_spec(run_of(f"{DSA} {flags}"))) - model_flops_per_token(model_spec(plain))
    assert more == 6 * 3 * (12 * 24 + 32 * (8 + 3))


def test_the_formula_is_the_count():
    """With a gated MLP of 48 and a padded vocabulary of 136 over the hidden size 32; K = 6 of s = 16 tokens."""
    spec = model_spec(run_of(f"{DSA} --q-lora-rank 12 --dsa-indexer-topk 6"))
    numbers = {
        "h": 32,
        "a": 12,
        "c": 20,
        "r": 4,
        "q": 48,
        "k": 32,
        "v": 24,
        "g": 3,
        "f": 48,
        "V": 136,
        "L": 3,
        "J": 3,
        "E": 8,
    }
    for causal in (True, False):
        text = (
            flops_formula(causal=causal, latent=True, sparse=True).replace("6 T (", "6 ( ").replace("(T/s) ", "/ s * ")
        )
        text = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text.replace("^", "**"))
        count = eval(text, {}, {**numbers, "K": 6, "s": 16})
        assert model_flops_per_token(spec, causal=causal) == pytest.approx(count)
