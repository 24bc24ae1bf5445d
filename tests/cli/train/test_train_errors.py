"""Bad input gets one clear error before training starts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import petatron
from petatron.base.errors import ConfigError
from petatron.cli.main import main
from petatron.data.indexed_writer import IndexedWriter
from petatron.estimate.memory.forecast import recompute_plans
from petatron.train.run_training import run_training
from petatron.train.state.check_run_dirs import lock_save_dir
from petatron.validate import load_config
from petatron.validate.preflight import preflight

MODEL = (
    "train --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --train-iters 2 --lr 1e-3 --eval-iters 0 "
    "--num-workers 0 --live off"
).split()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    prefix = tmp_path / "good"
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for start in range(20):
            writer.add_document(np.arange(start, start + 30, dtype=np.uint16))
    return prefix


def _fails(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = main([*MODEL, *flags])
    assert code in (1, 2)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert "iteration" not in captured.out, "training started"
    return code, captured.err


def test_good_input_trains(dataset: Path, tmp_path: Path):
    flags = ["--data-path", str(dataset), "--vocab-size", "64", "--tokenizer-type", "NullTokenizer", "--split", "1,0,0"]
    assert main([*MODEL, *flags, "--save", str(tmp_path / "out")]) == 0
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("train") == 2


def test_wrong_flag_names_the_nearest(capsys):
    code, text = _fails(capsys, "--mock-data", "--hiden-size", "32")
    assert code == 2 and "--hiden-size" in text and "--hidden-size" in text


def test_every_problem_at_once(capsys):
    flags = "--mock-data --tp 3 --global-batch-size 7 --micro-batch-size 2 --bf16 --fp16 --min-lr 1 --nproc-per-node 3".split()
    _, text = _fails(capsys, *flags)
    for words in ("--tensor-model-parallel-size 3", "--global-batch-size 7", "--fp16", "--min-lr 1"):
        assert words in text
    assert "problems in this configuration" in text


def test_later_features_are_refused_not_ignored(capsys):
    _, text = _fails(capsys, *"--mock-data --vision-model-type clip".split())
    assert text.count("not in this version") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--pp 2 --num-layers 3", "--pipeline-model-parallel-size 2 does not divide --num-layers 3. Use 1 or 3"),
        (
            "--tp 2 --num-attention-heads 1",
            "--tensor-model-parallel-size 2 does not divide --num-attention-heads 1. Use 1.",
        ),
        (
            "--num-experts 6 --ep 4 --dp 4",
            "--expert-model-parallel-size 4 does not divide --num-experts 6. Use 1, 2, 3 or 6.",
        ),
        (
            "--micro-batch-size 2 --dp 2 --global-batch-size 6",
            "--global-batch-size 6 is not a multiple of micro-batch 2 x data-parallel 2 = 4. Nearest: 4 or 8.",
        ),
        (
            "--cp 4 --seq-length 12 --attention-dropout 0",
            "--seq-length 12 is not a multiple of 2 x --context-parallel-size 4",
        ),
    ],
)
def test_layouts_that_do_not_divide(capsys, flags: str, words: str):
    code, text = _fails(capsys, "--mock-data", *flags.split())
    assert code == 2 and words in text and "problems" not in text


def _damaged(dataset: Path, suffix: str, change) -> Path:
    for end in (".bin", ".idx"):
        content = dataset.with_suffix(end).read_bytes()
        dataset.with_name("bad").with_suffix(end).write_bytes(change(content) if end == suffix else content)
    return dataset.with_name("bad")


@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        (".idx", lambda b: b"GARBAGE" + b[7:], "bad.idx"),
        (".idx", lambda b: b[:-9], "bad.idx"),
        (".bin", lambda b: b[: len(b) // 2], "bad.bin"),
    ],
)
def test_damaged_dataset(dataset: Path, capsys, suffix: str, change, words: str):
    prefix = _damaged(dataset, suffix, change)
    flags = ["--data-path", str(prefix), "--vocab-size", "64", "--tokenizer-type", "NullTokenizer", "--split", "1,0,0"]
    assert words in _fails(capsys, *flags)[1]


def test_missing_dataset(tmp_path: Path, capsys):
    flags = ["--data-path", str(tmp_path / "nothing"), "--vocab-size", "64", "--tokenizer-type", "NullTokenizer"]
    assert "nothing" in _fails(capsys, *flags)[1]


def test_empty_dataset(tmp_path: Path, capsys):
    prefix = tmp_path / "empty"
    with IndexedWriter(str(prefix), np.dtype(np.uint16)):
        pass
    flags = ["--data-path", str(prefix), "--vocab-size", "64", "--tokenizer-type", "NullTokenizer"]
    assert "empty" in _fails(capsys, *flags)[1]


def test_token_ids_beyond_the_vocabulary(dataset: Path, capsys):
    flags = ["--data-path", str(dataset), "--vocab-size", "40", "--tokenizer-type", "NullTokenizer", "--split", "1,0,0"]
    assert "40" in _fails(capsys, *flags)[1]


def test_missing_tokenizer(dataset: Path, tmp_path: Path, capsys):
    flags = ["--data-path", str(dataset), "--tokenizer-model", str(tmp_path / "tokenizer.json")]
    assert "tokenizer.json" in _fails(capsys, *flags)[1]


def test_no_vocabulary(dataset: Path, capsys):
    assert "--vocab-size" in _fails(capsys, "--data-path", str(dataset))[1]


@pytest.mark.parametrize("flag", ["--save", "--log-dir"])
@pytest.mark.parametrize(
    ("path", "rule"),
    [("file", "{folder}/file is a file"), ("file/a/run", "{folder}/file/a/run is in {folder}/file, which is a file")],
)
def test_a_file_where_a_folder_of_the_run_should_be(tmp_path: Path, capsys, flag: str, path: str, rule: str):
    (tmp_path / "file").write_text("in the way")
    code, text = _fails(capsys, "--mock-data", flag, str(tmp_path / path))
    assert code == 2 and "1 problem " in text
    assert f"{flag} {rule.format(folder=tmp_path)}. Give the path of a folder." in text


def test_unwritable_save_folder(tmp_path: Path, capsys, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("petatron.checkpoint.files.digested_file_io.tempfile.TemporaryFile", refuse)
    code, text = _fails(capsys, "--mock-data", "--save", str(tmp_path / "run"))
    assert code == 1 and f"cannot be written to {tmp_path}/run: Permission denied. Make that folder writable" in text


def test_every_missing_file_at_once(tmp_path: Path, capsys):
    flags = [
        "--data-path",
        f"{tmp_path}/data",
        "--vocab-file",
        f"{tmp_path}/v.json",
        "--merge-file",
        f"{tmp_path}/m.txt",
    ]
    code, text = _fails(capsys, *flags, "--tokenizer-type", "GPT2BPETokenizer")
    assert code == 2 and "3 problems" in text
    for name in ("data.idx and no", "v.json does not exist", "m.txt does not exist"):
        assert name in text


def test_missing_library(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, text = _fails(capsys, "--mock-data", "--wandb-project", "p", "--tensorboard-dir", "t")
    assert code == 2 and "pip install wandb" in text and "pip install tensorboard" in text


def test_a_missing_library_is_told_with_the_other_problems(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, text = _fails(
        capsys, "--mock-data", "--wandb-project", "p", "--tensorboard-dir", "t", "--lr", "-1", "--tp", "3"
    )
    assert code == 2 and text.startswith("4 problems"), text
    for flag in ("--wandb-project", "--tensorboard-dir", "--lr", "--tensor-model-parallel-size"):
        assert f"\n  {flag} " in text


def test_text_where_token_files_belong_names_what_reads_it(tmp_path: Path, capsys):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "a.parquet").write_bytes(b"PAR1")
    (folder / "b.jsonl").write_text("{}")
    code, text = _fails(capsys, "--data-path", str(folder / "a.parquet"), str(folder / "b.jsonl"))
    assert code == 2
    for name in ("a.parquet", "b.jsonl"):
        prefix = (folder / name).with_suffix("")
        assert f"petatron data preprocess --input {folder / name} --output-prefix {prefix}" in text


def test_machines_that_would_never_meet(capsys):
    code, text = _fails(capsys, "--mock-data", *"--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1".split())
    assert code == 2 and text.startswith("2 problems") and "Give the same --master-port" in text
    assert "--master-addr 127.0.0.1 (default) means each of the 2 machines itself" in text
    code, text = _fails(
        capsys, "--mock-data", *"--nnodes 2 --nproc-per-node 1 --master-addr localhost --master-port 29500".split()
    )
    assert code == 2 and "--master-addr localhost means each of the 2 machines itself" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--exit-on-missing-checkpoint", "--save", "{here}"], "--exit-on-missing-checkpoint needs one"),
        (["--finetune"], "--finetune needs one"),
        (["--save", "{here}/other"], "holds no checkpoint"),
        ([], "holds no checkpoint"),
    ],
)
def test_load_from_nothing(tmp_path: Path, capsys, flags: list[str], words: str):
    given = [flag.format(here=tmp_path) for flag in flags]
    assert words in _fails(capsys, "--mock-data", "--load", str(tmp_path), *given)[1]


def test_load_and_save_may_start_empty(tmp_path: Path):
    assert main([*MODEL, "--mock-data", "--save", str(tmp_path / "new"), "--load", str(tmp_path / "new")]) == 0


def test_load_that_points_beside_the_mark(tmp_path: Path, capsys):
    run = tmp_path / "run"
    assert main([*MODEL, "--mock-data", "--save", str(run)]) == 0
    capsys.readouterr()
    load = ["--mock-data", "--load"]
    assert f"--load {run} --ckpt-step 2" in _fails(capsys, *load, str(run / "step-00000002"))[1]
    assert "is a file" in _fails(capsys, *load, str(run / "metrics.jsonl"))[1]
    (run / "step-00000002" / "manifest.json").unlink()
    assert "not complete" in _fails(capsys, *load, str(run))[1]


def test_save_folder_of_another_run(tmp_path: Path, capsys):
    save = ["--mock-data", "--save", str(tmp_path)]
    assert main([*MODEL, *save]) == 0
    capsys.readouterr()
    _, text = _fails(capsys, *save)
    assert "already holds checkpoints (the newest of step 2)" in text and f"--load {tmp_path}" in text
    assert "already holds" in _fails(capsys, *save, "--load", str(tmp_path), "--finetune")[1]


def test_two_runs_at_once_in_one_folder(tmp_path: Path, capsys):
    with lock_save_dir(str(tmp_path), rank=0):
        assert "Another run is writing to" in _fails(capsys, "--mock-data", "--save", str(tmp_path))[1]
    assert main([*MODEL, "--mock-data", "--save", str(tmp_path)]) == 0


def test_resume_of_another_model(tmp_path: Path, capsys):
    save = ["--mock-data", "--save", str(tmp_path), "--load", str(tmp_path)]
    assert main([*MODEL, *save]) == 0
    capsys.readouterr()
    _, text = _fails(capsys, *save, "--norm-epsilon", "0.1", "--num-attention-heads", "1", "--kv-channels", "16")
    assert "norm_epsilon: 1e-05 then, 0.1 now" in text and "num_attention_heads: 2 then, 1 now" in text


def test_resume_of_a_finished_run_does_nothing(tmp_path: Path, capsys):
    save = ["--mock-data", "--save", str(tmp_path), "--load", str(tmp_path)]
    assert main([*MODEL, *save]) == 0
    before = (tmp_path / "step-00000002" / "manifest.json").read_bytes()
    assert main([*MODEL, *save]) == 0
    assert "nothing left to train" in capsys.readouterr().out
    assert (tmp_path / "step-00000002" / "manifest.json").read_bytes() == before


def test_resume_from_weights_that_no_run_saved(tmp_path: Path, capsys):
    run = petatron.load(None, [*MODEL[1:], "--mock-data"]).config
    model = petatron.build_model(run, petatron.launch(run))
    model.run = None
    petatron.save_checkpoint(str(tmp_path), step=5, model=model, optimizer=petatron.build_optimizer(run, model))
    assert "was not saved by a training run" in _fails(capsys, "--mock-data", "--load", str(tmp_path))[1]
    assert main([*MODEL, "--mock-data", "--load", str(tmp_path), "--finetune"]) == 0


def test_resume_with_another_schedule(tmp_path: Path, capsys):
    save = ["--mock-data", "--save", str(tmp_path), "--load", str(tmp_path)]
    assert main([*MODEL, *save]) == 0
    capsys.readouterr()
    _, text = _fails(capsys, *save, "--lr", "5e-3")
    assert "0.001 then, 0.005 now" in text and "--override-opt-param-scheduler" in text


def test_resume_without_optimizer_state(tmp_path: Path, capsys):
    assert main([*MODEL, "--mock-data", "--save", str(tmp_path), "--no-save-optim"]) == 0
    capsys.readouterr()
    assert "was saved without optimizer state" in _fails(capsys, "--mock-data", "--load", str(tmp_path))[1]
    assert main([*MODEL, "--mock-data", "--load", str(tmp_path), "--finetune"]) == 0


def test_a_budget_no_stage_can_keep_is_refused_before_ranks_start():
    """With what the largest stage needs, which is the last: it holds the head."""
    flags = "--mock-data --lr 1e-3 --train-iters 1 --pp 2 --recompute-memory-budget-gb"
    with pytest.raises(ConfigError) as error:
        run_training(load_config([*flags.split(), "0.00001"], preset="tiny-llama", world_size=2))
    needed = str(error.value).split("Give at least ")[1].split(",")[0]
    enough = load_config([*flags.split(), needed], preset="tiny-llama", world_size=2).config
    assert len(recompute_plans(enough, device="cpu")) == 2


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_finds_a_problem_ends_like_the_command_line():
    """With 2, as for what is found before ranks are started."""
    flags = "train tiny-llama --mock-data --lr 1e-3 --train-iters 1 --recompute-memory-budget-gb 0.00001".split()
    assert main(flags) == main([*flags, "--nproc-per-node", "2"]) == 2


@pytest.mark.parametrize(("path", "rule"), [(".", "is a folder"), ("missing/x.json", "is in a folder that does not")])
def test_a_timeline_that_cannot_be_written_is_refused(path: str, rule: str):
    flags = f"--mock-data --lr 1e-3 --train-iters 3 --pipeline-timeline {path}"
    with pytest.raises(ConfigError, match=rule):
        run_training(load_config(flags.split(), preset="tiny-llama"))


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("file", "--optimizer-nvme-offload {folder}/file is a file. Give the path of a folder."),
        ("file/state", "--optimizer-nvme-offload {folder}/file/state is in {folder}/file, which is no folder. "),
        (
            "missing/state",
            "--optimizer-nvme-offload {folder}/missing/state is in {folder}/missing, which is no folder. "
            "Make {folder}/missing first, or give a folder on a disk that is there.",
        ),
    ],
)
def test_a_folder_for_optimizer_state_that_cannot_be(capsys, tmp_path: Path, path: str, rule: str):
    (tmp_path / "file").write_text("")
    code, text = _fails(capsys, "--mock-data", "--optimizer-nvme-offload", str(tmp_path / path))
    assert code == 2 and rule.format(folder=tmp_path) in text
    assert [found.name for found in tmp_path.iterdir()] == ["file"], "nothing is made on the way"


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("file", "--profile-dir {folder}/file is a file. Give the path of a folder."),
        ("missing/traces", "--profile-dir {folder}/missing/traces is in {folder}/missing, which is no folder. "),
    ],
)
def test_a_folder_for_traces_that_cannot_be(capsys, tmp_path: Path, path: str, rule: str):
    (tmp_path / "file").write_text("")
    flags = ["--mock-data", "--profile", "--profile-step-start", "1", "--profile-dir", str(tmp_path / path)]
    code, text = _fails(capsys, *flags)
    assert code == 2 and rule.format(folder=tmp_path) in text
    assert [found.name for found in tmp_path.iterdir()] == ["file"], "nothing is made on the way"


def test_a_folder_for_traces_may_lie_in_one_that_the_run_makes(tmp_path: Path):
    flags = f"--profile --profile-step-start 1 --save {tmp_path}/new --profile-dir {tmp_path}/new/traces"
    for words in (flags, f"--profile-dir {tmp_path}/missing/traces"):  # without --profile nothing is asked
        assert preflight(load_config([*MODEL[1:], "--mock-data", *words.split()]).config) == []


@pytest.mark.parametrize("folder", ["there", "new"])
def test_a_folder_for_optimizer_state_that_may_not_be_written(capsys, tmp_path: Path, monkeypatch, folder: str):
    """Tried in the folder if it is there, else in the one that it would be made in."""
    (tmp_path / "there").mkdir()
    tried: list[Path] = []

    def refuse(*, prefix: str, dir: Path) -> None:
        tried.append(dir)
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("petatron.validate.preflight.tempfile.TemporaryDirectory", refuse)
    code, text = _fails(capsys, "--mock-data", "--optimizer-nvme-offload", str(tmp_path / folder))
    rule = f"{folder} cannot be written to (Read-only file system). Make it writable, or give another folder."
    assert code == 2 and rule in text
    assert tried == [tmp_path / "there" if folder == "there" else tmp_path]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder in which not even root can make one")
@pytest.mark.parametrize("flags", ["--optimizer-nvme-offload", "--profile --profile-step-start 1 --profile-dir"])
def test_a_folder_in_which_nothing_can_be_made(capsys, flags: str):
    code, text = _fails(capsys, "--mock-data", *flags.split(), "/proc/nope")
    assert code == 2 and "/proc/nope cannot be written to (" in text


def test_a_folder_for_optimizer_state_is_made(tmp_path: Path):
    where = ["--log-dir", str(tmp_path), "--optimizer-nvme-offload", str(tmp_path / "state")]
    assert main([*MODEL, "--mock-data", *where]) == 0
    assert list((tmp_path / "state").iterdir()) == []


def test_numbers_and_places_of_no_use_are_problems_of_their_flags(capsys: pytest.CaptureFixture[str]):
    flags = ("--mock-data", "--vocab-size", "32", "--tokenizer-type", "ByteTokenizer", "--tokenizer-model", "x.json")
    huge = ("--num-layers", "9" * 20, "--train-iters", "9" * 12, "--seq-length", "1000000000")
    code, err = _fails(capsys, *flags, *huge)
    assert code == 2 and "4 problems in this configuration:" in err
    assert "--tokenizer-model x.json contradicts --tokenizer-type ByteTokenizer, which reads no file." in err
    code, err = _fails(capsys, "--mock-data", "--vocab-size", "32", "--tensorboard-dir", "/proc/nowhere/tb")
    assert code == 2 and "--tensorboard-dir /proc/nowhere/tb cannot be written to (/proc: " in err


def test_a_run_beyond_the_memory_of_the_machine_stops_before_it_allocates(capsys: pytest.CaptureFixture[str]):
    code, err = _fails(capsys, "--mock-data", "--vocab-size", "32", "--seq-length", "100000000")
    assert code == 2 and "memory forecast " in err and "--no-check-memory starts it anyway." in err
