"""Multi-token prediction: what each depth sees and predicts, its losses, and what does not change by it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import petatron
from petatron.config import RunConfig
from petatron.config.schema.memory import MemoryConfig
from petatron.config.schema.model_identity import identity_differences, model_identity
from petatron.estimate.flops import head_gemm_elements, model_flops_per_token, parameter_count
from petatron.infer.engine import Engine
from petatron.infer.sampling_params import SamplingParams
from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch
from petatron.models.decoder import Decoder
from petatron.models.hf.config_json import FAMILIES
from petatron.models.hf.config_translation import ConfigWriter
from petatron.models.mtp_and_longrope_arrays import add_shifted_arrays, labels_name, mask_name, tokens_name
from petatron.models.registry import model_spec
from petatron.pretrained.saveable_model import Model
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.train.build_run import build_model
from petatron.validate import load_config
from tests.unit.models import test_activations as activations
from tests.unit.models.kept import kept_bytes

S, B, VOCAB = 12, 2, 60
BASE = (
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {S} --vocab-size {VOCAB} --mock-data --fp64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 48 --disable-bias-linear --num-workers 0 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --train-iters 2 --lr 1e-3 --micro-batch-size 2 "
    "--make-vocab-size-divisible-by 4 --init-method-std 0.2 "
)
TWO = BASE + "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.6 "
DEEPSEEK = (
    TWO
    + "--mtp-use-repeated-layer --multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
    "--q-lora-rank 20 --qk-layernorm "
)


def run_of(flags: str) -> RunConfig:
    return load_config(flags.split()).config


def model_of(flags: str) -> Model:
    run = run_of(flags)
    return build_model(run, petatron.launch(run))


def text() -> Tensor:
    return torch.randint(VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(3))


def batch_of(ids: Tensor) -> Batch:
    mask = torch.ones(B, S)
    mask[0, 4:6] = 0.0
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mask)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def test_losses_are_those_of_the_paper():
    """Each depth by hand: its layer is run by a model of one layer that has the depth's weights."""
    model = model_of(TWO)
    decoder = model.module.eval()
    assert isinstance(decoder, Decoder) and set(decoder.layers) == {"0", "1", "2", "3"}
    ids = text()
    batch = batch_of(ids)
    weights = dict(decoder.named_parameters())
    [outputs] = model.forward([Batch(batch.tokens)], collect=["hidden_states"])
    hidden = outputs["hidden_states"]
    expected = [
        F.cross_entropy(
            F.linear(hidden, weights["head.weight"][:VOCAB]).transpose(1, 2), batch.labels, reduction="none"
        )
    ]
    sums = [(expected[0] * batch.loss_mask).sum()]
    for depth in (1, 2):
        prefix = f"layers.{1 + depth}."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        # Positions whose token ahead is known: the text has one token more than positions.
        known = S + 1 - depth
        embedded = F.embedding(ids[:, depth : depth + S], weights["embedding.weight"])
        both = torch.cat(
            (rms(embedded, own["embedding_norm.weight"]), rms(hidden[:, :known], own["hidden_norm.weight"])), -1
        )
        z = F.linear(both, own["projection.weight"])
        y = one_layer(own, z)
        hidden = rms(y, own["norm.weight"])
        logits = F.linear(hidden[:, : S - depth], weights["head.weight"][:VOCAB])
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, depth + 1 :], reduction="none")
        sums.append((losses * batch.loss_mask[:, depth:]).sum())
    found, counts = model.evaluate_losses([batch])
    assert counts.tolist() == [22.0, 20.0, 18.0]
    torch.testing.assert_close(found, torch.stack(sums), rtol=1e-10, atol=1e-10)
    mean = found / counts
    assert [loss.weight for loss in model.io.losses] == [1.0, 0.3, 0.3]
    objective = model.train_step([batch])
    torch.testing.assert_close(objective, mean[0] + 0.3 * (mean[1] + mean[2]), rtol=1e-10, atol=1e-10)
    assert list(model.named_losses) == ["lm loss", "mtp 1 loss", "mtp 2 loss"]
    torch.testing.assert_close(torch.stack(list(model.named_losses.values())), mean, rtol=1e-10, atol=1e-10)


def one_layer(own: dict[str, Tensor], x_BSD: Tensor) -> Tensor:
    """Causal attention with rope and a gated MLP, in plain PyTorch."""
    batch, length, width = x_BSD.shape
    heads, size = 4, width // 4
    normed = rms(x_BSD, own["attention_norm.weight"])
    q, k, v = F.linear(normed, own["attention.qkv.weight"]).chunk(3, dim=-1)
    q, k, v = (x.view(batch, length, heads, size).transpose(1, 2) for x in (q, k, v))
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (
        torch.arange(0, size, 2, dtype=torch.float64) / size
    )
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    q, k = (x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin for x in (q, k))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x_BSD = x_BSD + F.linear(attended, own["attention.out.weight"])
    gate, up = F.linear(rms(x_BSD, own["mlp_norm.weight"]), own["mlp.gate_up.weight"]).chunk(2, dim=-1)
    return x_BSD + F.linear(F.silu(gate) * up, own["mlp.down.weight"])


