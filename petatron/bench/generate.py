"""`petatron bench generate`: the first token and the tokens after it, ours against transformers' `generate`, in one run.

A batch of prompts, greedy, the same weights on both sides in the run's precision. The time of one new token is the prefill; the cost of
each further token is the difference to a longer continuation. Sides alternate in both orders, and medians count; each has run once
before, so that graphs, recordings and compilations exist. Neither knows an end-of-document token, so both generate the same number of
tokens. `--ragged` prompts have lengths from a quarter of the longest on; transformers pads them on the left. On a CPU without
instructions for bf16 compare with `--no-bf16`: transformers' GEMMs are emulated there, ours are widened.

`--fp8-weights` quantizes the layers' weights of our side; against `bf16` it is compared with itself without. Against `forward` only the
prompt counts: the engine's prefill and the forward pass of training over the same tokens, both without the output head's GEMM.
`--speculative-tokens` drafts with the depths of `--mtp-num-layers`, and `plain` is the engine without it. Weights are random, so hardly
a draft is accepted: the ratio is what drafting costs, and a trained model's tokens per step are to be multiplied with it.

The limit is what reading takes: every weight but the embedding table once a step, and the keys and values of every sequence, at the
bandwidth that copying a large tensor reaches on the same device in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile

import torch

from petatron.base.errors import Problem, raise_problems
from petatron.base.log import get_logger
from petatron.bench import BenchResult
from petatron.bench.arguments import count_problems
from petatron.bench.measure.timing import copy_bandwidth, elapsed_seconds, run_rounds, synchronize
from petatron.bench.peers import OURS, BenchSpec
from petatron.bench.peers.bench_workload import bench_precision_text, bench_spec
from petatron.bench.peers.generation_models import build_engine, padded_prompts, transformers_model
from petatron.bench.peers.huggingface import model_problems
from petatron.config.required_settings import known_vocab_size
from petatron.estimate.generation_bytes import GenerationBytes
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.models.batch import Batch
from petatron.models.registry import model_spec
from petatron.optim.loss_scaler import compute_dtype
from petatron.parallel.parallel_model import ParallelModel

_log = get_logger(__name__)
GenerateFn = Callable[[int], Sequence[int]]
_STEP_TOKENS = 8192
_SHORTEST_S = 1e-9
"""A clock's tick: what takes less is not measured, and not divided by."""


def run(args: argparse.Namespace, flags: Sequence[str]) -> BenchResult:
    """Alternate, and compare what both wrote: at the same weights it is the same, but for ties."""
    spec = bench_spec(flags)
    raise_problems(_problems(args, spec))
    _log.info("building %s", OURS)
    if args.against == "forward":
        return _prefill_and_forward(args, spec)
    _, engine = _build_engine(args, spec, fp8_weights=args.fp8_weights, speculative_tokens=args.speculative_tokens)
    sides: dict[str, GenerateFn] = {OURS: _ours(args, spec, engine)}
    if args.against:
        _log.info("building %s", args.against)
        if args.against in ("bf16", "plain"):
            _, other = _build_engine(args, spec, fp8_weights=args.fp8_weights and args.against == "plain")
            sides[args.against] = _ours(args, spec, other)
        else:
            sides[args.against] = _transformers(args, spec)
    texts = {name: list(side(args.new_tokens)) for name, side in sides.items()}  # also warms up
    timed = {name: partial(_token_seconds, side, args.new_tokens) for name, side in sides.items()}
    times = run_rounds(timed, rounds=args.repeat, work=f"{args.new_tokens} tokens")
    medians = {name: [statistics.median(column) for column in zip(*pairs)] for name, pairs in times.items()}
    prompts = _prompts(args, spec)
    prompt_tokens, together = sum(map(len, prompts)), "one at a time" if args.batch == 1 else f"{args.batch} at once"
    ragged = ", of several lengths" if args.ragged else ""
    rows = [
        ("prompt", f"{args.prompt_tokens} tokens{ragged}, {args.new_tokens} new ones, greedy, {together}"),
        ("precision", bench_precision_text(spec)),
    ]
    for name, (first, token) in medians.items():
        speed = f"({prompt_tokens / first:,.0f} tok/s), then {args.batch / token:,.1f} tok/s"
        rows.append((name, f"prompt {first * 1e3:.1f} ms {speed}"))
    limit = _limit(args, spec, prompt_tokens)
    share = args.batch / medians[OURS][1] / limit
    rows.append(("limit", f"{limit:,.0f} tok/s by bytes of weights and cache; {OURS} reaches {share:.1%}"))
    values: dict[str, object] = {
        "seconds": times,
        "first_token_s": {name: first for name, (first, _) in medians.items()},
        "tokens_per_s": {name: args.batch / token for name, (_, token) in medians.items()},
        "limit_tokens_per_s": limit,
        "share_of_limit": share,
    }
    if args.speculative_tokens:
        stats = engine.stats
        shares = f"{stats.tokens_per_decode:.2f} tokens per step, {stats.acceptance_rate:.1%} of drafts accepted"
        rows.append(("speculative", f"{args.speculative_tokens} drafts; {shares}"))
        values |= {"tokens_per_step": stats.tokens_per_decode, "acceptance_rate": stats.acceptance_rate}
    if args.against:
        peer = args.against
        ratio = medians[peer][1] / medians[OURS][1]
        same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(texts[OURS], texts[peer]))])
        text = f"{ratio:.2f}x after the prompt; the first {same} of {args.new_tokens} tokens are the same"
        rows.append((f"speed / {peer}", text))
        values |= {"ratio": ratio, "same_tokens": same}
    return BenchResult(tuple(rows), values)


