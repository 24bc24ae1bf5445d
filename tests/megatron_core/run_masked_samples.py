"""Starts `real_masked_samples.py` for cases of `tests/unit/data/masked/sentence_corpus.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.megatron_core.run_core import TIMEOUT_S, WHEEL
from tests.unit.data.masked.sentence_corpus import CASES, MEGATRON, SEED, write_corpus, write_vocabulary


def real_samples(folder: Path, counts: Mapping[str, int]) -> dict[str, dict[str, NDArray[Any]]]:
    """Writes the corpus, and returns the arrays of so many samples, and those that come with them, of each case."""
    tokenizer, prefix = write_vocabulary(folder), write_corpus(folder)
    cases = []
    for name, count in counts.items():
        kind, _, changed, length, decoder, _ = CASES[name]
        settings = {**MEGATRON, **({"classification_head": True} if kind == "bert" else {}), **changed}
        cases.append(
            {"kind": kind, "settings": settings, "length": length, "decoder_length": decoder, "num_samples": count}
        )
    job = {
        "prefix": prefix,
        "vocabulary": {number: token for token, number in tokenizer._ids.items()},
        "special_ids": dict(tokenizer.special_ids),
        "sentinel_ids": list(tokenizer.sentinel_ids),
        "seed": SEED,
        "cases": cases,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    environment = {**os.environ, "PYTHONPATH": str(WHEEL), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("real_masked_samples.py")
    words = [sys.executable, "-W", "ignore", str(program), str(path)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: dict(np.load(folder / f"{number}.npz")) for number, name in enumerate(counts)}
