"""`--use-checkpoint-args`: the checkpoint in --load says what the model is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import petatron
from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.manifest import _digest
from petatron.cli.main import main
from petatron.cli.train import read_checkpoint
from petatron.config import LoadedConfig
from petatron.config.saved_config import saved_yaml
from petatron.validate import load_config, resolve_config
from tests.cli.train.test_run_again import write_dataset

RUN = "--lr 1e-3 --eval-iters 0 --num-workers 0 --live off --log-interval 1 --split 1,0,0 --train-iters 2".split()
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 300 --swiglu --hidden-dropout 0.25 "
    "--normalization RMSNorm --position-embedding-type rope --rotary-base 500 --num-query-groups 1 --disable-bias-linear "
    "--tokenizer-type ByteTokenizer --num-experts 4 --moe-router-topk 2"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset and a run of two iterations on it."""
    folder = tmp_path_factory.mktemp("runs")
    write_dataset(folder / "text")
    data = ["--data-path", str(folder / "text")]
    assert main(["train", *MODEL, *RUN, *data, "--save", str(folder / "a")]) == 0
    return folder


def read(*argv: str) -> LoadedConfig:
    return load_config(argv, read_checkpoint=read_checkpoint, require_training=False)


def test_a_run_needs_no_other_word_about_the_model(folder: Path, capsys: pytest.CaptureFixture[str]):
    flags = [*RUN[:-1], "3", "--lr-decay-iters", "2", "--data-path", str(folder / "text")]
    assert main(["train", "--load", str(folder / "a"), "--use-checkpoint-args", *flags]) == 0
    said = capsys.readouterr().out
    assert "resumed at iteration 2" in said and "changed since the checkpoint: train_iters 2 -> 3" in said
    assert "ByteTokenizer" in said


def test_every_value_has_its_origin(folder: Path, capsys: pytest.CaptureFixture[str]):
    flags = f"--load {folder / 'a'} --use-checkpoint-args --num-layers 5 --rotary-base 500 --hidden-dropout 0 --seq-length 4"
    assert main(["config", "show", "tiny-llama", *flags.split()]) == 0
    shown = capsys.readouterr()
    lines = {line.split()[0]: line.split()[1:] for line in shown.out.splitlines() if line.startswith("  ")}
    step = str(folder / "a" / "step-00000002")
    assert lines["num_layers"] == ["2", "checkpoint", step]
    assert lines["num_experts"] == ["4", "checkpoint", step]
    assert lines["tokenizer_type"] == ["ByteTokenizer", "checkpoint", step]
    assert lines["hidden_dropout"] == ["0", "--hidden-dropout"], "how a model is trained is the run's choice"
    assert lines["seq_length"] == ["4", "--seq-length"]
    [note] = [line for line in shown.err.splitlines() if "takes the place" in line]
    assert f"{step} takes the place of" in note and "--num-layers 5 (now 2)" in note and "--rotary-base" not in note


def test_what_nobody_chose_comes_from_the_checkpoint(folder: Path):
    run = read("--load", str(folder / "a"), "--use-checkpoint-args").config
    assert (run.model.hidden_dropout, run.model.seq_length, run.moe.moe_router_topk) == (0.25, 8, 2)
    other = read("--load", str(folder / "a"), "--use-checkpoint-args", "--tokenizer-type", "NullTokenizer").config
    assert other.tokenizer.tokenizer_type == "NullTokenizer"
    none = read("--load", str(folder / "a"), "--use-checkpoint-args", "--no-use-tokenizer-model-from-checkpoint-args")
    assert none.config.tokenizer.tokenizer_type is None and none.config.model.vocab_size == 300


def test_the_settings_are_written_out_and_not_read_again(folder: Path, tmp_path: Path):
    loaded = read("--load", str(folder / "a"), "--use-checkpoint-args")
    (tmp_path / "config.yaml").write_text(saved_yaml(loaded))
    again = load_config(files=[tmp_path / "config.yaml"], require_training=False).config
    assert again.model == loaded.config.model and again.moe == loaded.config.moe
    assert again.checkpoint.use_checkpoint_args is False


def test_sizes_of_the_layout_come_along_when_asked(folder: Path, tmp_path: Path):
    saved = tmp_path / "layout"
    shutil.copytree(folder / "a", saved)
    _edit(saved, lambda facts: facts["config"]["parallel"].update(tensor_model_parallel_size=2, sequence_parallel=True))
    asked = ["--load", str(saved), "--use-checkpoint-args"]
    assert read(*asked).config.parallel.tensor_model_parallel_size == 1
    loaded = read(*asked, "--use-mp-args-from-checkpoint-args", "--tp", "4")
    assert loaded.config.parallel.tensor_model_parallel_size == 2 and loaded.config.parallel.world_size == 2
    assert any("--tensor-model-parallel-size 4 (now 2)" in notice for notice in loaded.notices)


