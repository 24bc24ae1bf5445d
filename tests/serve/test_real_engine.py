"""The server of a real, tiny model: the same tokens as generation without a cache, a run that is followed, and the documented commands."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

import petatron
from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.step_list import list_steps
from petatron.data.tokenizer import ByteTokenizer
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.serve.http.follow_training_run import follow_run, newest_sound_step
from petatron.serve.open_engine import CheckpointEngine, model_settings
from petatron.serve.served_model_properties import ModelCard
from tests.forked_python import ForkedPython
from tests.load_deadline import scaled
from tests.serve.live_server import TEMPLATE, LiveServer, live_server

ROOT = Path(__file__).parent.parent.parent
FLAGS = ["--mock-data", "--lr", "1e-3", "--train-iters", "2", "--vocab-size", "257", "--num-layers", "2"]
OPTIONS = EngineOptions(max_sequences=8, num_pages=128, page_size=8)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one step, of a model whose answers are not all alike."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    _save(folder, step=1, scale=3.0)
    return folder


def _save(folder: Path, *, step: int, scale: float) -> None:
    run = petatron.load("tiny-llama", FLAGS)
    model = petatron.build_model(run, petatron.launch(run))
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(scale)
    petatron.save_checkpoint(str(folder), step=step, model=model, tokenizer=ByteTokenizer())


@pytest.fixture(scope="module")
def server(run_folder: Path) -> Iterator[LiveServer]:
    engine = CheckpointEngine(model_settings(run_folder, options=OPTIONS))

    def describe() -> ModelCard:
        return ModelCard.of_engine(
            engine, name="fake", created_s=1, step=engine.step_number, stop_ids=engine.stop_ids, chat_template=TEMPLATE
        )

    watch = follow_run(run_folder, engine, describe, interval_s=0.1)
    with live_server(engine, card=describe(), background=watch) as found:
        yield found


def _texts(server: LiveServer, prompts: list[str], **settings: object) -> list[str]:
    body = {"prompt": prompts, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **settings}
    with server.client() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def _is_empty(server: LiveServer) -> bool:
    """Nothing runs, waits or has pages, and the engine remembers no sequence."""
    engine = server.engine
    assert isinstance(engine, CheckpointEngine) and isinstance(engine._engine, Engine)
    stats = engine.stats
    return (
        server.is_idle()
        and stats.running == stats.waiting == stats.pages_used == len(engine._engine._requests.sequences) == 0
    )


def test_greedy_answers_are_those_without_a_cache(server: LiveServer, run_folder: Path):
    model = petatron.from_pretrained(run_folder)
    with server.client() as http:
        for prompt in ("abc", "Hello world, hello"):
            body = {"prompts": [prompt], "tokens_to_generate": 8, "top_k": 1, "stop_token": 256, "logprobs": True}
            tokens = http.put("/api", content=json.dumps(body)).json()["tokens"][0]
            expected = petatron.generate(model, list(prompt.encode()), max_new_tokens=8, temperature=0, eod=256)
            assert tokens == [*prompt.encode(), *expected]


def test_constraints_of_requests_have_an_effect(server: LiveServer):
    wanted = {"response_format": {"type": "regex", "regex": "[ab]{3}"}, "ignore_eos": False, "temperature": 1.0}
    assert all(re.fullmatch("[ab]{3}", text) for text in _texts(server, ["x", "y"], **wanted))
    body = {"prompts": ["a:"], "tokens_to_generate": 8, "temperature": 2.0, "prevent_newline_after_colon": True}
    with server.client() as http:
        assert ":\n" not in http.put("/api", content=json.dumps(body)).json()["text"][0]


def test_scores_of_a_prompt_are_exact(server: LiveServer):
    body = {"prompt": [list(b"abcdef")], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    with server.client() as http:
        found = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert {len(values) for values in found.values()} == {7} and found["token_logprobs"][0] is None
    assert found["token_logprobs"][-1] == max(found["top_logprobs"][-1].values())


def test_embeddings_and_chat(server: LiveServer):
    with server.client() as http:
        for pooling in ("mean", "last"):
            answer = http.post("/v1/embeddings", json={"input": ["ab", "abc"], "pooling": pooling}).json()
            first, second = (one["embedding"] for one in answer["data"])
            assert first != second and sum(value * value for value in first) == pytest.approx(1, abs=1e-5)
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert http.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] <= 3


def test_company_and_clients_that_leave_change_nothing(server: LiveServer):
    prompts = [f"{number} times" for number in range(12)]
    alone = [_texts(server, [prompt])[0] for prompt in prompts]
    assert len(set(alone)) > 3
    found: dict[int, str] = {}
    chance = random.Random(1)

    def leave(wait_s: float) -> None:
        timeout = httpx.Timeout(20, read=wait_s)
        body = {"prompt": "something long", "max_tokens": 90, "n": 2, "stream": wait_s > 0.05, "ignore_eos": True}
        try:
            with server.client() as http, http.stream("POST", "/v1/completions", json=body, timeout=timeout) as answer:
                for _ in answer.iter_lines():
                    return
        except httpx.ReadTimeout:
            pass

    threads = [
        threading.Thread(target=lambda n=n: found.update({n: _texts(server, [prompts[n]])[0]})) for n in range(12)
    ]
    threads += [threading.Thread(target=leave, args=(chance.uniform(0.01, 0.1),)) for _ in range(8)]
    chance.shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(12)] == alone
    server.wait_until(lambda: _is_empty(server))


def test_a_new_step_is_served_once_it_is_saved(server: LiveServer, run_folder: Path):
    """Last of this module: the server then has another model."""
    before = _texts(server, ["abc", "xyz"])
    assert server.state.model.step == 1
    _save(run_folder, step=2, scale=-2.0)
    server.wait_until(lambda: server.state.model.step == 2)
    after = _texts(server, ["abc", "xyz"])
    model = petatron.from_pretrained(run_folder)
    expected = petatron.generate(model, list(b"abc"), max_new_tokens=8, temperature=0)
    assert after != before and after[0] == ByteTokenizer().decode(expected)


def test_only_sound_newer_steps_are_found(run_folder: Path, caplog: pytest.LogCaptureFixture):
    rejected: set[int] = set()
    steps = list_steps(run_folder)
    assert newest_sound_step(run_folder, after=max(steps), rejected=rejected) is None
    assert newest_sound_step(run_folder, after=0, rejected=rejected) == max(steps.items())
    weights = max(steps.values()) / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        assert newest_sound_step(run_folder, after=max(steps) - 1, rejected=rejected) is None
        assert rejected == {max(steps)} and newest_sound_step(run_folder, after=0, rejected=rejected) != max(
            steps.items()
        )
    finally:
        weights.write_bytes(content)


def test_a_step_that_is_gone_leaves_the_one_before(run_folder: Path, tmp_path: Path):
    engine = CheckpointEngine(model_settings(min(list_steps(run_folder).values()), options=OPTIONS))
    assert engine.step_number == 1
    engine.reload(tmp_path / "step-00000009")
    assert engine.step_number == 1 and not engine.has_work
    engine.close()
    with pytest.raises(CheckpointError):
        model_settings(tmp_path)


def test_the_layout_says_how_many_ranks(run_folder: Path):
    assert model_settings(run_folder, ["--tp", "2", "--pp", "2"]).loaded.config.parallel.world_size == 4


def _serve(command: list[str], log: Path) -> tuple[ForkedPython, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = ForkedPython(
        [sys.executable, *command], stdout=log.open("wb"), stderr=subprocess.STDOUT, env=env, cwd=ROOT
    )
    end = time.monotonic() + 120
    while " at http" not in log.read_text():
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    return process, log.read_text().split(" at ")[1].split(" ")[0]


def _stop(process: ForkedPython) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(scaled(30))
    finally:
        process.kill()


@pytest.mark.slow
def test_megatrons_commands_as_typed(run_folder: Path, tmp_path: Path):
    log = tmp_path / "log"
    process, url = _serve(["tools/run_text_generation_server.py", "--load", str(run_folder), "--port", "0"], log)
    command = f"""curl -s '{url}/api' -X 'PUT' -d '{{"prompts":["Hello world"], "tokens_to_generate":1}}'"""
    try:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=scaled(60))
        answer = json.loads(done.stdout)
    finally:
        code = _stop(process)
    assert answer["text"][0].startswith("Hello world") and len(answer["tokens"][0]) == len("Hello world") + 1
    assert code == 0 and log.read_text().count("\n") == 1, log.read_text()  # SIGTERM drains


@pytest.mark.slow
def test_two_ranks_answer_as_one(run_folder: Path, tmp_path: Path):
    answers = []
    for number, flags in enumerate(([], ["--tp", "2"], ["--pp", "2"])):
        log = tmp_path / f"log{number}"
        step = str(min(list_steps(run_folder).values()))
        process, url = _serve(["-m", "petatron", "serve", step, "--port", "0", "--num-pages", "64", *flags], log)
        try:
            body = {"prompt": ["abc", "xyz"], "max_tokens": 8, "temperature": 0}
            found = httpx.post(f"{url}/v1/completions", json=body, timeout=scaled(60)).json()
            answers.append([choice["text"] for choice in found["choices"]])
        finally:
            code = _stop(process)
        assert code == 0, log.read_text()
    assert answers[0] == answers[1] == answers[2]
