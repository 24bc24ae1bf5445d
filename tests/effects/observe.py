"""Runs of `petatron train` at toy size, seen from outside: numbers, log, files, checkpoint, traces."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.cli.main import main

CORPUS = "web_text_document"
BASE = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64 --seq-length 16 --max-position-embeddings 32
--init-method-std 0.2 --global-batch-size 2 --micro-batch-size 1 --eval-iters 0 --log-interval 1 --lr 1e-3 --lr-decay-style linear
--train-iters 3 --mock-data"""
_LATENT = (
    "--multi-latent-attention --kv-lora-rank 8 --q-lora-rank 24 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
)
MODELS = {
    "MLA": _LATENT,
    "DSA": f"{_LATENT} --experimental-attention-variant dsa --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 16 --dsa-indexer-topk 4 "
    "--dsa-indexer-loss-coeff 0.5 --attention-dropout 0",
    "MUP": "--use-mup --mup-base-hidden-size 16",
    "MOE": "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32",
    "HYBRID": "--hybrid-layer-pattern M* --mamba-num-heads 4 --mamba-num-groups 1 --mamba-head-dim 16 --mamba-state-dim 8",
    "DELTA": "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-conv-kernel-dim 4 "
    "--linear-key-head-dim 8 --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-value-head-dim 8",
    "ROPE": "--position-embedding-type rope",
}
ROUNDING = 1e-6  # of float32 sums in another order, relative
_NUMBERS = ("lm_loss", "grad_norm", "lr", "decoupled_lr", "loss_scale", "num_zeros", "params_norm", "mtp_loss")


@dataclass(frozen=True)
class Observed:
    """What a run shows. text: the lines of its log."""

    numbers: dict[str, list[float]]
    columns: frozenset[str]
    text: list[str]
    files: frozenset[str]
    checkpoint: frozenset[str]
    trace: frozenset[str]


def expand(words: Sequence[str], folder: Path, corpus: Path) -> list[str]:
    """Replaces the table's capital words: models, folders, and DATA for token files in place of mock data."""
    folders = {name: str(folder / name.lower()) for name in ("SAVE", "TENSORBOARD", "CACHE", "LOADED")}
    result = []
    for word in words:
        if word == "DATA":
            result += ["--data-path", str(corpus / CORPUS), "--tokenizer-type", "ByteTokenizer", "--split", "90,10,0"]
        else:
            result += MODELS[word].split() if word in MODELS else [folders.get(word, word)]
    return result


def base_flags(words: Sequence[str]) -> list[str]:
    """Returns the flags of every run, without those that contradict the words."""
    base, removed = BASE.split(), set[str]()
    if "DATA" in words:
        base.remove("--mock-data")
        removed.add("--vocab-size")
    if "HYBRID" in words or "--hybrid-layer-pattern" in words or "--hybrid-override-pattern" in words:
        removed.add("--num-layers")
    if "--train-samples" in words:
        removed.add("--train-iters")
    if "--step-batch-size-schedule" in words:
        removed.add("--global-batch-size")
    for flag in removed:
        place = base.index(flag)
        del base[place : place + 2]
    return base


def observe(words: Sequence[str], folder: Path, corpus: Path) -> Observed:
    """Trains with the base flags and these, in a folder of its own."""
    if "LOADED" in words:
        _train([*base_flags([]), "--lr-decay-iters", "6", "--save", str(folder / "loaded")])
    flags = [*base_flags(words), *expand(words, folder, corpus), "--log-dir", str(folder / "log")]
    printed = _train(flags)
    lines = (folder / "log" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] in ("train", "valid")]
    names = (*_NUMBERS, *(key for row in rows for key in row if key.endswith("loss") and key not in _NUMBERS))
    numbers = {name: [float(row[name]) for row in rows if isinstance(row.get(name), int | float)] for name in names}
    return Observed(
        numbers,
        frozenset(key for row in rows for key in row),
        printed.splitlines(),
        frozenset(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
        _read_checkpoint(folder / "save"),
        _traced(folder),
    )


def _train(flags: Sequence[str]) -> str:
    """Returns what `petatron train` printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main(["train", *flags])
    assert status == 0, f"petatron train {shlex.join(flags)}\n{printed.getvalue()}"
    return printed.getvalue()


def differ(first: dict[str, list[float]], second: dict[str, list[float]]) -> bool:
    """Whether any number differs by more than rounding, or there are others."""
    if {name: len(values) for name, values in first.items()} != {name: len(values) for name, values in second.items()}:
        return True
    pairs = [pair for name, values in first.items() for pair in zip(values, second[name])]
    return any(abs(a - b) > ROUNDING * max(abs(a), abs(b)) for a, b in pairs)


def _read_checkpoint(folder: Path) -> frozenset[str]:
    """Returns the names in the tables of the newest checkpoint: of tensors, and of what is stored with them."""
    steps = sorted(folder.glob("step-*"))
    return frozenset(
        name
        for path in (steps[-1].rglob("*.table.json") if steps else ())
        for name in _keys(json.loads(path.read_text()))
    )


def _keys(table: Any) -> Iterator[str]:
    values = table.values() if isinstance(table, dict) else table if isinstance(table, list) else ()
    yield from table if isinstance(table, dict) else ()
    for value in values:
        yield from _keys(value)


def _traced(folder: Path) -> frozenset[str]:
    """Returns the names of what the events of traces have beside their times."""
    files = folder.rglob("*.json.gz")
    events = [event for path in files for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    return frozenset(key for event in events for key in (*event.get("args", {}), f"cat {event.get('cat')}"))
