"""Megatron's tools with the flags that its users' scripts have."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from petatron.base.errors import ConfigError
from petatron.checkpoint.megatron import open_megatron
from petatron.cli.subcommands.megatron_convert_flags import from_megatron_flags, parser
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.indexed_writer import IndexedWriter
from tests.golden.make_megatron import FOLDER

ROOT = Path(__file__).parents[2]


def run(script: str, *words: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / script), run_name="__main__")
    return int(str(ended.value.code))


def test_the_converter_writes_what_its_flags_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    source, target = FOLDER / "llama-torch_dist-newer", tmp_path / "cut"
    words = f"--model-type GPT --loader core --saver core --load-dir {source} --save-dir {target} --megatron-path /opt/megatron "
    words += "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --max-queue-size 5 --no-checking"
    assert run("checkpoint/convert.py", *words.split(), monkeypatch=monkeypatch) == 0
    assert {path.name for path in (target / "iter_0000010").iterdir()} == {
        f"mp_rank_{tp:02d}_{pp:03d}" for tp in (0, 1) for pp in (0, 1)
    }
    assert open_megatron(target).model["num_layers"] == 2
    assert "is now" in capsys.readouterr().out
    assert run("checkpoint/convert.py", source, tmp_path / "ours", "--to", "petatron", monkeypatch=monkeypatch) == 0


@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), (["--loader", "core", "-h"], 0), ([], 2)])
def test_the_help_of_the_converter_has_the_flags_that_it_takes(
    words: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run("checkpoint/convert.py", *words, monkeypatch=monkeypatch) == status
    shown = capsys.readouterr().out
    assert shown.startswith("usage: tools/checkpoint/convert.py") and "SOURCE TARGET --to" in shown
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    assert {"--load-dir", "--target-pipeline-parallel-size", "--megatron-path"} <= flags
    assert all(flag in shown for flag in flags)


def test_flags_of_the_converter():
    words = "--model-type GPT --loader llama_mistral --model-size llama3-8B --checkpoint-type hf --load-dir a --save-dir b --bf16 "
    words += "--saver torch_dist --saver-transformer-impl local --tokenizer-model a --target-expert-parallel-size 2 --no-optim"
    assert from_megatron_flags(words.split()) == (
        "a b --from huggingface --to megatron --megatron-format torch_dist --megatron-spec local --ep 2 --dtype bf16 --no-optim".split()
    )
    assert from_megatron_flags("--saver hf --load-dir a --save-dir b --true-vocab-size 5".split()) == (
        "a b --from megatron --to huggingface --vocab-size 5".split()
    )


def test_all_that_the_converter_cannot_do_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        from_megatron_flags("--model-type BERT --loader llava --saver core --checkpoint-type meta --load-dir a".split())
    assert [problem.where for problem in caught.value.problems] == [
        *("--save-dir", "--model-type", "--loader", "--checkpoint-type"),
    ]


def test_datasets_of_a_folder_are_merged_in_the_order_of_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, token in (("b", 2), ("a", 1), ("c", 3)):
        with IndexedWriter(tmp_path / "in" / name, np.uint16) as writer:
            writer.add_document([token] * 4)
    for number, form in enumerate((["--input", tmp_path / "in"], [f"--input={tmp_path / 'in'}"])):
        target = tmp_path / f"all{number}"
        assert run("merge_datasets.py", *form, "--output-prefix", target, monkeypatch=monkeypatch) == 0
        merged = IndexedDataset(target)
        assert [int(merged.get_document(index)[0]) for index in range(merged.num_documents)] == [1, 2, 3]
