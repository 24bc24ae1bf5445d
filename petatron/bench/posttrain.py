"""`petatron bench posttrain`: SFT, LoRA or GRPO as users run them, ours alone or beside TRL's trainers, on one device.

Both sides are whole commands in processes of their own (`petatron train --sft`, `petatron posttrain grpo`; TRL's trainers with transformers
and PEFT), one after the other, and with `--repeat` back again. Both have the same model from the same config.json with random weights, the
same tokenizer and texts, rows of the same length, and as many rows a step. Nothing is saved. A step's time is the median of those after the
first ones, which compile; memory is the most that tensors took.

In SFT and LoRA texts are packed. Ours see themselves alone. TRL's do, with `--peer-packing bfd`; without FlashAttention transformers builds
a mask for that, which costs it time and memory, so the default is `wrapped`: rows are cut from one long text and need no mask. With GRPO a
model of random weights draws answers of nearly always `--answer-tokens`, which are rewarded by a function that costs nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from petatron.base.errors import ConfigError, Problem, TrainError, raise_problems
from petatron.base.log import get_logger
from petatron.bench import BenchResult
from petatron.bench.arguments import count_problems
from petatron.bench.measure.timing import alternating_orders
from petatron.bench.peers import OURS, BenchSpec
from petatron.bench.peers.bench_workload import bench_precision_text, bench_spec
from petatron.bench.peers.trl_trainers import TRL, TrlWork
from petatron.data.tokenizer_training.train_tokenizer import TokenizerTraining, train_tokenizer
from petatron.history.metrics_file import METRICS_FILE
from petatron.models.hf import to_hf_config
from petatron.models.registry import model_spec

_log = get_logger(__name__)
_DISTINCT, _VOCAB_SIZE = 6000, 2048
_TEXTS, _PROMPTS = 4000, 2000
_LEARNING_RATE = 1e-5
_PHASE_SUFFIX = " s"
REWARD = """
def reward(answer, record):
    return sum(map(answer.count, "aeiou")) / max(1, len(answer))