def _token_seconds(side: GenerateFn, count: int) -> tuple[float, float]:
    """Returns the time of the first token and of one after it; tokens are on the host then, so there is nothing left to wait for."""
    first, total = (elapsed_seconds(partial(side, number)) for number in (1, count))
    return first, max(total - first, _SHORTEST_S) / (count - 1)


def _problems(args: argparse.Namespace, spec: BenchSpec) -> Iterator[Problem]:
    yield from count_problems("generate", args)
    yield from model_problems(spec) if args.against in ("hf", "hf-compiled") else ()
    if args.fp8_weights != (args.against == "bf16") and args.against in ("bf16", "forward"):
        rule, fix = "compares the engine with quantized weights", "Give --fp8-weights too."
        if args.against == "forward":
            rule, fix = "compares the same weights", "Leave out --fp8-weights."
        yield Problem("--against", args.against, rule, fix)
    if args.against == "plain" and not args.speculative_tokens:
        rule = "compares the engine with and without drafts"
        yield Problem("--against", args.against, rule, "Give --speculative-tokens too.")
    if args.against == "forward" and args.ragged:
        yield Problem("--ragged", "", "has no equal in a batch of training", "Leave it out.")


def _prompts(args: argparse.Namespace, spec: BenchSpec) -> list[list[int]]:
    """Returns random ids; of ragged prompts the first is the longest, and the others are spread evenly down to a quarter of it."""
    generator = torch.Generator().manual_seed(0)
    shortest = max(1, args.prompt_tokens // 4) if args.ragged else args.prompt_tokens
    step = (args.prompt_tokens - shortest) / max(1, args.batch - 1)
    lengths = [round(args.prompt_tokens - number * step) for number in range(args.batch)]
    size = known_vocab_size(spec.run.model)
    return [torch.randint(size, (length,), generator=generator).tolist() for length in lengths]


def _limit(args: argparse.Namespace, spec: BenchSpec, prompt_tokens: int) -> float:
    """Returns the tokens per second at which weights and cache are read at the speed of copying."""
    model, dtype = model_spec(spec.run), compute_dtype(spec.run.precision)
    bytes_each = dtype.itemsize
    params = model.params()
    tables = [param.num_active_elements for param in params.values() if param.role == "vocabulary"]
    layers = sum(param.num_active_elements for param in params.values()) - sum(tables)
    # Of the vocabulary's tables only the head's is read; quantized weights have one byte.
    read = layers / (bytes_each if args.fp8_weights else 1) + max(tables, default=0)
    kept = GenerationBytes.of(model, dtype)
    cached = kept.per_token * (prompt_tokens + args.batch * args.new_tokens / 2)
    states = 2 * args.batch * kept.per_sequence  # read and written
    return args.batch * copy_bandwidth(spec.device) / (read * bytes_each + cached + states)


def _prefill_and_forward(args: argparse.Namespace, spec: BenchSpec) -> BenchResult:
    """The engine's prefill against the forward pass of training, over the same tokens."""
    model, engine = _build_engine(args, spec)
    prompts, first = _prompts(args, spec), SamplingParams(max_new_tokens=1, temperature=0.0)
    batch = Batch(torch.tensor(prompts, device=spec.device))

    def forward() -> None:
        model.forward([batch], collect=["hidden_states"])
        synchronize(spec.device)

    sides = {OURS: lambda: engine.complete(prompts, first), "forward": forward}
    for run in sides.values():
        run()
    tokens = args.batch * args.prompt_tokens
    timed = {name: partial(elapsed_seconds, side) for name, side in sides.items()}
    times = run_rounds(timed, rounds=args.repeat, work=f"{tokens} tokens")
    speeds = {name: tokens / statistics.median(seconds) for name, seconds in times.items()}
    ratio = speeds[OURS] / speeds["forward"]
    rows = [
        ("prompt", f"{args.batch} x {args.prompt_tokens} tokens, without the head's GEMM"),
        *((name, f"{speed:,.0f} tok/s") for name, speed in speeds.items()),
        ("speed / forward", f"{ratio:.2f}x"),
    ]
    return BenchResult(tuple(rows), {"seconds": times, "tokens_per_s": speeds, "ratio": ratio})


def _build_engine(
    args: argparse.Namespace, spec: BenchSpec, *, fp8_weights: bool = False, speculative_tokens: int = 0
) -> tuple[ParallelModel, Engine]:
    options = EngineOptions(
        max_sequences=args.batch,
        max_length=args.prompt_tokens + args.new_tokens,
        max_step_tokens=max(_STEP_TOKENS, args.batch * args.prompt_tokens),  # prompts are one step, as the peers'
        prefix_caching=False,
        fp8_weights=fp8_weights,
        speculative_tokens=speculative_tokens,
    )
    return build_engine(spec, options)


def _ours(args: argparse.Namespace, spec: BenchSpec, engine: Engine) -> GenerateFn:
    prompts = _prompts(args, spec)

    def more(count: int) -> list[int]:
        return engine.complete(prompts, SamplingParams(max_new_tokens=count, temperature=0.0))[0][0].ids

    return more


def _transformers(args: argparse.Namespace, spec: BenchSpec) -> GenerateFn:
    model = transformers_model(spec)
    model.generation_config.eos_token_id = None
    tokens, mask = padded_prompts(_prompts(args, spec), spec.device)
    options = {"cache_implementation": "static"} if args.against == "hf-compiled" else {}
    options |= {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}

    def more(count: int) -> list[int]:
        return model.generate(tokens, max_new_tokens=count, **options)[0, tokens.shape[1] :].tolist()

    return more
