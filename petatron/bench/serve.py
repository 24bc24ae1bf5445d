"""`petatron bench serve`: the cost of HTTP in tokens per second and time to the first token.

The same requests (random ids, greedy, answers of several lengths) go to an engine in this process and, over loopback, to `petatron
serve` with its own processes; both have the same pages and batch, and no prefix cache, so that repeated rounds compute everything again.
They take turns, and medians count. The clients are raw asyncio protocols (`serving/http_clients.py`) in this process, whose engine is
idle meanwhile; the table says how much of a core they took.

The first token is measured for one client alone, and then with requests that arrive at random (Poisson) times at half the rate at which
all clients together were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from petatron.base.errors import ConfigError, LaunchError, Problem, raise_problems
from petatron.base.log import get_logger
from petatron.bench import BenchResult
from petatron.bench.arguments import SERVED_PRESET, count_problems
from petatron.bench.measure.device_memory import free_cached_memory
from petatron.bench.measure.timing import alternating_orders
from petatron.bench.peers import BenchSpec
from petatron.bench.peers.bench_workload import bench_spec
from petatron.bench.peers.generation_models import build_weights
from petatron.bench.serving.http_clients import BenchRequest, HttpClients
from petatron.config.flags.parse_command_line import FROM_FLAG
from petatron.config.required_settings import known_vocab_size
from petatron.data.tokenizer import HuggingFaceTokenizer
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.pretrained.detect_model_format import find_model
from petatron.serve.open_engine import model_settings, open_engine
from petatron.train.custom_loop import save_checkpoint

ENGINE, STREAMED, PLAIN = "engine alone", "HTTP, streamed", "HTTP, plain"
_PAGE_SIZE, _OUTSIDE_VOCAB = 16, 128
_SERVER_PACKAGES = ("fastapi", "uvicorn")
_START_TIMEOUT_S, _END_TIMEOUT_S, _LOOK_S = 600.0, 30.0, 0.1
_ADDRESS = re.compile(r" at (http://\S+) ")
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Seconds to the first token: of one client alone, and with requests at half the saturating rate."""

    alone_s: Sequence[float]
    half_load_s: Sequence[float]
    half_rate_per_s: float

    @property
    def ratio(self) -> float:
        """The p95 at half load over the p95 alone."""
        return percentile(self.half_load_s, 95) / percentile(self.alone_s, 95)


def run(args: argparse.Namespace, flags: Sequence[str]) -> BenchResult:
    """Measures a running server; or the engine alone and a server, on the model that the flags name."""
    raise_problems(_problems(args, flags))
    if args.url:
        return _result(args, _measure(args, args.url, vocab_size=_OUTSIDE_VOCAB, engine=None))
    with ExitStack() as stack:
        checkpoint, flags = _checkpoint(flags, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        options = _engine_options(args)
        _log.info("opening the engine")
        settings = model_settings(checkpoint, flags, options=options)
        if settings.num_ranks > 1:
            rule = f"asks for {settings.num_ranks} ranks, and the engine alone is measured on one"
            raise ConfigError([Problem(" ".join(flags), "", rule, "Start the server by itself, and give its --url.")])
        engine = open_engine(settings).engine
        _log.info("starting the server")
        url = stack.enter_context(server_process(str(checkpoint), [*_server_flags(options), *flags]))
        return _result(args, _measure(args, url, vocab_size=engine.vocab_size, engine=engine))


def _problems(args: argparse.Namespace, flags: Sequence[str]) -> Iterator[Problem]:
    yield from count_problems("serve", args)
    if args.url and flags:
        fix = "Leave it out, or leave out --url."
        yield Problem(" ".join(flags), "", "has no effect on a server that runs already (--url)", fix)
    if args.api_key_file and not args.url:
        yield Problem("--api-key-file", "", "is for a server that runs already", "Give its --url too.")
    missing = [] if args.url else [name for name in _SERVER_PACKAGES if find_spec(name) is None]
    if missing:
        fix = "Install them: pip install 'petatron[serve]'; or give the --url of a server."
        yield Problem("bench serve", "", f"starts a server, which needs {' and '.join(missing)}", fix)


def _checkpoint(flags: Sequence[str], scratch: Path) -> tuple[Path, list[str]]:
    """Returns the named checkpoint, or one of random weights, and the flags to serve it with."""
    if list(flags[:1]) == [FROM_FLAG]:
        return find_model(flags[1]), list(flags[2:])
    if list(flags[:1]) == ["--preset"] and len(Path(flags[1]).parts) > 1:
        find_model(flags[1])  # no preset has such a name: says what a checkpoint is
    named = any(flag.partition("=")[0] in ("--preset", "--config") for flag in flags)
    spec = bench_spec([*([] if named else ["--preset", SERVED_PRESET]), *flags])
    _log.info("saving random weights")
    save_random_checkpoint(spec, scratch / "run")
    return scratch / "run", ["--device", spec.device.type]


def save_random_checkpoint(spec: BenchSpec, folder: Path) -> None:
    """Saves the initial weights of a run in its precision, as step 1, with a tokenizer of as many ids as its vocabulary has."""
    tokenizer = word_tokenizer(known_vocab_size(spec.run.model), folder / "tokenizer.json")
    model = build_weights(spec)
    save_checkpoint(str(folder), step=1, model=model, random_states=False, tokenizer=tokenizer)
    del model
    free_cached_memory(spec.device)


def word_tokenizer(vocab_size: int, path: Path) -> HuggingFaceTokenizer:
    """Returns a tokenizer whose ids are whole words, so that every streamed token is an event."""
    fast = FastTokenizer(models.BPE(vocab={f"Ġw{number}": number for number in range(vocab_size)}, merges=[]))
    fast.decoder = decoders.ByteLevel()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fast.to_str(), encoding="utf-8")
    return HuggingFaceTokenizer(path)


