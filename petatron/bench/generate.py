"""`petatron bench generate`: the first token and the tokens after it, ours against transformers' `generate`, in one run.

One prompt, greedy, the same weights on both sides in the run's precision. The time of one new token is the prefill; the cost of
each further token is the difference to a longer continuation. Sides alternate in both orders, and medians count. Both ignore the
end-of-document token, so both generate the same number of tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from petatron.base.errors import ConfigError
from petatron.base.log import get_logger
from petatron.bench.measure.arguments import minimum_problems
from petatron.bench.measure.progress import ProgressLog
from petatron.bench.peers import OURS
from petatron.config.required_settings import known_vocab_size

if TYPE_CHECKING:
    from petatron.bench.peers import BenchSpec
    from petatron.bench.result import BenchResult

TAKES_RUN_FLAGS = True
_log = get_logger(__name__)
GenerateFn = Callable[[int], Sequence[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Every other word is the model's own: a preset's name, --seq-length, --device, --bf16 ..."
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="length of the prompt (default: 64)")
    parser.add_argument(
        "--new-tokens", type=int, default=32, metavar="N", help="tokens to make, at least 2 (default: 32)"
    )
    parser.add_argument(
        "--repeat", type=int, default=4, metavar="N", help="rounds, made even against a peer (default: 4)"
    )
    parser.add_argument("--against", choices=("hf",), help="transformers, if it is installed")


def run(args: argparse.Namespace, flags: Sequence[str]) -> BenchResult:
    """Alternate, and compare what both wrote: at the same weights it is the same, but for ties."""
    from petatron.bench.measure.timing import alternating_orders, elapsed_seconds
    from petatron.bench.peers.bench_model import bench_spec
    from petatron.bench.result import BenchResult

    spec = bench_spec(flags)
    _check(args, spec)
    _log.info("building %s", OURS)
    sides: dict[str, GenerateFn] = {OURS: _ours(args, spec)}
    if args.against:
        _log.info("building hf")
        sides["hf"] = _transformers(args, spec)
    texts = {name: list(side(args.new_tokens)) for name, side in sides.items()}  # also warms up
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    rounds, news = list(alternating_orders(list(sides), rounds=args.repeat)), ProgressLog()
    _log.info("timing %d rounds of %d tokens of each: %s", len(rounds), args.new_tokens, ", ".join(sides))
    for number, order in enumerate(rounds):
        news(f"timed {number} of {len(rounds)} rounds")
        for name in order:
            # Both sides return tokens to the host, so there is nothing left to wait for.
            one, all_of_them = (elapsed_seconds(lambda n=n, name=name: sides[name](n)) for n in (1, args.new_tokens))
            times[name].append((one, (all_of_them - one) / (args.new_tokens - 1)))
    medians = {name: [statistics.median(column) for column in zip(*pairs)] for name, pairs in times.items()}
    rows = [("prompt", f"{args.prompt_tokens} tokens, {args.new_tokens} new ones, greedy, one text at a time")]
    for name, (first, each) in medians.items():
        rows.append(
            (name, f"prompt {first * 1e3:.1f} ms ({args.prompt_tokens / first:,.0f} tok/s), then {1 / each:,.1f} tok/s")
        )
    values: dict[str, object] = {"seconds": times, "first_token_s": {}, "tokens_per_s": {}}
    values["first_token_s"] = {name: first for name, (first, _) in medians.items()}
    values["tokens_per_s"] = {name: 1 / each for name, (_, each) in medians.items()}
    if args.against:
        ratio, same = medians["hf"][1] / medians[OURS][1], _common_prefix_length(texts[OURS], texts["hf"])
        rows.append(
            ("speed / hf", f"{ratio:.2f}x after the prompt; the first {same} of {args.new_tokens} tokens are the same")
        )
        values |= {"ratio": ratio, "same_tokens": same}
    return BenchResult(tuple(rows), values)


def _check(args: argparse.Namespace, spec: BenchSpec) -> None:
    from petatron.bench.peers import problems

    least = {
        "--prompt-tokens": (args.prompt_tokens, 1),
        "--new-tokens": (args.new_tokens, 2),
        "--repeat": (args.repeat, 1),
    }
    found = [*minimum_problems(least), *(problems(args.against, spec) if args.against else ())]
    if found:
        raise ConfigError(found)


def _prompt(args: argparse.Namespace, spec: BenchSpec) -> list[int]:
    import torch

    return torch.randint(
        known_vocab_size(spec.run.model), (args.prompt_tokens,), generator=torch.Generator().manual_seed(0)
    ).tolist()


def _ours(args: argparse.Namespace, spec: BenchSpec) -> GenerateFn:
    from petatron.bench.peers.ours import load_initial_weights
    from petatron.infer.generate import generate
    from petatron.train.build_run import build_model, launch

    model = build_model(spec.run, launch(spec.run), init_weights=False)
    load_initial_weights(model)
    prompt = _prompt(args, spec)
    return lambda count: generate(model, prompt, max_new_tokens=count, temperature=0.0)


def _transformers(args: argparse.Namespace, spec: BenchSpec) -> GenerateFn:
    import torch

    from petatron.bench.peers.huggingface import build_model
    from petatron.optim.loss_scaler import compute_dtype

    model = build_model(spec.run, device=spec.device, dtype=compute_dtype(spec.run.precision)).eval()
    prompt = torch.tensor([_prompt(args, spec)], device=spec.device)

    def more(count: int) -> list[int]:
        made = model.generate(  # pyright: ignore[reportCallIssue]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return made[0, prompt.shape[1] :].tolist()

    return more


def _common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the common prefix.

    >>> _common_prefix_length([1, 2, 3], [1, 2, 4])
    2
    """
    same = [a == b for a, b in zip(first, second)]
    return same.index(False) if False in same else len(same)
