"""The measure of a checkout counts what starts, names what blocks, and takes the ranks of recipes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.megatron_core.accept_configs import main, measure, world_sizes

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
RUN = "--micro-batch-size 1 --global-batch-size 32 --train-iters 5 --lr 1e-4 --mock-data --vocab-size 64"


def write_test(folder: Path, name: str, flags: str) -> None:
    case = folder / "tests" / "test_cases" / "gpt" / name
    case.mkdir(parents=True)
    pairs = [text.partition(" ") for text in f" {flags}".split(" --")[1:]]
    lines = [f"  --{flag}: {value or 'true'}" for flag, _, value in pairs]
    (case / "model_config.yaml").write_text("\n".join(["MODEL_ARGS:", *lines, "TEST_TYPE: regular"]) + "\n")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    write_test(tmp_path, "gpt_plain", f"{MODEL} {RUN} --save ${{CHECKPOINT_SAVE_PATH}} --log-timers-to-tensorboard")
    write_test(tmp_path, "gpt_wide", f"{MODEL} {RUN} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4")
    write_test(tmp_path, "gpt_refused", f"{MODEL} {RUN} --enable-hyper-connections --optimizer adaptive_muon")
    write_test(tmp_path, "gpt_inference", "--load ${LOAD} --prompts one --num-tokens-to-generate 4")
    write_test(tmp_path, "gpt_grpo", f"{MODEL} {RUN} --perform-rl-step")
    recipes = tmp_path / "tests" / "recipes" / "gpu"
    recipes.mkdir(parents=True)
    products = "[{test_case: [gpt_plain], products: [{gpus: [4]}]}, {test_case: [gpt_refused], nodes: [2]}]"
    (recipes / "gpt.yaml").write_text(f"spec: {{nodes: 1, gpus: 8}}\nproducts: {products}\n")
    examples = tmp_path / "examples"
    examples.mkdir()
    (examples / "train.sh").write_text(f"torchrun --nproc_per_node $N pretrain_gpt.py {MODEL} {RUN} --load $1 $MORE\n")
    (examples / "no_model.sh").write_text("docker run image\n")
    return tmp_path


def test_what_starts_and_what_blocks(checkout: Path):
    assert world_sizes(checkout) == {"gpt_plain": 4, "gpt_refused": 16}
    outcomes = {Path(item.file).parent.name or item.file: item for item in measure(checkout)}
    assert {name: item.kind for name, item in outcomes.items()} == {
        "gpt_plain": "training",
        "gpt_wide": "training",
        "gpt_refused": "training",
        "gpt_inference": "inference",
        "gpt_grpo": "outside: reinforcement learning",
        "examples": "example",
    }
    passing = {name for name, item in outcomes.items() if item.passes}
    assert passing == {"gpt_plain", "gpt_wide", "gpt_inference", "examples"}
    assert outcomes["gpt_plain"].world_size == 4
    assert outcomes["gpt_wide"].world_size == 16, "the first likely number that fits the layout"
    refused = outcomes["gpt_refused"]
    assert refused.names == ("--enable-hyper-connections",) and "adaptive Muon" in refused.others[0]


def test_what_is_assumed_does_not_count(checkout: Path):
    names = {
        Path(item.file).parent.name
        for item in measure(checkout, ["--enable-hyper-*", "--optimizer adaptive*"])
        if item.passes
    }
    assert "gpt_refused" in names


def test_the_report_and_its_json(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    found = checkout / "found.json"
    monkeypatch.setattr(sys, "argv", ["accept_configs", str(checkout), "--json", str(found)])
    assert main() == 0
    out = capsys.readouterr().out
    assert "training" in out and "    1  --enable-hyper-connections" in out and "gpt_refused/model_config.yaml" in out
    items = json.loads(found.read_text())
    assert len(items) == 6 and sum(item["passes"] for item in items) == 4
    empty = checkout / "empty"
    empty.mkdir()
    monkeypatch.setattr(sys, "argv", ["accept_configs", str(empty)])
    assert main() == 1
