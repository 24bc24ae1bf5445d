"""Greedy continuations of every family equal those of transformers in every layout that generates.

`test_equal.py` has tensor parallelism with them; here are the layouts whose logits are on some ranks only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petatron.models.hf import family_name_of_config, to_logical
from petatron.models.registry import model_spec
from tests.dist import RankPool
from tests.hf.ours import continue_all, run_config
from tests.hf.zoo import DENSE, MIXED, NEW_TOKENS, PLAIN, truth
from tests.longform import later

EXPERTS = [name for name in MIXED if name in PLAIN]
VARIANTS = [name for name in (*DENSE, *MIXED) if name not in PLAIN]
LAYOUTS = {
    "pp2": ("--pp 2", 2, PLAIN),
    "dp2": ("--dp 2", 2, PLAIN[::4]),
    "all-dp2": ("--dp 2", 2, PLAIN),
    "tp2-pp2": ("--tp 2 --pp 2", 4, PLAIN),
    "tp2-sp-pp2": ("--tp 2 --sequence-parallel --pp 2", 4, ["llama-gqa", "gpt2", "mixtral", "deepseek-v3"]),
    "ep2": ("--ep 2", 2, EXPERTS[::2]),
    "all-ep2": ("--ep 2", 2, EXPERTS),
    "pp2-ep2": ("--pp 2 --ep 2", 4, ["mixtral"]),
    "variants-pp2": ("--pp 2", 2, VARIANTS),
    "some-variants-pp2": ("--pp 2", 2, VARIANTS[::4]),
    "variants-tp2-pp2": ("--tp 2 --pp 2", 4, VARIANTS),
}
LATER = ("tp2-pp2", "pp2", "all-dp2", "all-ep2", "variants-pp2", "variants-tp2-pp2")


@pytest.mark.parametrize("layout", [later(layout) if layout in LATER else layout for layout in LAYOUTS])
def test_greedy_tokens_are_those_of_transformers(ranks: RankPool, tmp_path: Path, layout: str):
    flags, world_size, names = LAYOUTS[layout]
    cases = []
    for name in names:
        true = truth(name)
        flags_here = f"{flags} --micro-batch-size 1"
        run = run_config(true.config, tmp_path, layout=flags_here, world_size=world_size, length=true.tokens.shape[1])
        family = family_name_of_config(true.config)
        cases.append((run, to_logical(family, true.weights, model_spec(run)), true.tokens))
    for found in ranks.run(continue_all, world_size, cases, NEW_TOKENS):
        wrong = [name for name, tokens in zip(names, found) if not torch.equal(tokens, truth(name).greedy)]
        assert not wrong
