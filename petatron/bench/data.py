"""`petatron bench data`: what preprocessing costs beyond the tokenizer itself, and how fast a sample index is built and batches are read.

The baseline is bare tokenizing: the same number of processes, each calling the `tokenizers`
library on texts already parsed in its memory, and dropping the result. Its processes are up and warm before
the clock starts. Ours is timed from the command to the finished files: starting processes, reading, parsing JSON,
tokenizing, sending back, writing. The two alternate, so that a busy machine slows both, and the median of the ratios counts.
The baseline is measured twice: with encode_batch, the usual call, and with encode_batch_fast, which omits offsets.

The batch loader is measured alone, on the files that were written.

With `--against megatron` the loop of Megatron-LM's tool preprocesses the same corpus too (`bench/preprocessing/`).
"""

from __future__ import annotations

import argparse
import importlib.util
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
from dataclasses import asdict, dataclass
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
from petatron.bench.preprocessing.compare_with_megatron import AgainstMegatron, PreprocessCase
from petatron.config.schema.data import TokenizerConfig
from petatron.data.batch_loader import BatchLoader, LoaderOptions
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.document_sample_shuffle_index import build_sample_indices, plan_epochs
from petatron.data.gpt_dataset import GPTDataset
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.preprocess import PreprocessOptions, preprocess
from petatron.data.preprocess_parts.encode_blocks import init_worker

BATCH_TEXTS = 64
TRAINING_BYTES = 2_000_000
LOADED_SEQ_LENGTH, LOADED_BATCH, LOADED_TOKENS = 2048, 8, 1 << 24
ENCODE_METHODS = ("encode_batch", "encode_batch_fast")
_log = get_logger(__name__)


def argument_problems(args: argparse.Namespace) -> list[Problem]:
    """Returns what is wrong with the arguments."""
    counts = {"--size-mb": args.size_mb, "--workers": args.workers, "--documents": args.documents}
    problems = [*positive_problems(counts), *count_problems("data", args)]
    if args.against and importlib.util.find_spec("transformers") is None:
        rule = "needs transformers, whose tokenizer Megatron's tool uses, and which is not installed"
        problems.append(Problem("--against", "megatron", rule, "pip install 'petatron[hf]'."))
    return problems


def run(args: argparse.Namespace) -> BenchResult:
    """Both measurements."""
    texts = standard_library_texts(int(args.size_mb * 1e6))
    with tempfile.TemporaryDirectory() as folder:
        corpus = _write_corpus(args, texts, Path(folder))
        times = _preprocess_times(args, texts, corpus)
        against = _against_megatron(args, corpus) if args.against else None
        _log.info("reading batches")
        loader_tokens_per_s = _loader_tokens_per_s(str(corpus.source.parent / "out_text_document"))
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
        ("batch loader", f"{loader_tokens_per_s:,.0f} tokens/s, sequences of {LOADED_SEQ_LENGTH:,}, in one process"),
        ("sample index", f"{args.documents:,} documents in {index['seconds']:.2f} s"),
        ("sample index memory", memory),
    ]
    values: dict[str, object] = {
        "megabytes": megabytes,
        "workers": args.workers,
        "seconds": times,
        "ratio": ratios,
        "loader_tokens_per_s": loader_tokens_per_s,
        "index": index,
    }
    if against is not None:
        rounds = f"(median of {len(against.seconds['megatron'])})"
        for name, label in (
            ("megatron", "loop of Megatron's tool"),
            ("petatron", "petatron data preprocess, a process"),
        ):
            tokens_per_s = f"{statistics.median(against.steady[name]):,.0f} tokens/s"
            rows.append((label, f"{statistics.median(against.seconds[name]):.1f} s, {tokens_per_s}"))
        rows.append(("tokens/s over Megatron's", f"{against.steady_ratio:.2f} {rounds}"))
        rows.append(("Megatron's time over ours", f"{against.wall_ratio:.2f} {rounds}"))
        values["against_megatron"] = {
            **asdict(against),
            "wall_ratio": against.wall_ratio,
            "steady_ratio": against.steady_ratio,
        }
    return BenchResult(tuple(rows), values)


def _against_megatron(args: argparse.Namespace, corpus: _Corpus) -> AgainstMegatron:
    against, case = (
        AgainstMegatron(),
        PreprocessCase(corpus.source, corpus.tokenizer, args.workers, corpus.source.parent),
    )
    rounds = max(3, args.repeat)
    for number in range(rounds):
        _log.info("preprocessing like Megatron and with petatron, round %d of %d", number + 1, rounds)
        against.measure_round(case)
    return against


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
            if text.strip():  # Megatron's tool writes a document for an empty text, and ours leaves it out
                texts.append(text)
            total += len(text)
        if total == before:
            break
    return texts


@dataclass(frozen=True, slots=True)
class _Corpus:
    source: Path
    tokenizer: Path


def _write_corpus(args: argparse.Namespace, texts: list[str], folder: Path) -> _Corpus:
    _log.info("training a tokenizer")
    corpus = _Corpus(folder / "corpus.jsonl", folder / "tokenizer.json")
    sizes_before = accumulate(map(len, texts), initial=0)
    first_texts = (text for text, before in zip(texts, sizes_before) if before < TRAINING_BYTES)
    train_bpe(first_texts, args.vocab, corpus.tokenizer)
    with corpus.source.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return corpus


def _preprocess_times(args: argparse.Namespace, texts: list[str], corpus: _Corpus) -> dict[str, list[float]]:
    options = PreprocessOptions(
        inputs=(str(corpus.source),),
        output_prefix=str(corpus.source.parent / "out"),
        tokenizer=TokenizerConfig(tokenizer_model=str(corpus.tokenizer)),
        append_eod=True,
        workers=args.workers,
        overwrite=True,  # once per repetition
    )
    times: dict[str, list[float]] = {name: [] for name in (*ENCODE_METHODS, "preprocess")}
    with _baseline_workers(corpus.tokenizer, texts, args.workers) as pipes:
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


def _loader_tokens_per_s(prefix: str) -> float:
    """Returns how many tokens per second become batches, as training reads them, without a model."""
    indexed = IndexedDataset(prefix)
    epochs = max(1, LOADED_TOKENS // indexed.num_tokens)
    num_samples = max(LOADED_BATCH, epochs * indexed.num_tokens // LOADED_SEQ_LENGTH)
    sequences = range(indexed.num_sequences)
    dataset = GPTDataset(indexed, sequences, num_samples=num_samples, seq_length=LOADED_SEQ_LENGTH, seed=1234)
    steps = num_samples // LOADED_BATCH
    options = LoaderOptions(micro_batch_size=LOADED_BATCH, seed=1234, num_workers=2)
    with BatchLoader(dataset, options) as loader:
        loader.next_step(LOADED_BATCH, 0)
        started = time.perf_counter()
        tokens = sum(
            batch.tokens.numel()
            for step in range(1, steps)
            for batch in loader.next_step(LOADED_BATCH, step * LOADED_BATCH)
        )
    return tokens / (time.perf_counter() - started)


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
