"""Samples of masked text from the published megatron-core's own datasets, in a process of its own.

    PYTHONPATH=WHEEL python real_masked_samples.py JOB

The job has a dataset's prefix, a vocabulary and cases; each case's arrays are written as `<number>.npz` beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def megatron_samples(job: dict[str, Any], case: dict[str, Any], cache: Path) -> dict[str, np.ndarray]:
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
    from megatron.core.datasets.utils import Split

    vocabulary = {int(number): token for number, token in job["vocabulary"].items()}
    tokenizer = SimpleNamespace(
        **job["special_ids"],
        inv_vocab=dict(sorted(vocabulary.items())),
        additional_special_tokens_ids=job["sentinel_ids"],
        unique_identifiers={"class": "words"},
    )
    common = {
        "random_seed": job["seed"],
        "sequence_length": case["length"],
        "split": "1",
        "path_to_cache": str(cache),
        "tokenizer": tokenizer,
        **case["settings"],
    }
    if case["kind"] == "bert":
        kind, config = BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig(**common)
    else:
        settings = {**common, "sequence_length_decoder": case["decoder_length"]}
        kind, config = T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig(**settings)
    indexed = IndexedDataset(job["prefix"])
    units = np.arange(len(indexed.document_indices) - 1, dtype=np.int32)
    dataset = kind(indexed, job["prefix"], units, case["num_samples"], Split.train, config)
    samples = [dataset[index] for index in range(len(dataset))]
    names = [name for name in samples[0] if not name.endswith("_mask") or name in ("loss_mask", "padding_mask")]
    return {name: np.stack([np.asarray(sample[name]) for sample in samples]) for name in names}


def main() -> None:
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=0, world_size=1)
    for number, case in enumerate(job["cases"]):
        arrays = megatron_samples(job, case, path.parent / f"cache-{number}")
        np.savez(path.parent / f"{number}.npz", **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
