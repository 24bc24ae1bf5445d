"""Adapters served beside their model: requests name them as the model, and get what merged weights would answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import petatron
from petatron.base.errors import ConfigError
from petatron.cli.generation.generate import main as generate
from petatron.cli.serve.arguments import named_adapters
from petatron.data.tokenizer import ByteTokenizer
from petatron.infer.engine_options import EngineOptions
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from petatron.serve.open_engine import CheckpointEngine, model_settings
from tests.serve.live_server import live_server

FLAGS = "--mock-data --lr 1 --train-iters 1 --vocab-size 257 --num-layers 2".split()
OPTIONS = EngineOptions(max_sequences=8, num_pages=128, page_size=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an adapter beside it whose answers are others."""
    folder = tmp_path_factory.mktemp("adapters")
    for name, flags in (("base", []), ("run", ["--adapter", "lora", "--adapter-targets", "q_proj", "down_proj"])):
        run = petatron.load("tiny-llama", [*FLAGS, *flags])
        model = petatron.build_model(run, petatron.launch(run))
        with torch.no_grad():
            for key, parameter in model.module.named_parameters():
                parameter.mul_(3.0) if "lora" not in key else parameter.normal_(0.0, 0.3)
        petatron.save_checkpoint(folder / name, step=1, model=model, tokenizer=ByteTokenizer())
    options = ConversionOptions(target_format="peft", base_model=str(folder / "base"))
    convert(open_model_reader(folder / "run"), folder / "adapter", options)
    return folder / "base", folder / "adapter"


def test_requests_name_an_adapter_as_the_model(folders: tuple[Path, Path]):
    base, adapter = folders
    prompt = list(b"Hello world")
    expected = {
        name: petatron.generate(petatron.from_pretrained(folder), prompt, max_new_tokens=8, temperature=0)
        for name, folder in (("fake", base), ("mine", adapter))
    }
    assert expected["fake"] != expected["mine"]
    engine = CheckpointEngine(model_settings(base, options=EngineOptions(adapters=(("mine", str(adapter)),))))
    with live_server(engine, adapters=("mine",)) as server, server.client() as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["fake", "mine"]
        for name, ids in expected.items():
            body = {
                "model": name,
                "prompt": prompt,
                "max_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
            }
            answer = http.post("/v1/completions", json={**body, "return_token_ids": True}).json()
            assert (answer["model"], answer["choices"][0]["token_ids"]) == (name, ids)
            chat = {"model": name, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            assert http.post("/v1/chat/completions", json=chat).json()["model"] == name
        refused = http.post("/v1/completions", json={"model": "other", "prompt": "a"})
        assert refused.status_code == 404 and "'fake' and its adapters mine" in refused.text


def test_generate_takes_an_adapter(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]):
    base, adapter = folders
    answers = []
    for argv in ([str(base)], [str(base), "--lora", str(adapter)], [str(adapter)]):
        assert generate([*argv, "--prompt", "Hello", "--max-tokens", "8", "--temperature", "0", "--ignore-eos"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1] == answers[2]


@pytest.mark.parametrize(("given", "told"), [(["mine"], "is no NAME=FOLDER"), (["a=x", "a=y"], "is named twice")])
def test_adapters_have_a_name_each(given: list[str], told: str):
    with pytest.raises(ConfigError, match=told):
        named_adapters(given)
