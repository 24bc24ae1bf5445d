from __future__ import annotations

import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from petatron.bench import data as bench_data
from petatron.cli import data
from petatron.cli.main import main
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.preprocess_report import PreprocessProgress
from tests.load_deadline import scaled

REPOSITORY = Path(__file__).parents[3]
TEXTS = ["hello world", "", "second document"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def preprocess(corpus: Path, *flags: str, output: str = "out") -> int:
    prefix = str(corpus.parent / output)
    common = ("--input", str(corpus), "--output-prefix", prefix, "--workers", "1")
    return main(["data", "preprocess", *common, *(flags or ("--tokenizer-type", "ByteTokenizer", "--append-eod"))])


def test_preprocess_inspect_merge(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess(corpus) == 0
    printed = capsys.readouterr().out
    assert (
        "2 documents, 28 tokens" in printed
        and "1 empty text left out" in printed
        and "out_text_document.idx" in printed
    )
    prefix = str(corpus.parent / "out_text_document")
    assert main(["data", "inspect", prefix, "--tokenizer-type", "ByteTokenizer", "--document", "1"]) == 0
    printed = capsys.readouterr().out
    assert "documents          2" in printed and "tokens             28" in printed and "uint16" in printed
    assert "min 12" in printed and "max 16" in printed and "second document" in printed
    assert (
        "default split      train 2 documents, validation 0 documents, test 0 documents (--split 969,30,1)" in printed
    )
    assert main(["data", "inspect", prefix]) == 0
    assert "104 101 108 108 111" in (printed := capsys.readouterr().out) and "give --tokenizer-model" in printed
    merged = str(corpus.parent / "merged")
    assert main(["data", "merge", "--input", prefix, prefix, "--output-prefix", merged]) == 0
    assert "4 documents, 56 tokens from 2 datasets" in capsys.readouterr().out
    assert IndexedDataset(merged).num_documents == 4


def test_malformed_lines(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.write_text(corpus.read_text() + "oops\n")
    assert preprocess(corpus) == 1
    assert (
        "corpus.jsonl:4: not JSON (Expecting value, column 1): is this plain text? Use --input-format text. "
        in capsys.readouterr().err
    )
    assert preprocess(corpus, "--tokenizer-type", "ByteTokenizer", "--on-error", "skip") == 0
    printed = capsys.readouterr()
    assert "1 malformed line skipped:\n" in printed.out
    assert (printed.out + printed.err).count("corpus.jsonl:4: ") == 1
    corpus.write_text(corpus.read_text() + "oops\n" * 6)
    assert preprocess(corpus, "--tokenizer-type", "ByteTokenizer", "--on-error", "skip", output="more") == 0
    printed = capsys.readouterr()
    assert "7 malformed lines skipped, the first 5 of them:\n" in printed.out
    assert (printed.out + printed.err).count("corpus.jsonl:") == 5


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (
            ("--tokenizer-type", "SFTTokenizer"),
            2,
            "--tokenizer-type SFTTokenizer is not in this version",
        ),
        (("--log-interval", "0"), 2, "--log-interval 0 must be at least 1"),
        (("--tokenizer-model", "/nowhere/tokenizer.json"), 1, "/nowhere/tokenizer.json does not exist"),
        ((), 0, "note: --keep-sequential-samples is not needed"),
        ((), 0, "note: --workers-to-check has no effect without --find-optimal-num-workers"),
    ],
)
def test_flags_of_other_tools(
    corpus: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], code: int, message: str
) -> None:
    chosen = flags or ("--tokenizer-type", "ByteTokenizer", "--partitions", "1", "--keep-sequential-samples")
    chosen += ("--workers-to-check", "1")
    assert preprocess(corpus, *chosen) == code
    assert message in capsys.readouterr().err


def test_inspect_refusals(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(corpus)
    assert main(["data", "inspect", str(corpus.parent / "out_text_document"), "--document", "2"]) == 2
    assert "--document 2 is not a document" in capsys.readouterr().err
    assert main(["data", "inspect", str(corpus.parent / "none")]) == 1
    assert "none.idx does not exist" in capsys.readouterr().err


def test_plain_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with data._progress_display(10) as show:
        for documents in (4, 12, 15, 33):
            show(PreprocessProgress(documents, 100 * documents, documents, 40, 2.0))
    printed = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in printed] == ["12", "33"]
    assert printed[0] == "12 documents, 600 tokens/s, 0.0 MB/s, 30%, 0:00:04 left"


def test_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with data._progress_display(10) as show:
        show(PreprocessProgress(5, 500, 20, 40, 2.0))
    assert "50%" in (printed := capsys.readouterr().err) and "250 tokens/s" in printed


