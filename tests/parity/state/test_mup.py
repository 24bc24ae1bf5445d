"""muP trains the same model in every layout: factors, initial weights and the learning rates of matrices and vectors."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.base.errors import CheckpointError
from petatron.verify.compare_traces import compare_traces
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import BOUNDS, check_layout, reference, tiny_run
from tests.parity.state.test_resume import DELAYED, ITERATIONS, MODEL, QUIET, STOP, run_loop, trained

MUP = "--use-mup --mup-base-hidden-size 8 --mup-base-head-dim 4 --mup-embedding-mult 2"
TIED = f"{MUP} --no-untie-embeddings-and-output-weights"
PREDICTIONS = f"{MUP} --mtp-num-layers 1"
EXPERTS = f"{MUP} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16"
LATENT = f"{MUP} --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
HYBRID = f"{MUP} --hybrid-layer-pattern M*-M --num-layers 4 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8"
ZERO1 = "--use-distributed-optimizer"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"


@diagonal(2)
@pytest.mark.parametrize(
    ("layout", "model", "world_size"),
    [
        ("--tp 2 --sequence-parallel", MUP, 2),
        later("--tp 2", f"{TIED} --position-embedding-type learned_absolute", 2),
        ("--pp 2", TIED, 2),
        later("--pp 2", PREDICTIONS, 2),
        (f"--dp 2 {ZERO1}", f"{MUP} --optimizer sgd --lr 1e-2", 2),
        (f"--dp 2 {ZERO3}", MUP, 2),
        ("--ep 2 --dp 2", EXPERTS, 2),
        ("--tp 2 --sequence-parallel", LATENT, 2),
        ("--tp 2", HYBRID, 2),
        later("--cp 2", MUP, 2),
        later(f"--dp 2 {ZERO1}", f"{MUP} --optimizer muon --muon-scale-mode unit_rms_norm", 2),
        later(f"--tp 2 --dp 2 {ZERO1}", f"{MUP} --optimizer adafactor", 4),
        later(f"--dp 2 {ZERO3}", f"{MUP} --optimizer soap", 2),
        later(f"--pp 2 --dp 2 {ZERO1}", f"{TIED} --optimizer lion --lr 1e-3", 4),
    ],
)
def test_layout_equals_one_process(ranks: RankPool, layout: str, model: str, world_size: int):
    check_layout(ranks, layout, model, world_size=world_size)


@pytest.mark.parametrize("other", ["", MUP.replace("size 8", "size 16"), MUP.replace("dim 4", "dim 8")])
def test_another_base_is_another_model(other: str):
    """So that the comparison above could fail."""
    verdict = compare_traces([reference(MUP, "float64")], [reference(other, "float64")], BOUNDS["float64"])
    assert not verdict.agrees


def test_resumes_in_another_layout_and_as_no_other_model(ranks: RankPool, tmp_path: Path):
    whole, _ = run_loop(tiny_run(f"{MODEL} --log-interval 1 {QUIET} {MUP}", dtype="float64"))
    trained(ranks, f"{QUIET} {MUP} --save {tmp_path} --exit-interval {STOP} --tp 2", 2, "float64")
    flags = f"{QUIET} --load {tmp_path} --dp 2 {ZERO1}"
    after, _ = trained(ranks, f"{flags} {MUP}", 2, "float64")[0]
    assert sorted(after) == list(range(STOP + 1, ITERATIONS + 1))
    assert after == pytest.approx({step: whole[step] for step in after}, rel=1e-9)
    for other, difference in (
        ("", "embedding_multiplier: 2.0 then, None now; logits_scaling: 4.0 then, None now; softmax_scale: 0.25 then"),
        (MUP.replace("size 8", "size 16"), "logits_scaling: 4.0 then, 2.0 now"),
        (MUP.replace("dim 4", "dim 16"), "softmax_scale: 0.25 then, 0.5 now"),
    ):
        run = tiny_run(f"{MODEL} {QUIET} --load {tmp_path} {other}", dtype="float64")
        with pytest.raises(CheckpointError, match="of another model") as error:
            run_loop(run)
        assert difference in str(error.value)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["", "--tp 2 --sequence-parallel --micro-batch-size 4"])
def test_bitwise_after_a_stop_in_fp8(ranks: RankPool, tmp_path: Path, layout: str):
    flags, world_size = f"--bf16 {DELAYED} {MUP} {layout}", 2 if layout else 1
    whole = trained(ranks, flags, world_size)
    trained(ranks, f"{flags} --save {tmp_path} --exit-interval {STOP}", world_size)
    after = trained(ranks, f"{flags} --load {tmp_path}", world_size)
    assert after[0][0] == {step: loss for step, loss in whole[0][0].items() if step > STOP}