@pytest.mark.parametrize("kind", ["huggingface", "saved by hand"])
def test_a_checkpoint_of_no_training_run_says_what_its_model_is(folder: Path, tmp_path: Path, kind: str):
    if kind == "huggingface":
        where = tmp_path / "model"
        shutil.copytree(folder / "a" / "step-00000002" / "model", where)
    else:
        where = tmp_path / "own"
        model = petatron.from_pretrained(folder / "a")
        petatron.save_checkpoint(str(where), step=1, model=model)
    asked = ["--load", str(where), "--use-checkpoint-args", "--finetune"]
    run, original = read(*asked).config, read("--load", str(folder / "a"), "--use-checkpoint-args").config
    for name in (
        "num_layers",
        "hidden_size",
        "num_query_groups",
        "vocab_size",
        "rotary_base",
        "activation",
        "normalization",
    ):
        assert getattr(run.model, name) == getattr(original.model, name), name
    assert (run.moe.num_experts, run.moe.moe_router_topk) == (4, 2)
    problems = resolve_config([*asked, "--use-mp-args-from-checkpoint-args"], read_checkpoint=read_checkpoint)[1]
    assert [str(problem).partition(", and")[0] for problem in problems] == [
        "--use-mp-args-from-checkpoint-args needs the checkpoint of a training run"
    ]
    flags = [*RUN, "--data-path", str(folder / "text"), "--save", str(tmp_path / "new")]
    assert main(["train", *asked, *flags]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--use-checkpoint-args",
            "--use-checkpoint-args needs --load, the checkpoint to read the model from. Give it, or leave this out.",
        ),
        (
            "--preset tiny-llama --use-mp-args-from-checkpoint-args",
            "--use-mp-args-from-checkpoint-args needs --use-checkpoint-args. Give both, or leave this out.",
        ),
    ],
)
def test_what_is_missing_is_the_only_problem(flags: str, message: str):
    problems = resolve_config(flags.split(), read_checkpoint=read_checkpoint, require_training=False)[1]
    assert [str(problem) for problem in problems] == [message]


def test_a_command_that_loads_nothing_says_so(folder: Path):
    problems = resolve_config(["--load", str(folder / "a"), "--use-checkpoint-args"])[1]
    assert [problem.rule for problem in problems] == ["is not known to this command"]


def test_an_empty_folder_has_no_model(tmp_path: Path):
    with pytest.raises(CheckpointError, match="holds no checkpoint, and --use-checkpoint-args needs one"):
        read("--load", str(tmp_path), "--save", str(tmp_path), "--use-checkpoint-args")


def test_a_checkpoint_of_another_version_is_refused(folder: Path, tmp_path: Path):
    saved = tmp_path / "newer"
    shutil.copytree(folder / "a", saved)
    manifest = saved / "step-00000002" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))
    with pytest.raises(CheckpointError, match="has format version 99"):
        read("--load", str(saved), "--use-checkpoint-args")


def test_settings_that_this_version_does_not_have_are_named(folder: Path, tmp_path: Path):
    saved = tmp_path / "later"
    shutil.copytree(folder / "a", saved)
    _edit(saved, lambda facts: facts["config"]["model"].update(sideways_attention=True, activation="wiggle"))
    problems = resolve_config(["--load", str(saved), "--use-checkpoint-args"], read_checkpoint=read_checkpoint)[1]
    rules = [problem.rule for problem in problems]
    assert len(rules) == 2 and all(problem.where == "--use-checkpoint-args" for problem in problems)
    assert any("--activation wiggle" in rule for rule in rules)
    assert any("sideways_attention True" in rule for rule in rules)


def test_a_damaged_step_gives_way_only_when_that_is_allowed(folder: Path, tmp_path: Path):
    saved = tmp_path / "damaged"
    shutil.copytree(folder / "a", saved)
    shutil.copytree(saved / "step-00000002", saved / "step-00000003")
    (saved / "step-00000003" / "manifest.json").write_text("{}")
    (saved / "latest").write_text("step-00000003\n")
    asked = ["--load", str(saved), "--use-checkpoint-args"]
    with pytest.raises(CheckpointError, match="is damaged"):
        read(*asked)
    assert read(*asked, "--load-fallback").origins["model.num_layers"].detail.endswith("step-00000002")


def _edit(saved: Path, change) -> None:
    """Change the facts of a checkpoint as if its run had written them."""
    path = saved / "step-00000002" / "manifest.json"
    body = json.loads(path.read_text())
    del body["digest"]
    change(body["facts"]["facts"])
    path.write_text(json.dumps({**body, "digest": _digest(body)}))
