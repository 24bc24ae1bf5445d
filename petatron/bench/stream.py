"""`petatron bench stream`: many requests of all lengths at once, ours against transformers, in one run.

Lengths of prompts and answers are drawn from one range, from 16 to 2,048 tokens. All requests arrive at once, and the time is that
until the last answer is whole; only tokens of answers count. Both sides are greedy, have the same weights and ignore the end of a
document. transformers batches continuously where its version can (`hf`), or takes the requests in static batches of 16, padded on the
left, each as long as its longest (`hf-static`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.log import get_logger
from petatron.bench.measure.arguments import minimum_problems, positive_problems
from petatron.bench.peers import OURS
from petatron.config.required_settings import known_vocab_size

if TYPE_CHECKING:
    from petatron.bench.peers import BenchSpec
    from petatron.bench.result import BenchResult

TAKES_RUN_FLAGS = True
_log = get_logger(__name__)
_STATIC_BATCH = 16
_STEP_TOKENS = 8192
Requests = Sequence[tuple[list[int], int]]
"""Prompts with the number of tokens to make."""
RunRequests = Callable[[Requests], Sequence[Sequence[int]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Every other word is the model's own: a preset's name, --seq-length, --device, --bf16 ..."
    parser.add_argument("--requests", type=int, default=256, metavar="N", help="requests at once (default: 256)")
    parser.add_argument("--shortest", type=int, default=16, metavar="N", help="of prompts and answers (default: 16)")
    parser.add_argument("--longest", type=int, default=2048, metavar="N", help="of prompts and answers (default: 2048)")
    parser.add_argument("--max-batch-size", type=int, default=256, metavar="N", help="that run at once (default: 256)")
    parser.add_argument(
        "--peer-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="after which transformers' continuous batching is given up, and its speed is a bound (default: 600)",
    )
    parser.add_argument("--fp8-weights", action="store_true", help="our weights are quantized to FP8")
    parser.add_argument(
        "--against", choices=("hf", "hf-static"), help="transformers' continuous batching, or its static batches of 16"
    )


def run(args: argparse.Namespace, flags: Sequence[str]) -> BenchResult:
    from petatron.bench.measure.timing import elapsed_seconds
    from petatron.bench.peers.bench_model import bench_precision_text, bench_spec
    from petatron.bench.result import BenchResult

    spec = bench_spec(flags)
    _check(args, spec)
    requests = draw_requests(args, vocab_size=known_vocab_size(spec.run.model))
    wanted = sum(count for _, count in requests)
    sides: dict[str, RunRequests] = {OURS: _ours(args, spec)}
    if args.against:
        sides[args.against] = (
            _transformers_static(spec) if args.against == "hf-static" else _transformers(spec, args.peer_seconds)
        )
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
        *(
            (
                name,
                f"{'below ' * (name in unfinished)}{wanted / taken:,.0f} new tok/s, {_time(name, taken, unfinished)}",
            )
            for name, taken in seconds.items()
        ),
    ]
    values: dict[str, object] = {"seconds": seconds, "new_tokens": wanted, "prompt_tokens": prompts}
    if args.against:
        ratio = seconds[args.against] / seconds[OURS]
        rows.append((f"speed / {args.against}", f"{'above ' * bool(unfinished)}{ratio:.2f}x"))
        values |= {"ratio": ratio, "unfinished": unfinished}
    return BenchResult(tuple(rows), values)


def _time(name: str, seconds: float, unfinished: Sequence[str]) -> str:
    return f"not ended after {seconds:.0f} s" if name in unfinished else f"{seconds:.1f} s"


def _check(args: argparse.Namespace, spec: BenchSpec) -> None:
    from petatron.bench.peers.huggingface import model_problems

    least = {name: (getattr(args, name[2:].replace("-", "_")), 1) for name in ("--requests", "--max-batch-size")}
    found = [*minimum_problems(least | {"--shortest": (args.shortest, 1), "--longest": (args.longest, args.shortest)})]
    found += positive_problems({"--peer-seconds": args.peer_seconds})
    positions = spec.run.model.max_position_embeddings
    if 2 * args.longest > positions:
        rule = f"makes sequences of up to {2 * args.longest}, and the model has {positions} positions"
        found.append(Problem("--longest", str(args.longest), rule, "Use less, or a longer --seq-length."))
    found += model_problems(spec) if args.against else ()
    if found:
        raise ConfigError(found)


def draw_requests(args: argparse.Namespace, *, vocab_size: int) -> Requests:
    """Draws prompts and lengths of answers, the same every time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(args.shortest, args.longest + 1, (args.requests, 2), generator=generator).tolist()
    return [(torch.randint(vocab_size, (prompt,), generator=generator).tolist(), new) for prompt, new in lengths]


def _ours(args: argparse.Namespace, spec: BenchSpec) -> RunRequests:
    from petatron.bench.peers.ours import load_initial_weights
    from petatron.infer.engine import Engine
    from petatron.infer.engine_options import EngineOptions
    from petatron.infer.sampling_params import SamplingParams
    from petatron.train.build_run import build_model, launch

    model = build_model(spec.run, launch(spec.run), init_weights=False, gradients=False)
    load_initial_weights(model)
    options = EngineOptions(
        max_sequences=args.max_batch_size,
        max_length=2 * args.longest,
        max_step_tokens=_STEP_TOKENS,
        prefix_caching=False,
        fp8_weights=args.fp8_weights,
    )

    engine = Engine(model, options=options)
    engine.capture_graphs()

    def serve(requests: Requests) -> list[list[int]]:
        numbers = [
            engine.submit(prompt, SamplingParams(max_new_tokens=count, temperature=0.0)) for prompt, count in requests
        ]
        while engine.has_work:
            engine.step()
        return [engine.take(number).ids for number in numbers]

    return serve


def _transformers(spec: BenchSpec, limit_s: float) -> RunRequests:
    from petatron.bench.peers.huggingface import build_model
    from petatron.optim.loss_scaler import compute_dtype

    model = build_model(spec.run, device=spec.device, dtype=compute_dtype(spec.run.precision)).eval()
    if not hasattr(model, "continuous_batching_context_manager"):
        raise DataError("This version of transformers has no continuous batching. Use --against hf-static.")

    def serve(requests: Requests) -> list[list[int]]:
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=max(count for _, count in requests), do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(generation_config=config) as manager:  # pyright: ignore[reportCallIssue]
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
    import torch

    from petatron.bench.peers.huggingface import build_model
    from petatron.optim.loss_scaler import compute_dtype

    model = build_model(spec.run, device=spec.device, dtype=compute_dtype(spec.run.precision)).eval()

    def serve(requests: Requests) -> list[list[int]]:
        answers: list[list[int]] = []
        for begin in range(0, len(requests), _STATIC_BATCH):
            batch = requests[begin : begin + _STATIC_BATCH]
            width, count = max(len(ids) for ids, _ in batch), max(count for _, count in batch)
            prompt = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in batch], device=spec.device)
            mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in batch], device=spec.device)
            made = model.generate(  # pyright: ignore[reportCallIssue]
                prompt,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            answers += [row[width : width + wanted].tolist() for row, (_, wanted) in zip(made, batch)]
        return answers

    return serve
