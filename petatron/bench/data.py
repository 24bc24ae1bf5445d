"""`petatron bench data`: what preprocessing costs beyond the tokenizer itself, and how fast a sample index is built.

The baseline is bare tokenizing: the same number of processes, each calling the `tokenizers`
library on texts already parsed in its memory, and dropping the result. Its processes are up and warm before
the clock starts. Ours is timed from the command to the finished files: starting processes, reading, parsing JSON,
tokenizing, sending back, writing. The two alternate, so that a busy machine slows both, and the median of the ratios counts.
The baseline is measured twice: with encode_batch, the usual call, and with encode_batch_fast, which omits offsets.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from petatron.base.errors import Problem
from petatron.base.log import get_logger
from petatron.bench import BenchResult
from petatron.bench.arguments import count_problems
from petatron.bench.measure.check_arguments import positive_problems
from petatron.config.schema.training import TokenizerConfig
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.document_sample_shuffle_index import build_sample_indices, plan_epochs
from petatron.data.parts.encode_blocks import init_worker
from petatron.data.preprocess import PreprocessOptions, preprocess

BATCH_TEXTS = 64
TRAINING_BYTES = 2_000_000
ENCODE_METHODS = ("encode_batch", "encode_batch_fast")
_log = get_logger(__name__)


def argument_problems(args: argparse.Namespace) -> list[Problem]:
    """Returns what is wrong with the arguments."""
    counts = {"--size-mb": args.size_mb, "--workers": args.workers, "--documents": args.documents}
    return [*positive_problems(counts), *count_problems("data", args)]


def run(args: argparse.Namespace) -> BenchResult:
    """Both measurements."""
    texts = standard_library_texts(int(args.size_mb * 1e6))
    with tempfile.TemporaryDirectory() as folder:
        times = _preprocess_times(args, texts, Path(folder))
    ratios = {
        method: statistics.median(ours / bare for ours, bare in zip(times["preprocess"], times[method]))
        for method in ENCODE_METHODS
    }
    _log.info("building a sample index of %s documents", f"{args.documents:,}")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # in a process whose peak is the index's own
        index = pool.submit(_measure_index, args.documents).result()
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    speed = {name: megabytes / statistics.median(seconds) for name, seconds in times.items()}
    memory = f"{index['peak_growth_mb']:.0f} MB above the input, of which result {index['result_mb']:.0f} MB"
    rows = [
        ("corpus", f"{megabytes:.1f} MB of Python source, {len(texts):,} documents"),
        ("workers", f"{args.workers}"),
        *((f"bare {method}", f"{speed[method]:.2f} MB/s") for method in ENCODE_METHODS),
        ("petatron data preprocess", f"{speed['preprocess']:.2f} MB/s, start to files"),
        *((f"time / bare {name}", f"{ratio:.3f} (median of {len(times[name])})") for name, ratio in ratios.items()),
        ("sample index", f"{args.documents:,} documents in {index['seconds']:.2f} s"),
        ("sample index memory", memory),
    ]
    values = {"megabytes": megabytes, "workers": args.workers, "seconds": times, "ratio": ratios, "index": index}
    return BenchResult(tuple(rows), values)


def standard_library_texts(size_bytes: int) -> list[str]:
    """Returns source files of the Python standard library, repeated or truncated to about the requested size."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    texts: list[str] = []
    total = 0
    while total < size_bytes:
        before = total
        for path in paths:
            if "site-packages" in path.parts or total >= size_bytes:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):  # a few test files are broken on purpose
                continue
            texts.append(text)
            total += len(text)
        if total == before:
            break
    return texts


def _preprocess_times(args: argparse.Namespace, texts: list[str], folder: Path) -> dict[str, list[float]]:
    _log.info("training a tokenizer")
    tokenizer = folder / "tokenizer.json"
    sizes_before = accumulate(map(len, texts), initial=0)
    first_texts = (text for text, before in zip(texts, sizes_before) if before < TRAINING_BYTES)
    train_bpe(first_texts, args.vocab, tokenizer)
    source = folder / "corpus.jsonl"
    with source.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    options = PreprocessOptions(
        inputs=(str(source),),
        output_prefix=str(folder / "out"),
        tokenizer=TokenizerConfig(tokenizer_model=str(tokenizer)),
        append_eod=True,
        workers=args.workers,
        overwrite=True,  # once per repetition
    )
    times: dict[str, list[float]] = {name: [] for name in (*ENCODE_METHODS, "preprocess")}
    with _baseline_workers(tokenizer, texts, args.workers) as pipes:
        rounds = max(3, args.repeat)
        for number in range(rounds):
            _log.info("tokenizing, round %d of %d", number + 1, rounds)
            for method in ENCODE_METHODS:
                times[method].append(_baseline_seconds(pipes, method))
            started = time.perf_counter()
            preprocess(options)
            times["preprocess"].append(time.perf_counter() - started)
    return times


@contextmanager
def _baseline_workers(tokenizer: Path, texts: list[str], workers: int) -> Iterator[list[Connection]]:
    """Starts processes that hold their share of the texts in memory and tokenize it on request."""
    context = get_context("spawn")
    # Largest first, each to the worker with least so far: an uneven share would slow the baseline down.
    shares: list[list[str]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for text in sorted(texts, key=len, reverse=True):
        least = loads.index(min(loads))
        shares[least].append(text)
        loads[least] += len(text)
    pipes: list[Connection] = []
    processes = []
    try:
        for share in shares:
            ours, theirs = context.Pipe()
            process = context.Process(target=_baseline_loop, args=(theirs, str(tokenizer), share), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        yield pipes
    finally:
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(10)


def _baseline_loop(pipe: Connection, path: str, texts: list[str]) -> None:
    init_worker()
    tokenizer = Tokenizer.from_file(path)
    batches = [texts[first : first + BATCH_TEXTS] for first in range(0, len(texts), BATCH_TEXTS)]
    pipe.send("ready")
    while (method := pipe.recv()) is not None:
        encode = getattr(tokenizer, method)
        for batch in batches:
            encode(batch, add_special_tokens=False)
        pipe.send("done")


def _baseline_seconds(pipes: Sequence[Connection], method: str) -> float:
    started = time.perf_counter()
    for pipe in pipes:
        pipe.send(method)
    for pipe in pipes:
        pipe.recv()
    return time.perf_counter() - started


def _measure_index(documents: int) -> dict[str, float]:
    """Returns time and memory to build one epoch's sample index."""
    numbers = np.arange(documents)
    lengths = np.random.RandomState(0).randint(1, 1500, documents, dtype=np.int32)
    before = _peak_mb()
    started = time.perf_counter()
    index = build_sample_indices(numbers, lengths, plan_epochs(int(lengths.sum(dtype=np.int64)), 2048, None), 1234)
    seconds = time.perf_counter() - started
    result = sum(array.nbytes for array in (index.document_index, index.sample_index, index.shuffle_index)) / 1e6
    return {"documents": documents, "seconds": seconds, "peak_growth_mb": _peak_mb() - before, "result_mb": result}


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3