"""


@dataclass(slots=True)
class Measured:
    """Of one side: seconds of each step and of its parts, tokens of a step, and the most bytes of tensors."""

    step_s: list[float] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    peak_bytes: int = 0


def run(args: argparse.Namespace, flags: Sequence[str]) -> BenchResult:
    spec = bench_spec(flags)
    raise_problems(_problems(args, spec))
    sides = [OURS, *([TRL] if args.against else [])]
    measured: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="petatron-bench-") as name:
        folder = Path(name)
        write_model_and_data(args, spec, folder)
        orders = [sides] if args.repeat == 1 else alternating_orders(sides, rounds=args.repeat)
        turns = [side for order in orders for side in order]
        for number, side in enumerate(turns, start=1):
            _log.info("%s, run %d of %d", side, number, len(turns))
            made = _run_ours(args, spec, flags, folder) if side == OURS else _run_trl(args, spec, folder)
            _merge(measured.setdefault(side, Measured()), made, skipped=args.first_steps)
    return _report(args, spec, measured)


def _problems(args: argparse.Namespace, spec: BenchSpec) -> Iterator[Problem]:
    yield from count_problems("posttrain", args)
    run = spec.run
    if run.launch.nproc_per_node not in (None, 1):
        yield Problem("--nproc-per-node", str(run.launch.nproc_per_node), "is not measured", "Leave it out.")
    if args.kind == "grpo" and (longest := args.prompt_tokens + args.answer_tokens) > run.model.seq_length:
        rule = f"is shorter than a prompt with its answer, {longest} tokens"
        yield Problem("--seq-length", str(run.model.seq_length), rule, f"Use {longest} or more.")
    if (size := run.model.vocab_size or 0) < _VOCAB_SIZE:
        rule = f"is less than the {_VOCAB_SIZE:,} ids of the texts that are made"
        yield Problem("--vocab-size", str(size), rule, f"Use {_VOCAB_SIZE} or more.")
    if args.steps <= args.first_steps:
        rule = f"are no more than the {args.first_steps} first ones, which are not counted"
        yield Problem("--steps", str(args.steps), rule, "Use more.")
    for package in ("trl", "datasets", *(["peft"] if args.kind == "lora" else [])) if args.against else ():
        if importlib.util.find_spec(package) is None:
            yield Problem(
                "--against", args.against, f"needs {package}, which is not installed", f"pip install {package}."
            )
    try:
        to_hf_config(model_spec(run))
    except ConfigError as error:
        yield from error.problems


def write_model_and_data(args: argparse.Namespace, spec: BenchSpec, folder: Path) -> None:
    """Writes config.json, a tokenizer and texts of invented words."""
    rng = random.Random(0)
    characters = "aeioubcdfglmnprst"
    vocabulary = ["".join(rng.choices(characters, k=rng.randint(2, 9))) for _ in range(_DISTINCT)]

    def text(count: int) -> str:
        return " ".join(rng.choices(vocabulary, k=max(1, count // 2)))  # two tokens a word, about

    train_tokenizer((text(2000) for _ in range(100)), TokenizerTraining(vocab_size=_VOCAB_SIZE), folder)
    config = {**to_hf_config(model_spec(spec.run)), "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        if args.kind == "grpo":
            records = ({"prompt": text(args.prompt_tokens - 8)} for _ in range(_PROMPTS))
        else:
            longest = spec.run.model.seq_length * 3 // 4
            lengths = (int(min(longest, max(30.0, rng.lognormvariate(6.0, 0.8)))) for _ in range(_TEXTS))
            records = ({"prompt": text(length // 4), "completion": " " + text(length)} for length in lengths)
        file.writelines(json.dumps(record) + "\n" for record in records)


def _run_ours(args: argparse.Namespace, spec: BenchSpec, flags: Sequence[str], folder: Path) -> Measured:
    run, logs = spec.run, folder / "logs"
    given = {flag.partition("=")[0] for flag in flags}
    settings = {
        "--tokenizer-model": str(folder),
        "--log-dir": str(logs),
        "--train-iters": str(args.steps),
        "--log-interval": "1",
        "--eval-iters": "0",
        "--live": "off",
        "--lr": f"{_LEARNING_RATE:g}",
        "--lr-decay-style": "constant",
        "--lr-warmup-iters": "0",
        "--global-batch-size": str(run.train.global_batch_size),
    }
    command = ["train", "--sft", str(folder / "data.jsonl")]
    if args.kind == "lora":
        settings |= {"--adapter": "lora", "--adapter-rank": str(args.rank)}
    if args.kind == "grpo":
        command = ["posttrain", "grpo", "--rollout-prompts", str(folder / "data.jsonl")]
        settings |= {
            "--rewards": f"{folder / 'reward.py'}:reward",
            "--rollouts-per-prompt": str(args.answers),
            "--max-answer-tokens": str(args.answer_tokens),
            "--rollout-sequences": str(args.prompts * args.answers),
            "--global-batch-size": str(args.prompts * args.answers),
        }
        given -= {"--global-batch-size"}
    precision = [] if given & {"--bf16", "--no-bf16", "--fp16", "--fp64"} else ["--bf16"]
    defaults = [text for flag, value in settings.items() if flag not in given for text in (flag, value)]
    _run([sys.executable, "-m", "petatron", *command, *precision, *flags, *defaults])
    lines = (logs / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record.get("kind") == "train"]
    (logs / METRICS_FILE).unlink()
    return _read_records(args, run.model.seq_length, run.train.global_batch_size, records)


def _read_records(args: argparse.Namespace, seq_length: int, rows: int, records: list[dict[str, Any]]) -> Measured:
    metrics = [record.get("objective_metrics") or {} for record in records]
    counted = metrics[args.first_steps :]
    phases = {
        name.removesuffix(_PHASE_SUFFIX): statistics.median(values[name] for values in counted)
        for name in counted[0]
        if name.endswith(_PHASE_SUFFIX)
    }
    tokens = float(rows * seq_length)
    if args.kind == "grpo":
        answers = statistics.mean(values["answer tokens"] for values in counted)
        tokens = args.prompts * args.answers * answers
    return Measured(
        [record["elapsed_ms_per_iteration"] / 1000 for record in records],
        phases,
        tokens,
        max(record["memory_bytes"] for record in records),
    )


def _run_trl(args: argparse.Namespace, spec: BenchSpec, folder: Path) -> Measured:
    run = spec.run
    rows, micro_batches = run.train.micro_batch_size, spec.micro_batches
    if args.kind == "grpo":
        rows = args.peer_rows
        micro_batches = args.prompts * args.answers // rows
    work = TrlWork(
        kind=args.kind,
        folder=str(folder),
        steps=args.steps,
        rows=rows,
        micro_batches=micro_batches,
        seq_length=run.model.seq_length,
        recompute=args.peer_recompute,
        learning_rate=_LEARNING_RATE,
        packing_strategy=args.peer_packing,
        lora_rank=args.rank,
        answers_per_prompt=args.answers,
        answer_tokens=args.answer_tokens,
        continuous_batching=args.peer_continuous_batching,
        device=spec.device.type,
    )
    given, answered = folder / "work.json", folder / "measured.json"
    given.write_text(json.dumps(asdict(work)), encoding="utf-8")
    _run([sys.executable, "-m", "petatron.bench.peers.trl_trainers", str(given), str(answered)])
    values = json.loads(answered.read_text(encoding="utf-8"))
    _log.info("versions: %s", ", ".join(f"{name} {version}" for name, version in values["versions"].items()))
    tokens = float(rows * micro_batches * run.model.seq_length)
    if args.kind == "grpo":
        tokens = args.prompts * args.answers * values["answer_tokens"]
    return Measured(values["step_s"], {}, tokens, values["peak_bytes"])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise TrainError(f"{' '.join(command[1:4])} failed:\n{(done.stderr or done.stdout)[-3000:].strip()}")


def _merge(total: Measured, made: Measured, *, skipped: int) -> None:
    total.step_s += made.step_s[skipped:]
    total.phases_s, total.tokens = made.phases_s, made.tokens
    total.peak_bytes = max(total.peak_bytes, made.peak_bytes)


def _report(args: argparse.Namespace, spec: BenchSpec, measured: Mapping[str, Measured]) -> BenchResult:
    seconds = {name: statistics.median(side.step_s) for name, side in measured.items()}
    run = spec.run
    work = f"{run.train.global_batch_size} rows of {run.model.seq_length} tokens a step"
    if args.kind == "grpo":
        work = f"{args.prompts} prompts of about {args.prompt_tokens} tokens, {args.answers} answers of {args.answer_tokens} to each"
    rows = [("work", f"{args.kind}, {work}"), ("precision", bench_precision_text(spec))]
    for name, side in measured.items():
        speed = f"{seconds[name]:.3f} s a step, {side.tokens / seconds[name]:,.0f} tok/s"
        memory = f", {side.peak_bytes / 1e9:.1f} GB" if spec.device.type == "cuda" else ""
        rows.append((name, speed + memory))
    phases = measured[OURS].phases_s
    if phases:
        parts = {**phases, "train": max(0.0, seconds[OURS] - sum(phases.values()))}
        rows.append(
            ("parts", ", ".join(f"{name} {part:.3f} s ({part / seconds[OURS]:.1%})" for name, part in parts.items()))
        )
    values: dict[str, object] = {
        "work": {"kind": args.kind, "text": work},
        "sides": {name: asdict(side) for name, side in measured.items()},
        "step_s": seconds,
    }
    if args.against:
        ours, peer = measured[OURS], measured[TRL]
        ratio = ours.tokens / seconds[OURS] / (peer.tokens / seconds[TRL])
        rows.append((f"speed / {TRL}", f"{ratio:.2f}x"))
        values["ratio"] = ratio
        if spec.device.type == "cuda":
            share = ours.peak_bytes / peer.peak_bytes
            rows.append((f"memory / {TRL}", f"{share:.2f}x"))
            values["memory_share"] = share
    return BenchResult(tuple(rows), values)
