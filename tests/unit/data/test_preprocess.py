from __future__ import annotations

import builtins
import gzip
import json
from pathlib import Path

import pytest
import zstandard

from petatron.base.errors import DataError
from petatron.config.schema.data import TokenizerConfig
from petatron.data import preprocess as module
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.inputs.line_blocks import read_line_blocks
from petatron.data.preprocess import PreprocessOptions, preprocess
from petatron.data.preprocess_parts.part_report import MAX_SHOWN_PROBLEMS
from petatron.data.preprocess_report import PreprocessProgress, PreprocessReport

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")
TEXTS = ["one", "deux", "", "日本", "line\u2028separator", "x" * 300]


def lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


def run(tmp_path: Path, *inputs: Path, name: str = "out", **options: object) -> PreprocessReport:
    chosen = {"tokenizer": BYTES, "output_prefix": str(tmp_path / name), "overwrite": True, **options}
    return preprocess(PreprocessOptions(inputs=tuple(map(str, inputs)), **chosen))  # type: ignore[arg-type]


def documents(prefix: str | Path) -> list[str]:
    data = IndexedDataset(prefix)
    return [bytes(data.get_document(i).astype("u1")).decode() for i in range(data.num_documents)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(lines(TEXTS))
    return path


def test_output(corpus: Path, tmp_path: Path) -> None:
    seen: list[PreprocessProgress] = []
    options = PreprocessOptions(inputs=(str(corpus),), output_prefix=str(tmp_path / "out"), tokenizer=BYTES)
    report = preprocess(options, seen.append)
    assert documents(tmp_path / "out_text_document") == [text for text in TEXTS if text]
    assert report.outputs == (str(tmp_path / "out_text_document"),)
    total = sum(len(text.encode()) for text in TEXTS)
    assert (report.documents, report.sequences, report.tokens, report.empty, report.malformed) == (5, 5, total, 1, 0)
    assert seen[-1].documents == 5 and seen[-1].bytes_read == seen[-1].bytes_total == corpus.stat().st_size
    assert report.bytes_read == corpus.stat().st_size


def test_append_eod(corpus: Path, tmp_path: Path) -> None:
    run(tmp_path, corpus, append_eod=True)
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [int(data.get(i)[-1]) for i in range(data.num_sequences)] == [256] * 5
    assert data.get(0).tolist() == [*b"one", 256]


def test_sentences_and_several_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": ["one", "", "two"], "b": "B"}\n{"a": [], "b": "C"}\n{"a": "three", "b": "D"}\n')
    report = run(tmp_path, path, json_keys=("a", "b"), append_eod=True)
    data = IndexedDataset(tmp_path / "out_a_document")
    assert data.document_indices.tolist() == [0, 2, 3] and data.lengths.tolist() == [3, 4, 6]
    assert data.get_document(0).tolist() == [*b"onetwo", 256]
    assert IndexedDataset(tmp_path / "out_b_document").num_documents == 3
    assert report.empty == 1 and report.documents == 3  # the second line has a text under b
    path.write_text('{"a": "", "b": []}\n{"a": "", "b": "C"}\n{"a": "three", "b": "D"}\n')
    report = run(tmp_path, path, json_keys=("a", "b"))
    assert (report.documents, report.sequences, report.empty) == (2, 3, 3)


def test_workers_and_compression_do_not_change_the_output(tmp_path: Path) -> None:
    texts = [f"document {i} " + "word " * (i % 37) for i in range(300)]
    plain, zipped, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz", tmp_path / "a.jsonl.zst"
    half = lines(texts[:150]), lines(texts[150:])
    plain.write_bytes(b"".join(half))
    zipped.write_bytes(gzip.compress(half[0]) + gzip.compress(half[1]))  # two members, two frames
    packed.write_bytes(zstandard.compress(half[0]) + zstandard.compress(half[1]))
    (tmp_path / "b").write_bytes(half[1])
    (tmp_path / "a").write_bytes(half[0])
    run(tmp_path, plain, name="reference")
    assert documents(tmp_path / "reference_text_document") == texts
    run(tmp_path, plain, name="two", workers=2, block_bytes=400)
    run(tmp_path, zipped, name="gz", block_bytes=1000)
    run(tmp_path, packed, name="zst")
    run(tmp_path, tmp_path / "a", tmp_path / "b", name="parts")
    for name in ("two", "gz", "zst", "parts"):
        for end in ("idx", "bin"):
            expected = (tmp_path / f"reference_text_document.{end}").read_bytes()
            assert (tmp_path / f"{name}_text_document.{end}").read_bytes() == expected, (name, end)


BAD_LINES = {
    "not json": "Expecting value",
    '{"text": "cut': "Unterminated string",
    '["text"]': "a JSON list, not an object",
    '{"other": "x", "more": 1}': r"no key 'text' \(keys here: more, other\)",
    '{"text": 3}': "neither a string nor a list of strings",
    '{"text": ["a", 3]}': "neither a string nor a list of strings",
    '{"text": null}': "neither a string nor a list of strings",
    '{"text": "\\ud800"}': "cannot be tokenized",
    "[" * 100_000: "recursion",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_malformed_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + '\n{"text": "also good"}\n')
    with pytest.raises(DataError, match=rf"x\.jsonl:3: .*{reason}.*--on-error skip"):
        run(tmp_path, path)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["x.jsonl"]
    report = run(tmp_path, path, on_error="skip")
    assert (report.documents, report.malformed, len(report.problems)) == (2, 1, 1)
    assert report.problems[0].startswith(f"{path}:3: ")
    assert documents(tmp_path / "out_text_document") == ["good", "also good"]


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(["good"]) + b'{"text": "caf\xe9"}\n' + lines(["é"]))
    report = run(tmp_path, path, on_error="skip")
    assert report.malformed == 1 and "x.jsonl:2: " in report.problems[0]
    assert documents(tmp_path / "out_text_document") == ["good", "é"]


