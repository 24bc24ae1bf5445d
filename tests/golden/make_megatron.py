"""Makes the checkpoints that real Megatron-Core wrote: `make megatron-core`, then `python -m tests.golden.make_megatron`.

Each folder has the checkpoint and `reference.safetensors`, the logits that Megatron-Core's own model had of some tokens. `newer` ones store
their arguments as version 0.20 does.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

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


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    jobs = [{"task": "save", "out": name, "layers": 2, "width": 16, **options} for name, options in CASES.items()]
    for tp in (1, 2):  # one run for each layout
        run_core(*(job for job in jobs if job.get("tp", 1) == tp), folder=FOLDER)
    print(f"{FOLDER}: {sum(path.stat().st_size for path in FOLDER.rglob('*') if path.is_file()) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
