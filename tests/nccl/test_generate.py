"""Generation over NCCL: every layout draws what one rank draws, also where decode steps with their collectives are CUDA graphs."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from tests.dist import RankPool
from tests.longform import cases_over_nccl
from tests.unit.infer import test_latent, test_recurrent, test_speculative
from tests.unit.infer.test_sample import model_in

PROMPTS = [[5, 17, 20, 3, 3], [1], [2, 3, 4, 5, 6, 7, 8, 9], [9] * 12, [7, 8]]
EXPERTS = "--num-experts 4 --moe-router-topk 2"


def continuations(flags: str, world_size: int, graphs: bool = True, drafts: int = 0) -> list[list[int]]:
    """On a rank: greedy and drawn continuations of several prompts at once."""
    model = model_in(f"--device cuda {flags}", world_size=world_size, device="cuda")
    options = EngineOptions(
        page_size=4, max_step_tokens=12, max_sequences=3, cuda_graphs=graphs, speculative_tokens=drafts
    )
    engine = Engine(model, options=options)
    engine.capture_graphs()
    params = [
        SamplingParams(max_new_tokens=8, temperature=0.0),
        SamplingParams(max_new_tokens=8, temperature=1.1, top_p=0.9, seed=2),
    ]
    found = [answer.ids for row in engine.complete_on_all_ranks(PROMPTS, params) for answer in row]
    assert not drafts or engine.stats.accepted_tokens > 0, "no draft of these random weights is right"
    engine.release()
    if dist.is_initialized():
        dist.barrier()
    return found


LAYOUTS = [
    ("--tp 2", 2, ""),
    ("--tp 4 --sequence-parallel", 4, ""),
    ("--pp 2", 2, ""),
    ("--tp 2 --pp 2 --sequence-parallel", 4, ""),
    ("--dp 2 --tp 2", 4, ""),
    ("--ep 2", 2, EXPERTS),
    ("--pp 2 --ep 2", 4, EXPERTS),
    *cases_over_nccl(test_latent.LAYOUTS),
    *cases_over_nccl(test_recurrent.LAYOUTS),
]


@pytest.mark.parametrize(("layout", "world_size", "model"), LAYOUTS)
def test_every_layout_draws_the_same(gpu_ranks: RankPool, layout: str, world_size: int, model: str):
    [alone] = gpu_ranks.run(continuations, 1, f"{model} --fp64", 1, timeout_s=120)
    flags = f"{model} --fp64 {layout} --micro-batch-size 1"
    assert gpu_ranks.run(continuations, world_size, flags, world_size, timeout_s=120) == [alone] * world_size


@pytest.mark.parametrize(("layout", "world_size", "model"), cases_over_nccl(test_speculative.LAYOUTS))
def test_drafts_change_no_token(gpu_ranks: RankPool, layout: str, world_size: int, model: str):
    flags = f"--mtp-num-layers 1 {model} --vocab-size 24 --fp64"
    [alone] = gpu_ranks.run(continuations, 1, flags, 1, timeout_s=120)
    args = (f"{flags} {layout} --micro-batch-size 1", world_size, True, 3)
    assert gpu_ranks.run(continuations, world_size, *args, timeout_s=120) == [alone] * world_size


@pytest.mark.parametrize(
    ("layout", "world_size"), [("--tp 2", 2), ("--tp 4 --sequence-parallel", 4), ("--dp 2 --tp 2", 4)]
)
def test_prompts_in_graphs_draw_the_same(gpu_ranks: RankPool, layout: str, world_size: int):
    """In float32, for which attention reads the bounds of prompts on the device: collectives of a prompt's rows are in the graph."""
    flags = f"{layout} --micro-batch-size 1"
    graphed, eager = (
        gpu_ranks.run(continuations, world_size, flags, world_size, graphs, timeout_s=120) for graphs in (True, False)
    )
    assert graphed == eager
