"""Log-probabilities that the engine records are those of training, bit for bit, whatever shares the batch (`--exact-rollouts`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import petatron
from petatron.base.errors import ConfigError
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.kernels.batch_invariant import gemm
from petatron.kernels.batch_invariant.row_functions import fixed_order_sum, gelu, gelu_tanh, sigmoid, silu, softmax
from petatron.kernels.policy_log_probs import policy_log_probs
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel.parallel_model import ParallelModel
from petatron.verify.measure_rollouts import RolloutCase, RolloutResult, measure_rollouts, random_prompts
from tests.dist import RankPool
from tests.longform import diagonal

FAMILIES = {
    "llama": "--window-size 24",
    "qwen3": "--qk-layernorm --kv-channels 24",
    "experts": "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 50 --moe-shared-expert-intermediate-size 40",
    "sigmoid experts": "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias",
    "latent": "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 20 "
    "--no-group-query-attention",
    "adapters": "--adapter lora --adapter-rank 3 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48",
    "gpt": "--normalization LayerNorm --activation gelu --add-bias-linear",
}
CASES = [RolloutCase(1), RolloutCase(3, chunk=5), RolloutCase(16), RolloutCase(16, chunk=7)]


@cache
def tiny_model(flags: str, *, num_ranks: int = 1) -> ParallelModel:
    sizes = "--num-layers 2 --hidden-size 48 --ffn-hidden-size 76 --num-attention-heads 4 --vocab-size 301 --lr 1e-3"
    group = "" if "group-query" in flags else "--num-query-groups 2"
    run = petatron.load(
        "tiny-llama", f"--mock-data --train-iters 1 {sizes} {group} {flags}".split(), world_size=num_ranks
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    layout = Layout.from_config(run.config.parallel)
    model = petatron.build_model(run, ParallelMesh(layout, rank, device=torch.device("cpu"), backend="gloo"))
    with torch.no_grad():
        for param in (param for stage in model.stages.values() for param in stage.parameters()):
            if not param.any():  # an adapter changes nothing yet
                param.normal_(std=0.1)
            param.mul_(6.0 if param.dim() > 1 else 1.0)  # as drawn, all tokens are nearly as likely
    return model


def measured(flags: str, *, count: int = 10, cases: list[RolloutCase] = CASES, **options: int) -> list[RolloutResult]:
    prompts = random_prompts(count, longest=40, vocab_size=301, seed=1)
    return list(measure_rollouts(tiny_model(flags), prompts, cases, new_tokens=5, row_tokens=128, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_log_probability_differs(family: str):
    for result in measured(f"{FAMILIES[family]} --exact-rollouts"):
        assert (result.tokens, result.differing, result.largest, result.k3) == (150, 0, 0.0, 0.0)


@pytest.mark.parametrize("precision", ["--bf16", "--fp64"])
def test_no_log_probability_differs_in_another_precision(precision: str):
    assert all(result.differing == 0 for result in measured(f"{precision} --exact-rollouts", cases=CASES[1:3]))


def measured_in(layout: str) -> list[RolloutResult]:
    """The results, without the seconds."""
    prompts = random_prompts(8, longest=40, vocab_size=301, seed=1)
    model = tiny_model(f"--exact-rollouts {layout}", num_ranks=2)
    results = measure_rollouts(model, prompts, CASES[1:3], new_tokens=4, row_tokens=128)
    return [replace(result, draw_s=0.0, forward_s=0.0) for result in results]


@diagonal(2)
@pytest.mark.parametrize("layout", ["--tp 2", "--tp 2 --sequence-parallel", "--pp 2", "--dp 2"])
@pytest.mark.parametrize("family", ["llama", "experts", "latent"])
def test_no_log_probability_differs_in_a_layout(ranks: RankPool, family: str, layout: str):
    for results in ranks.run(measured_in, 2, f"{layout} {FAMILIES[family]}"):
        assert [(result.tokens, result.differing) for result in results] == [(96, 0), (96, 0)]


def test_other_modes_and_a_planted_tile_differ():
    """A tile that merges other keys is found, and so is the library's choice by the number of rows."""
    [planted] = measured("--exact-rollouts", cases=CASES[-1:], key_tile=16)
    assert planted.differing > 0 and 0.0 < planted.largest < 1e-4
    [plain] = measured("", cases=CASES[-1:])
    assert plain.differing > 0 and plain.k3 >= 0.0


def test_pages_and_preemption_change_nothing():
    model, prompts = tiny_model("--exact-rollouts"), random_prompts(9, longest=40, vocab_size=301, seed=3)
    params = SamplingParams(max_new_tokens=12, logprobs=1, policy_logprobs=True, temperature=0.8)
    plenty, scarce = (
        Engine(model, options=EngineOptions(exact=True, **options))
        for options in ({"prefix_caching": False}, {"page_size": 4, "num_pages": 33, "max_sequences": 8})
    )
    answers = [engine.complete_on_all_ranks(prompts, params) for engine in (plenty, scarce)]
    assert scarce.stats.preemptions > 0
    assert answers[0] == [[replace_cached(answer)] for [answer] in answers[1]]
    for [answer] in answers[0]:
        assert all(
            x.logprob <= x.top[0][1] and (x.token != x.top[0][0] or x.logprob == x.top[0][1]) for x in answer.logprobs
        )


def replace_cached(answer: petatron.infer.engine_outputs.Completion):
    answer.cached_tokens = 0
    return answer


