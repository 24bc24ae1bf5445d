"""Sampling: what may be drawn, what is drawn, and that every layout draws the same."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError, DataError
from petatron.infer.engine import Engine
from petatron.infer.generate import generate
from petatron.infer.sampling import filter_logits
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.decoder import Decoder
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.build_run import build_model
from petatron.validate import load_config
from tests.dist import RankPool
from tests.longform import diagonal

VOCAB, POSITIONS = 131, 24
PROMPT = [5, 17, 90, 3, 3]
MODEL = (
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {POSITIONS} --vocab-size {VOCAB} --mock-data "
    "--make-vocab-size-divisible-by 8 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--untie-embeddings-and-output-weights --hidden-dropout 0.3 --attention-dropout 0.3 --train-iters 1 --lr 1e-3 "
    "--init-method-std 0.4 --device cpu"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 20 --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 7 "
    "--qk-layernorm"
)
LATENT_YARN = (
    "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 7 "
    "--position-embedding-type yarn --rotary-scaling-factor 4 --original-max-position-embeddings 8 --mscale 0.7 "
    "--mscale-all-dim 1.3"
)


def model_in(layout: str = "", *, world_size: int = 1, device: str = "cpu") -> ParallelModel:
    run = load_config([*MODEL.split(), *layout.split()], world_size=world_size).config
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    mesh = ParallelMesh(
        Layout.from_config(run.parallel), rank, device=place, backend="nccl" if device == "cuda" else "gloo"
    )
    return build_model(run, mesh)


def continuations(layout: str, world_size: int) -> list[list[int]]:
    """Runs on a rank: one greedy continuation and one drawn one; odd lengths, so that filling is needed at tp 2."""
    torch.set_num_threads(1)
    model = model_in(layout, world_size=world_size)
    return [
        generate(model, PROMPT, max_new_tokens=8, temperature=0.0),
        generate(model, PROMPT, max_new_tokens=8, temperature=1.5, top_k=None, seed=3),
    ]


@pytest.fixture(scope="module")
def model() -> ParallelModel:
    return model_in()


def greedy_by_hand(model: ParallelModel, count: int) -> list[int]:
    decoder = model.module
    assert isinstance(decoder, Decoder)
    decoder.eval()
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(decoder.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(PROMPT) :]


def test_temperature_zero_is_the_argmax_loop(model: ParallelModel) -> None:
    model.module.train()  # dropout must not reach generation
    assert generate(model, PROMPT, max_new_tokens=10, temperature=0.0) == greedy_by_hand(model, 10)


def test_top_k_1_is_greedy(model: ParallelModel) -> None:
    drawn = generate(model, PROMPT, max_new_tokens=10, temperature=2.0, top_k=1, seed=9)
    assert drawn == greedy_by_hand(model, 10)


def test_a_tiny_top_p_is_greedy(model: ParallelModel) -> None:
    drawn = generate(model, PROMPT, max_new_tokens=10, temperature=1.0, top_k=None, top_p=1e-6)
    assert drawn == greedy_by_hand(model, 10)


def test_a_seed_decides_the_draw(model: ParallelModel) -> None:
    def draw(seed: int) -> list[int]:
        return generate(model, PROMPT, max_new_tokens=12, temperature=3.0, top_k=None, seed=seed)

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(5)}) == 5


def test_draws_follow_the_models_probabilities(model: ParallelModel) -> None:
    decoder = model.module.eval()
    assert isinstance(decoder, Decoder)
    with torch.no_grad():
        expected = (decoder.logits(torch.tensor([PROMPT]))[0, -1] / 1.5).softmax(-1)
    params = [SamplingParams(max_new_tokens=1, temperature=1.5, seed=seed) for seed in range(300)]
    counts = Counter(answer.ids[0] for answer in Engine(model).complete([PROMPT], params)[0])
    likeliest = int(expected.argmax())
    share = float(expected[likeliest])
    assert 0.1 < share < 0.9, "the model is no test of drawing"
    assert abs(counts[likeliest] / 300 - share) < 5 * math.sqrt(share * (1 - share) / 300)


def test_the_end_of_document_stops(model: ParallelModel) -> None:
    free = generate(model, PROMPT, max_new_tokens=12, temperature=2.0, top_k=None, seed=4)
    eod = free[5]
    stopped = generate(model, PROMPT, max_new_tokens=12, temperature=2.0, top_k=None, seed=4, eod=eod)
    assert stopped == free[: free.index(eod) + 1]


@diagonal(2)
@pytest.mark.parametrize("layout", ["--tp 2", "--tp 2 --sequence-parallel", "--pp 2", "--dp 2"])
def test_every_layout_draws_the_same(ranks: RankPool, layout: str) -> None:
    alone = continuations("", 1)
    assert ranks.run(continuations, 2, layout, 2) == [alone, alone]


def test_a_replica_without_work_takes_part_in_the_experts(ranks: RankPool) -> None:
    experts = "--num-experts 4 --moe-router-topk 2"
    alone = continuations(experts, 1)
    assert ranks.run(continuations, 2, f"{experts} --ep 2", 2) == [alone, alone]


def _refused(layout: str) -> str:
    with pytest.raises(ConfigError) as error:
        continuations(layout, 2)
    return str(error.value)


def test_a_split_sequence_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(_refused, 2, "--context-parallel-size 2"):
        assert "--context-parallel-size 2 splits sequences, which generation keeps whole" in message


def test_virtual_stages_are_refused(ranks: RankPool) -> None:
    for message in ranks.run(_refused, 2, "--num-layers 4 --pp 2 --num-virtual-stages-per-pipeline-rank 2"):
        assert "--num-virtual-stages-per-pipeline-rank 2 cuts a rank's layers into several stages" in message


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=20),
    top_k=st.one_of(st.none(), st.integers(1, 25)),
    top_p=st.one_of(st.none(), st.floats(0.01, 1.0)),
)
def test_what_may_be_drawn(logits: list[int], top_k: int | None, top_p: float | None) -> None:
    rows = torch.tensor([logits], dtype=torch.float64)
    [kept] = filter_logits(rows, top_k=[top_k or len(logits)], top_p=[top_p or 1.0], min_p=[0.0])
    allowed = {number for number, value in enumerate(kept.tolist()) if value != -math.inf}
    assert allowed == set(allowed_by_definition(logits, top_k, top_p))
    assert all(kept[number] == logits[number] for number in allowed)


def allowed_by_definition(logits: list[int], top_k: int | None, top_p: float | None) -> list[int]:
    order = sorted(range(len(logits)), key=lambda number: (-logits[number], number))[:top_k]
    if top_p is None:
        return order
    weights = torch.tensor([logits[number] for number in order], dtype=torch.float64).softmax(-1)
    before = weights.cumsum(-1) - weights
    return [number for number, share in zip(order, before.tolist()) if share < top_p]


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 1, "The prompt is empty"),
        ([5, VOCAB], 1, f"ids 5..{VOCAB}, but the model's vocabulary has {VOCAB}"),
        ([-1], 1, "ids -1..-1"),
        ([1] * (POSITIONS + 1), 1, f"has {POSITIONS + 1} tokens, but the model has {POSITIONS} positions"),
        ([1] * 20, 6, "leaves room for 5 new ones"),
    ],
)
def test_prompts_that_cannot_be_continued(model: ParallelModel, prompt: list[int], new: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        generate(model, prompt, max_new_tokens=new)


def test_the_last_position_is_used(model: ParallelModel) -> None:
    assert len(generate(model, [1] * 20, max_new_tokens=5)) == 5
    assert len(generate(model, [1] * POSITIONS, max_new_tokens=1)) == 1


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens -1 is negative"),
        ({"temperature": -1.0}, "temperature -1.0 is not 0 or above"),
        ({"temperature": math.nan}, "temperature nan is not 0 or above"),
        ({"top_k": 0}, "top_k 0 keeps no id"),
        ({"top_p": 0.0}, "top_p 0.0 is not a share"),
        ({"top_p": 1.5}, "top_p 1.5 is not a share"),
    ],
)
def test_choices_that_make_no_sense(model: ParallelModel, choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(model, PROMPT, **{"max_new_tokens": 1, **choice})


def test_all_bad_choices_are_named_at_once(model: ParallelModel) -> None:
    with pytest.raises(ConfigError, match="3 problems") as raised:
        generate(model, PROMPT, max_new_tokens=-1, temperature=-2.0, top_k=0)
    assert [problem.where for problem in raised.value.problems] == ["max_new_tokens", "temperature", "top_k"]