def _engine_options(args: argparse.Namespace) -> EngineOptions:
    length = args.prompt_tokens + args.new_tokens
    pages = {"page_size": _PAGE_SIZE, "num_pages": args.clients * -(-length // _PAGE_SIZE)}
    return EngineOptions(**pages, max_sequences=args.clients, max_length=length, prefix_caching=False)


def _server_flags(options: EngineOptions) -> list[str]:
    values = {
        "--num-pages": options.num_pages,
        "--max-sequences": options.max_sequences,
        "--max-length": options.max_length,
        "--max-step-tokens": options.max_step_tokens,
        "--max-open": 4096,  # of random arrivals any number may be open
        "--max-connections": 4096,
    }
    return [*(text for flag, value in values.items() for text in (flag, str(value))), "--no-prefix-caching"]


def make_requests(count: int, *, prompt_tokens: int, new_tokens: int, vocab_size: int) -> list[BenchRequest]:
    """Returns prompts of random ids, and answers of half to all of the new tokens."""
    chance, fewest = random.Random(0), -(-new_tokens // 2)
    return [
        BenchRequest([chance.randrange(vocab_size) for _ in range(prompt_tokens)], chance.randint(fewest, new_tokens))
        for _ in range(count)
    ]


@dataclass(frozen=True, slots=True)
class ServeMeasurements:
    """Seconds of each round by side, the CPU seconds of the clients in them, and times to the first token."""

    requests: Sequence[BenchRequest]
    seconds: dict[str, list[float]]
    client_cpu_s: dict[str, list[float]]
    first_token: FirstTokenTimes

    @property
    def tokens(self) -> int:
        return sum(request.new_tokens for request in self.requests)

    def tokens_per_s(self, side: str) -> float:
        return self.tokens / statistics.median(self.seconds[side])


def _measure(args: argparse.Namespace, url: str, *, vocab_size: int, engine: Engine | None) -> ServeMeasurements:
    lengths = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    requests = make_requests(args.clients * args.requests, **lengths, vocab_size=vocab_size)

    async def measure() -> ServeMeasurements:
        clients = HttpClients(url, api_key=_api_key(args))
        try:
            seconds, cpu = await _rounds(args, clients, requests, engine)
            _log.info("measuring the time to the first token")
            rate = len(requests) / statistics.median(seconds[STREAMED])
            first = await _first_tokens(args, clients, requests, half_rate_per_s=rate / 2)
            return ServeMeasurements(requests, seconds, cpu, first)
        finally:
            clients.close()

    return asyncio.run(measure())


async def _rounds(
    args: argparse.Namespace, clients: HttpClients, requests: Sequence[BenchRequest], engine: Engine | None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    sides = [*([ENGINE] if engine is not None else []), STREAMED, PLAIN]
    seconds, cpu = ({side: list[float]() for side in sides} for _ in range(2))
    rounds = list(alternating_orders(sides, rounds=args.repeat))
    _log.info("timing %d rounds of %d requests each: %s", len(rounds), len(requests), ", ".join(sides))
    for number, order in enumerate([sides, *rounds]):  # the first one warms up
        for side in order:
            used, took = time.process_time(), 0.0
            if side == ENGINE:
                assert engine is not None
                took = _engine_seconds(engine, requests)
            else:
                took, answers = await clients.ask_all(requests, clients=args.clients, stream=side == STREAMED)
                assert sum(answer.tokens for answer in answers) == sum(request.new_tokens for request in requests)
            if number:
                seconds[side].append(took)
                cpu[side].append(time.process_time() - used)
    return seconds, cpu


def _engine_seconds(engine: Engine, requests: Sequence[BenchRequest]) -> float:
    """Runs the requests in an engine, as many at once as clients send."""
    began = time.perf_counter()
    sampling = (SamplingParams(max_new_tokens=request.new_tokens, temperature=0.0) for request in requests)
    numbers = [engine.submit(request.prompt_ids, params) for request, params in zip(requests, sampling)]
    while engine.has_work:
        engine.step()
    took = time.perf_counter() - began
    assert sum(len(engine.take(number).ids) for number in numbers) == sum(request.new_tokens for request in requests)
    return took


async def _first_tokens(
    args: argparse.Namespace, clients: HttpClients, requests: Sequence[BenchRequest], *, half_rate_per_s: float
) -> FirstTokenTimes:
    """Measures half of the unloaded requests before the load and half after it, since the machine's speed may drift."""
    wanted = [requests[number % len(requests)] for number in range(args.first_tokens)]
    half = -(-len(wanted) // 2)
    _, before = await clients.ask_all(wanted[:half], clients=1, stream=True)
    loaded = await clients.ask_at_random_times(wanted, per_s=half_rate_per_s, seed=1)
    _, after = await clients.ask_all(wanted[half:], clients=1, stream=True)
    alone = [answer.first_token_s for answer in (*before, *after)]
    return FirstTokenTimes(alone, [answer.first_token_s for answer in loaded], half_rate_per_s)


def _api_key(args: argparse.Namespace) -> str | None:
    if args.api_key_file is None:
        return None
    try:
        return args.api_key_file.read_text().split()[0]
    except (OSError, ValueError, IndexError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or 'it has no key'}"
        problem = Problem("--api-key-file", str(args.api_key_file), rule, "Give a file with a key.")
        raise ConfigError([problem]) from error


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that `percent` of the values do not exceed.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile([3.0, 1.0, 2.0, 4.0], 95)
    (2.0, 4.0)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _latency_text(times_ms: Sequence[float]) -> str:
    return f"median {statistics.median(times_ms):.1f} ms, p95 {percentile(times_ms, 95):.1f} ms"


def _result(args: argparse.Namespace, measured: ServeMeasurements) -> BenchResult:
    first = measured.first_token
    alone_ms, half_ms = ([1e3 * value for value in values] for values in (first.alone_s, first.half_load_s))
    answers = f"{-(-args.new_tokens // 2)} to {args.new_tokens} new ones, greedy"
    rows = [("requests", f"{len(measured.requests)} of {args.prompt_tokens} tokens, {answers}")]
    speeds = {side: measured.tokens_per_s(side) for side in measured.seconds}
    ratios: dict[str, float] = {}
    for side, speed in speeds.items():
        if side == ENGINE:
            rows.append((side, f"{speed:,.0f} tok/s, {args.clients} sequences at once"))
            continue
        text = f"{speed:,.0f} tok/s, {args.clients} clients"
        if ENGINE in speeds:
            ratios[side] = statistics.median(a / b for a, b in zip(measured.seconds[ENGINE], measured.seconds[side]))
            text += f": {ratios[side]:.2f} of the engine alone"
        rows.append((side, text))
    load = f" at {first.half_rate_per_s:.1f} requests/s: {first.ratio:.2f} of the p95 alone"
    rows += [("first token, alone", _latency_text(alone_ms)), ("first token, half load", _latency_text(half_ms) + load)]
    cpu_s = {side: sum(seconds) for side, seconds in measured.client_cpu_s.items() if side != ENGINE}
    shares = {side: seconds / sum(measured.seconds[side]) for side, seconds in cpu_s.items()}
    rows.append(("clients", ", ".join(f"{share:.0%} of a core ({side})" for side, share in shares.items())))
    values: dict[str, object] = {
        "seconds": measured.seconds,
        "tokens": measured.tokens,
        "tokens_per_s": speeds,
        "ratio": ratios,
        "first_token_alone_ms": alone_ms,
        "first_token_half_load_ms": half_ms,
        "first_token_ratio": first.ratio,
        "half_load_requests_per_s": first.half_rate_per_s,
        "client_core_share": shares,
    }
    return BenchResult(tuple(rows), values)


@contextmanager
def server_process(checkpoint: str, flags: Sequence[str], *, timeout_s: float = _START_TIMEOUT_S) -> Iterator[str]:
    """Starts a server and yields its address; `LaunchError` with the end of its output if it does not start."""
    command = [sys.executable, "-m", "petatron", "serve", checkpoint, "--host", "127.0.0.1", "--port", "0", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            end = time.monotonic() + timeout_s
            while (address := _ADDRESS.search(_text(log))) is None:
                if process.poll() is not None or time.monotonic() > end:
                    why = "has ended" if process.poll() is not None else f"has not started within {timeout_s:.0f} s"
                    raise LaunchError(f"The server {why}. It said: {_text(log)[-2000:].strip() or 'nothing'}")
                time.sleep(_LOOK_S)
            yield address[1]
        finally:
            process.terminate()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _text(log) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")
