"""The bytes that an encoder-decoder keeps for the backward pass: formula against what really stays in memory; and its model FLOPs."""

from __future__ import annotations

import pytest
import torch

from petatron.config import RunConfig
from petatron.config.schema.memory import MemoryConfig
from petatron.estimate.flops import model_flops_per_token
from petatron.models.batch import Batch
from petatron.models.registry import model_spec
from tests.unit.models.test_activations import LLAMA, build, measured, recompute, run_of

T5 = (
    f"{LLAMA} --model-type t5 --num-layers 4 --encoder-num-layers 2 --decoder-seq-length 12 --softmax-scale 1 "
    "--relative-attention-num-buckets 8 --relative-attention-max-distance 6"
)
MODELS = {
    "t5": f"{T5} --position-embedding-type relative --activation relu",
    "t5, one row": f"{T5} --position-embedding-type relative --activation relu --micro-batch-size 1",
    "rotary": f"{T5} --position-embedding-type rope --num-query-groups 2 --qk-layernorm",
    "learned": f"{T5} --position-embedding-type learned_absolute --hidden-dropout 0.1 --encoder-num-layers 1 --decoder-num-layers 3",
}
RECOMPUTE = {
    "nothing": MemoryConfig(),
    "core": MemoryConfig(recompute_granularity="selective"),
    "attention": MemoryConfig(recompute_granularity="selective", recompute_modules=("attention", "mlp")),
    "uniform": MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


def batch_of(run: RunConfig) -> Batch:
    torch.manual_seed(5)
    assert run.model.vocab_size is not None and run.model.decoder_seq_length is not None
    rows = run.train.micro_batch_size
    source = torch.randint(0, run.model.vocab_size, (rows, run.model.seq_length))
    text = torch.randint(0, run.model.vocab_size, (rows, run.model.decoder_seq_length + 1))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return Batch(tokens, labels, torch.ones(tokens.shape), arrays={"encoder_tokens": source})


@pytest.mark.parametrize("kind", MODELS)
def test_kept_bytes_are_those_of_the_formula(kind: str):
    run, found = run_of(MODELS[kind]), dict[str, tuple[int, int]]()
    measured(build(run)[0], batch_of(run))  # the classes of distances stay on the device
    for name in RECOMPUTE:
        model, streams = build(run)
        plan = recompute(run, model, RECOMPUTE[name], streams)
        found[name] = measured(model, batch_of(run)), plan.saved_bytes
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}


def test_flops_are_those_of_both_sequences():
    """Of 16 tokens that are encoded and 12 that are decoded: every weight once per token of its sequence, and three kinds of scores."""
    run = run_of(f"{T5} --position-embedding-type relative --activation relu")
    source, target, width, ffn, vocab = 16, 12, 32, 48, 136
    attention, mlp = 4 * width * width, 2 * width * ffn
    encoder = 2 * (source * (attention + mlp) * 6 + 12 * width * source * source)
    projections = target * 2 * width * width + source * 2 * width * width
    cross = 6 * projections + 12 * width * target * source
    decoder = 2 * (target * (attention + mlp) * 6 + 6 * width * target * target + cross)
    assert model_flops_per_token(model_spec(run)) * source == encoder + decoder + 6 * target * width * vocab
