"""Runs of real Megatron-Core go on in Petatron, and runs of Petatron in Megatron-Core: weights, moments, step, schedule, position.

One chain for each case: Megatron trains 3 steps and saves; Petatron continues the conversion to step 10, and is compared with Megatron's
own continuation; it exports step 10, from which Megatron continues, and is compared with Petatron's own. The conversion is also converted
back at once: Megatron's losses are then, to the last bit, those that it had without.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import petatron
from petatron.cli.main import main
from tests.megatron_core.models import PADDED, POSITIONS, TRAINING
from tests.megatron_core.run_core import WHEEL, run_core

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not WHEEL.is_dir(), reason=f"{WHEEL} has no megatron-core: make megatron-core fetches it"),
]
SAVED_AT, HANDED_BACK_AT, COMPARED = 3, 10, 20
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, dict[str, Any]]]] = {
    "one rank": (
        {},
        {
            "llama plain": {"kind": "llama"},
            "moe distributed": {"kind": "moe", "optimizer": "distributed"},
            "gpt legacy distributed": {"kind": "gpt", "format": "legacy", "optimizer": "distributed"},
            "llama legacy bf16": {"kind": "llama", "format": "legacy", "bf16": True},
            "dsa distributed": {"kind": "dsa", "optimizer": "distributed"},
            "dsa sparse loss": {"kind": "dsa sparse loss"},
        },
    ),
    "ep 2": (  # experts have an optimizer of their own; both ranks see all samples, so the losses are those of one
        {"ep": 2},
        {
            "moe distributed": {"kind": "moe", "optimizer": "distributed"},
            "moe legacy": {"kind": "moe", "format": "legacy"},
            "moe legacy distributed": {"kind": "moe", "format": "legacy", "optimizer": "distributed"},
        },
    ),
    "tp 2 pp 2": (
        {"tp": 2, "pp": 2},
        {
            "llama distributed": {"kind": "llama", "optimizer": "distributed"},
            "gpt legacy": {"kind": "gpt", "format": "legacy"},
            "gpt legacy distributed": {"kind": "gpt", "format": "legacy", "optimizer": "distributed"},
        },
    ),
}
SIZES = {"layers": 2, "width": 16}


def write_tokens(path: Path) -> None:
    """Writes the samples that a run of Petatron sees with --mock-data, in its order."""
    sizes = {name: TRAINING[name] for name in ("global_batch_size", "micro_batch_size", "train_iters", "seed", "lr")}
    flags = [text for name, value in sizes.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--vocab-size", str(PADDED), "--seq-length", str(POSITIONS), "--mock-data", "--eval-iters", "0"]
    run = petatron.load("tiny-llama", flags)
    loader, steps = petatron.build_loader(run, petatron.launch(run)), []
    for _ in range(TRAINING["train_iters"]):
        ids = [torch.cat((batch.tokens, batch.labels[:, -1:]), dim=1) for batch in next(loader)]
        steps.append(torch.cat(ids))
    save_file({"tokens": torch.stack(steps)}, path)


def resume(folder: Path, scratch: Path, *, until: int) -> list[float]:
    """Continues a checkpoint with `petatron train`, saves at the end, and returns the losses of its steps."""
    flags = ["--mock-data", "--eval-iters", "0", "--log-interval", "1", "--exit-interval", str(until)]
    target = ["--save", str(scratch / "run"), "--log-dir", str(scratch / f"log {until}")]
    assert main(["train", "--config", str(folder / "config.yaml"), "--load", str(folder), *target, *flags]) == 0
    rows = map(json.loads, (scratch / f"log {until}" / "metrics.jsonl").read_text().splitlines())
    return [row["lm_loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_go_on_in_the_other_program(tmp_path: Path, name: str):
    layout, cases = LAYOUTS[name]
    write_tokens(tmp_path / "tokens.safetensors")
    jobs = [{"task": "train", "out": case, "steps": SAVED_AT, **SIZES, **layout, **job} for case, job in cases.items()]
    theirs = dict(zip(cases, run_core(*jobs, folder=tmp_path), strict=True))
    ours: dict[str, list[float]] = {}
    for case, job in cases.items():
        scratch = tmp_path / f"{case} here"
        assert main(["checkpoint", "convert", str(tmp_path / case), str(scratch / "in"), "--to", "petatron"]) == 0
        losses = resume(scratch / "in", scratch, until=HANDED_BACK_AT)
        form = ["--megatron-spec", "local", "--megatron-optimizer", job.get("optimizer", "plain")]
        form += ["--ep", str(layout.get("ep", 1))]
        for source, name in ((scratch / "in", "again"), (scratch / "run", "back")):
            target = [str(source), str(tmp_path / f"{case} {name}"), "--to", "megatron", *form]
            assert main(["checkpoint", "convert", *target]) == 0
        os.symlink(scratch / "in" / "config.yaml", scratch / "run" / "config.yaml")
        losses += resume(scratch / "run", scratch, until=TRAINING["train_iters"])
        ours[case] = losses
    jobs = [
        {"task": "resume", "out": f"{case} {name}", **SIZES, **layout, **job, "format": "torch_dist"}
        for name in ("again", "back")
        for case, job in cases.items()
    ]
    results = run_core(*jobs, folder=tmp_path)
    again, back = (dict(zip(cases, part, strict=True)) for part in (results[: len(cases)], results[len(cases) :]))
    assert all(again[case]["losses"] == theirs[case]["losses"] for case in cases)
    differences = {}
    for case, job in cases.items():
        there = difference(ours[case], theirs[case]["losses"])
        returned = difference(ours[case][HANDED_BACK_AT - SAVED_AT :], back[case]["losses"])
        differences[case] = (there, returned, 1e-2 if job.get("bf16") else 1e-6)
    assert all(max(there, back) < limit for there, back, limit in differences.values()), differences


def difference(ours: list[float], theirs: list[float]) -> float:
    """Returns the largest difference of the next losses."""
    pairs = list(zip(ours, theirs))
    assert len(pairs) == COMPARED
    return max(abs(here - there) for here, there in pairs)
