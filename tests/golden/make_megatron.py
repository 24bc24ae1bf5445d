"""Makes the checkpoints that real Megatron-Core wrote: `make megatron-core`, then `python -m tests.golden.make_megatron`.

Each folder has the checkpoint and `reference.safetensors`, the logits that Megatron-Core's own model had of some tokens. `newer` ones store
their arguments as version 0.20 does. RUNS have optimizer state; their reference has the samples of all steps, and the losses of those
that Megatron-Core made after it had saved.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.megatron_core.models import PADDED, POSITIONS, TRAINING
from tests.megatron_core.run_core import run_core

FOLDER = Path(__file__).parent / "megatron"
CASES: dict[str, dict[str, Any]] = {
    "llama-torch_dist-newer": {"kind": "llama", "newer": True},
    "moe-torch_dist": {"kind": "moe"},
    "mla-torch_dist": {"kind": "yarn"},
    "qk-norm-legacy-newer": {"kind": "qk-norm", "format": "legacy", "newer": True},
    "llama-torch_dist-tp2-pp2": {"kind": "llama", "tp": 2, "pp": 2},
    "gpt-legacy-tp2-pp2": {"kind": "gpt", "format": "legacy", "tp": 2, "pp": 2},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert-torch_dist": {"kind": "bert"},
    "bert-legacy-tp2-pp2": {"kind": "bert", "format": "legacy", "tp": 2, "pp": 2},
}
RUNS: dict[str, dict[str, Any]] = {
    "run-torch_dist-distributed-bf16": {"kind": "llama", "optimizer": "distributed", "bf16": True},
    "run-legacy-plain-bf16": {"kind": "llama", "format": "legacy", "bf16": True},
    "run-legacy-distributed-pp2": {"kind": "gpt", "format": "legacy", "optimizer": "distributed", "pp": 2, "layers": 2},
}
SAVED_AT, NUM_LOSSES = 3, 20


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    cases = {**CASES, **ENCODERS}
    jobs = [{"task": "save", "out": name, "layers": 2, "width": 16, **options} for name, options in cases.items()]
    for tp in (1, 2):  # one run for each layout
        run_core(*(job for job in jobs if job.get("tp", 1) == tp), folder=FOLDER)
    make_runs()
    print(f"{FOLDER}: {sum(path.stat().st_size for path in FOLDER.rglob('*') if path.is_file()) / 1e3:.0f} kB")


def make_runs() -> None:
    """Makes the checkpoints with optimizer state."""
    shape = (SAVED_AT + NUM_LOSSES, TRAINING["global_batch_size"], POSITIONS + 1)
    tokens = torch.randint(0, PADDED, shape, generator=torch.Generator().manual_seed(0))
    save_file({"tokens": tokens}, FOLDER / "tokens.safetensors")
    sizes = {"steps": SAVED_AT, "more_steps": NUM_LOSSES, "layers": 1, "width": 8}
    for pp in (1, 2):
        cases = {name: options for name, options in RUNS.items() if options.get("pp", 1) == pp}
        jobs = [{"task": "train", "out": name, **sizes, **options} for name, options in cases.items()]
        for name, result in zip(cases, run_core(*jobs, folder=FOLDER), strict=True):
            losses = torch.tensor(result["losses"], dtype=torch.float64)
            save_file({"tokens": tokens.to(torch.int16), "losses": losses}, FOLDER / name / "reference.safetensors")
    (FOLDER / "tokens.safetensors").unlink()


if __name__ == "__main__":
    main()
