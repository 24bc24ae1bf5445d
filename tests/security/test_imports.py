"""A folder from a stranger names a module: nothing of it runs, whatever is done with the folder, until the user types its name."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import petatron
from petatron.base.errors import ConfigError
from petatron.checkpoint.files.manifest import _digest
from petatron.cli.main import main
from tests.cli.test_import import TINY, TRAINING, home, write_model  # noqa: F401  a home of its own
from tests.longform import diagonal

ATTACK = "import pathlib\npathlib.Path(__file__).with_name('owned').touch()\n"


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    assert main(["train", *TINY.split(), *TRAINING.split(), "--save", str(folder)]) == 0
    return folder


def plant(plain_run: Path, folder: Path, name: str) -> Path:
    """The run as a stranger hands it over: its config.yaml and its checkpoint name a module."""
    shutil.copytree(plain_run, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text() + f"\nlaunch:\n  imports: [{name}]\n")
    write_imports(folder, [name])
    return folder


def write_imports(folder: Path, imports: Any) -> None:
    """Changes the checkpoint as if its run had named these modules, digest and all."""
    manifest = folder / "step-00000002" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["digest"]
    content["facts"]["facts"]["config"]["launch"]["imports"] = imports
    manifest.write_text(json.dumps({**content, "digest": _digest(content)}))


@diagonal(2)
@pytest.mark.parametrize("kind", ["absolute path", "path in the folder", "dotted name", "package"])
def test_a_stranger_cannot_make_us_import(plain_run: Path, tmp_path: Path, monkeypatch, capsys, kind: str):
    """The name of a file, of one beside the config, of a module in the working folder, of a package that runs on the way."""
    folder = tmp_path / "stranger"
    names = {
        "absolute path": str(folder / "attack.py"),
        "path in the folder": "./attack.py",
        "dotted name": "attack",
        "package": "attacks.inner",
    }
    plant(plain_run, folder, names[kind])
    (folder / "attack.py").write_text(ATTACK)
    (folder / "attacks").mkdir()
    for file in ("__init__.py", "inner.py"):
        (folder / "attacks" / file).write_text(ATTACK)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # as `python -m petatron` has it
    held = folder / "held-out.txt"
    held.write_text("text")
    for command in (
        f"generate {folder} --prompt a --max-tokens 1",
        f"generate {folder}/step-00000002 --prompt a --max-tokens 1",
        f"eval {folder} --task text --data {held}",
        f"train {folder}/config.yaml --load {folder}",
        f"train --from {folder} {TRAINING} --mock-data",
        f"train {TINY} {TRAINING} --load {folder} --use-checkpoint-args",
        f"plan memory {folder}/config.yaml",
        f"plan cache --from {folder}",
        f"verify {folder}/config.yaml --steps 1",
        f"config show {folder}/config.yaml",
    ):
        assert main(command.split()) == 2, command
        text = capsys.readouterr().err
        assert "a file's word is not enough for that" in text and f"add --import {names[kind]}" in text, command
    with pytest.raises(ConfigError, match="add --import"):
        petatron.load(str(folder / "config.yaml"))
    petatron.from_pretrained(folder)  # reads the model alone
    main(["checkpoint", "inspect", str(folder)])
    main(["checkpoint", "verify", str(folder)])
    assert not list(tmp_path.rglob("owned")), "the stranger's code ran"


def test_what_the_user_typed_once_is_trusted_at_that_place_alone(plain_run: Path, tmp_path: Path, monkeypatch, capsys):
    """A module of the same name in the stranger's folder is another file."""
    own, stranger = tmp_path / "own", tmp_path / "stranger"
    own.mkdir()
    write_model(own, "shared_name")
    monkeypatch.chdir(own)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    words = ["--model-type", "shared-name", "--import", "shared_name"]
    assert main(["train", *TINY.split(), *TRAINING.split(), *words, "--save", "run"]) == 0
    sys.modules.pop("shared_name")
    sys.path.remove(str(own))
    plant(plain_run, stranger, "shared_name")
    (stranger / "shared_name.py").write_text(ATTACK)
    monkeypatch.chdir(stranger)
    assert main(["generate", str(stranger), "--prompt", "a", "--max-tokens", "1"]) == 2
    assert "--import shared_name" in capsys.readouterr().err
    assert not list(tmp_path.rglob("owned"))


def test_a_record_that_others_can_write_counts_for_nothing(plain_run: Path, tmp_path: Path, home: Path, capsys):  # noqa: F811
    folder = plant(plain_run, tmp_path / "stranger", str(tmp_path / "attack.py"))
    (tmp_path / "attack.py").write_text(ATTACK)
    record = home / ".petatron" / "imports"
    record.mkdir(parents=True)
    (record / "files").write_text(f"{tmp_path / 'attack.py'}\n")
    record.chmod(0o777)
    assert main(["generate", str(folder), "--prompt", "a", "--max-tokens", "1"]) == 2
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("imports", [[1], "text.py", {"a": 1}, [None]])
def test_a_damaged_list_is_told(plain_run: Path, tmp_path: Path, capsys, imports):
    folder = plant(plain_run, tmp_path / "stranger", "x")
    write_imports(folder, imports)
    assert main(["generate", str(folder), "--prompt", "a", "--max-tokens", "1"]) in (1, 2)
    assert "manifest.json" in capsys.readouterr().err
