"""Load on a server over real HTTP: many clients with a mix of requests, of which some leave in a stream and some are wrong."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from petatron.data.tokenizer import ByteTokenizer
from petatron.infer.engine import Engine
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import SamplingParams
from tests.load_deadline import scaled

NUM_CLIENTS, LONGEST_ANSWER = 64, 32
LEAVING_SHARE, WRONG_SHARE = 0.1, 0.05
_CHAT = "<user>{}<assistant>"  # as `live_server.TEMPLATE` renders one message
WRONG: Sequence[tuple[dict, int]] = (
    ({"content": b'{"prompt": "a"', "headers": {"Content-Type": "application/json"}}, 400),
    ({"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415),
    ({"json": {"prompt": "a", "max_tokens": -1}}, 400),
    ({"json": {"prompt": "a" * 500}}, 400),
    ({"json": {"prompt": [999_999]}}, 400),
    ({"json": {"prompt": "a", "model": "another"}}, 404),
)


def make_prompts(count: int, *, seed: int = 0) -> list[str]:
    """Returns prompts of 1 to 60 characters; three of four begin with one of two shared prefixes."""
    chance = random.Random(seed)
    shared = ["Once upon a time there was a server that ", "The quick brown fox jumps over "]
    words = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()
    found: dict[str, None] = {}
    while len(found) < count:
        tail = " ".join(chance.choices(words, k=chance.randint(1, 3)))[: chance.randint(1, 19)]
        found[chance.choice([*shared, *shared[:1], ""]) + tail] = None
    return list(found)


@dataclass(frozen=True)
class SerialAnswers:
    """What the engine alone answers, greedily, to one prompt after another."""

    completions: Mapping[str, Completion]

    @classmethod
    def of_engine(cls, engine: Engine, prompts: Sequence[str]) -> SerialAnswers:
        params = SamplingParams(max_new_tokens=LONGEST_ANSWER, temperature=0.0, stop_ids=(ByteTokenizer().eod,))
        texts = [*prompts, *(_CHAT.format(prompt) for prompt in prompts)]
        return cls({text: engine.complete([list(text.encode())], params)[0][0] for text in texts})

    def answer(self, prompt: str, count: int, *, chat: bool) -> tuple[str, int]:
        """Returns the text of the first `count` tokens, and how many there are."""
        whole = self.completions[_CHAT.format(prompt) if chat else prompt]
        ids = whole.ids[:count]
        ended = whole.finish_reason == "stop" and len(ids) == len(whole.ids)
        return ByteTokenizer().decode(ids[:-1] if ended else ids), len(ids)


@dataclass
class LoadReport:
    """What clients saw. wrong_answers, failures: of which there may be none."""

    statuses: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    left: int = 0
    of_model: Counter[int] = field(default_factory=Counter)
    wrong_answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class LoadClients:
    """Clients that ask one request after another until `stop` is set; every answer must be that of one of the models."""

    def __init__(self, url: str, models: Sequence[SerialAnswers], *, num_clients: int = NUM_CLIENTS) -> None:
        self.report = LoadReport()
        self.stop = asyncio.Event()
        self._url, self._models, self._num_clients = url, models, num_clients
        self._prompts = [text for text in models[0].completions if not text.startswith(_CHAT[:6])]

    async def run(self) -> LoadReport:
        await asyncio.gather(*(self._client(random.Random(number)) for number in range(self._num_clients)))
        return self.report

    async def _client(self, chance: random.Random) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=scaled(60), verify=False, trust_env=False) as http:
            while not self.stop.is_set():
                try:
                    await self._ask(http, chance)
                except Exception as error:
                    self.report.failures.append(repr(error))

    async def _ask(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        kind = chance.random()
        if kind < WRONG_SHARE:
            request, status = chance.choice(WRONG)
            found = await http.post("/v1/completions", **request)
            self._count(found, allowed=status)
            return
        chat, stream = chance.random() < 0.3, chance.random() < 0.5
        prompt, count = chance.choice(self._prompts), chance.randint(1, LONGEST_ANSWER)
        body: dict[str, object] = {"max_tokens": count, "temperature": 0, "stream": stream}
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        if stream:
            leaves = kind < WRONG_SHARE + 2 * LEAVING_SHARE  # a tenth of all: half of them are streams
            text, tokens = await self._read_stream(http, path, body, leaves_after=chance.randint(1, 8) if leaves else 0)
        else:
            text, tokens = self._read_answer(await http.post(path, json=body), chat=chat)
        if tokens is None:
            await asyncio.sleep(chance.uniform(0.02, 0.2) if text is None else 0)
            return
        self.report.finished[f"{'chat' if chat else 'completion'}, {'streamed' if stream else 'plain'}"] += 1
        self.report.tokens += tokens
        self._compare(prompt, count, chat, found=(text or "", tokens))

    def _compare(self, prompt: str, count: int, chat: bool, *, found: tuple[str, int]) -> None:
        expected = [model.answer(prompt, count, chat=chat) for model in self._models]
        if found not in expected:
            self.report.wrong_answers.append(f"{prompt!r} {count} {chat}: {found}, not one of {expected}")
        elif expected.count(found) == 1:
            self.report.of_model[expected.index(found)] += 1

    def _count(self, answer: httpx.Response, *, allowed: int) -> bool:
        """Returns whether the status is the allowed one; a full or swapping server may also ask to come again."""
        status = answer.status_code
        self.report.statuses[status] += 1
        honest = status in (429, 503) and answer.headers.get("retry-after", "").isdigit()
        if status != allowed and not honest:
            self.report.failures.append(f"status {status}, not {allowed}")
        return status == allowed

    def _read_answer(self, answer: httpx.Response, *, chat: bool) -> tuple[str | None, int | None]:
        if not self._count(answer, allowed=200):
            return None, None
        content = answer.json()
        choice = content["choices"][0]
        return choice["message"]["content"] if chat else choice["text"], content["usage"]["completion_tokens"]

    async def _read_stream(
        self, http: httpx.AsyncClient, path: str, body: dict[str, object], *, leaves_after: int
    ) -> tuple[str | None, int | None]:
        body = {**body, "stream_options": {"include_usage": True}}
        text, tokens, events = "", None, 0
        async with http.stream("POST", path, json=body) as answer:
            if not self._count(answer, allowed=200):
                return None, None
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return text, tokens
                if not line:
                    continue
                event = json.loads(line.removeprefix("data: "))
                for choice in event["choices"]:
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                tokens = event["usage"]["completion_tokens"] if event.get("usage") else tokens
                events += 1
                if events == leaves_after:
                    self.report.left += 1
                    return text, None
        self.report.failures.append("a stream ended without [DONE]")
        return text, None
