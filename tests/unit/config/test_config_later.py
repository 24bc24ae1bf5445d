"""Features that are not in this version: each is refused by one problem, and other rules go on as usual."""

# ruff: noqa: E501  (a table of whole messages reads better unwrapped)

from __future__ import annotations

import shlex

import pytest

from petatron.config import check, load_config, resolve_config
from petatron.config.check import NOT_IN_THIS_VERSION
from petatron.config.check_layout import check_layout
from petatron.config.check_model import check_model
from petatron.config.check_run import check_run
from petatron.config.derive import derive
from petatron.config.fields import assemble, by_path, flatten

BASE = shlex.split("--preset tiny-llama --mock-data --lr 1e-3 --train-iters 100")
LATER = "which is not in this version."
# Rules about flags that are not themselves refused still speak, beside the refusals of others.
WITH_REFUSALS = [
    ("--cp 3 --world-size 3", "--seq-length 128 is not a multiple of 2 x --context-parallel-size 3 = 6. Nearest: 126 or 132.", 1),
    ("--num-experts 2 --moe-router-topk 3", "--moe-router-topk 3 is not between 1 and --num-experts 2. Use 2, say.", 1),
    ("--num-experts 8 --moe-router-num-groups 3", "--moe-router-num-groups 3 does not divide --num-experts 8. Use 1, 2, 4 or 8.", 1),
    ("--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 3", "--moe-router-group-topk 3 is not between 1 and --moe-router-num-groups 2. Use fewer groups per token than there are groups.", 1),
    ("--num-experts 8 --moe-router-enable-expert-bias", "--moe-router-enable-expert-bias balances sigmoid scores, but --moe-router-score-function is softmax. Use --moe-router-score-function sigmoid.", 1),
    ("--num-experts 8 --moe-expert-capacity-factor 0", "--moe-expert-capacity-factor 0.0 is not above 0. Use a number above 0.", 1),
    ("--recompute-activations --recompute-num-layers 1", "--recompute-num-layers applies to full recompute, but --recompute-granularity is selective. Use --recompute-granularity full, or leave it out.", 1),
    ("--multi-latent-attention", "--group-query-attention cannot be combined with --multi-latent-attention, which has no key/value heads to share. Leave one out.", 1),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message", "refusals"), WITH_REFUSALS, ids=[row[0] for row in WITH_REFUSALS])
def test_rule_beside_a_later_feature(flags: str, message: str, refusals: int):
    found = [str(problem) for problem in resolve_config([*BASE, *flags.split()])[1]]
    assert [text for text in found if LATER not in text] == [message]
    assert len([text for text in found if LATER in text]) == refusals


# Rules that `check` leaves out while the flag they are about is refused as a whole.
BEHIND_REFUSALS = [
    ("--pp 3", "--pipeline-model-parallel-size 3 does not divide --num-layers 4. Use 1, 2 or 4.", 1),
    ("--pp 2 --num-layers-per-virtual-pipeline-stage 3", "--num-layers-per-virtual-pipeline-stage 3 does not divide the 2 layers of a pipeline stage. Use 1 or 2.", 2),
    ("--num-layers-per-virtual-pipeline-stage 2", "--num-layers-per-virtual-pipeline-stage 2 needs --pipeline-model-parallel-size above 1. Leave it out.", 1),
    ("--ep 2", "--expert-model-parallel-size 2 needs --num-experts. Use 1 for a dense model.", 1),
    ("--num-experts 8 --ep 3 --dp 3", "--expert-model-parallel-size 3 does not divide --num-experts 8. Use 1, 2, 4 or 8.", 2),
    ("--num-experts 8 --ep 4 --dp 2", "--expert-model-parallel-size 4 x etp 1 x pp 1 = 4 does not divide the world size 2. Change the expert layout or the world size.", 2),
    ("--num-experts 0", "--num-experts 0 is below 1. Use 1 or more.", 1),
    ("--overlap-param-gather", "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce. Add them, or leave it out.", 1),
    ("--recompute-granularity full", "--recompute-granularity full needs --recompute-method and --recompute-num-layers. Common: --recompute-method uniform, 1 layer.", 1),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message", "refusals"), BEHIND_REFUSALS, ids=[row[0] for row in BEHIND_REFUSALS])
def test_a_refused_flag_has_no_other_problem(flags: str, message: str, refusals: int):
    loaded, problems = resolve_config([*BASE, *flags.split()])
    assert len(problems) == refusals
    assert all(LATER in str(problem) for problem in problems)
    config = loaded.config
    rules = [*check_model(config), *check_layout(config), *check_run(config, require_training=True)]
    assert [str(problem) for problem in rules] == [message]


@pytest.mark.parametrize("path", NOT_IN_THIS_VERSION)
def test_refused_until_its_feature_arrives(path: str):
    info = by_path()[path]
    value = {"bool": True, "choice": info.choices[0] if info.choices else ""}.get(info.kind, 2)
    config, _ = derive(assemble({**flatten(load_config(BASE).config), path: value}))
    messages = [str(problem) for problem in check(config) if LATER in str(problem)]
    fix = "Use 1." if info.default == 1 else "Leave it out."
    found = info.flag if info.kind == "bool" else f"{info.flag} {value}"
    assert f"{found} needs {NOT_IN_THIS_VERSION[path]}, {LATER} {fix}" in messages
