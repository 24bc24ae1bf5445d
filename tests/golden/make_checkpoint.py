"""Makes the golden checkpoint of the current format version: `python -m tests.golden.make_checkpoint`.

A released version's checkpoint is never made again: it stands for the files that people have. A new format version gets a
folder of its own.

The model is a GPT-2, the family whose files differ most from our tensors (three in one, transposed), on two tensor-parallel and
two data-parallel ranks with a sharded optimizer, so that state is cut in both ways.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from petatron.checkpoint.files.manifest import VERSION
from tests.golden.reader import digests, read_checkpoint
from tests.unit.checkpoint.rewriting import rewrite_manifest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / f"checkpoint-v{VERSION}"
STEP = 3
MODEL = (
    "--num-layers 2 --hidden-size 8 --ffn-hidden-size 16 --num-attention-heads 4 --kv-channels 2 --seq-length 16 "
    "--max-position-embeddings 16 --vocab-size 32"
)
RUN = f"--mock-data --bf16 --micro-batch-size 2 --global-batch-size 4 --train-iters {STEP} --lr 1e-2 --eval-iters 0"
LAYOUT = "--tp 2 --dp 2 --use-distributed-optimizer"


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        words = f"-m petatron train tiny-gpt {MODEL} {RUN} {LAYOUT} --save run --live off".split()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *words], cwd=scratch, env=environment, check=True)
        run = Path(scratch) / "run"
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        shutil.copy(run / "latest", FOLDER)
        step = run / f"step-{STEP:08d}"
        shutil.copytree(step, FOLDER / step.name)
        rewrite_manifest(FOLDER / step.name, lambda head: _replace_path(head, os.path.realpath(scratch)))
        (FOLDER / "expected.json").write_text(json.dumps(digests(read_checkpoint(step)), indent=1) + "\n")
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    print(f"{FOLDER}: {size / 1e3:.0f} kB")


def _replace_path(head: dict[str, Any], scratch: str) -> None:
    """Puts a name in the place of the temporary folder, which is in the settings of the run and of no interest."""
    head.update(json.loads(json.dumps(head).replace(scratch, "/golden")))


if __name__ == "__main__":
    main()
