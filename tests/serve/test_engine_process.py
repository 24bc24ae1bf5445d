"""An engine in a process of its own: the same answers, refusals and counts as in this one, and an end that is noticed on both sides."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

import petatron
from petatron.base.errors import CheckpointError, ConfigError, DataError, LaunchError, PetatronError, Problem
from petatron.data.tokenizer import ByteTokenizer
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import Constraint, SamplingParams
from petatron.serve import engine_process
from petatron.serve.engine_process import EngineProcess
from petatron.serve.engine_thread import ServedEngine
from petatron.serve.open_engine import CheckpointEngine, model_settings
from tests.serve.live_server import live_server

FLAGS = ["--mock-data", "--lr", "1e-3", "--train-iters", "2", "--vocab-size", "257", "--num-layers", "2"]
OPTIONS = EngineOptions(max_sequences=8, num_pages=64, page_size=8)
REQUESTS = (
    SamplingParams(max_new_tokens=6, temperature=0.0),
    SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1, logit_bias={98: 5.0}),
    SamplingParams(max_new_tokens=6, temperature=1.0, constraint=Constraint(kind="regex", grammar="[ab]{3}")),
    SamplingParams(max_new_tokens=0, temperature=0.0, pooling="mean"),
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("process") / "run"
    for step, scale in ((1, 3.0), (2, -2.0)):
        run = petatron.load("tiny-llama", FLAGS)
        model = petatron.build_model(run, petatron.launch(run))
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(scale)
        petatron.save_checkpoint(str(folder), step=step, model=model, tokenizer=ByteTokenizer())
    return folder


pytestmark = pytest.mark.usefixtures("forked_engines")


@pytest.fixture(scope="module")
def elsewhere(run_folder: Path, forked_engines: None) -> Iterator[EngineProcess]:
    engine = EngineProcess(model_settings(run_folder / "step-00000001", options=OPTIONS))
    yield engine
    engine.close()


def _answers(engine: ServedEngine) -> list[Completion]:
    numbers = [engine.submit(list(b"abcdef"), params) for params in REQUESTS]
    events = []
    while engine.has_work:
        events += engine.step()
    answers = [engine.take(number) for number in numbers]
    for number, answer in zip(numbers, answers):
        own = [event for event in events if event.request == number]
        assert "".join(event.text for event in own) == answer.text and own[-1].finish_reason == answer.finish_reason
        assert [event.logprob for event in own if event.logprob is not None] == answer.logprobs
    return answers


def _assert_same(answers: list[Completion], expected: list[Completion]) -> None:
    """Log-probabilities may differ by rounding: a grammar is ready sooner or later, so its request joins another batch."""
    assert [_without_numbers(answer) for answer in answers] == [_without_numbers(answer) for answer in expected]
    for answer, other in zip(answers, expected):
        for tokens, others in ((answer.logprobs, other.logprobs), (answer.prompt_logprobs, other.prompt_logprobs)):
            assert [token.logprob for token in tokens] == pytest.approx([token.logprob for token in others], abs=1e-4)
        assert answer.pooled == pytest.approx(other.pooled, abs=1e-5)


def _without_numbers(answer: Completion) -> Completion:
    names = [[(token.token, [best for best, _ in token.top]) for token in answer.logprobs], len(answer.prompt_logprobs)]
    return replace(answer, text=f"{answer.text} {names}", logprobs=[], prompt_logprobs=[], pooled=None)


def test_answers_and_counts_are_those_of_an_engine_here(elsewhere: EngineProcess, run_folder: Path):
    here = CheckpointEngine(model_settings(run_folder / "step-00000001", options=OPTIONS))
    _assert_same(_answers(elsewhere), _answers(here))
    assert elsewhere.stats == here.stats and elsewhere.stats.generated_tokens > 12
    assert (elsewhere.max_length, elsewhere.vocab_size) == (here.max_length, here.vocab_size)
    assert (elsewhere.step_number, elsewhere.stop_ids) == (1, here.stop_ids)


def test_a_cancelled_request_ends(elsewhere: EngineProcess):
    number = elsewhere.submit(list(b"abc"), SamplingParams(max_new_tokens=50, temperature=0.0))
    elsewhere.step()
    assert elsewhere.has_work and elsewhere.stats.running == 1
    elsewhere.cancel(number)
    events = [event for _ in range(60) if elsewhere.has_work for event in elsewhere.step()]
    assert [event.finish_reason for event in events if event.finish_reason] == ["cancelled"]
    assert elsewhere.take(number).finish_reason == "cancelled" and not elsewhere.has_work
    assert elsewhere.stats.running == elsewhere.stats.pages_used == 0


def test_the_engine_steps_on_without_being_told(elsewhere: EngineProcess, monkeypatch: pytest.MonkeyPatch):
    sent: list[object] = []
    send = engine_process._send
    monkeypatch.setattr(engine_process, "_send", lambda pipe, message: (sent.append(message), send(pipe, message)))
    numbers = [elsewhere.submit([65 + n], SamplingParams(max_new_tokens=9, temperature=0.0)) for n in range(2)]
    for _ in range(3):
        elsewhere.step()
    late = elsewhere.submit([90] * 40, SamplingParams(max_new_tokens=3, temperature=0.0))
    while elsewhere.has_work:
        elsewhere.step()
    assert len(sent) == 2, "one message for each time that something was asked"
    assert [len(elsewhere.take(number).ids) for number in (*numbers, late)] == [9, 9, 3]


def test_who_waits_for_a_step_can_be_woken(elsewhere: EngineProcess):
    assert elsewhere.pid is not None
    os.kill(elsewhere.pid, signal.SIGSTOP)  # no step can end meanwhile
    try:
        elsewhere.wake()
        number = elsewhere.submit(list(b"abc"), SamplingParams(max_new_tokens=4, temperature=0.0))
        assert elsewhere.step() == [] and elsewhere.has_work, "it returns at once, and the request has been sent"
    finally:
        os.kill(elsewhere.pid, signal.SIGCONT)
    events = []
    while elsewhere.has_work:
        events += elsewhere.step()
    assert len(events) == len(elsewhere.take(number).ids) == 4


@pytest.mark.slow
def test_answers_that_nobody_reads_hold_up_no_request(elsewhere: EngineProcess):
    """The pipe is full both ways."""
    params = SamplingParams(max_new_tokens=40, temperature=1.0, logprobs=20)
    numbers = [elsewhere.submit([65], params) for _ in range(60)]
    elsewhere.step()
    time.sleep(1.0)
    numbers += [elsewhere.submit([65] * 20, params) for _ in range(300)]
    while elsewhere.has_work:
        elsewhere.step()
    assert all(len(elsewhere.take(number).logprobs) > 0 for number in numbers)


def test_what_cannot_be_served_is_refused_at_once(elsewhere: EngineProcess):
    with pytest.raises(DataError, match="prompt is empty"):
        elsewhere.submit([], SamplingParams())
    assert not elsewhere.has_work


def test_a_request_that_fails_in_the_engine_fails_alone(elsewhere: EngineProcess):
    wrong = elsewhere.submit([1], SamplingParams(constraint=Constraint(kind="regex", grammar="(")))
    other = elsewhere.submit([65], SamplingParams(max_new_tokens=5, temperature=0.0))
    left = elsewhere.submit([65], SamplingParams(constraint=Constraint(kind="regex", grammar="ab+c")))
    elsewhere.cancel(left)
    events = []
    while elsewhere.has_work:
        events += elsewhere.step()
    reasons = {event.request: event.finish_reason for event in events if event.finish_reason}
    assert reasons == {wrong: "failed", other: "length", left: "cancelled"}
    with pytest.raises(DataError, match="regular expression cannot be used"):
        elsewhere.take(wrong)
    assert len(elsewhere.take(other).ids) == 5 and elsewhere.take(left).ids == []
    assert elsewhere.stats.running == elsewhere.stats.pages_used == 0


def test_another_step_is_loaded_or_the_former_stays(elsewhere: EngineProcess, run_folder: Path, tmp_path: Path):
    before = _answers(elsewhere)
    assert elsewhere.reload(run_folder / "step-00000002") is elsewhere and elsewhere.step_number == 2
    after = _answers(elsewhere)
    assert after[0].ids != before[0].ids
    elsewhere.reload(tmp_path / "step-00000009")
    assert elsewhere.step_number == 2
    _assert_same(_answers(elsewhere), after)


def test_a_process_that_was_killed_fails_the_server(elsewhere: EngineProcess):
    """Last of those that use it."""
    with live_server(elsewhere) as server, server.client() as http:
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert elsewhere.pid is not None
        assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200
        os.kill(elsewhere.pid, signal.SIGKILL)
        server.wait_until(lambda: http.get("/healthz").status_code == 503, timeout_s=5)  # before any request is lost
        assert http.get("/readyz").json()["status"] == "failed"
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 503
    with pytest.raises(LaunchError, match="exit code -9"):
        elsewhere.step()


def test_an_engine_that_cannot_be_opened_says_why(run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_process.signal, "signal", lambda *_: None)  # of this process
    ours, theirs = Pipe()
    engine_process._run_engine(theirs, str(run_folder), [], EngineOptions(num_pages=1), None)
    error = engine_process._read_error(json.loads(ours.recv_bytes())["error"])
    assert isinstance(error, ConfigError) and error.problems[0].where == "--num-pages"


@pytest.mark.parametrize(
    "error", [CheckpointError("gone"), ConfigError([Problem("--x", "1", "is odd", "Use 2.")]), DataError("é")], ids=str
)
def test_an_error_crosses_the_pipe(error: PetatronError):
    read = engine_process._read_error(json.loads(json.dumps(engine_process._error_content(error))))
    assert type(read) is type(error) and str(read) == str(error)


def test_the_engine_ends_with_its_server(run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(engine_process, "_send", lambda pipe, message: said.append(message))
    said: list = []
    ours, theirs = Pipe()
    ours.send_bytes(b'{"commands": []}')
    ours.close()  # as a server that was killed does
    engine_process._run_engine(theirs, str(run_folder), [], OPTIONS, None)
    first, *others = said
    assert first["step_number"] == 2 and len(others) <= 1, "it may step before it hears of the end"
