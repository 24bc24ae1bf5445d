"""The config.yaml of a run tells where its values first came from, also after resumes from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.config.saved_config import saved_yaml
from petatron.config.value_origins import read_origin_comments
from petatron.validate import load_config

MOCK = "--mock-data --train-iters 4 --lr 1e-3".split()


def save(tmp_path: Path, *flags: str, **sources: object) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(saved_yaml(load_config([*MOCK, *flags], **sources)))  # pyright: ignore[reportArgumentType]
    return path


def origins(path: Path, *flags: str) -> dict[str, str]:
    return {name: str(origin) for name, origin in load_config(flags, files=[path]).origins.items()}


def test_origins_survive_a_resume_and_the_next(tmp_path: Path):
    (tmp_path / "own.yaml").write_text("clip_grad: 0.5\n")
    path = save(tmp_path, "--num-layers", "2", "--tp", "2", preset="tiny-llama", files=[tmp_path / "own.yaml"])
    for _ in range(2):
        found = origins(path)
        assert found["model.hidden_size"].startswith("preset tiny-llama (")
        assert found["model.num_layers"].startswith("--num-layers (") and str(path) in found["model.num_layers"]
        assert found["optim.clip_grad"].startswith(f"{tmp_path}/own.yaml:1 (")
        assert found["model.rotary_percent"].startswith("default (")
        assert found["model.kv_channels"] == "derived: hidden size / heads"
        path.write_text(saved_yaml(load_config([], files=[path])))
    assert origins(path, "--num-layers", "3")["model.num_layers"] == "--num-layers"


def test_an_edited_value_is_of_the_file(tmp_path: Path):
    path = save(tmp_path, preset="tiny-llama")
    path.write_text(
        path.read_text()
        .replace("  hidden_size: 128", "  hidden_size: 64", 1)
        .replace("rotary_percent: 1.0", "rotary_percent: 0.5")
    )
    found = origins(path)
    assert found["model.hidden_size"] == f"{path}:4" and found["model.num_layers"].startswith("preset tiny-llama (")
    assert found["model.rotary_percent"].startswith(f"{path}:")


def test_show_leaves_out_defaults_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save(tmp_path, preset="tiny-llama")
    assert main(["config", "show", str(tmp_path), "--changed"]) == 0
    text = capsys.readouterr().out
    assert "preset tiny-llama (" in text and "--lr (" in text and "default (" not in text


def test_comments_of_strangers_can_only_be_read(tmp_path: Path):
    path = save(tmp_path, preset="tiny-llama")
    text = path.read_text().replace("<- preset tiny-llama", "<- \x1b[2J" + "x" * 1000)
    told = read_origin_comments(text).comments["model.num_layers"][1]
    assert "\x1b" not in told and len(told) == 300
    assert read_origin_comments("# First origins").comments == {} and not read_origin_comments("model:\n").is_told