def test_every_malformed_line_is_counted_and_a_few_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"bad\n" * 20 + lines(["good"]))
    report = run(tmp_path, path, on_error="skip", workers=2)
    assert report.malformed == 20 and len(report.problems) == MAX_SHOWN_PROBLEMS
    with pytest.raises(DataError, match=r"x\.jsonl:1: "):
        run(tmp_path, path, workers=2)


def test_text_the_tokenizer_refuses(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(["1 2", "3 99", "4"]))
    null = TokenizerConfig(tokenizer_type="NullTokenizer")
    report = run(tmp_path, path, tokenizer=null, vocab_size=50, on_error="skip")
    assert report.malformed == 1 and "x.jsonl:2: cannot be tokenized: Token ids 3..99" in report.problems[0]


def test_line_forms(tmp_path: Path) -> None:
    """Byte order mark, carriage returns, blank lines, no newline at the end."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n   \n\n{"text": "b"}\r\n{"text": "c"}')
    assert run(tmp_path, path).documents == 3
    assert documents(tmp_path / "out_text_document") == ["a", "b", "c"]


@pytest.mark.parametrize("limit", [1, 2, 6, 7, 8, 12, 50])
def test_max_documents_counts_lines_over_all_files(tmp_path: Path, corpus: Path, limit: int) -> None:
    texts = [text for text in (TEXTS + TEXTS)[:limit] if text]
    run(tmp_path, corpus, corpus, max_documents=limit)
    assert documents(tmp_path / "out_text_document") == texts


def test_wide_vocabulary_uses_int32(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(lines(["70000 5"]))
    run(tmp_path, tmp_path / "x", tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer"), vocab_size=100_000)
    assert IndexedDataset(tmp_path / "out_text_document").get(0).tolist() == [70000, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ()}, "no input is given"),
        ({"inputs": ("nowhere-a", "nowhere-b")}, "input nowhere-a does not exist; input nowhere-b does not exist"),
        ({"workers": 0}, "--workers 0 must be at least 1"),
        ({"json_keys": ("a", "a")}, "--json-keys a a must name each key once"),
        ({"max_documents": 0}, "--max-documents 0"),
        ({"tokenizer": TokenizerConfig()}, "No tokenizer is given"),
    ],
)
def test_bad_options(tmp_path: Path, corpus: Path, options: dict[str, object], message: str) -> None:
    chosen = {"inputs": (str(corpus),), "output_prefix": str(tmp_path / "out"), "tokenizer": BYTES, **options}
    with pytest.raises(DataError, match=message):
        preprocess(PreprocessOptions(**chosen))  # type: ignore[arg-type]


def test_append_eod_without_one(tmp_path: Path, corpus: Path) -> None:
    bare = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(bare))
    with pytest.raises(DataError, match="has no end-of-document token"):
        run(tmp_path, corpus, tokenizer=TokenizerConfig(tokenizer_model=str(tmp_path)), append_eod=True)


def test_nothing_to_write_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\n" + lines(["", ""]))
    with pytest.raises(DataError, match=r"No tokens for key 'text'.*0 documents, 0 malformed lines, 2 empty"):
        run(tmp_path, tmp_path / "x")
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(DataError, match="No tokens"):
        run(tmp_path, tmp_path / "x")
    (tmp_path / "x").write_bytes(b"bad\n" * 2)
    with pytest.raises(
        DataError, match=r"0 documents, 2 malformed lines \(the first: .*x:1: not JSON .Expecting value.*\), 0 empty"
    ):
        run(tmp_path, tmp_path / "x", on_error="skip")
    assert [found.name for found in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_damaged_archives(tmp_path: Path, pack: object) -> None:
    whole = pack(lines([f"text {i} {i * 7919 % 10007}" for i in range(2000)]))  # type: ignore[operator]
    path = tmp_path / "x"
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match="x cannot be read beyond line"):
        run(tmp_path, path)
    path.write_bytes(whole[:100] + b"\x00" * 50 + whole[150:])
    with pytest.raises(DataError, match=r"x(:| cannot be read beyond line)"):  # without a checksum, garbage is read
        run(tmp_path, path)
    assert [found.name for found in tmp_path.iterdir()] == ["x"]


def test_missing_zstandard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(zstandard.compress(lines(["a"])))
    real = builtins.__import__

    def blocked(name: str, *args: object) -> object:
        if name == "zstandard":
            raise ImportError(name)
        return real(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(DataError, match=r"petatron\[data\]"):
        run(tmp_path, tmp_path / "x")


def test_a_dead_worker_is_reported(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_encode_block", _die)
    with pytest.raises(DataError, match="A worker process died"):
        run(tmp_path, corpus, workers=2)
    assert [found.name for found in tmp_path.iterdir()] == ["corpus.jsonl"]


def _die(*_: object) -> None:
    import os

    os._exit(9)


def test_blocks_are_whole_lines(tmp_path: Path) -> None:
    data = b"a\n" + b"b" * 50 + b"\n" + b"cc\nd\n" + b"last"
    (tmp_path / "x").write_bytes(data)
    for size in (1, 3, 7, 1000):
        blocks = list(read_line_blocks(tmp_path / "x", block_bytes=size))
        assert b"".join(block.data for block in blocks) == data
        assert all(block.data.endswith(b"\n") for block in blocks[:-1])
        for block in blocks:
            assert block.first_line == data[: data.index(block.data)].count(b"\n") + 1
