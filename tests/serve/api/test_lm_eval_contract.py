"""What lm_eval's local-completions needs: the prompt's log-probabilities beside one new token, and `is_greedy` by equality of floats."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from petatron.infer.engine_outputs import TokenLogprob
from petatron.serve.logprob_formats import LEAST_LOGPROB, chat_logprobs, completion_logprobs, top_by_text
from petatron.serve.token_texts import TokenTexts
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server

REQUEST = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine()) as found:
        yield found


def _ask(server: LiveServer, prompts: list[list[int]]) -> list[dict]:
    with server.client() as http:
        answer = http.post("/v1/completions", json={"model": "fake", "prompt": prompts, **REQUEST})
    assert answer.status_code == 200
    return answer.json()["choices"]


def test_lengths_are_those_of_the_prompt_and_one(server: LiveServer):
    prompts = [[97, 98, 99], [100], [101, 0xC3, 0xA9, 103, 104]]
    for prompt, choice in zip(prompts, _ask(server, prompts), strict=True):
        found = choice["logprobs"]
        assert {len(found[name]) for name in found} == {len(prompt) + 1}
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert all(isinstance(one, float) for one in found["token_logprobs"][1:])


def test_a_greedy_continuation_equals_the_largest_exactly_and_another_does_not(server: LiveServer):
    engine = server.engine
    assert isinstance(engine, FakeEngine)
    greedy = list(b"abc" + engine.greedy("abc", 5).encode())
    other = [*greedy[:-1], ord("!")]
    verdicts = []
    for choice in _ask(server, [greedy, other]):
        found = choice["logprobs"]
        pairs = zip(found["token_logprobs"][3:-1], found["top_logprobs"][3:-1], strict=True)
        verdicts.append([value == max(top.values()) for value, top in pairs])
    assert verdicts == [[True] * 5, [True] * 4 + [False]]


@pytest.mark.slow
def test_lm_evals_own_parser_reads_the_scores(server: LiveServer):
    api = pytest.importorskip("lm_eval.models.openai_completions", exc_type=ImportError)
    engine = server.engine
    assert isinstance(engine, FakeEngine)
    context, continuation = list(b"ab"), list(b"xyz")
    with server.client() as http:
        body = {"model": "fake", "prompt": [context + continuation], **REQUEST}
        answer = http.post("/v1/completions", json=body).json()
    [(score, is_greedy)] = api.LocalCompletionsAPI.parse_logprobs(
        outputs=[answer], tokens=[context + continuation], ctxlens=[len(context)]
    )
    ids = context + continuation
    expected = sum(float(engine.logprobs(ids[:place])[ids[place]]) for place in range(2, 5))
    assert score == pytest.approx(expected, rel=1e-12) and is_greedy is False


class _TwoIdsOneText(TokenTexts):
    """Ids 1 and 2 are the same text."""

    def __init__(self) -> None:
        super().__init__(None)

    def bytes_of(self, token: int) -> bytes:
        return {1: b"x", 2: b"x"}.get(token, b"%d" % token)


def test_ids_with_one_text_do_not_collide():
    texts = _TwoIdsOneText()
    best_is_other = TokenLogprob(1, -2.0, ((2, -0.5), (7, -1.0)))
    assert top_by_text(best_is_other, texts) == {"token_id:2": -0.5, "7": -1.0, "x": -2.0}
    best_is_own = TokenLogprob(1, -0.5000001, ((1, -0.5), (2, -0.6)))
    found = completion_logprobs([1], [best_is_own], texts)
    assert found["token_logprobs"][0] == max(found["top_logprobs"][0].values()) == -0.5  # one float, not two roundings


def test_minus_infinity_is_written_as_a_number():
    entry = TokenLogprob(5, float("-inf"), ((6, 0.0),))
    found = completion_logprobs([5], [entry], TokenTexts(None))
    assert found["token_logprobs"] == [LEAST_LOGPROB] and found["tokens"] == ["token_id:5"]
    assert chat_logprobs([entry], TokenTexts(None))["content"][0]["logprob"] == LEAST_LOGPROB


def test_prompt_logprobs_as_vllm_gives_them(server: LiveServer):
    with server.client() as http:
        body = {"prompt": "abc", "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
        [choice] = http.post("/v1/completions", json=body).json()["choices"]
    found = choice["prompt_logprobs"]
    assert len(found) == 3 and found[0] is None and choice["logprobs"] is None
    assert found[1]["98"]["decoded_token"] == "b" and sorted(one["rank"] or 9 for one in found[1].values())[:2] == [
        1,
        2,
    ]