def test_arrays_ahead_end_with_their_document():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16]])
    starts = torch.tensor([[0, 0, 0, 3, 3, 3]])
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(1, 6), documents=Documents.of(starts))
    shifted = add_shifted_arrays(batch, depths=2)
    assert shifted[tokens_name(1)].tolist() == [[11, 12, 13, 14, 15, 16]]
    assert shifted[tokens_name(2)].tolist() == [[12, 13, 14, 15, 16, 0]]
    assert shifted[labels_name(2)].tolist() == [[13, 14, 15, 16, 0, 0]]
    assert shifted[mask_name(1)].tolist() == [[1, 1, 0, 1, 1, 0]]
    assert shifted[mask_name(2)].tolist() == [[1, 0, 0, 1, 0, 0]]
    unlabeled = add_shifted_arrays(Batch(ids), depths=1)
    assert set(unlabeled.arrays) == {"tokens", tokens_name(1)} and unlabeled[tokens_name(1)][0, -2:].tolist() == [
        16,
        0,
    ]
    short = add_shifted_arrays(Batch(ids[:, :1], ids[:, 1:2], torch.ones(1, 1)), depths=3)
    assert short[tokens_name(3)].tolist() == short[labels_name(3)].tolist() == [[0]]


def test_the_model_itself_is_the_one_without():
    """Logits, scores and continuations do not depend on depths; their pages are not allocated."""
    plain, predicting = model_of(BASE), model_of(TWO)
    theirs = dict(plain.module.named_parameters())
    assert all(
        torch.equal(value, theirs[name]) for name, value in predicting.module.named_parameters() if name in theirs
    )
    batch = batch_of(text())
    names = ["logits", "token_losses", "greedy_targets"]
    [one], [other] = (model.forward([batch], collect=names) for model in (plain, predicting))
    assert all(torch.equal(one[name], other[name]) for name in names)
    params = SamplingParams(max_new_tokens=5, temperature=0.0)
    answers = [Engine(model).complete([[1, 2, 3]], params)[0][0].ids for model in (plain, predicting)]
    assert answers[0] == answers[1]
    assert len(Engine(predicting)._steps._pages) == 2


def test_parameters_and_flops_count_the_depths():
    plain, predicting = (model_spec(run_of(flags)) for flags in (BASE, TWO))
    layer = sum(param.num_elements for param in plain.layers[0].params().values())
    depth = layer + 3 * 32 + 2 * 32 * 32
    assert parameter_count(predicting) == parameter_count(plain) + 2 * depth
    gemms = sum(param.num_elements for param in plain.layers[0].params().values() if param.is_gemm) + 2 * 32 * 32
    attention = 12 * 32 * S / 2
    more = 2 * (6 * (gemms + head_gemm_elements(plain)) + attention)
    assert model_flops_per_token(predicting) == pytest.approx(model_flops_per_token(plain) + more)


def test_a_checkpoint_holds_the_depths(tmp_path: Path):
    model = model_of(TWO)
    model.save_pretrained(tmp_path / "model")
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    assert content["model_type"] == "petatron" and content["model"]["mtp_num_layers"] == 2
    again = petatron.from_pretrained(tmp_path / "model")
    kept = dict(again.module.named_parameters())
    assert all(torch.equal(kept[name][: len(value)], value) for name, value in model.module.named_parameters())
    batch = batch_of(text())
    assert torch.equal(again.evaluate_losses([batch])[0], model.evaluate_losses([batch])[0])


@pytest.mark.parametrize(
    ("depths", "flags"),
    [
        (1, "--mtp-num-layers 1"),
        (2, "--mtp-num-layers 2"),
        (3, "--mtp-num-layers 3 --mtp-use-repeated-layer"),
        (2, "--hybrid-layer-pattern *-*-/*-/*- --num-layers 4"),
        (2, "--hybrid-layer-pattern *-*-/-**/-** --num-layers 4 --mtp-use-repeated-layer"),
    ],
)
def test_kept_bytes_are_those_of_the_formula(depths: int, flags: str):
    run = activations.run_of(f"{activations.LLAMA} {flags}")
    model, _ = activations.build(run)
    buffers = activations.take_gradients(model)
    batch = add_shifted_arrays(activations.batch_of(run), depths=depths)
    masks = {loss.name: batch[loss.mask].t().double() for loss in model_spec(run).io([model.stage]).losses}

    def forward() -> Tensor:
        losses = model(batch, {}, loss_weights=masks).losses
        return torch.stack([loss.sum() for loss in losses.values()]).sum()

    kept, _ = kept_bytes(forward, without=[*model.parameters(), *buffers, *batch.arrays.values(), *masks.values()])
    assert activations.plan_of(run, model, MemoryConfig()).saved_bytes == kept


HYBRID = BASE.replace("--num-layers 2", "--hybrid-layer-pattern *-*-/*-/*-") + "--mtp-loss-scaling-factor 0.6 "
REPEATED = TWO + "--mtp-use-repeated-layer "


