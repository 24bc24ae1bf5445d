"""Exact rollouts on a GPU: CUDA graphs of decode steps, chunks of prompts and training have the same bits in bfloat16."""

from __future__ import annotations

import pytest
import torch

import petatron
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.kernels.policy_log_probs import policy_log_probs
from petatron.parallel.parallel_model import ParallelModel
from petatron.verify.measure_rollouts import RolloutCase, measure_rollouts, random_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [RolloutCase(1), RolloutCase(7, chunk=11), RolloutCase(64)]
SIZES = "--mock-data --lr 1e-3 --train-iters 1 --bf16 --exact-rollouts --num-layers 2 --seq-length 512 --max-position-embeddings 512"
FAMILIES = {
    "llama": "tiny-llama --hidden-size 512 --ffn-hidden-size 1000",
    "qwen3": "qwen3-0.6b --window-size 60",
    "experts": "qwen3-30b-a3b --num-experts 16",
    "latent": "tiny-llama --hidden-size 512 --multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 64 "
    "--qk-pos-emb-head-dim 32 --v-head-dim 64 --no-group-query-attention",
    "adapters": "qwen3-0.6b --adapter lora --adapter-rank 8",
}


def model_of(family: str) -> ParallelModel:
    preset, *flags = FAMILIES[family].split()
    run = petatron.load(preset, [*SIZES.split(), *flags])
    model = petatron.build_model(run, petatron.launch(run))
    with torch.no_grad():
        for param in model.module.parameters():
            if not param.any():  # an adapter changes nothing yet
                param.normal_(std=0.1)
            param.mul_(3.0 if param.dim() > 1 else 1.0)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_no_log_probability_differs(family: str):
    prompts = random_prompts(30, longest=90, vocab_size=256, seed=1)
    for result in measure_rollouts(model_of(family), prompts, CASES, new_tokens=6, row_tokens=512):
        assert (result.tokens, result.differing) == (30 * 3 * 6, 0)


@pytest.mark.parametrize("family", ["qwen3", "experts"])
def test_the_first_ratio_is_one(family: str):
    """With gradients, of answers that CUDA graphs drew."""
    model = model_of(family)
    engine = Engine(model, options=EngineOptions(exact=True))
    params = SamplingParams(max_new_tokens=24, logprobs=0, policy_logprobs=True, temperature=0.8)
    answers = [answer for [answer] in engine.complete([[7 + n] * (3 + 9 * n) for n in range(12)], params)]
    assert engine._steps.graphs is not None
    engine.release()
    for answer in answers:
        ids = torch.tensor([[*answer.prompt_ids, *answer.ids]], device="cuda")
        logits = model.module(petatron.Batch(ids[:, :-1]), collect=["logits"]).collected["logits"]
        trained = policy_log_probs(logits, ids[:, 1:], 0.8)[0, len(answer.prompt_ids) - 1 :]
        recorded = torch.tensor([x.logprob for x in answer.logprobs], device="cuda")
        assert trained.requires_grad and (trained - recorded).exp().tolist() == [1.0] * 24
