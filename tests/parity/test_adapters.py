"""Adapters trained in every kind of layout as one process trains them."""

from __future__ import annotations

import pytest

from petatron.verify.proof_matrix import MODEL_FLAGS
from tests.dist import RankPool
from tests.parity.harness import check_layout, check_part_of_model

GROUPED = "--num-query-groups 2 --add-qkv-bias --micro-batch-size 2"
LOW_RANK = "--adapter-rank 3 --adapter-alpha 5 --lr 0.05"
LORA = f"{GROUPED} --adapter lora {LOW_RANK}"
DORA = f"{GROUPED} --adapter dora {LOW_RANK}"
IA3 = f"{GROUPED} --adapter ia3 --adapter-targets q k down up --lr 0.05"
SP, ZERO1, FSDP = (
    "--sequence-parallel",
    "--use-distributed-optimizer",
    "--data-parallel-sharding-strategy optim_grads_params",
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2", 2),
        (f"--tp 2 {SP}", 2),
        (f"--tp 4 {SP} --tp-comm-overlap", 4),
        ("--pp 2", 2),
        (f"--dp 2 {ZERO1}", 2),
        (f"--dp 2 {FSDP}", 2),
        ("--cp 2", 2),
        (f"--pp 2 --pipeline-schedule zb-h1 --tp 2 {SP}", 4),
        (f"--tp 2 {SP} {FULL}", 2),
    ],
)
def test_lora_equals_one_process(ranks: RankPool, layout: str, world_size: int):
    check_layout(ranks, layout, LORA, world_size=world_size)


@pytest.mark.parametrize("model", [DORA, IA3], ids=["dora", "ia3"])
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [("--tp 2", 2), (f"--tp 4 {SP} --tp-comm-overlap", 4), (f"--dp 2 {FSDP}", 2), (f"--pp 2 --dp 2 {ZERO1}", 4)],
)
def test_others_equal_one_process(ranks: RankPool, model: str, layout: str, world_size: int):
    check_layout(ranks, layout, model, world_size=world_size)


MODELS = {
    "moe": ("--dp 2 --ep 2", "--tp 2 --sequence-parallel --ep 2 --etp 1", "--tp 2 --etp 2"),
    "mla": (f"--tp 2 {SP}", f"--dp 2 --ep 2 {FSDP}"),
    "hybrid": (f"--tp 2 {SP}", "--cp 2"),
    "delta": (f"--tp 2 {SP}",),
    "t5": ("--tp 2",),
    "vlm": ("--tp 2",),
    "gpt": (f"--tp 4 {SP}",),
}


@pytest.mark.parametrize(
    ("model", "layout"), [(model, layout) for model, layouts in MODELS.items() for layout in layouts]
)
def test_other_layers_equal_one_process(ranks: RankPool, model: str, layout: str):
    num_layers = "--num-layers 4" if model in ("hybrid", "t5") else ""
    flags = f"{MODEL_FLAGS[model]} {num_layers} --adapter lora {LOW_RANK}"
    check_layout(ranks, layout, flags, world_size=4 if "--tp 4" in layout else 2)


def test_what_is_compared_is_trained():
    check_part_of_model(LORA, LORA.replace("--adapter-alpha 5", "--adapter-alpha 6"))
