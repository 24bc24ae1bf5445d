"""The generation engine: requests go in, steps are run, events come out.

Every rank has an engine with the same requests and the same schedule; only what enters (requests and cancellations, at rank 0) and what the
last pipeline stages sample is communicated, once per step each. A data-parallel replica has its own pages and serves every dp-th
request; replicas step together.

    engine = Engine(model, tokenizer)
    request = engine.submit(tokenizer.encode("Once"), SamplingParams(max_new_tokens=20))
    while engine.has_work:
        for event in engine.step():
            print(event.text, end="")
    answer = engine.take(request)

Rank 0 does that; the other ranks call `follow`, which returns when rank 0 closes its engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from petatron.config.required_settings import known_vocab_size
from petatron.data.tokenizer import Tokenizer
from petatron.infer.check_request import check_request
from petatron.infer.constrained_decoding import ConstraintCompiler
from petatron.infer.decoder_start import decoder_start_id
from petatron.infer.draft.speculative_decoding import Drafter
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion, EngineStats, TokenEvent
from petatron.infer.exact_options import exact_options
from petatron.infer.prompt_images import PromptImages, check_prompt_images
from petatron.infer.running_requests import RunningRequests
from petatron.infer.sampling_params import Constraint, SamplingParams
from petatron.infer.scheduler import Scheduler
from petatron.infer.served_adapters import ServedAdapters, check_adapter
from petatron.infer.step.generation_weights import GenerationWeights
from petatron.infer.step.kv_cache_and_states import any_layer_has, choose_cache_size
from petatron.infer.step.packed_step import CacheLocations, ScheduledTokens, StepOutputs, pack_rows
from petatron.infer.step.run_model_step import ModelSteps, shares_experts
from petatron.infer.step.step_images import step_images
from petatron.infer.step.step_result import (
    PendingDraws,
    StepLayout,
    compute_result,
    draw_ids,
    exchange_results,
    needs_host,
)
from petatron.layers.spec.generation_state import PagedState, RecurrentState
from petatron.mesh import collectives
from petatron.models.vision_language_spec import VisionLanguageSpec
from petatron.parallel.parallel_model import ParallelModel
from petatron.validate.layer_capabilities import check_generation

_PREPARING_S = 0.02


@dataclass(slots=True, eq=False)
class _InFlightStep:
    """A step that has been started. draws: if new ids are all it is about, and come from the device."""

    layouts: Sequence[StepLayout]
    outputs: StepOutputs | None
    draws: PendingDraws | None = None


class Engine:
    """Continues any number of prompts at once. Not thread-safe: one thread drives it.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> engine = Engine(petatron.build_model(run, petatron.launch(run)))
    >>> [[answer]] = engine.complete([[1, 2, 3]], SamplingParams(max_new_tokens=5, temperature=0.0))
    >>> len(answer.ids), answer.finish_reason
    (5, 'length')
    """

    reads_only: str | None = None

    def __init__(
        self, model: ParallelModel, tokenizer: Tokenizer | None = None, options: EngineOptions | None = None
    ) -> None:
        self.options = exact_options(options or EngineOptions(), model)
        self._adapters = None if not self.options.adapters else ServedAdapters(model, self.options.adapters)
        if self._adapters is not None:
            self.options = self._adapters.checked_options(self.options)
        check_generation(
            model.spec,
            model.mesh.layout,
            virtual_stages=model.plan.virtual,
            fully_sharded=model.fully_sharded,
            fp8_weights=self.options.fp8_weights,
            speculative_tokens=self.options.speculative_tokens,
        )
        self.tokenizer = tokenizer
        self.vocab_size = known_vocab_size(model.spec.config)
        positions = model.spec.max_positions
        self.max_length = min(self.options.max_length or positions + 1, positions + 1)
        """The last new token is never an input, so it needs no position."""
        if not any_layer_has(model, PagedState):  # pages hold nothing then, and one is enough for a sequence
            self.options = replace(self.options, page_size=self.max_length, num_pages=None)
        self._mesh = model.mesh
        self._weights = GenerationWeights(model, fp8=self.options.fp8_weights, copies=self.options.copied_weights)
        cache = choose_cache_size(model, self.options, max_length=self.max_length)
        self._steps = ModelSteps(model, self.options, cache, max_length=self.max_length)
        self._pack = partial(
            pack_rows,
            page_size=self.options.page_size,
            multiple=model.mesh.tp.size if model.sequence_parallel else 1,
        )
        num_drafts = self.options.speculative_tokens
        self._drafter = Drafter(model, self._steps, self._pack, num_drafts=num_drafts) if num_drafts else None
        # A page says nothing of the recurrent state after its tokens.
        caching = self.options.prefix_caching and not any_layer_has(model, RecurrentState)
        context = model.spec.original_context
        self._schedulers = [
            Scheduler(self.options, cache, prefix_caching=caching, original_context=context)
            for _ in range(model.mesh.dp.size)
        ]
        self.source_length = model.spec.source_length
        self._config = model.spec.config
        self.image_config = model.spec.config if isinstance(model.spec, VisionLanguageSpec) else None
        start = None if self.source_length is None else decoder_start_id(tokenizer, self.options, self.vocab_size)
        self._hidden_size = self._config.hidden_size
        self._shares_experts = shares_experts(model)
        self._constraints = ConstraintCompiler(tokenizer, vocab_size=self.vocab_size)
        self._inbox: list[dict[str, Any]] = []
        self._preparing: dict[int, tuple[Future[Any], dict[str, Any]]] = {}
        self._requests = RunningRequests(
            self._schedulers,
            self._constraints,
            tokenizer=tokenizer,
            max_length=self.max_length,
            decoder_start=start,
            image_config=self.image_config,
        )
        self._next_request = 0
        self.between_steps: Callable[[], None] | None = None
        """Called by every rank before each step; it may change the weights, and then calls `forget_prefixes`."""
        self._closed = False
        self._in_flight: _InFlightStep | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._inbox or self._preparing) or any(scheduler.has_work for scheduler in self._schedulers)

    @property
    def num_ranks(self) -> int:
        return self._mesh.world.size

    @property
    def num_replicas(self) -> int:
        return len(self._schedulers)

    @property
    def stats(self) -> EngineStats:
        schedulers = self._schedulers
        return EngineStats(
            waiting=sum(len(scheduler.waiting) for scheduler in schedulers)
            + sum(message["kind"] == "submit" for message in self._inbox)
            + len(self._preparing),
            running=sum(len(scheduler.running) for scheduler in schedulers),
            pages_used=sum(scheduler.pool.num_used for scheduler in schedulers),
            pages_total=sum(scheduler.pool.num_pages for scheduler in schedulers),
            preemptions=sum(scheduler.num_preemptions for scheduler in schedulers),
            computed_prompt_tokens=sum(scheduler.num_computed_prompt_tokens for scheduler in schedulers),
            **self._requests.counts,
        )

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        images: PromptImages | None = None,
        compiled: bool = True,
    ) -> int:
        """Takes a request at rank 0 and returns its number; `DataError` if the model cannot serve it.

        images: those of a prompt that has an image token in the place of each of their vectors.

        compiled: waits until its constraint is. Otherwise that happens beside the steps of other requests, on every rank, and a
        constraint that cannot be compiled is what `take` raises.
        """
        check_request(prompt_ids, params, self)
        check_prompt_images(prompt_ids, images, self._config, pipeline_stages=self._mesh.pp.size)
        check_adapter(params.adapter, () if self._adapters is None else self._adapters.names)
        if params.constraint is not None and compiled:
            self._constraints.check(params.constraint)
        request = self._next_request
        self._next_request += 1
        message = {"kind": "submit", "request": request, "prompt": list(prompt_ids), "params": asdict(params)}
        if images is not None:
            message["images"] = images.to_json()
        if params.constraint is None or compiled:
            self._inbox.append(message)
            return request
        self._preparing[request] = self._constraints.prepare(params.constraint), message
        if self.num_ranks > 1:
            self._inbox.append({"kind": "prepare", "constraint": asdict(params.constraint)})
        return request

    def cancel(self, request: int) -> None:
        """Ends a request with the next step; nothing happens if it has ended."""
        if (preparing := self._preparing.pop(request, None)) is not None:
            self._inbox.append({**preparing[1], "params": {**preparing[1]["params"], "constraint": None}})
        self._inbox.append({"kind": "cancel", "request": request})

    def take(self, request: int) -> Completion:
        """Returns the answer of a request that has ended, and forgets it; raises the error of one that failed."""
        return self._requests.take(request)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | Sequence[Sequence[SamplingParams]],
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[list[Completion]]:
        """Returns the answers of each prompt: one for each of the parameters, which may be one, or each prompt's own. At rank 0."""
        requests = [
            [self.submit(prompt, sampling) for sampling in of_prompt]
            for prompt, of_prompt in zip(prompts, _params_of_prompts(params, len(prompts)), strict=True)
        ]
        while self.has_work:
            for event in self.step():
                if on_event is not None:
                    on_event(event)
        return [[self.take(request) for request in row] for row in requests]

    def complete_on_all_ranks(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | Sequence[Sequence[SamplingParams]],
    ) -> list[list[Completion]]:
        """`complete`, called by every rank with the same arguments, and with the same answers on each."""
        if self._mesh.world.rank == 0:
            return self.complete(prompts, params)
        counts = [len(of_prompt) for of_prompt in _params_of_prompts(params, len(prompts))]
        left, first = sum(counts), self._next_request
        self._next_request += left
        while left:
            left -= sum(event.finish_reason is not None for event in self.step())
        answers = iter([self.take(number) for number in range(first, self._next_request)])
        return [list(islice(answers, count)) for count in counts]

    def follow(self) -> None:
        """Takes part in the steps of rank 0 until it closes its engine."""
        while not self._closed:
            for event in self.step():
                if event.finish_reason is not None:
                    self._requests.forget(event.request)

    def capture_graphs(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures every CUDA graph of steps beforehand, so that no request waits for it; at every rank.

        Called with how many of how many are captured; nothing happens where steps are no graphs.
        """
        self._steps.capture_graphs(progress)

    def close(self) -> None:
        """Ends the engines of all ranks; at rank 0."""
        if not self._closed and self._mesh.world.size > 1:
            self._inbox.append({"kind": "close"})
            self._exchange_inbox()
        self.release()

    def release(self) -> None:
        """Ends this rank's engine, and frees its pages and CUDA graphs: NCCL cannot end while a graph has its collectives."""
        self._closed, self._in_flight = True, None
        self._steps.release()
        self._weights.release()
        if self._adapters is not None:
            self._adapters.release()

    def pause(self) -> None:
        """Lets the model train until `resume`: the memory of a releasable cache is given back, and what was computed from the weights is
        forgotten; CUDA graphs stay. At every rank, while nothing runs.
        """
        assert not self.has_work, "an engine that pauses has no requests"
        self._in_flight = None
        self.forget_prefixes()
        self._weights.pause()
        self._steps.release_cache()

    def resume(self) -> None:
        """Goes on with the weights of now; `torch.OutOfMemoryError` if the memory of the cache is not free: it pauses still."""
        self._steps.take_cache()
        self._weights.resume()

    def forget_prefixes(self) -> None:
        """Forgets all that was computed from the weights: they have changed. At every rank, between two steps.

        What runs goes on with its pages of former weights.
        """
        for scheduler in self._schedulers:
            scheduler.pool.forget_prefixes()
        self._weights.forget_copies()
        self._steps.forget_recordings()

    def step(self) -> list[TokenEvent]:
        """Runs one step of all requests; returns what became known.

        On a GPU the step after it is already started where its tokens do not matter for that.
        """
        if self.between_steps is not None:
            self.between_steps()
        if (
            self._preparing
        ):  # lets requests in whose constraints are compiled; waits a little where there is no other work
            if not self._inbox and not any(scheduler.has_work for scheduler in self._schedulers):
                futures = [future for future, _ in self._preparing.values()]
                wait(futures, timeout=_PREPARING_S, return_when=FIRST_COMPLETED)
            for request in [request for request, (future, _) in self._preparing.items() if future.done()]:
                self._inbox.append(self._preparing.pop(request)[1])
        events = self._exchange_inbox()
        if self._closed or not any(scheduler.has_work for scheduler in self._schedulers):
            self._in_flight = None
            return events
        step = self._in_flight or self._start_step()
        self._in_flight = self._start_ahead(step)
        return events + self._finish_step(step)

    def _start_step(self) -> _InFlightStep:
        scheduled = [scheduler.schedule() for scheduler in self._schedulers]
        layouts = [StepLayout.of(work, hidden_size=self._hidden_size) for work in scheduled]
        layout_here = layouts[self._mesh.dp.rank]
        # Ranks that share experts exchange as many rows each.
        least = max(replica.num_tokens for replica in layouts) if self._shares_experts else 1
        rows = [ScheduledTokens.of(work) for work in layout_here.scheduled]
        packed = self._pack(rows, layout_here.logit_rows, least=least)
        if self._adapters is not None:
            works = zip(layout_here.scheduled, rows, strict=True)
            self._adapters.route((work.sequence.params.adapter, len(row.tokens)) for work, row in works)
        with self._weights.host_gemms.step():
            if self.source_length is not None:
                self._steps.encode_sources([work.sequence for work in layout_here.scheduled if work.start == 0])
            images = None
            if self.image_config is not None:
                self._steps.encode_images([work.sequence for work in layout_here.scheduled])
                images = step_images(layout_here.scheduled, packed, self._steps.device)
            outputs = self._steps.run(packed, images)
        step = _InFlightStep(layouts, outputs)
        sampled = layout_here.sampled_rows(self._steps.device)
        alone = self._mesh.pp.size == 1 and self._mesh.dp.size == 1 and self._drafter is None
        if alone and self._steps.runs_as_graph(packed) and not any(map(needs_host, sampled)):
            self._draw(step, pending=0)
        return step

    def _start_ahead(self, step: _InFlightStep) -> _InFlightStep | None:
        """Starts the step after one whose new ids are still on the device."""
        if step.draws is None:
            return None
        [layout], [scheduler] = step.layouts, self._schedulers
        following = scheduler.schedule_ahead(layout.scheduled)
        if following is None:
            return None
        ahead, sources = following
        next_layout = StepLayout(ahead, [[0]] * len(ahead), [1] * len(ahead), self._hidden_size)
        positions = np.array(
            [~work.start if work.sequence.is_long else work.start + work.sequence.position_offset for work in ahead]
        )
        rows = CacheLocations([work.sequence.pages for work in ahead], [work.sequence.slot for work in ahead])
        started = _InFlightStep([next_layout], self._steps.run_graph(sources, positions, rows, sources))
        self._draw(started, pending=1)
        return started

    def _draw(self, step: _InFlightStep, *, pending: int) -> None:
        assert step.outputs is not None and self._steps.graphs is not None
        step.draws = draw_ids(self._steps.graphs.ids, step.outputs[0], step.layouts[0], pending=pending)

    def _finish_step(self, step: _InFlightStep) -> list[TokenEvent]:
        """Waits for what a step found, and adds it to its sequences."""
        layout = step.layouts[self._mesh.dp.rank]
        events: list[TokenEvent] = []
        if step.draws is not None:
            [scheduler] = self._schedulers
            for work, (token, logprob) in zip(layout.scheduled, step.draws.wait()):
                if work.sequence.completion.finish_reason is None:  # else it ended while this step ran
                    scheduler.advance(work)
                    try:
                        events.append(self._requests.add_token(scheduler, work.sequence, token, logprob))
                    except Exception as error:
                        events.append(self._requests.fail(work.sequence.request, error))
            return events
        result = None if step.outputs is None else compute_result(layout, *step.outputs)
        for scheduler, results in zip(self._schedulers, exchange_results(self._mesh, step.layouts, result)):
            for result in results:
                if result.work.sequence.completion.finish_reason is None:
                    scheduler.advance(result.work, result.num_accepted)
                    try:
                        events += self._requests.add_result(scheduler, result, speculative=self._drafter is not None)
                    except Exception as error:
                        events.append(self._requests.fail(result.work.sequence.request, error))
        if self._drafter is not None:
            with self._weights.host_gemms.step():
                self._drafter.draft(step.layouts, self._schedulers, step.outputs)
        return events

    def _exchange_inbox(self) -> list[TokenEvent]:
        """Takes what entered at rank 0 since the last step; the bytes' number first, since mostly there are none."""
        control, messages = self._mesh.control, self._inbox
        self._inbox = []
        if control.size > 1:
            text = json.dumps(messages).encode() if messages else b""
            size = collectives.broadcast(torch.tensor([len(text)]), control)
            if int(size):
                content = torch.empty(int(size), dtype=torch.uint8)
                if control.rank == 0:
                    content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
                messages = json.loads(collectives.broadcast(content, control).numpy().tobytes())
        events: list[TokenEvent] = []
        for message in messages:
            if message["kind"] == "submit":
                try:
                    params = SamplingParams.from_json(message["params"])
                    images = PromptImages.from_json(message["images"]) if "images" in message else None
                    self._requests.start(message["request"], message["prompt"], params, images)
                except Exception as error:
                    events.append(self._requests.fail(message["request"], error))
            elif message["kind"] == "prepare":
                self._constraints.prepare(Constraint(**message["constraint"]))
            elif message["kind"] == "cancel":
                events += self._requests.cancel(message["request"])
            else:
                self.release()
        return events


def _params_of_prompts(
    params: SamplingParams | Sequence[SamplingParams] | Sequence[Sequence[SamplingParams]], count: int
) -> list[list[SamplingParams]]:
    """Returns the parameters of each prompt: one, several for all, or each prompt's own."""
    if isinstance(params, SamplingParams):
        return [[params]] * count
    shared = [sampling for sampling in params if isinstance(sampling, SamplingParams)]
    if shared or not params:
        return [shared] * count
    return [list(of_prompt) for of_prompt in params if not isinstance(of_prompt, SamplingParams)]
