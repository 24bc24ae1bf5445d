"""`/v1/recommend`: items with scores, by number or by name; unknown ones are named, and sizes are bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.base.errors import ConfigError, DataError
from petatron.infer.check_request import check_request
from petatron.infer.recommend.recommender_engine import RecommenderEngine
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.mesh import ParallelMesh
from petatron.serve.item_names import ItemNames
from petatron.serve.serve_options import ServeOptions
from petatron.train.build_run import build_model
from petatron.validate import load_config
from petatron.validate.layer_capabilities import why_reading_only
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server

FLAGS = (
    "--model-type recommender --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 12 --train-iters 1 "
    "--lr 1e-2 --mock-data --device cpu --init-method-std 0.5"
)


class InProcessRecommender(RecommenderEngine):
    """`CheckpointEngine` without a checkpoint."""

    def wake(self) -> None:
        """A step is computed here, and waits for nothing."""

    def check_alive(self) -> None:
        """Holds always."""


def engine_of(flags: str = "") -> InProcessRecommender:
    model = build_model(load_config(f"{FLAGS} {flags}".split()).config, ParallelMesh.single())
    return InProcessRecommender(model, None, None, reads_only=str(why_reading_only(model.spec)))


def expected(history: list[int], count: int, **params) -> list[int]:
    engine = engine_of()
    request = engine.submit(history, SamplingParams(max_new_tokens=0, best_items=count, **params))
    engine.step()
    return [item for item, _ in engine.take(request).items]


def numbers(answer: dict) -> list[int]:
    return [entry["item"] for entry in answer["data"]]


def test_items_are_those_of_the_engine_the_best_first():
    with live_server(engine_of()) as server, server.client() as client:
        answer = client.post("/v1/recommend", json={"history": [3, 5, 11], "k": 4}).json()
        with_history = client.post("/v1/recommend", json={"history": [3, 5], "k": 12, "exclude_history": False}).json()
    assert numbers(answer) == expected([3, 5, 11], 4) and not {3, 5, 11} & set(numbers(answer))
    scores = [entry["score"] for entry in answer["data"]]
    assert scores == sorted(scores, reverse=True) and [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    assert sorted(numbers(with_history)) == list(range(12))
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3} and answer["unknown_items"] == []


def test_unknown_items_are_left_out_and_named():
    with live_server(engine_of()) as server, server.client() as client:
        answer = client.post("/v1/recommend", json={"history": [3, 99, "x", 5], "k": 2}).json()
        refused = client.post("/v1/recommend", json={"history": [99, 12]})
    assert answer["unknown_items"] == [99, "x"] and answer["num_unknown_items"] == 2
    assert numbers(answer) == expected([3, 5], 2)
    assert refused.status_code == 400 and "knows no item of the history: 99, 12" in refused.json()["error"]["message"]


def test_items_have_the_names_that_clients_know(tmp_path: Path):
    path = tmp_path / "names"
    path.write_text("".join(f"{1000 + number}\n" for number in range(12)))
    names = ItemNames.read(path, num_items=12)
    with live_server(engine_of(), item_names=names) as server, server.client() as client:
        answer = client.post("/v1/recommend", json={"history": ["1003", 1005, "3"], "k": 3}).json()
    assert numbers(answer) == [f"{1000 + item}" for item in expected([3, 5], 3)] and answer["unknown_items"] == ["3"]
    with pytest.raises(ConfigError, match="has 12 names, and the model 13 items"):
        ItemNames.read(path, num_items=13)
    with pytest.raises(DataError, match="cannot be read"):
        ItemNames.read(tmp_path / "missing", num_items=12)


def test_the_most_recent_items_of_a_long_history_count():
    history = [number % 12 for number in range(30)]
    with live_server(engine_of()) as server, server.client() as client:
        answer = client.post("/v1/recommend", json={"history": history, "exclude_history": False, "k": 3}).json()
    assert answer["usage"]["prompt_tokens"] == 8
    assert numbers(answer) == expected(history[-8:], 3, leave_out_history=False)


def test_times_are_for_models_that_read_them():
    with live_server(engine_of("--recommender-layers hstu")) as server, server.client() as client:
        answer = client.post("/v1/recommend", json={"history": [1, 2], "times": [5, 900], "k": 3})
        without = client.post("/v1/recommend", json={"history": [1, 2]})
        too_few = client.post("/v1/recommend", json={"history": [1, 2], "times": [5]})
    assert len(answer.json()["data"]) == 3
    assert without.status_code == 400 and "reads the times of interactions" in without.json()["error"]["message"]
    assert too_few.status_code == 400 and "times has 1 entries for 2 items" in too_few.json()["error"]["message"]


WRONG = {
    "no history": {"history": []},
    "too many items": {"history": [1], "k": 1001},
    "no items": {"history": [1], "k": 0},
    "negative": {"history": [-1]},
    "a number of another kind": {"history": [1.5]},
    "long": {"history": [1] * 65_537},
    "another model": {"history": [1], "model": "other"},
}


@pytest.fixture(scope="module")
def server():
    with live_server(engine_of()) as running:
        yield running


@pytest.mark.parametrize("name", WRONG)
def test_requests_are_bounded(server: LiveServer, name: str):
    with server.client() as client:
        answer = client.post("/v1/recommend", json=WRONG[name])
    assert answer.status_code in (400, 404), answer.text


def test_other_models_recommend_nothing_and_a_recommender_continues_no_text(server: LiveServer):
    with pytest.raises(DataError, match="continues text, and recommends no items"):
        check_request([1], SamplingParams(max_new_tokens=0, best_items=3), FakeEngine())
    with server.client() as client:
        text = client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2})
        vectors = client.post("/v1/embeddings", json={"input": [1, 2]})
    assert text.status_code == vectors.status_code == 400 and "recommends items" in text.json()["error"]["message"]


def test_names_are_an_option_of_the_server():
    assert ServeOptions().item_names is None
