"""Rules and notices about CUDA graphs: what a recorded step cannot have is refused before anything runs, all at once."""

from __future__ import annotations

import shlex

import pytest

from petatron.models.uses_random_numbers import uses_random_numbers
from petatron.validate import resolve_config

BASE = shlex.split(
    "--preset tiny-llama --mock-data --lr 1e-3 --train-iters 100 --bf16 --cuda-graphs --hidden-dropout 0 --attention-dropout 0"
)
EXPERTS = "--num-experts 4"
PADDED = f"{EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
GLOO = "--distributed-backend gloo"


def messages(flags: str, *, world_size: int = 1) -> list[str]:
    _, problems = resolve_config([*BASE, *shlex.split(flags)], world_size=world_size)
    return [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        ("--no-bf16 --fp16", 1),
        ("--no-bf16", 1),
        ("--hidden-dropout 0.1 --attention-dropout 0.1", 1),
        ("--fp8-hybrid", 1),
        ("--fp8-hybrid --fp8-recipe blockwise", 1),
        ("--fp8-hybrid --fp8-recipe delayed --fp8-amax-history-len 16", 1),
        ("--recompute-activations", 1),
        ("--optimizer-cpu-offload", 1),
        ("--reset-position-ids --eod-mask-loss", 1),
        ("--window-size 16", 1),
        ("--reset-attention-mask --seq-length 512 --window-size 16", 1),
        ("--no-bf16 --window-size 4096", 1),
        ("--rampup-batch-size 2 2 100 --global-batch-size 4", 1),
        ("--data-parallel-sharding-strategy optim_grads_params", 1),
        ("", 2),
        (f"--no-overlap-grad-reduce {GLOO}", 2),
        (f"--no-overlap-grad-reduce --use-distributed-optimizer {GLOO}", 2),
        ("--use-distributed-optimizer --overlap-param-gather --grad-reduce-in-bf16", 2),
        ("--tp 2 --sequence-parallel --tp-comm-overlap --hidden-dropout 0.1", 2),
        ("--cp 2", 2),
        ("--cp 2 --cp-comm-type a2a --attention-dropout 0.1 --window-size 16", 2),
        ("--pp 2 --pipeline-schedule zb-h1 --global-batch-size 4", 2),
        (f"{PADDED} --ep 2 {ALL_TO_ALL}", 2),
        (f"{EXPERTS} --ep 2 --moe-expert-capacity-factor 1.0", 2),
        (f"{EXPERTS} --etp 2", 2),
        (f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss", 2),
        (EXPERTS, 1),
        (f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss", 1),
        (f"{EXPERTS} --moe-expert-capacity-factor 1.0", 1),
        (f"{EXPERTS} --no-bf16 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", 1),
        (f"{EXPERTS} --fp8-hybrid --no-moe-grouped-gemm", 1),
    ],
)
def test_what_can_be_recorded(flags: str, world_size: int):
    assert messages(flags, world_size=world_size) == []


@pytest.mark.parametrize(
    ("flags", "world_size", "found"),
    [
        (f"--tp 2 {GLOO}", 2, "--tensor-model-parallel-size 2: gloo communicates inside it, on the host. Use"),
        (f"--pp 2 {GLOO}", 2, "--pipeline-model-parallel-size 2: gloo communicates inside it"),
        (f"--cp 2 {GLOO}", 2, "--context-parallel-size 2: gloo communicates inside it"),
        (f"{PADDED} --ep 2 --no-overlap-grad-reduce {GLOO}", 2, "--expert-model-parallel-size 2: gloo communicates"),
        (f"{PADDED} --etp 2 --no-overlap-grad-reduce {GLOO}", 2, "--expert-tensor-parallel-size 2: gloo communicates"),
        (GLOO, 2, "--overlap-grad-reduce: gloo communicates inside it, on the host. Add --no-overlap-grad-reduce"),
        (
            f"{EXPERTS} --no-overlap-grad-reduce --moe-router-load-balancing-type global_aux_loss {GLOO}",
            2,
            "--moe-router-load-balancing-type global_aux_loss: gloo communicates inside it",
        ),
        ("--data-parallel-sharding-strategy optim_grads", 2, "strategy optim_grads: fully_shard frees and gathers weights by hooks"),
        (
            f"--ep 2 {PADDED} {ALL_TO_ALL} --overlap-moe-expert-parallel-comm --global-batch-size 4",
            2,
            "--overlap-moe-expert-parallel-comm: two threads launch its kernels in turns",
        ),
        (f"{EXPERTS} --ep 2 {ALL_TO_ALL}", 2, "alltoall over 2 ranks: the host must know how many rows a rank gets"),
        (f"{EXPERTS} --ep 2", 2, "--expert-model-parallel-size 2 without --moe-expert-capacity-factor: the host must know"),
        ("--cp 2 --attention-dropout 0.1", 2, "--cp-comm-type p2p and --attention-dropout 0.1: the host draws its seeds"),
        ("--cp 2 --cp-comm-type all_gather --window-size 16", 2, "--cp-comm-type all_gather and --window-size 16: the host makes the mask"),
        (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", 1, "sinkhorn: the host looks when the load is even enough."),
        (f"{EXPERTS} --no-moe-grouped-gemm", 1, "--no-moe-grouped-gemm: the host must know how many rows each expert has."),
        (f"{EXPERTS} --no-bf16", 1, "--moe-pad-expert-input-to-capacity with --moe-expert-capacity-factor."),
        (f"{EXPERTS} --no-bf16", 1, "experts in another precision than bf16: the host must know"),
        (f"{EXPERTS} --moe-ffn-hidden-size 100", 1, "--moe-ffn-hidden-size 100: the host must know how many rows"),
        (f"{EXPERTS} --moe-latent-size 20", 1, "--moe-latent-size 20: the host must know how many rows"),
        ("--cpu-offloading-num-layers 1", 1, "--cpu-offloading-num-layers 1: activations leave for memory that the host hands out."),
        ("--hidden-dropout 0.1 --recompute-activations", 1, "recompute and random numbers: the host would set random states back"),
        ("--attention-dropout 0.1 --recompute-memory-budget-gb 9", 1, "recompute and random numbers: the host would set"),
        ("--attn-logit-softcapping 5", 1, "--attn-logit-softcapping 5: without FlashAttention the host makes the mask"),
        ("--softmax-type learnable", 1, "--softmax-type learnable: without FlashAttention the host makes the mask"),
        ("--reset-attention-mask --seq-length 1024", 1, "--seq-length 1024: attention of documents of 1024 tokens or more is planned"),
        ("--reset-attention-mask", 2, "--reset-attention-mask and 2 ranks: what they capture would depend on their documents."),
        ("--reset-attention-mask --attention-dropout 0.1", 1, "--attention-dropout 0.1: how many random numbers are drawn depends"),
        ("--reset-attention-mask --deterministic-mode", 1, "--deterministic-mode: in which order gradients are added depends on"),
        ("--reset-attention-mask --no-bf16", 1, "--reset-attention-mask in this precision: without FlashAttention the host makes"),
        ("--reset-attention-mask --kv-channels 36", 1, "--reset-attention-mask and heads of width 36: without FlashAttention"),
        ("--no-bf16 --window-size 16", 1, "--window-size 16 in this precision: without FlashAttention the host makes the mask."),
        ("--attention-chunk-size 16", 1, "--attention-chunk-size 16: the host keeps the boundaries of chunks, and may forget them."),
        ("--window-size 16 --kv-channels 36", 1, "--window-size 16 and heads of width 36: without FlashAttention"),
        ("--pipeline-timeline found.json", 1, "--pipeline-timeline found.json: its parts are timed one by one, by the host."),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded(flags: str, world_size: int, found: str):
    [message] = messages(flags, world_size=world_size)
    assert message.startswith("--cuda-graphs cannot capture a step with ")
    assert found in message
    assert message.endswith(" With --device cpu nothing is captured."), "auto is checked as a GPU, on every machine"
    assert message.rsplit(": ", 1)[1].count(". ") == 2, "it says what to do"
    assert (
        f"{messages(f'{flags} --device cuda', world_size=world_size)[0]} With --device cpu nothing is captured."
        == message
    )


T5 = "--preset t5-small --mock-data --lr 1e-3 --train-iters 9 --bf16 --cuda-graphs"


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("", None),
        ("--position-embedding-type rope", None),
        ("--kv-channels 80", "heads of width 80: without a kernel of key intervals the host makes the mask. Use heads of 16,"),
        (
            "--max-position-embeddings 1024 --decoder-seq-length 1024",
            "--decoder-seq-length 1024: attention of texts of 1024 tokens or more is planned",
        ),
        ("--attention-dropout 0.1", "--attention-dropout 0.1: how many random numbers are drawn depends"),
        ("--no-bf16", "in this precision: without FlashAttention the host makes the mask"),
    ],
)  # fmt: skip
def test_encoder_decoders_in_half_precision_can_be_recorded(flags: str, found: str | None):
    _, problems = resolve_config([*shlex.split(T5), *shlex.split(flags)], world_size=1)
    messages = [str(problem) for problem in problems]
    assert messages == [] if found is None else len(messages) == 1 and found in messages[0], messages


def test_all_reasons_are_told_at_once():
    assert len(messages(f"--tp 2 --attn-logit-softcapping 5 --softmax-type learnable {GLOO}", world_size=2)) == 3


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_every_optimizer_is_outside_the_graph(optimizer: str):
    assert messages(f"--optimizer {optimizer} --decoupled-lr 1e-5", world_size=1) == []


def test_without_the_flag_nothing_is_refused():
    assert messages("--no-cuda-graphs --tp 2 --reset-attention-mask", world_size=2) == []


def test_on_a_cpu_the_flag_is_told_to_do_nothing():
    loaded, problems = resolve_config([*BASE, "--device", "cpu", "--reset-attention-mask"])
    assert problems == []
    assert "--cuda-graphs has no effect: the CPU computes" in loaded.notices


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),
        ("--hidden-dropout 0.1", True),
        ("--attention-dropout 0.1", True),
        (f"{EXPERTS} --moe-input-jitter-eps 0.01", True),
        (f"{EXPERTS} --moe-router-force-load-balancing", True),
        (EXPERTS, False),
    ],
)
def test_whether_a_step_draws(flags: str, expected: bool):
    assert uses_random_numbers(resolve_config([*BASE, *flags.split()])[0].config) is expected