def test_script_runs_from_a_clone_with_several_workers(corpus: Path) -> None:
    script = REPOSITORY / "tools" / "preprocess_data.py"
    flags = ["--input", str(corpus), "--output-prefix", str(corpus.parent / "out"), "--tokenizer-type", "ByteTokenizer"]
    done = subprocess.run(
        [sys.executable, str(script), *flags, "--workers", "2"],
        cwd=corpus.parent,
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 0, done.stderr
    assert IndexedDataset(corpus.parent / "out_text_document").num_documents == 2


def test_tokenizing_needs_no_torch() -> None:
    code = "import sys, petatron.cli.data, petatron.data.preprocess; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=scaled(60))


@pytest.mark.parametrize(
    "name",
    [
        *("indexed_dataset", "indexed_writer", "train_valid_test_split", "blended_dataset", "tokenizer"),
        *("wordpiece.word_splitter", "sentences.sentence_splitter", "sentences.language_rules"),
    ],
)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"petatron.data.{name}"))
    assert result.attempted > 0 and result.failed == 0


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "bench.json"
    flags = ["--size-mb", "0.05", "--workers", "1", "--vocab", "300", "--documents", "5000", "--json", str(report)]
    assert main(["bench", "data", *flags]) == 0
    values = json.loads(report.read_text())
    assert {len(seconds) for seconds in values["seconds"].values()} == {3}
    assert set(values["ratio"]) == set(bench_data.ENCODE_METHODS) and values["index"]["documents"] == 5000
    assert "time / bare encode_batch" in capsys.readouterr().out
    assert main(["bench", "data", *flags[:-1], str(tmp_path / "no" / "where.json")]) == 2
    assert "is in a folder that does not exist" in capsys.readouterr().err
    assert main(["bench", "data", "--workers", "0", "--size-mb", "-1"]) == 2
    assert "2 problems" in capsys.readouterr().err


def test_corpus_is_cut_and_repeated() -> None:
    texts = bench_data.standard_library_texts(200_000)
    assert 200_000 <= sum(map(len, texts)) < 1_500_000


def test_an_output_is_replaced_only_when_asked(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bytes_only = ("--tokenizer-type", "ByteTokenizer")
    assert preprocess(corpus, *bytes_only) == 0
    index = corpus.parent / "out_text_document.idx"
    before = index.read_bytes()
    corpus.write_text(json.dumps({"text": "other"}))
    assert preprocess(corpus, *bytes_only) == 1
    assert (
        "out_text_document.idx exist already; give another --output-prefix, or replace with --overwrite."
        in capsys.readouterr().err
    )
    assert index.read_bytes() == before
    assert preprocess(corpus, *bytes_only, "--overwrite") == 0
    assert IndexedDataset(str(index.with_suffix(""))).num_documents == 1


@pytest.mark.parametrize(
    ("form", "documents"), [("text", ["One,\ntwo", "three", "four"]), ("text-file", ["One,\ntwo\n\n\nthree\n \nfour"])]
)
def test_plain_text(tmp_path: Path, form: str, documents: list[str]) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\nOne,\ntwo\n\n\nthree\n \nfour\n")
    flags = ("--tokenizer-type", "ByteTokenizer", "--input-format", form)
    assert preprocess(path, *flags) == 0
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert [bytes(dataset.get_document(n).tolist()).decode() for n in range(dataset.num_documents)] == documents
    assert preprocess(path, *flags, "--max-documents", "1", output="one") == 0
    assert IndexedDataset(tmp_path / "one_text_document").num_documents == 1


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (b"fine\n\nbad \xff\n", (), "book.txt:3: not UTF-8 text (invalid start byte): convert the file to UTF-8."),
        (b"long\nlines\n", ("--max-line-bytes", "8"), "book.txt:1: the document is longer than 8 bytes."),
        (
            b"fine\n",
            ("--json-keys", "a", "b"),
            "--input-format text has one text per document, and --json-keys names several",
        ),
    ],
)
def test_plain_text_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, flags: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(content)
    assert preprocess(path, "--tokenizer-type", "ByteTokenizer", "--input-format", "text", *flags) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_either_file_of_a_dataset_names_it(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess(corpus) == 0
    for ending in (".bin", ".idx"):
        assert main(["data", "inspect", f"{corpus.parent}/out_text_document{ending}"]) == 0
    assert capsys.readouterr().out.count("documents          2") == 2


def test_a_tokenizer_without_files_takes_none(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess(corpus, "--tokenizer-type", "ByteTokenizer", "--tokenizer-model", "tokenizer.json") == 2
    rule = "--tokenizer-model tokenizer.json contradicts --tokenizer-type ByteTokenizer, which reads no file."
    assert rule in capsys.readouterr().err