def test_gradients_are_those_of_the_other_mode():
    """Forward passes differ in their last bits, so gradients do."""
    gradients = []
    for flags in ("--fp64", "--fp64 --exact-rollouts"):
        model = tiny_model(f"{flags} {FAMILIES['experts']}")
        torch.manual_seed(0)
        tokens = torch.randint(301, (2, 33))
        loss = model.train_step([petatron.Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(2, 32))])
        gradients.append([loss, *(grad.clone() for group in model.param_groups for grad in group.grads())])
    for plain, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(exact, plain, rtol=1e-9, atol=1e-12)


def test_the_first_ratio_is_one():
    """The importance ratio of the first update, from logits with gradients."""
    model = tiny_model("--exact-rollouts")
    params = SamplingParams(max_new_tokens=8, logprobs=0, policy_logprobs=True, temperature=0.6)
    [[answer]] = Engine(model, options=EngineOptions(exact=True)).complete_on_all_ranks([[5, 6, 7]], params)
    ids = torch.tensor([[*answer.prompt_ids, *answer.ids]])
    logits = model.module(petatron.Batch(ids[:, :-1]), collect=["logits"]).collected["logits"]
    trained = policy_log_probs(logits, ids[:, 1:], 0.6)[0, 2:]
    assert trained.requires_grad
    ratios = (trained - torch.tensor([x.logprob for x in answer.logprobs])).exp()
    assert ratios.tolist() == [1.0] * 8


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_policy_log_probs_equal_a_log_softmax(temperature: float):
    logits = torch.randn(2, 5, 37, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.randint(37, (2, 5)), torch.randn(2, 5, dtype=torch.float64)
    other = logits.detach().clone().requires_grad_()
    expected = (other / temperature).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    log_probs = policy_log_probs(logits, labels, temperature)
    torch.testing.assert_close(log_probs, expected)
    (log_probs * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logits.grad, other.grad)


def test_filters_leave_the_log_probability_and_report_what_they_kept():
    model = tiny_model("--exact-rollouts")
    whole = SamplingParams(max_new_tokens=1, logprobs=20, policy_logprobs=True, temperature=0.9)
    engine = Engine(model, options=EngineOptions(exact=True))
    answers = engine.complete_on_all_ranks([[4, 5]], [whole, replace(whole, top_k=3), replace(whole, top_p=0.4)])[0]
    for answer in answers:
        assert answer.logprobs[0].top == answers[0].logprobs[0].top
    expected = sum(torch.tensor([x for _, x in answers[0].logprobs[0].top[:3]], dtype=torch.float64).exp())
    assert answers[0].logprobs[0].kept_mass == 1.0
    assert answers[1].logprobs[0].kept_mass == pytest.approx(float(expected), rel=1e-6)
    assert 0.4 <= answers[2].logprobs[0].kept_mass < 1.0


@pytest.mark.parametrize("threads", [1, 2])
def test_gemms_of_rows_have_the_bits_of_the_row(threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(threads)
        for inner, width in ((7, 5), (48, 100), (96, 257), (1000, 320)):
            x, weight = torch.randn(200, inner, generator=generator), torch.randn(width, inner, generator=generator)
            whole = gemm.matmul_rows(x, weight)
            torch.testing.assert_close(whole, x @ weight.t(), rtol=1e-4, atol=1e-4)
            for count in (1, 2, 31, 32, 33, 64, 150):
                rows = torch.randperm(200, generator=generator)[:count]
                assert torch.equal(gemm.matmul_rows(x[rows], weight), whole[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("function", [fixed_order_sum, sigmoid, silu, gelu, gelu_tanh, softmax])
@pytest.mark.parametrize("width", [1, 3, 16, 100])
def test_functions_of_rows_have_the_bits_of_the_row(function: Callable[[Tensor], Tensor], width: int):
    x = torch.randn(70, width, generator=torch.Generator().manual_seed(width)) * 4
    whole = function(x)
    for count in (1, 2, 3, 17, 69):
        assert torch.equal(function(x[-count:].clone()), whole[-count:])


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--hidden-dropout 0.1", "drops what generation does not"),
        ("--adapter lora --adapter-dropout 0.1", "drops what generation does not"),
        ("--adapter lora --adapter-base-format nf4", "dequantizes weights"),
        ("--attention-dropout 0.1", "dropout of attention"),
        ("--num-experts 4 --moe-expert-capacity-factor 1.0", "a capacity of experts"),
        ("--attention-output-gate", "a gated attention output"),
        ("--position-embedding-type alibi", "score biases"),
    ],
)
def test_what_is_refused(flags: str, rule: str):
    with pytest.raises(ConfigError, match=rule):
        tiny_model(f"{flags} --exact-rollouts")


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--tp 4", "adds more than two partial sums"),
        ("--cp 2", "computes in an order"),
        ("--num-experts 4 --ep 2", "computes in an order"),
        ("--fp8-format e4m3 --bf16", "scales whole tensors"),
    ],
)
def test_layouts_that_are_refused(flags: str, rule: str):
    with pytest.raises(ConfigError, match=rule):
        petatron.load(
            "tiny-llama", f"--mock-data --lr 1 --train-iters 1 --exact-rollouts {flags}".split(), world_size=4
        )


def test_an_exact_engine_needs_an_exact_model():
    with pytest.raises(ConfigError, match="Build the model with --exact-rollouts"):
        Engine(tiny_model(""), options=EngineOptions(exact=True))
    with pytest.raises(ConfigError, match="weights that training does not"):
        Engine(tiny_model("--exact-rollouts"), options=EngineOptions(fp8_weights=True))
    with pytest.raises(ConfigError, match="verifies several tokens"):
        Engine(tiny_model("--exact-rollouts"), options=EngineOptions(speculative_tokens=2))


def test_policy_logprobs_go_with_nothing_that_changes_the_distribution():
    with pytest.raises(ConfigError, match="which training does not compute"):
        SamplingParams(policy_logprobs=True, repetition_penalty=1.2)
