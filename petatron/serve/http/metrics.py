"""Counters in Prometheus' format. Each server has its own registry, so that several in one process do not meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from petatron.infer.engine_outputs import Completion
from petatron.serve.generation_handle import Generation

if TYPE_CHECKING:
    from petatron.serve.engine_thread import EngineThread

_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)


class ServerMetrics:
    """Observations of requests; the engine's own counts are read when somebody asks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        self.requests = counter("petatron_http_requests", "HTTP requests by route and status", ("route", "status"))
        text = "From acceptance of a sequence to its first token"
        self.first_token = histogram("petatron_time_to_first_token_seconds", text, buckets=_FIRST_TOKEN_BUCKETS_S)
        text = "Mean of a sequence, after its first token"
        self.token_time = histogram("petatron_time_per_output_token_seconds", text, buckets=_TOKEN_BUCKETS_S)
        self.swaps = counter("petatron_model_swaps", "Newer models loaded while serving")

    def observe(self, generation: Generation, completion: Completion) -> None:
        """Called once for each sequence, at its end: tokens are too many to be observed one by one."""
        first, last, count = generation.first_token_s, generation.finished_s, len(completion.ids)
        if first is None or last is None or not count:
            return
        self.first_token.observe(first - generation.submitted_s)
        if count > 1:
            self.token_time.observe((last - first) / (count - 1))

    def watch_engine(self, thread: EngineThread, model_step: Callable[[], int | None]) -> None:
        self.registry.register(_EngineCollector(thread, model_step))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, thread: EngineThread, model_step: Callable[[], int | None]) -> None:
        self._thread, self._model_step = thread, model_step
        self._before: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def collect(self) -> Iterable[Metric]:
        stats = self._thread.stats
        waiting = max(self._thread.num_open - stats.running, stats.waiting, 0)
        use = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        for name, help_text, value in (
            ("queue_length", "Sequences accepted and not yet running", waiting),
            ("running_sequences", "Sequences of the current batch", stats.running),
            ("cache_pages_used", "Pages of the key/value cache in use", stats.pages_used),
            ("cache_pages", "Pages of the key/value cache", stats.pages_total),
            ("cache_use_ratio", "Used share of the key/value cache", use),
            ("model_step", "Training step of the served model", self._model_step()),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"petatron_{name}", help_text, value)
        for name, help_text in (
            ("prompt_tokens", "Tokens of prompts"),
            ("computed_prompt_tokens", "Tokens of prompts that steps computed"),
            ("cached_prompt_tokens", "Tokens of prompts found in the prefix cache"),
            ("generated_tokens", "New tokens"),
            ("preemptions", "Sequences that lost their pages and were recomputed"),
            ("drafted_tokens", "Drafts of speculative decoding that were verified"),
            ("accepted_tokens", "Drafts of speculative decoding that were accepted"),
            ("speculative_decodes", "Decode steps of sequences with speculative decoding"),
        ):
            yield CounterMetricFamily(f"petatron_{name}", help_text, self._total(name, getattr(stats, name)))

    def _total(self, name: str, value: int) -> int:
        """Goes on counting where a new engine has begun at zero."""
        if value < self._last.get(name, 0):
            self._before[name] = self._before.get(name, 0) + self._last[name]
        self._last[name] = value
        return self._before.get(name, 0) + value
