"""`petatron bench stream`: many requests of all lengths at once, ours against transformers, in one run.

Lengths of prompts and answers are drawn from one range, from 16 to 2,048 tokens. All requests arrive at once, and the time is that
until the last answer is whole; only tokens of answers count. Both sides are greedy, have the same weights and ignore the end of a
document. transformers batches continuously where its version can (`hf`), or takes the requests in static batches of 16, padded on the
left, each as long as its longest (`hf-static`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from petatron.base.errors import DataError, Problem, raise_problems
from petatron.base.log import get_logger
from petatron.bench import BenchResult
from petatron.bench.arguments import count_problems
from petatron.bench.measure.check_arguments import minimum_problems, positive_problems
from petatron.bench.measure.timing import elapsed_seconds
from petatron.bench.peers import OURS, BenchSpec
from petatron.bench.peers.bench_workload import bench_precision_text, bench_spec
from petatron.bench.peers.generation_models import build_engine, padded_prompts, transformers_model
from petatron.bench.peers.huggingface import model_problems
from petatron.config.required_settings import known_vocab_size
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams

_log = get_logger(__name__)
_STATIC_BATCH = 16
_STEP_TOKENS = 8192
Requests = Sequence[tuple[list[int], int]]
"""Prompts with the number of tokens to make."""
RunRequests = Callable[[Requests], Sequence[Sequence[int]]]


def run(args: argparse.Namespace, flags: Sequence[str]) -> BenchResult:
    spec = bench_spec(flags)
    raise_problems(_problems(args, spec))
    requests = draw_requests(args, vocab_size=known_vocab_size(spec.run.model))
    wanted = sum(count for _, count in requests)
    sides: dict[str, RunRequests] = {OURS: _ours(args, spec)}
    if args.against:
        static = args.against == "hf-static"
        sides[args.against] = _transformers_static(spec) if static else _transformers(spec, args.peer_seconds)
    seconds: dict[str, float] = {}
    unfinished: list[str] = []
    for name, side in sides.items():
        _log.info("%s: warming up, then %d requests of %s new tokens", name, len(requests), f"{wanted:,}")
        side([(prompt, 4) for prompt, _ in requests[: min(len(requests), 2 * _STATIC_BATCH)]])
        answers: list[Sequence[Sequence[int]]] = []
        try:
            seconds[name] = elapsed_seconds(lambda side=side, answers=answers: answers.append(side(requests)))
        except TimeoutError:
            unfinished.append(name)
            seconds[name] = args.peer_seconds
            continue
        made = [len(answer) for answer in answers[0]]
        if made != [count for _, count in requests]:
            raise DataError(f"{name} made {sum(made):,} tokens instead of {wanted:,}, so its time means nothing.")
    prompts = sum(len(prompt) for prompt, _ in requests)
    rows = [
        ("requests", f"{len(requests)} at once, {prompts:,} tokens of prompts and {wanted:,} new ones, greedy"),
        ("precision", bench_precision_text(spec)),
        *((name, _speed_text(wanted, taken, unfinished=name in unfinished)) for name, taken in seconds.items()),
    ]
    values: dict[str, object] = {"seconds": seconds, "new_tokens": wanted, "prompt_tokens": prompts}
    if args.against:
        ratio = seconds[args.against] / seconds[OURS]
        rows.append((f"speed / {args.against}", f"{'above ' * bool(unfinished)}{ratio:.2f}x"))
        values |= {"ratio": ratio, "unfinished": unfinished}
    return BenchResult(tuple(rows), values)


def _speed_text(tokens: int, seconds: float, *, unfinished: bool) -> str:
    if unfinished:
        return f"below {tokens / seconds:,.0f} new tok/s, not ended after {seconds:.0f} s"
    return f"{tokens / seconds:,.0f} new tok/s, {seconds:.1f} s"


def _problems(args: argparse.Namespace, spec: BenchSpec) -> Iterator[Problem]:
    yield from count_problems("stream", args)
    yield from minimum_problems({"--longest": (args.longest, args.shortest)})
    yield from positive_problems({"--peer-seconds": args.peer_seconds})
    positions = spec.run.model.max_position_embeddings
    if 2 * args.longest > positions:
        rule = f"makes sequences of up to {2 * args.longest}, and the model has {positions} positions"
        yield Problem("--longest", str(args.longest), rule, "Use less, or a longer --seq-length.")
    yield from model_problems(spec) if args.against else ()


def draw_requests(args: argparse.Namespace, *, vocab_size: int) -> Requests:
    """Draws prompts and lengths of answers, the same every time."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(args.shortest, args.longest + 1, (args.requests, 2), generator=generator).tolist()
    return [(torch.randint(vocab_size, (prompt,), generator=generator).tolist(), new) for prompt, new in lengths]


def _ours(args: argparse.Namespace, spec: BenchSpec) -> RunRequests:
    options = EngineOptions(
        max_sequences=args.max_batch_size,
        max_length=2 * args.longest,
        max_step_tokens=_STEP_TOKENS,
        prefix_caching=False,
        fp8_weights=args.fp8_weights,
    )
    _, engine = build_engine(spec, options)
    engine.capture_graphs()

    def serve(requests: Requests) -> list[list[int]]:
        sampling = (SamplingParams(max_new_tokens=count, temperature=0.0) for _, count in requests)
        numbers = [engine.submit(prompt, params) for (prompt, _), params in zip(requests, sampling)]
        while engine.has_work:
            engine.step()
        return [engine.take(number).ids for number in numbers]

    return serve


def _transformers(spec: BenchSpec, limit_s: float) -> RunRequests:
    model = transformers_model(spec)
    if not hasattr(model, "continuous_batching_context_manager"):
        raise DataError("This version of transformers has no continuous batching. Use --against hf-static.")

    def serve(requests: Requests) -> list[list[int]]:
        from transformers import GenerationConfig

        longest = max(count for _, count in requests)
        config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(generation_config=config) as manager:
            numbers = [manager.add_request(prompt, max_new_tokens=count) for prompt, count in requests]
            deadline = time.perf_counter() + limit_s
            while len(answers) < len(requests) and manager.is_running():
                if time.perf_counter() > deadline:
                    raise TimeoutError
                result = manager.get_result(timeout=1.0)
                if result is not None and result.is_finished():
                    answers[result.request_id] = list(result.generated_tokens)
        return [answers.get(number, []) for number in numbers]

    return serve


def _transformers_static(spec: BenchSpec) -> RunRequests:
    model = transformers_model(spec)

    def serve(requests: Requests) -> list[list[int]]:
        answers: list[list[int]] = []
        for begin in range(0, len(requests), _STATIC_BATCH):
            batch = requests[begin : begin + _STATIC_BATCH]
            tokens, mask = padded_prompts([ids for ids, _ in batch], spec.device)
            count = max(count for _, count in batch)
            lengths = {"max_new_tokens": count, "min_new_tokens": count}
            made = model.generate(tokens, attention_mask=mask, **lengths, do_sample=False, pad_token_id=0)
            answers += [row[tokens.shape[1] :][:wanted].tolist() for row, (_, wanted) in zip(made, batch)]
        return answers

    return serve
