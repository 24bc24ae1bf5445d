"""Names of models on the hub, and a config.json alone, wherever the folder of a model is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch

import petatron
from petatron.base.errors import CheckpointError, ConfigError
from petatron.cli.main import main
from petatron.integrations import transformers as petatron_transformers
from petatron.pretrained.detect_model_format import find_model
from petatron.pretrained.hub import local_model
from tests.hf.zoo import build, truth
from tests.unit.data.stand_in_hub import StandInHub, serve

NAME = "acme/tiny-llama"
NOT_READ = (
    "pytorch_model.bin",
    "modeling_acme.py",
    "consolidated.safetensors",
    "original/model.safetensors",
    "README.md",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a repository has: a model, and files that are not read."""
    folder = tmp_path_factory.mktemp("hub") / NAME
    build("llama-gqa").save_pretrained(folder)
    for name in NOT_READ:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("nobody reads this")
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    with serve(folder.parents[1]) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield hub


def test_a_name_is_downloaded_once_without_pickles_and_code(hub: StandInHub, tmp_path: Path):
    true = truth("llama-gqa")
    with torch.no_grad():
        logits = petatron.from_pretrained(NAME).module.eval().logits(true.tokens)
    torch.testing.assert_close(logits, true.logits, rtol=0, atol=5e-5)
    assert sorted(hub.downloads) == ["config.json", "generation_config.json", "model.safetensors"]
    found = find_model(NAME)
    assert found.is_relative_to(tmp_path / "cache") and not any((found / name).exists() for name in NOT_READ)
    assert petatron_transformers.from_checkpoint(NAME).spec.config.num_layers == 2
    assert main(["checkpoint", "convert", NAME, str(tmp_path / "converted"), "--to", "petatron"]) == 0
    assert len(hub.downloads) == 3


def test_planning_downloads_the_settings_alone(hub: StandInHub, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "cache", "--from", NAME]) == 0
    assert "in 2 layers" in capsys.readouterr().out
    assert hub.downloads == ["config.json"]
    assert main(["config", "show", "--from", f"{NAME}@main"]) == 0
    shown = capsys.readouterr()
    assert "there are no weights beside it" in shown.err and "snapshots" in shown.out
    petatron.load(None, ["--from", NAME, "--mock-data", "--lr", "1e-3", "--train-iters", "1"])
    assert "model.safetensors" in hub.downloads


REFUSALS = {
    "unknown": ((404, "RepoNotFound"), "is neither a folder here, nor a model at", "hf auth login"),
    "gated": ((403, "GatedRepo"), "is gated: its owner gives access by request", "hf auth login"),
    "revision": ((404, "RevisionNotFound"), "has no such revision", "leave @REVISION out"),
    "busy": ((503, ""), "HTTP 503|cannot be reached", "what is downloaded is kept|hf download"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_hub_refuses_is_told_with_advice(hub: StandInHub, case: str):
    hub.refuse, rule, fix = REFUSALS[case]
    with pytest.raises(ConfigError, match=rule) as caught:
        local_model(NAME)
    caught.match(fix)
    caught.match(f"--from {NAME}")


def test_without_a_network_the_cache_is_used_and_else_told(hub: StandInHub, monkeypatch: pytest.MonkeyPatch):
    first = local_model(NAME)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert local_model(NAME) == first
    with pytest.raises(ConfigError, match=r"cannot be reached.*`hf download acme/other --local-dir FOLDER"):
        local_model("acme/other")


def test_without_the_library_it_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"which is not installed. pip install huggingface-hub"):
        find_model(NAME)


def test_a_repository_without_safetensors_is_refused(hub: StandInHub):
    other = hub.folder / "acme" / "pickled"
    other.mkdir(exist_ok=True)
    (other / "config.json").write_text("{}")
    (other / "pytorch_model.bin").write_text("")
    with pytest.raises(ConfigError, match="has no weights as safetensors on the hub"):
        local_model("acme/pickled")
    assert hub.downloads == ["config.json"]


def test_a_path_is_not_taken_for_a_name(hub: StandInHub, tmp_path: Path):
    (tmp_path / "runs").mkdir()
    assert local_model("runs/mistyped") == Path("runs/mistyped")
    assert local_model("./acme/tiny-llama") == Path("acme/tiny-llama")
    assert not hub.downloads


ALONE: dict[str, Callable[[Path], str]] = {"folder": str, "file": lambda folder: str(folder / "config.json")}


@pytest.mark.parametrize("case", ALONE)
def test_a_config_json_alone_can_be_planned(
    folder: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((folder / "config.json").read_bytes())
    for words in (["plan", "cache"], ["plan", "memory", "--device-memory-gb", "80"], ["config", "show"]):
        reports = []
        for place in (str(folder), ALONE[case](alone)):
            assert main([*words, "--from", place]) == 0
            reports.append(capsys.readouterr().out.replace(str(folder), "PLACE").replace(str(alone), "PLACE"))
        assert reports[0].split() == reports[1].split()


def test_without_weights_nothing_trains_or_generates(folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    flags = ["--from", str(tmp_path), "--mock-data", "--lr", "1e-3", "--train-iters", "1"]
    for act in (lambda: petatron.load(None, flags), lambda: find_model(tmp_path)):
        with pytest.raises(CheckpointError, match=r"has config.json and no safetensors beside it"):
            act()
