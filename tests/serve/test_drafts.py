"""A server that drafts: `--speculative-tokens` reaches the engine, answers are the same, and /metrics counts drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import petatron
from petatron.cli.serve.arguments import engine_options, parser
from petatron.data.tokenizer import ByteTokenizer
from petatron.serve.open_engine import CheckpointEngine, model_settings
from petatron.serve.served_model_properties import ModelCard
from tests.serve.live_server import TEMPLATE, LiveServer, live_server

FLAGS = "--mock-data --lr 1e-3 --train-iters 2 --vocab-size 257 --num-layers 2 --mtp-num-layers 1 --device cpu".split()
PROMPTS = ["Once", "upon a time", "there was"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats what it said: its embeddings outweigh its layers, so some drafts are right."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run = petatron.load("tiny-llama", FLAGS)
    model = petatron.build_model(run, petatron.launch(run))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            parameter.mul_(1.0 if "norm" in name else 3.0)
    petatron.save_checkpoint(str(folder), step=1, model=model, tokenizer=ByteTokenizer())
    return folder


def texts(server: LiveServer, **settings: object) -> list[str]:
    body = {"prompt": PROMPTS, "max_tokens": 24, "ignore_eos": True, **settings}
    with server.client() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def streamed(server: LiveServer) -> str:
    body = {"prompt": PROMPTS[0], "max_tokens": 24, "ignore_eos": True, "temperature": 0, "stream": True}
    with server.client() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


def answers(folder: Path, words: list[str]) -> tuple[list[list[str]], dict[str, float]]:
    options = engine_options(parser().parse_args([*words, "--num-pages", "64"]))
    engine = CheckpointEngine(model_settings(folder, ["--device", "cpu"], options=options))
    card = ModelCard.of_engine(
        engine, name="fake", created_s=1, step=engine.step_number, stop_ids=engine.stop_ids, chat_template=TEMPLATE
    )
    with live_server(engine, card=card) as server:
        found = [texts(server, temperature=0), texts(server, temperature=0.7, seed=3), [streamed(server)]]
        with server.client() as http:
            lines = http.get("/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return found, {name: float(value) for name, value in pairs if name.startswith("petatron_")}


def test_a_server_drafts_and_answers_the_same(run_folder: Path):
    plain, before = answers(run_folder, [])
    found, counted = answers(run_folder, ["--speculative-tokens", "2"])
    assert found == plain and plain[2] == plain[0][:1]
    assert before["petatron_drafted_tokens_total"] == before["petatron_speculative_decodes_total"] == 0
    assert counted["petatron_speculative_decodes_total"] > 0
    assert 0 < counted["petatron_accepted_tokens_total"] < counted["petatron_drafted_tokens_total"]
