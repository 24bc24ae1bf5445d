"""`petatron completion`: a real bash completes subcommands, flags, choices, presets and paths."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from petatron.cli.completion import completions, fish_script, zsh_script
from petatron.cli.main import SUBCOMMANDS, main
from petatron.config.schema.fields import all_fields

QUESTIONS = {
    "tr": "train",
    "train tiny-": "tiny-gpt tiny-llama",
    "train --swig": "--swiglu",
    "train tiny-llama --no-check-m": "--no-check-memory",
    "train --tp 2 --preset tiny-l": "tiny-llama",
    "train --lr-decay-style co": "constant cosine",
    "train --num-layers 1": "",
    "train --save da": "data.jsonl data.txt",
    "data pre": "preprocess",
    "data preprocess --overw": "--overwrite",
    "data preprocess --input-format text-": "text-file",
    "plan memory --device-m": "--device-memory-gb",
    "verify tiny-llama --inj": "--inject",
    "config show tiny-g": "tiny-gpt",
    "checkpoint inspect da": "data.jsonl data.txt",
    "bench ker": "kernels",
    "completion z": "zsh",
    "generate run --top-": "--top-k --top-p",
    "generate run --prompts da": "data.jsonl data.txt",
    "chat run --sys": "--system",
    "chat da": "data.jsonl data.txt",
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for name in ("data.jsonl", "data.txt"):
        (folder / name).touch()
    with pytest.MonkeyPatch.context() as patch, (folder / "petatron.bash").open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return folder / "petatron.bash"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes(script: Path):
    ask = 'read -ra COMP_WORDS <<< "petatron $1"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _petatron; echo "${COMPREPLY[*]}"'
    program = f'source {script}; ask() {{ {ask}; }}; for line in "$@"; do ask "$line"; done'
    answer = subprocess.run(
        ["bash", "-c", program, "bash", *QUESTIONS], capture_output=True, text=True, cwd=script.parent
    )
    assert answer.stderr == ""
    found = [" ".join(sorted(line.split())) for line in answer.stdout.splitlines()]  # files come in any order
    assert dict(zip(QUESTIONS, found, strict=True)) == QUESTIONS


@pytest.mark.parametrize(("shell", "make"), [("zsh", zsh_script), ("fish", fish_script)])
def test_other_shells_can_read_their_script(shell: str, make, tmp_path: Path):
    text = make()
    assert all(subcommand in text for subcommand in SUBCOMMANDS) and "tiny-llama" in text and "num-layers" in text
    if shutil.which(shell) is not None:
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_every_flag_of_the_schema_and_every_verb_is_there():
    found = completions()
    assert {command.split()[0] for command in found} == set(SUBCOMMANDS)
    assert {info.flag for info in all_fields()} <= set(found["train"].flags)


def test_only_shells_that_are_known(capsys: pytest.CaptureFixture[str]):
    assert main(["completion", "tcsh"]) == 2
    assert "usage: petatron completion bash|zsh|fish" in capsys.readouterr().err
    assert main(["completion", "--help"]) == 0
