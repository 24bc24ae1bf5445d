"""`--import`: code of one's own reaches every rank, is stored in the run, and later commands find it again."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import petatron
from petatron.base.errors import ConfigError
from petatron.cli.main import main
from petatron.config.import_user_modules import PLUGIN_GROUP, import_installed_plugins
from petatron.models import registry
from petatron.validate import load_config

TINY = "tiny-llama --mock-data --tokenizer-type ByteTokenizer --num-layers 2 --hidden-size 32 --num-attention-heads 4"
TRAINING = "--seq-length 16 --lr 1e-3 --train-iters 2 --eval-iters 0 --global-batch-size 4 --log-interval 1"
MODEL = """
from dataclasses import dataclass, replace
import petatron

@dataclass(frozen=True)
class Note:  # dataclasses look their module up while it runs
    text: str

def small(config, moe):
    return replace(petatron.decoder_spec(replace(config, init_method_std=0.5), moe), config=config)

petatron.register_model("{name}", small)
"""


def write_model(folder: Path, name: str) -> Path:
    """A file that registers a model; names are registered once per process."""
    file = folder / f"{name}.py"
    file.write_text(MODEL.format(name=name.replace("_", "-")))
    return file


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own: what was typed before is recorded there."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)  # where runs without a folder write their log
    return folder


def train(*words: str) -> int:
    return main(["train", *TINY.split(), *TRAINING.split(), *words])


@pytest.mark.usefixtures("forked_ranks")
def test_a_model_of_ones_own_trains_on_two_ranks_and_later_commands_find_it(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file, run = write_model(tmp_path, "model_on_ranks"), tmp_path / "run"
    flags = ["--model-type", "model-on-ranks", "--tp", "2"]
    assert train(*flags, "--import", file.name, "--save", str(run)) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["launch"]["imports"] == [str(file)]
    (tmp_path / "held-out.txt").write_text("def f(): pass")
    monkeypatch.chdir(run)
    again = "--train-iters 3 --override-opt-param-scheduler --load"
    for command in (
        f"generate {run} --prompt a --max-tokens 2",
        f"eval {run} --task text --data {tmp_path}/held-out.txt",
        f"train {run}/config.yaml {again} {run} --tp 1",
        f"train --from {run} --mock-data {TRAINING}",
        f"plan memory {run}/config.yaml",
        f"plan cache --from {run}",
        f"verify {run}/config.yaml --steps 1 --dtype float64 --tp 1",
        f"checkpoint convert {run} {tmp_path}/own --to petatron",
    ):
        forget("model-on-ranks")
        assert main(command.split()) == 0, f"{command}\n{capsys.readouterr().err}"
    forget("model-on-ranks")
    assert petatron.from_pretrained(run).spec.config.model_type == "model-on-ranks"


def test_a_module_that_was_moved_is_named_anew(tmp_path: Path, capsys):
    file, run = write_model(tmp_path, "moved_model"), tmp_path / "run"
    assert train("--model-type", "moved-model", "--import", str(file), "--save", str(run)) == 0
    (tmp_path / "new").mkdir()
    moved = file.rename(tmp_path / "new" / file.name)
    generate = ["generate", str(run), "--prompt", "a", "--max-tokens", "1"]
    forget("moved-model")
    assert main(generate) == 2
    said = capsys.readouterr().err
    assert f"--import {file} does not exist" in said and f"{run}/step-00000002 names it" in said
    assert "if it was moved, add --import PATH, where PATH ends in moved_model.py." in said
    convert = ["checkpoint", "convert", str(run), str(tmp_path / "own"), "--to", "petatron"]
    assert main(convert) == 2 and f"--import {file} does not exist" in capsys.readouterr().err
    again = ["train", str(run / "config.yaml"), "--load", str(run), "--train-iters", "3", "--lr-decay-iters", "2"]
    for command in (generate, again, convert):
        forget("moved-model")
        assert main([*command, "--import", str(moved)]) == 0, capsys.readouterr().err
    assert yaml.safe_load((run / "config.yaml").read_text())["launch"]["imports"] == [str(moved)]
    file.write_text(moved.read_text())  # an older copy in the old place is not imported beside the one that is typed
    forget("moved-model")
    assert main([*generate, "--import", str(moved)]) == 0


def forget(model: str) -> None:
    """As in a fresh process: nobody has imported anything."""
    registry._BUILDERS.pop(model, None)
    registry.spec_from_config.cache_clear()
    for name in [name for name in sys.modules if name.startswith("petatron_import_")]:
        del sys.modules[name]


def test_a_dotted_name_is_found_in_the_working_folder(tmp_path: Path, monkeypatch):
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    write_model(tmp_path / "own_package", "dotted_model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded = load_config(
        ["--import", "own_package.dotted_model", "--model-type", "dotted-model", *TINY.split()[1:], *TRAINING.split()]
    )
    assert loaded.config.launch.imports == ("own_package.dotted_model",)


def test_several_modules_and_those_of_the_environment_add_up(tmp_path: Path, monkeypatch):
    first, second, third = (write_model(tmp_path, f"of_several_{number}") for number in range(3))
    monkeypatch.setenv("PETATRON_IMPORT", str(third))
    words = ["--import", str(first), "--import", str(second), "--model-type", "of-several-2"]
    run = petatron.load("tiny-llama", [*TINY.split()[1:], *TRAINING.split(), *words])
    assert run.config.launch.imports == tuple(map(str, (first, second, third)))


def test_the_environment_is_stored_in_the_run(tmp_path: Path, monkeypatch, capsys):
    file = write_model(tmp_path, "of_environment")
    monkeypatch.setenv("PETATRON_IMPORT", str(file))
    assert train("--model-type", "of-environment", "--save", str(tmp_path / "run")) == 0
    monkeypatch.delenv("PETATRON_IMPORT")
    forget("of-environment")
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a", "--max-tokens", "1"]) == 0


def test_every_module_that_is_wrong_is_told_with_the_other_problems(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "broken.py").write_text("\n\nraise RuntimeError('half done')\n")
    monkeypatch.chdir(tmp_path)
    assert train("--import", "absent.py", "--import", "no.such", "--import", "broken.py", "--tp", "3") == 2
    text = capsys.readouterr().err
    assert f"--import absent.py does not exist: looked for the file {tmp_path}/absent.py. Give its path" in text
    assert f"--import no.such is no module that Python finds: looked in {tmp_path} and the" in text
    assert f"--import broken.py fails with RuntimeError: half done ({tmp_path}/broken.py:3)" in text
    assert "--tensor-model-parallel-size 3" in text


def test_a_model_that_nobody_registered_names_the_flag(capsys):
    assert train("--model-type", "of-nobody") == 2
    assert "add --import MODULE" in capsys.readouterr().err


def test_installed_plugins_are_found_when_a_name_is_unknown(tmp_path: Path, monkeypatch):
    """A package with an entry point in our group, as pip leaves it in a folder of sys.path."""
    write_model(tmp_path, "installed_model")
    facts = tmp_path / "own_plugin-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: own-plugin\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\nown = installed_model\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    import_installed_plugins.cache_clear()
    assert train("--model-type", "installed-model") == 0


def test_help_imports_nothing(tmp_path: Path):
    (tmp_path / "loud.py").write_text("raise RuntimeError('imported')")
    done = subprocess.run(
        [sys.executable, "-m", "petatron", "train", "--import", str(tmp_path / "loud.py"), "--help"],
        capture_output=True,
    )
    assert done.returncode == 0


def test_the_flag_needs_a_value(capsys):
    assert main(["checkpoint", "inspect", "--import"]) == 2
    assert "--import needs a value" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--import needs a value"):
        load_config(["--import"], preset="tiny-llama", require_training=False)
