"""Rewards and environments of a real server, which fails in every way that a server can."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import TrainError
from petatron.config.schema.rollout import RolloutConfig
from petatron.data.tokenizer import ByteTokenizer
from petatron.posttrain.environments.environment import TurnResult
from petatron.posttrain.environments.environment_pool import EnvironmentPool
from petatron.posttrain.environments.environment_spec import environment_backend
from petatron.posttrain.rewards.function_pool import RewardFailure
from petatron.posttrain.rewards.http_rewards import HttpRewards
from petatron.posttrain.rewards.reward_spec import parse_rewards
from petatron.posttrain.rewards.reward_sum import RewardSum
from tests.unit.posttrain.rollouts import learn, load, write_prompts

EXAMPLE = Path(__file__).parents[3] / "examples/posttraining/reward_server.py"


class Handler(BaseHTTPRequestHandler):
    """Answers as its path says. `seen`: how often each path was asked for."""

    seen: Counter[str] = Counter()
    closed: list[str] = []

    def do_GET(self) -> None:
        self._send(200, b"[1]" if self.path == "/list" else b'{"stop": ["!"]}')

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen[self.path] += 1
        match self.path:
            case "/busy" if self.seen[self.path] < 3:
                self._send(503, b"busy")
            case "/refused":
                self._send(422, b"no such thing")
            case "/text":
                self._send(200, b"<html>")
            case "/short":
                self._send(200, b"[1]")
            case "/odd":
                self._send(200, b'[1, null, "x", true, NaN]')
            case "/slow":
                time.sleep(5)
            case "/drips":
                self.send_response(200)
                self.end_headers()
                for _ in range(50):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.1)
            case "/gone":
                self.connection.close()
            case "/game/reset":
                self._send_json({"episode": f"{job['record']['answer']}-{job['seed']}", "observation": ":"})
            case "/game/step" if job["answer"] == "fail":
                self._send_json({"error": "no such move"})
            case "/game/step" if job["answer"] == "odd":
                self._send_json({"observation": 7})
            case "/game/step":
                done = job["turn"] == 2
                self._send_json({"observation": "<>", "reward": float("a" <= job["answer"][:1] <= "m"), "done": done})
            case "/game/close":
                self.closed.append(job["episode"])
                self._send_json(None)
            case "/bare/reset":
                self._send_json({})
            case _:
                self._send_json([float(len(item["answer"]) * item["record"]["factor"]) for item in job])

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode())

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None: ...


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = Server(("127.0.0.1", 0), handler)
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Handler) as address:
        yield address


def failures_of(url: str, count: int = 2, timeout_s: float = 5.0) -> list[str]:
    rewards = HttpRewards(url, workers=1, timeout_s=timeout_s)
    results = rewards.rewards([{"answer": "ab", "record": {"factor": 2}}] * count)
    rewards.close()
    assert all(isinstance(result, RewardFailure) for result in results)
    return [str(result) for result in results]


def test_rewards_come_in_their_order(url: str):
    rewards = RewardSum(parse_rewards([f"0.5*{url}/score", "contains:word"]), workers=3, timeout_s=5.0)
    record = {"factor": 2, "word": "a"}
    answers = rewards.of([("a" * (number % 7), record) for number in range(150)])
    rewards.close()
    assert [answer.reward for answer in answers[:3]] == [0.0, 2.0, 3.0]
    assert [answer.parts[f"0.5*{url}/score"] for answer in answers] == [2.0 * (number % 7) for number in range(150)]


def test_a_busy_server_is_asked_again(url: str):
    rewards = HttpRewards(f"{url}/busy", workers=1, timeout_s=10.0)
    assert rewards.rewards([{"answer": "ab", "record": {"factor": 2}}]) == [4.0] and Handler.seen["/busy"] == 3
    rewards.close()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/refused", "answered with the status 422: no such thing"),
        ("/text", "did not answer with JSON but '<html>'"),
        ("/short", "did not answer with a list of 2 numbers"),
        ("/gone", "cannot be reached"),
    ],
)
def test_a_server_that_fails_costs_its_answers(url: str, path: str, text: str):
    assert all(text in failure for failure in failures_of(f"{url}{path}"))
    assert Handler.seen["/refused"] <= 1, "what will not be well is not tried again"


@pytest.mark.parametrize("path", ["/slow", "/drips"])
def test_a_slow_server_costs_its_answers(url: str, path: str):
    began = time.monotonic()
    assert all("did not answer within 0.5 s" in failure for failure in failures_of(f"{url}{path}", timeout_s=0.5))
    assert time.monotonic() - began < 2


def test_odd_numbers_cost_their_answers(url: str):
    rewards = HttpRewards(f"{url}/odd", workers=1, timeout_s=5.0)
    first, *others = rewards.rewards([{"answer": "", "record": {}}] * 5)
    rewards.close()
    assert first == 1.0 and [str(other)[:20] for other in others] == [
        "the server has no re", "the reward is 'x', w", "the reward is 'True'", "the reward is 'nan',",
    ]  # fmt: skip


def test_nobody_listens():
    assert "cannot be reached" in failures_of("http://127.0.0.1:9", timeout_s=0.3)[0]


def test_the_server_of_the_documentation_answers(url: str):
    spec = importlib.util.spec_from_file_location("reward_server", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Rewards.log_message = Handler.log_message
    with serving(module.Rewards) as address:
        rewards = HttpRewards(address, workers=1, timeout_s=5.0)
        jobs = [{"answer": text, "record": {"answer": "19"}} for text in ("it is 19", "20")]
        assert rewards.rewards(jobs) == [1.0, 0.0]
        rewards.close()


def test_environments_of_a_server(url: str):
    backend = environment_backend(RolloutConfig(environment=f"{url}/game/"), ByteTokenizer())
    assert backend is not None and backend.properties.stop == ("!",)
    pool = EnvironmentPool(backend, workers=2)
    records = [({"answer": str(place)}, 7) for place in range(3)]
    assert pool.start(records) == [":"] * 3
    results = pool.step([(0, "a"), (1, "fail"), (2, "odd")])
    assert results[0] == TurnResult("<>", 1.0, False) and pool.step([(0, "z")]) == [TurnResult("<>", 0.0, True)]
    assert str(results[1]) == "no such move" and "neither a text nor a list" in str(results[2])
    pool.close()
    assert sorted(Handler.closed) == ["0-7", "1-7", "2-7"]
    bare = EnvironmentPool(environment_backend(RolloutConfig(environment=f"{url}/bare"), ByteTokenizer()), workers=1)  # pyright: ignore[reportArgumentType]
    assert str(bare.start(records[:1])[0]) == "the server named no episode"
    bare.close()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/game", "{url}/list"])
def test_a_server_that_has_no_environment_ends_the_run(url: str, address: str):
    backend = environment_backend(RolloutConfig(environment=address.format(url=url)), ByteTokenizer())
    assert backend is not None
    with pytest.raises(TrainError, match=r"--environment http.* cannot be used: .*It answers GET with a JSON object"):
        _ = backend.properties


def test_a_run_learns_from_a_server(url: str, tmp_path: Path):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    learned = learn(
        load(f"--rollout-prompts {prompts} --environment {url}/game --max-turns 2 --max-answer-tokens 3"), 2
    )
    assert 0 <= learned[0].metrics["reward"] <= 2 and learned[0].metrics["rollout difference"] < 1e-6
