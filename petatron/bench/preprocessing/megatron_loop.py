"""The loop of Megatron-LM's tools/preprocess_data.py with a Hugging Face tokenizer, written from its rules; a program of its own.

    python -m petatron.bench.preprocessing.megatron_loop SOURCE.jsonl TOKENIZER.json PREFIX WORKERS

A pool of processes encodes line after line, 32 to a task; the process that reads the lines also receives the ids and writes them,
document by document. The tool also imports torch, NLTK and megatron, and makes its index in Python: here it starts and ends faster.
The last line printed is JSON: the tokens, and their number per second from the first document that arrived.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from petatron.data.indexed_dataset import optimal_dtype
from petatron.data.indexed_writer import IndexedWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LINES_PER_TASK = 32


class _LineEncoder:
    """A worker's tokenizer, opened once in its process."""

    tokenizer: PreTrainedTokenizerFast

    def __init__(self, tokenizer_file: str) -> None:
        self.tokenizer_file = tokenizer_file

    def open(self) -> None:
        _LineEncoder.tokenizer = open_tokenizer(self.tokenizer_file)

    def encode(self, line: str) -> list[int]:
        tokenizer = _LineEncoder.tokenizer
        ids: list[int] = tokenizer(json.loads(line)["text"]).input_ids
        return [*ids, tokenizer.eos_token_id] if ids else ids


def open_tokenizer(path: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=path, eos_token="<|endoftext|>")


def main(source: str, tokenizer_file: str, prefix: str, workers: str) -> None:
    dtype = optimal_dtype(len(open_tokenizer(tokenizer_file)))
    encoder = _LineEncoder(tokenizer_file)
    pool = multiprocessing.get_context("fork").Pool(int(workers), initializer=encoder.open)
    lengths: list[int] = []
    started = 0.0
    tokens = Path(f"{prefix}.tokens")
    with pool, Path(source).open(encoding="utf-8") as lines, tokens.open("wb") as file:
        for ids in pool.imap(encoder.encode, lines, LINES_PER_TASK):
            started = started or time.perf_counter()
            file.write(np.array(ids, dtype).tobytes())
            lengths.append(len(ids))
    seconds = time.perf_counter() - started
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_sequences(np.fromfile(tokens, dtype), np.array(lengths))
    tokens.unlink()
    sys.stdout.write(json.dumps({"tokens": sum(lengths), "steady_tokens_per_s": (sum(lengths) - lengths[0]) / seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
