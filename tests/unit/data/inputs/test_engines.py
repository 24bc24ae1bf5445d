"""Whichever process tokenizes the parts, the files are those of one process: groups of workers, tasks of Slurm, parts one by one."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.cli.subcommands import data_worker_speeds
from petatron.config.schema.data import TokenizerConfig
from petatron.data import worker_speed
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.preprocess import (
    PreprocessOptions,
    begin_parts,
    join_finished_parts,
    preprocess,
    preprocess_parts,
)
from petatron.data.preprocess_parts import ray_engine, slurm_scripts
from petatron.data.preprocess_parts.part_report import PartReport
from petatron.data.preprocess_parts.parts_folder import PartsFolder
from petatron.data.preprocess_parts.process_pool_engine import tokenize_in_groups
from petatron.data.preprocess_parts.slurm_scripts import write_slurm_scripts
from petatron.data.preprocess_report import PreprocessProgress
from petatron.data.tokenizer import build_tokenizer
from tests.load_deadline import scaled
from tests.unit.data.inputs.corpora import BYTES, jsonl, run
from tests.unit.data.vocabularies import piece_model, trained_tokens, write_bert_vocabulary, write_vocabulary

ROWS = [{"id": str(number), "text": f"text {number} " * (number % 9)} for number in range(120)]
ROOT = Path(__file__).parents[4]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus.jsonl").write_bytes(jsonl(ROWS))
    run(tmp_path, tmp_path / "corpus.jsonl", name="expected")
    return tmp_path / "corpus.jsonl"


def options(corpus: Path, **changes: object) -> PreprocessOptions:
    chosen = {"inputs": (str(corpus),), "output_prefix": str(corpus.parent / "out"), "tokenizer": BYTES, **changes}
    return PreprocessOptions(**{"part_bytes": 1500, **chosen})  # type: ignore[arg-type]


def check_output(folder: Path, name: str = "out") -> None:
    for end in ("bin", "idx", "sources"):
        expected = (folder / f"expected_text_document.{end}").read_bytes()
        assert (folder / f"{name}_text_document.{end}").read_bytes() == expected, end
    assert not (folder / f"{name}.parts").exists()


def test_groups(corpus: Path, tmp_path: Path) -> None:
    seen: list[PreprocessProgress] = []
    report = preprocess(options(corpus, partitions=2, workers=2, part_bytes=1 << 28), seen.append)
    assert report.parts == 2 and report.documents == seen[-1].documents
    assert seen[-1].bytes_read == seen[-1].bytes_total == corpus.stat().st_size
    check_output(tmp_path)


def failing_or_slow(part: int) -> PartReport:
    if part == 1:
        raise DataError("a problem of part 1")
    time.sleep(600)
    raise AssertionError


def test_an_error_ends_the_parts_in_progress(corpus: Path) -> None:
    job = begin_parts(options(corpus))
    with pytest.raises(DataError, match="a problem of part 1"):
        list(tokenize_in_groups(failing_or_slow, 2, None, job, [0, 1]))


def test_groups_stop_at_a_problem(corpus: Path, tmp_path: Path) -> None:
    corpus.write_bytes(corpus.read_bytes() + b"oops\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl:121: not JSON.*keeps the parts that are finished"):
        preprocess(options(corpus, partitions=2, workers=2))


@pytest.mark.parametrize(("partitions", "workers"), [(0, 1), (3, 2)])
def test_groups_need_workers(corpus: Path, partitions: int, workers: int) -> None:
    with pytest.raises(DataError, match=rf"--partitions {partitions} must be from 1 to --workers {workers}"):
        preprocess(options(corpus, partitions=partitions, workers=workers))


def test_parts_have_bytes(corpus: Path) -> None:
    with pytest.raises(DataError, match="--part-bytes 0 must be at least 1"):
        preprocess(options(corpus, part_bytes=0))


# Parts one by one


def test_parts_by_hand_in_any_order(corpus: Path, tmp_path: Path) -> None:
    chosen = options(corpus)
    with pytest.raises(DataError, match=r"out\.parts has no job"):
        preprocess_parts(chosen, [0])
    with pytest.raises(DataError, match=r"out\.parts has no job"):
        join_finished_parts(chosen)
    job = begin_parts(chosen)
    assert job.num_parts == 5 and begin_parts(options(corpus, part_bytes=100)) == job
    with pytest.raises(DataError, match=rf"--part {job.num_parts}: the parts of .* are 0 to {job.num_parts - 1}"):
        preprocess_parts(chosen, [job.num_parts])
    for part in reversed(range(1, job.num_parts)):
        assert preprocess_parts(chosen, [part])[part].part == part
    in_progress = tmp_path / "out.parts" / ".00000_text_document.bin.123.tmp"
    in_progress.write_bytes(b"x")
    with pytest.raises(
        DataError, match=rf"1 of {job.num_parts} parts in .* are not finished: 0\. Run them with --part"
    ):
        join_finished_parts(chosen)
    assert in_progress.exists()  # its task may be running
    report = PartsFolder(chosen.output_prefix).path / "00001.json"
    before = report.stat().st_mtime_ns
    assert set(preprocess_parts(chosen, [0, 1])) == {0, 1}
    assert report.stat().st_mtime_ns == before  # a part that is finished is left alone
    joined = join_finished_parts(chosen)
    assert joined.documents == IndexedDataset(tmp_path / "out_text_document").num_documents
    check_output(tmp_path)


def test_a_join_that_comes_too_early_keeps_the_job(corpus: Path, tmp_path: Path) -> None:
    begin_parts(options(corpus))
    with pytest.raises(DataError, match=r"5 of 5 parts in .*out\.parts are not finished: 0, 1, 2"):
        join_finished_parts(options(corpus))
    assert (tmp_path / "out.parts" / "job.json").exists()


def test_parts_one_by_one_keep_a_job_of_other_inputs(corpus: Path) -> None:
    begin_parts(options(corpus))
    corpus.write_bytes(corpus.read_bytes() + b"\n")
    for step in (join_finished_parts, lambda chosen: preprocess_parts(chosen, [0])):
        with pytest.raises(DataError, match="inputs that have changed"):
            step(options(corpus, overwrite=True))


def test_what_an_attempt_has_left_is_removed(corpus: Path, tmp_path: Path) -> None:
    begin_parts(options(corpus))
    left = tmp_path / "out.parts" / ".00001_text_document.bin.123.tmp"
    left.write_bytes(b"x")
    preprocess_parts(options(corpus), [0])
    assert left.exists()
    preprocess_parts(options(corpus), [1])
    assert not left.exists()


# Slurm


def test_slurm_scripts_do_the_job(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task of the array is run as Slurm would, by a shell with the number of the task."""
    monkeypatch.setattr(slurm_scripts, "MAX_TASKS", 2)
    monkeypatch.chdir(tmp_path)
    words = ["data", "preprocess", "--input", str(corpus), "--output-prefix", "out", "--part-bytes", "2500"]
    words += ["--tokenizer-type", "ByteTokenizer", "--engine", "slurm", "--workers", "1"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    array, join = tmp_path / "out.parts" / "array.sbatch", tmp_path / "out.parts" / "join.sbatch"
    assert f"sbatch --dependency=afterok:$(sbatch --parsable {array}) {join}" in printed
    script = array.read_text()
    assert "#SBATCH --array=0-1\n" in script and "#SBATCH --cpus-per-task=1\n" in script
    monkeypatch.chdir("/")
    for number, path in ((0, array), (1, array), (2, join)):
        done = subprocess.run(
            ["bash", str(path)],
            env={**os.environ, "SLURM_ARRAY_TASK_ID": str(number), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=scaled(120),
        )
        assert done.returncode == 0, done.stderr
        expected = {0: ("part 0:", "part 2:"), 1: ("part 1:",), 2: ("documents,",)}[number]
        assert all(text in done.stdout for text in expected)
    check_output(tmp_path)


def test_a_folder_that_no_script_can_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has a line break in its name"):
        write_slurm_scripts(tmp_path / "a\nb", ["x"], num_parts=1, workers=1, working_folder=tmp_path)
    with pytest.raises(DataError, match="Cannot write to"):
        write_slurm_scripts(tmp_path / "none", ["x"], num_parts=1, workers=1, working_folder=tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine", "slurm", "--join"), "--join does not go with --engine"),
        (("--part", "0", "--find-optimal-num-workers"), "--find-optimal-num-workers does not go with --part"),
        (("--address", "auto"), "--address auto needs --engine ray"),
        (("--engine", "ray", "--find-optimal-num-workers"), "--find-optimal-num-workers does not go with --engine"),
        (("--engine", "ray", "--partitions", "2"), "--partitions 2 does not go with --engine"),
        (("--workers-to-check", "0", "2"), "--workers-to-check 0 2 must be at least 1 each"),
        (
            ("--find-optimal-num-workers", "--performance-dir", "/dev/null/x"),
            "--performance-dir /dev/null/x cannot be made",
        ),
    ],
)
def test_flags_that_do_not_go_together(
    corpus: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    words = ["data", "preprocess", "--input", str(corpus), "--output-prefix", "x", "--tokenizer-type", "ByteTokenizer"]
    assert main([*words, *flags]) == 2
    assert message in capsys.readouterr().err


def test_examples() -> None:
    result = doctest.testmod(worker_speed)
    assert result.attempted > 0 and result.failed == 0


# Ray is there, or says how to get it


def test_ray_is_an_extra(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(module: str) -> object:
        raise ImportError(module)

    monkeypatch.setattr(ray_engine.importlib, "import_module", blocked)
    with pytest.raises(DataError, match=r"pip install 'petatron\[ray\]'"):
        preprocess(options(corpus, engine="ray"))
    assert not (tmp_path / "out.parts").exists()


# Numbers of workers


def test_numbers_of_workers_are_measured(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_worker_speeds.os, "cpu_count", lambda: 1)
    words = ["data", "preprocess", "--input", str(corpus), "--output-prefix", str(tmp_path / "x" / "out")]
    words += ["--tokenizer-type", "ByteTokenizer", "--workers", "1", "--find-optimal-num-workers"]
    assert main([*words, "--performance-dir", str(tmp_path / "p"), "--max-documents", "50"]) == 0
    printed = capsys.readouterr().out
    assert "documents/s" in printed and "fastest: --workers 1\n" in printed
    assert json.loads((tmp_path / "p" / "1_workers.json").read_text())["1"][0] > 0
    assert list((tmp_path / "x").iterdir()) == []


# Begin of document


def write_word_tokenizer(folder: Path, config: Mapping[str, object]) -> Path:
    tokens = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "a"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def test_documents_begin_with_a_token(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path, {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    (tmp_path / "x.jsonl").write_bytes(jsonl([{"text": ["a b", "b"]}, {"text": ""}, {"text": "b"}]))
    tokenizer = TokenizerConfig(tokenizer_model=str(tmp_path))
    run(tmp_path, tmp_path / "x.jsonl", tokenizer=tokenizer, append_bod=True, append_eod=True)
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [data.get(number).tolist() for number in range(3)] == [[0, 2, 3], [3, 1], [0, 3, 1]]
    assert data.document_indices.tolist() == [0, 2, 3]


def test_tokens_that_begin_documents(tmp_path: Path) -> None:
    bert = TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase", vocab_file=str(write_bert_vocabulary(tmp_path / "vocab.txt"))
    )
    ranks = TokenizerConfig(
        tokenizer_type="TikTokenizer",
        tokenizer_model=str(write_vocabulary(tmp_path / "vocab.json", trained_tokens(300))),
        tiktoken_num_special_tokens=7,
    )
    (tmp_path / "tokenizer.model").write_bytes(piece_model("llama"))
    pieces = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "tokenizer.model"))
    names = {"[CLS]": bert, "<s>": ranks}
    for name, config in names.items():
        tokenizer = build_tokenizer(config)
        assert tokenizer.bod is not None and tokenizer.decode([tokenizer.bod]) == name
    assert build_tokenizer(pieces).bod == 1  # `<unk> <s> </s>` are first


@pytest.mark.parametrize(
    ("config", "bod"),
    [({"cls_token": "</s>"}, 1), ({"bos_token": None, "cls_token": "<s>"}, 0), ({"bos_token": "of another"}, None)],
)
def test_a_config_beside_a_tokenizer_names_the_token(
    tmp_path: Path, config: dict[str, object], bod: int | None
) -> None:
    model = write_word_tokenizer(tmp_path, config)
    assert build_tokenizer(TokenizerConfig(tokenizer_model=str(model))).bod == bod


def test_a_token_that_is_no_text(tmp_path: Path) -> None:
    model = write_word_tokenizer(tmp_path, {"bos_token": ["<s>"]})
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not valid JSON"):
        build_tokenizer(TokenizerConfig(tokenizer_model=str(model)))


def test_a_job_with_another_first_token_is_another_job(corpus: Path, tmp_path: Path) -> None:
    tokenizer = TokenizerConfig(tokenizer_model=str(write_word_tokenizer(tmp_path, {"bos_token": "<s>"})))
    begin_parts(options(corpus, tokenizer=tokenizer, append_bod=True))
    with pytest.raises(DataError, match="append_bod was 0 and is null"):
        begin_parts(options(corpus, tokenizer=tokenizer))


def test_a_tokenizer_without_such_a_token(corpus: Path) -> None:
    with pytest.raises(DataError, match="--append-bod: the tokenizer ByteTokenizer has no begin-of-document token"):
        preprocess(options(corpus, append_bod=True))
