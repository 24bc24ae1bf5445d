"""The engine: a request's tokens are the model's own, whatever shares its batch, pages, chunks and prefixes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError, DataError
from petatron.data.tokenizer import ByteTokenizer
from petatron.infer import scheduler
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion, TokenEvent
from petatron.infer.sampling_params import PoolingName, SamplingParams
from petatron.models.decoder import Decoder
from tests.unit.infer.test_sample import LATENT, LATENT_YARN, POSITIONS, VOCAB, model_in

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=1)
WINDOW = "--fp64 --window-size 5"


@cache
def exact_model(flags: str = "--fp64"):
    return model_in(flags)


def whole_logprobs(ids: list[int], flags: str = "--fp64") -> torch.Tensor:
    decoder = exact_model(flags).module.eval()
    assert isinstance(decoder, Decoder)
    with torch.no_grad():
        return decoder.logits(torch.tensor([ids]))[0].log_softmax(-1)


def check_by_hand(answer: Completion, flags: str = "--fp64") -> None:
    """Every token is the most likely one, and every reported number that of the whole sequence without a cache."""
    ids = [*answer.prompt_ids, *answer.ids]
    logprobs = whole_logprobs(ids[:-1], flags)
    start = len(answer.prompt_ids) - 1
    assert logprobs[start:].argmax(-1).tolist() == answer.ids
    found = [*answer.prompt_logprobs, *answer.logprobs]
    assert [each.token for each in found] == ids[1:]
    for row, each in zip(logprobs, found, strict=True):
        assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-10)
        for token, logprob in each.top:
            assert logprob == pytest.approx(float(row[token]), abs=1e-10)
        assert [token for token, _ in each.top] == row.topk(len(each.top)).indices.tolist()


prompts = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=15), min_size=1, max_size=6)


@settings(max_examples=6, deadline=None)
@given(
    prompts=prompts,
    page_size=st.sampled_from([1, 3, 4, 16]),
    max_step_tokens=st.integers(1, 20),
    max_sequences=st.integers(1, 6),
    spare_pages=st.integers(0, 6),
    prefix_caching=st.booleans(),
    flags=st.sampled_from(["--fp64", WINDOW, f"--fp64 {LATENT}", f"{WINDOW} {LATENT_YARN}"]),
)
def test_nothing_but_the_request_decides_its_tokens(
    prompts: list[list[int]],
    page_size: int,
    max_step_tokens: int,
    max_sequences: int,
    spare_pages: int,
    prefix_caching: bool,
    flags: str,
):
    options = EngineOptions(
        page_size=page_size,
        num_pages=-(-(POSITIONS + 1) // page_size) + spare_pages,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
        prefix_caching=prefix_caching,
    )
    engine = Engine(exact_model(flags), options=options)
    for [answer] in engine.complete(prompts, GREEDY):
        check_by_hand(answer, flags)
    assert engine.stats.pages_used == 0 and engine.stats.running == 0


def drawn(prompts: list[list[int]], **options: object) -> list[list[list[int]]]:
    params = [SamplingParams(max_new_tokens=6, temperature=1.3, top_p=0.9, seed=5, sample=n) for n in range(2)]
    engine = Engine(exact_model(), options=EngineOptions(**options))  # type: ignore[arg-type]
    return [[answer.ids for answer in row] for row in engine.complete(prompts, params)]


def test_draws_do_not_depend_on_the_batch():
    several = [[1, 2, 3], [4], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3]]
    together = drawn(several, page_size=4, max_step_tokens=5)
    assert together == [drawn([prompt])[0] for prompt in several]
    assert together[0] == together[3] and together[0][0] != together[0][1], "samples differ, equal requests do not"


def test_preemption_computes_again_and_changes_nothing():
    several = [[number, 1, 2, 3, 4, 5] for number in range(5)]
    engine = Engine(exact_model(), options=EngineOptions(page_size=2, num_pages=13, max_sequences=5))
    for [answer] in engine.complete(several, SamplingParams(max_new_tokens=10, temperature=0.0)):
        assert whole_logprobs([*answer.prompt_ids, *answer.ids][:-1])[5:].argmax(-1).tolist() == answer.ids
    assert engine.stats.preemptions > 0 and engine.stats.pages_used == 0


def test_a_known_prefix_is_not_computed_again():
    engine = Engine(exact_model(), options=EngineOptions(page_size=4))
    prompt = list(range(14))
    params = SamplingParams(max_new_tokens=3, temperature=0.0)
    first, again, other = (engine.complete([ids], params)[0][0] for ids in (prompt, prompt, [*prompt[:9], 50, 51]))
    assert (first.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, 12, 8)
    assert first.ids == again.ids
    engine.forget_prefixes()
    assert engine.complete([prompt], params)[0][0].cached_tokens == 0


@pytest.mark.parametrize("max_step_tokens", [5, 32, 512])
def test_prompts_that_arrive_together_are_computed_once(max_step_tokens: int):
    """Of n samples, and of distinct requests that begin alike; whatever a step holds."""
    prompt = [7 * number % VOCAB for number in range(18)]
    prompts = [prompt] * 5 + [[*prompt[:13], 3, number] for number in range(3)] + [[9, 8, 7, 6, 5]]
    options = EngineOptions(page_size=4, max_sequences=16, max_step_tokens=max_step_tokens)
    engine = Engine(exact_model(), options=options)
    answers = [answer for [answer] in engine.complete(prompts, SamplingParams(max_new_tokens=4, temperature=0.0))]
    assert [answer.cached_tokens for answer in answers] == [0, *[16] * 4, *[12] * 3, 0]
    assert engine.stats.computed_prompt_tokens == 18 + 4 * 2 + 3 * 3 + 5
    for answer in answers:
        ids = [*answer.prompt_ids, *answer.ids]
        assert whole_logprobs(ids[:-1])[len(answer.prompt_ids) - 1 :].argmax(-1).tolist() == answer.ids


@pytest.mark.parametrize("prompt_logprobs", [0, 3])
def test_a_step_reports_a_bounded_number_of_logprobs(prompt_logprobs: int, monkeypatch: pytest.MonkeyPatch):
    """The others go on beside them, and the numbers are the same."""
    monkeypatch.setattr(scheduler, "MAX_STEP_LOGPROBS", 12)
    engine = Engine(exact_model(), options=EngineOptions(page_size=4))
    params = SamplingParams(max_new_tokens=3, temperature=0.0, logprobs=0, prompt_logprobs=prompt_logprobs)
    numbers = [
        engine.submit([7 * number % VOCAB for number in range(first, first + 14)], params) for first in (0, 3, 5)
    ]
    other = engine.submit([1, 2], SamplingParams(max_new_tokens=3, temperature=0.0, logprobs=0, prompt_logprobs=None))
    reported = [0]
    while engine.has_work:
        engine.step()
        found = [engine._requests.sequences[number].completion.prompt_logprobs for number in numbers]
        reported.append(sum(len(each) for each in found) * (1 + prompt_logprobs))
    assert max(after - before for before, after in pairwise(reported)) <= 12
    for number in numbers:
        check_by_hand(engine.take(number))
    assert len(engine.take(other).ids) == 3


def test_groups_do_not_share_prefixes():
    """Neither those that are there, nor those that are being computed; and within a group all is shared."""
    engine = Engine(exact_model(), options=EngineOptions(page_size=4))
    prompt = list(range(14))
    params = [SamplingParams(max_new_tokens=2, temperature=0.0, prefix_group=name) for name in ("a", "b", "a", "")]
    answers = [engine.complete([prompt], each)[0][0] for each in params]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 12, 0]
    engine.forget_prefixes()
    [together] = engine.complete([prompt], params)
    assert [answer.cached_tokens for answer in together] == [0, 0, 12, 0]
    assert len({tuple(answer.ids) for answer in [*answers, *together]}) == 1


def test_a_prefix_is_not_awaited_of_a_request_that_leaves():
    """Nor of one that was preempted; and what reports on its prompt computes it itself."""
    prompt = [7 * number % VOCAB for number in range(18)]
    engine = Engine(exact_model(), options=EngineOptions(page_size=4, max_step_tokens=6))
    first, second = (engine.submit(prompt, SamplingParams(max_new_tokens=3, temperature=0.0)) for _ in range(2))
    reporting = engine.submit(prompt, GREEDY)
    engine.step()
    assert engine.stats.running == 1
    engine.cancel(first)
    while engine.has_work:
        engine.step()
    assert engine.take(second).ids == engine.take(reporting).ids[:3]
    assert engine.stats.computed_prompt_tokens == 6 + (18 - 4) + 18 and engine.stats.pages_used == 0


def test_cancelling_frees_everything():
    engine = Engine(exact_model(), options=EngineOptions(page_size=2, max_sequences=2))
    requests = [engine.submit([1, 2, number], GREEDY) for number in range(4)]
    engine.step()
    engine.step()
    for request in requests:
        engine.cancel(request)
    events = engine.step()
    assert sorted(event.request for event in events if event.finish_reason == "cancelled") == requests
    assert not engine.has_work and engine.stats.pages_used == 0
    assert len(engine.take(requests[0]).ids) == 2 and not engine.take(requests[3]).ids
    engine.cancel(99)  # nothing to cancel is no error
    assert engine.step() == []


def test_stops_at_ids_and_texts():
    engine = Engine(model_in("--vocab-size 257"), ByteTokenizer())
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    [[free]] = engine.complete([[5, 6]], params)
    assert free.finish_reason == "length" and free.text == ByteTokenizer().decode(free.ids)
    stop = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, stop_ids=(free.ids[4],))
    [[ended]] = engine.complete([[5, 6]], stop)
    first = free.ids.index(free.ids[4])
    assert ended.ids == free.ids[: first + 1] and ended.finish_reason == "stop" and ended.stop == free.ids[4]
    assert ended.text == ByteTokenizer().decode(free.ids[:first]), "the stop id has no text"
    ending = free.text[3:5]
    events: list[TokenEvent] = []
    texts = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, stop_strings=(ending,))
    [[cut]] = engine.complete([[5, 6]], texts, on_event=events.append)
    assert cut.text == free.text[: free.text.index(ending)] == "".join(event.text for event in events)
    assert cut.stop == ending and cut.finish_reason == "stop"


def test_no_stop_id_before_the_least_number_of_tokens():
    engine = Engine(exact_model())
    [[free]] = engine.complete([[7, 8]], SamplingParams(max_new_tokens=8, temperature=0.0))
    params = SamplingParams(max_new_tokens=8, min_new_tokens=4, temperature=0.0, stop_ids=(free.ids[0],))
    [[answer]] = engine.complete([[7, 8]], params)
    assert len(answer.ids) >= 4 and free.ids[0] not in answer.ids[:4]


@pytest.mark.parametrize("pooling", get_args(PoolingName))
def test_pooled_hidden_states(pooling: str):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    model = exact_model()
    engine = Engine(model, options=EngineOptions(max_step_tokens=3))
    [[answer]] = engine.complete([prompt], SamplingParams(max_new_tokens=0, pooling=pooling))  # type: ignore[arg-type]
    [outputs] = model.forward([_batch(prompt)], collect=["hidden_states"])
    states = outputs["hidden_states"][0]
    wanted = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]
    assert answer.ids == [] and answer.finish_reason == "length"
    torch.testing.assert_close(torch.tensor(answer.pooled, dtype=torch.float64), wanted.double())


def _batch(prompt: list[int]):
    from petatron.models.batch import Batch

    return Batch(torch.tensor([prompt]))


def test_the_prompt_alone_is_reported():
    params = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
    [[answer]] = Engine(exact_model()).complete([[4, 5, 6]], params)
    rows = whole_logprobs([4, 5, 6])
    assert [each.logprob for each in answer.prompt_logprobs] == pytest.approx([float(rows[0, 5]), float(rows[1, 6])])
    assert answer.ids == []


def test_what_cannot_be_served():
    engine = Engine(exact_model())
    with pytest.raises(DataError, match="The prompt is empty"):
        engine.submit([], GREEDY)
    with pytest.raises(DataError, match="logit_bias, stop_ids, allowed_ids or bad_words_ids are not among"):
        engine.submit([1], SamplingParams(stop_ids=(VOCAB,)))
    with pytest.raises(DataError, match="Stop texts need a tokenizer"):
        engine.submit([1], SamplingParams(stop_strings=("a",)))
    with pytest.raises(ConfigError, match="--num-pages 2 of 4 tokens are fewer than one sequence"):
        Engine(exact_model(), options=EngineOptions(page_size=4, num_pages=2))
    assert not engine.has_work


def test_layers_without_a_generation_state_are_refused():
    import tests.outside.gated_linear_attention  # noqa: F401  registers the model

    with pytest.raises(DataError, match="This model does not continue text: its gla layers have no state"):
        Engine(model_in("--model-type hybrid"))


def test_an_answer_without_wanted_text_has_its_ids():
    engine = Engine(exact_model(), ByteTokenizer(), EngineOptions(page_size=4))
    plain = SamplingParams(max_new_tokens=6, temperature=0.0)
    [[told]] = engine.complete([[5, 17]], plain)
    [[silent]] = engine.complete([[5, 17]], replace(plain, wants_text=False))
    assert told.text and silent.text == "" and silent.ids == told.ids
    [[stopped]] = engine.complete([[5, 17]], replace(plain, wants_text=False, stop_strings=(told.text[1],)))
    assert stopped.finish_reason == "stop" and stopped.stop == told.text[1] and len(stopped.ids) < len(told.ids)


@pytest.mark.parametrize("releasable", [True, False])
def test_an_engine_that_waited_reads_the_weights_of_now(releasable: bool):
    model = model_in("--fp64")
    options = EngineOptions(page_size=4, releasable_cache=releasable, copied_weights=False)
    params = SamplingParams(max_new_tokens=6, temperature=0.9, seed=3)
    engine = Engine(model, options=options)
    engine.complete([[5, 17, 90, 3, 3]], params)
    engine.pause()
    with torch.no_grad():
        for param in model.module.parameters():
            param.mul_(1.5)
    engine.resume()
    [[answer]] = engine.complete([[5, 17, 90, 3, 3]], params)
    [[fresh]] = Engine(model, options=options).complete([[5, 17, 90, 3, 3]], params)
    assert answer.ids == fresh.ids and answer.cached_tokens == 0