def hybrid_name(name: str) -> str:
    """Where a weight of the model of two layers and two depths is in the hybrid that has two layers for each of them."""
    if not name.startswith("layers."):
        return name
    _, layer, rest = name.split(".", 2)
    second = rest.startswith(("mlp", "norm."))
    return f"layers.{2 * int(layer) + second}.{rest}"


def grads_by_name(model: Model) -> dict[str, Tensor]:
    return {
        piece.name: view.clone()
        for group in model.param_groups
        for piece, view in group_tensor_shards(group, group.grads())
    }


def copy_weights(model: Model, source: Model, name_in_source: Callable[[str], str]) -> None:
    values = dict(source.module.named_parameters())
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            parameter.copy_(values[name_in_source(name)])


def trained_losses(model: Model) -> Tensor:
    model.train_step([batch_of(text())])
    return torch.stack(list(model.named_losses.values()))


def test_depths_of_a_hybrid_are_those_of_the_layers_they_spell():
    """`*-` is a layer with attention and an MLP: losses and gradients are those of the model that has such layers."""
    plain, hybrid = model_of(TWO), model_of(HYBRID)
    names = {hybrid_name(name): name for name, _ in plain.module.named_parameters()}
    copy_weights(hybrid, plain, names.__getitem__)
    torch.testing.assert_close(trained_losses(hybrid), trained_losses(plain), rtol=1e-12, atol=1e-12)
    wanted, found = grads_by_name(plain), grads_by_name(hybrid)
    assert len(found) == len(wanted)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[hybrid_name(name)], grad, rtol=1e-9, atol=1e-12)


def test_a_repeated_layer_is_every_depth():
    """Losses are those of depths with equal weights, and its gradient is the sum of theirs."""
    repeated, separate = model_of(REPEATED), model_of(TWO)
    assert isinstance(repeated.module, Decoder) and set(repeated.module.layers) == {"0", "1", "2"}
    copy_weights(separate, repeated, lambda name: name.replace("layers.3.", "layers.2."))
    torch.testing.assert_close(trained_losses(repeated), trained_losses(separate), rtol=1e-12, atol=1e-12)
    wanted, found = grads_by_name(separate), grads_by_name(repeated)
    for name, grad in found.items():
        other = wanted[name.replace("layers.2.", "layers.3.")] if name.startswith("layers.2.") else 0.0
        torch.testing.assert_close(grad, wanted[name] + other, rtol=1e-9, atol=1e-12)


def test_counts_of_a_repeated_layer():
    """Its parameters are there once, and its FLOPs for every depth."""
    one, repeated, separate = (model_spec(run_of(flags)) for flags in (BASE + "--mtp-num-layers 1", REPEATED, TWO))
    assert parameter_count(repeated) == parameter_count(one)
    assert model_flops_per_token(repeated) == pytest.approx(model_flops_per_token(separate))


@pytest.mark.parametrize("flags", [HYBRID, REPEATED], ids=["hybrid", "repeated"])
def test_such_a_model_is_saved_in_names_of_its_own(tmp_path: Path, flags: str):
    model = model_of(flags)
    model.save_pretrained(tmp_path / "model")
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    assert content["model_type"] == "petatron" and content["model"]["mtp_num_layers"] == 2
    again = petatron.from_pretrained(tmp_path / "model")
    batch = batch_of(text())
    assert torch.equal(again.evaluate_losses([batch])[0], model.evaluate_losses([batch])[0])


@pytest.mark.parametrize(
    ("flags", "family", "named"),
    [
        (HYBRID, "nemotron_h", "--mtp-num-layers"),
        (DEEPSEEK, "deepseek_v3", "--mtp-use-repeated-layer"),
    ],
)
def test_families_without_such_depths_refuse_by_name(flags: str, family: str, named: str):
    writer = ConfigWriter(family, model_spec(run_of(flags)))
    FAMILIES[family].translate(writer)
    writer.finish()
    assert named in [problem.where for problem in writer.problems]


def test_which_settings_of_depths_make_another_model():
    ours = model_identity(run_of(TWO).model, None)
    assert identity_differences(model_identity(run_of(REPEATED).model, None), ours) == ["mtp_use_repeated_layer"]
    hybrid = model_identity(run_of(HYBRID).model, None)
    other = model_identity(run_of(HYBRID.replace("/*-", "/-*")).model, None)
    assert identity_differences(other, hybrid) == ["mtp_hybrid_override_pattern"]
    without = model_identity(run_of(HYBRID.replace("/*-", "")).model, None)
    assert "mtp_hybrid_override_pattern" not in without


def test_a_preset_can_be_without_depths():
    """DeepSeek-V3's has one."""
    flags = ["--preset", "deepseek-v3", "--train-iters", "1", "--lr", "1e-3", "--mock-data", "--mtp-num-layers", "0"]
    without = load_config(flags).config.model
    unset = dataclasses.replace(without, mtp_num_layers=None)
    assert model_identity(without, None) == model_identity(unset, None)
