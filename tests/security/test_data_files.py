"""Data, tokenizers and configurations that others made: one error that names the file, in bounded time and memory, and nothing else."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from petatron.base.errors import ConfigError, DataError, PetatronError
from petatron.cli.main import main
from petatron.config.nccl_communicators import communicator_problems
from petatron.config.saved_config import with_absolute_paths
from petatron.config.schema.data import DataConfig, TokenizerConfig
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.parallel import ParallelConfig
from petatron.config.schema.run import RunConfig
from petatron.config.yaml_file import MAX_PROBLEMS, MAX_YAML_BYTES, read_yaml_file
from petatron.data import tokenizer as tokenizer_module
from petatron.data.build_datasets import build_datasets
from petatron.data.indexed_dataset import HEADER, MAGIC, IndexedDataset
from petatron.data.inputs.line_blocks import MAX_LINE_BYTES, read_line_blocks
from petatron.data.preprocess import PreprocessOptions, preprocess
from petatron.data.tokenizer import GPT2BPETokenizer, HuggingFaceTokenizer
from petatron.quickstart import corpus
from petatron.schedule.measured_timeline import read_measured
from petatron.validate import load_config
from petatron.validate.preflight import preflight
from tests.longform import diagonal
from tests.security.limits import limited

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")
pytestmark = pytest.mark.timeout(60)  # whoever opens a FIFO waits for ever


# .idx and .bin


def write_index(prefix: Path, lengths: list[int], offsets: list[int], boundaries: list[int], tokens: bytes) -> None:
    head = HEADER.pack(MAGIC, 1, 8, len(lengths), len(boundaries))
    body = struct.pack(f"<{len(lengths)}i{len(offsets)}q{len(boundaries)}q", *lengths, *offsets, *boundaries)
    Path(f"{prefix}.idx").write_bytes(head + body)
    Path(f"{prefix}.bin").write_bytes(tokens)


@pytest.mark.parametrize(
    ("lengths", "offsets", "boundaries", "message"),
    [
        ([4, 4], [0, 2**63 - 1], [0, 1, 2], r"truncated: it has 16 bytes, its index needs 9,223,372,036,854,775,815"),
        ([4, 1], [0, 2**63 - 2], [0, 1, 2], "truncated: it has 16 bytes, its index needs 9,223,372,036,854,775,808"),
        ([2**31 - 1, 4], [2**63 - 2**33, 0], [0, 1, 2], "truncated"),
        ([4, 4], [0, 8], [0, -(2**63), 2], "go backwards"),
        ([4, 4, 4], [0, 8, 0], [0, 2**63 - 1, -(2**63), 3], "sequences overlap|go backwards"),
        (
            [8, 8, 8],
            [0, 0, 0],
            [0, 1, 2, 3],
            "counts 24 tokens of 2 bytes, but x.bin has only 16 bytes: sequences overlap",
        ),
    ],
)
def test_arithmetic_of_an_index_does_not_wrap(
    tmp_path: Path, lengths: list[int], offsets: list[int], boundaries: list[int], message: str
) -> None:
    write_index(tmp_path / "x", lengths, offsets, boundaries, bytes(16))
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


@pytest.mark.parametrize("counts", [(2**61, 2), (2**64 - 1, 2**64 - 1), (2, 2**60), (2, 0), (10**12, 3)])
def test_counts_are_compared_with_the_file_before_anything_is_made(tmp_path: Path, counts: tuple[int, int]) -> None:
    write_index(tmp_path / "x", [4, 4], [0, 8], [0, 1, 2], bytes(16))
    path = tmp_path / "x.idx"
    path.write_bytes(HEADER.pack(MAGIC, 1, 8, *counts) + path.read_bytes()[HEADER.size :])
    with pytest.raises(DataError, match=r"x\.idx (is truncated|has \d+ bytes)"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file_is_no_dataset(tmp_path: Path, suffix: str, kind: str) -> None:
    write_index(tmp_path / "x", [4, 4], [0, 8], [0, 1, 2], bytes(16))
    _become(Path(f"{tmp_path / 'x'}{suffix}"), kind)
    with pytest.raises(
        DataError,
        match=rf"x\{suffix} cannot be read: (it is a (FIFO|device), not a file|Is a directory)",
    ):
        IndexedDataset(tmp_path / "x")


def _become(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


# JSON lines


def _read_all(path: Path, limit: int) -> int:
    return sum(len(block.data) for block in read_line_blocks(path, max_line_bytes=limit))


@diagonal(3)
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, bytes], ids=["gzip", "zstd", "plain"])
def test_a_line_that_has_no_end_is_given_up_in_bounded_memory(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    size = (16 if pack is bytes else 160) << 20
    path = tmp_path / "bomb.jsonl"
    path.write_bytes(pack(b'{"text": "short"}\n' + b'{"text": "' + b"a" * size))
    tracemalloc.start()
    try:
        with pytest.raises(
            DataError, match=r"bomb\.jsonl:2: the line is longer than 1,048,576 bytes.*--max-line-bytes"
        ):
            _read_all(path, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()


@diagonal(2)
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_many_short_lines_do_not_fill_the_memory(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "bomb.jsonl"
    path.write_bytes(pack(b'{"text": "a"}\n' * (10 << 20)))
    tracemalloc.start()
    try:
        assert _read_all(path, 1 << 20) == 140 << 20
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_the_limit_is_exact_and_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"12345678\n1234\n123456789\n")
    assert _read_all(path, 9) == 24
    with pytest.raises(DataError, match=r"x\.jsonl:3: "):
        _read_all(path, 8)
    path.write_bytes(b"1\n12345")
    assert _read_all(path, 5) == 7
    with pytest.raises(DataError, match=r"x\.jsonl:2: "):
        _read_all(path, 4)


def test_the_limit_has_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "a" * 300}) + "\n")
    words = ["data", "preprocess", "--input", str(path), "--output-prefix", str(tmp_path / "out")]
    words += ["--tokenizer-type", "ByteTokenizer", "--workers", "1"]
    assert main([*words, "--max-line-bytes", "200"]) == 1
    assert "x.jsonl:1: the line is longer than 200 bytes" in capsys.readouterr().err
    assert main([*words, "--max-line-bytes", "0"]) == 1
    assert "--max-line-bytes 0 must be at least 1" in capsys.readouterr().err
    assert main(words) == 0
    assert PreprocessOptions(inputs=(), output_prefix="", tokenizer=BYTES).max_line_bytes == MAX_LINE_BYTES == 256 << 20


def test_a_frame_with_a_huge_window_needs_consent(tmp_path: Path) -> None:
    # A frame header with a window of 2 GiB (exponent 21, mantissa 0), then one last, empty block.
    path = tmp_path / "x.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes([0x00, 21 << 3]) + b"\x01\x00\x00")
    with pytest.raises(DataError, match=r"x\.zst cannot be read.*--max-line-bytes 2147483648"):
        _read_all(path, 1 << 20)
    assert _read_all(path, 1 << 31) == 0


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_fifo_is_no_input(tmp_path: Path, kind: str) -> None:
    _become(tmp_path / "x.jsonl", kind)
    options = PreprocessOptions(inputs=(str(tmp_path / "x.jsonl"),), output_prefix=str(tmp_path / "o"), tokenizer=BYTES)
    with pytest.raises(DataError, match=r"input .*x\.jsonl is not a file"):
        preprocess(options)
    with pytest.raises(DataError, match=", not a file"):
        _read_all(tmp_path / "x.jsonl", 1 << 20)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"text": ' * 50_000,
        b'{"text": ' + b"9" * 100_000 + b"}",
        b'{"text": "\\ud800"}',
        b"\xff\xfe{}",
        b"\x00",
    ],
    ids=["lists", "objects", "digits", "surrogate", "not utf-8", "nul"],
)
def test_a_hostile_line_is_a_malformed_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    options = PreprocessOptions(inputs=(str(path),), output_prefix=str(tmp_path / "o"), tokenizer=BYTES)
    with pytest.raises(DataError, match=r"x\.jsonl:2: "):
        preprocess(options)


# Tokenizers

FAST: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b", -1.0]], "byte_fallback": False},
}
CRASHING_MODEL = {
    "type": "BPE",
    "vocab": {"a": 1, "b": 2, "ab": 3},
    "merges": ["a b"],
    "continuing_subword_prefix": "xxxxxxx",
}
CHARSMAP = base64.b64encode(struct.pack("<I", 8) + b"\xff" * 8).decode()


def fast(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(FAST | changes))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"model": CRASHING_MODEL},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA////"}},
        {"model": 3},
        {"model": {"type": "Unigram", "unk_id": 9, "vocab": [["a", 0.0]]}},
    ],
    ids=["panic in merges", "panic in a normalizer", "a number", "an id that is not there"],
)
def test_a_tokenizer_that_makes_its_library_panic_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = fast(tmp_path / "t", **changes)
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer\.json: it cannot be understood"):
        HuggingFaceTokenizer(folder)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 200_000, b"null", b"\x00" * 100])
def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer\.json"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("place", ["normalizer", "decoder"])
def test_a_tokenizer_that_makes_gigabytes_of_a_line_is_refused(tmp_path: Path, place: str) -> None:
    """Nine replacements, each by ten characters."""
    ten = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    inner = {"normalizer": "normalizers", "decoder": "decoders"}[place]
    folder = fast(tmp_path / "t", **{place: {"type": "Sequence", inner: [ten] * 9}})
    with limited(), pytest.raises(DataError, match=f"The {place} of .* may make a text 1,000,000,000 times as long"):
        HuggingFaceTokenizer(folder).decode(HuggingFaceTokenizer(folder).encode("a" * 10))
    harmless = fast(tmp_path / "u", **{place: {"type": "Sequence", inner: [ten] * 2}})
    assert HuggingFaceTokenizer(harmless).vocab_size


@pytest.mark.parametrize("workers", [1, 2])
def test_a_panic_at_a_text_is_one_error(tmp_path: Path, workers: int) -> None:
    folder = fast(tmp_path / "t", normalizer={"type": "Precompiled", "precompiled_charsmap": CHARSMAP})
    tokenizer = HuggingFaceTokenizer(folder)
    with pytest.raises(DataError, match=r"A text for the tokenizer .*t cannot be understood \(PanicException"):
        tokenizer.encode("é")
    (tmp_path / "x.jsonl").write_text('{"text": "hello"}\n' * 2)
    options = PreprocessOptions(
        inputs=(str(tmp_path / "x.jsonl"),),
        output_prefix=str(tmp_path / "o"),
        tokenizer=TokenizerConfig(tokenizer_model=str(folder)),
        workers=workers,
    )
    with pytest.raises(DataError, match=r"x\.jsonl:1: cannot be tokenized: .*PanicException"):
        preprocess(options)


def test_ids_that_no_tokenizer_has(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(fast(tmp_path / "t"))
    for ids in ([-1], [2**40]):
        with pytest.raises(DataError, match=r"Token ids for the tokenizer .*t cannot be understood \(OverflowError"):
            tokenizer.decode(ids)


def test_an_id_of_four_billion_is_not_believed(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "\x1b[31mb": 4_294_967_295}, "unk_token": "a"}
    with pytest.raises(DataError, match=r"id 4,294,967,295, but has only 2 tokens") as caught:
        HuggingFaceTokenizer(fast(tmp_path / "t", model=model))
    assert "\x1b" not in str(caught.value)
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 3_000_000_000}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match=r"vocab\.json gives the token 'a' the id 3,000,000,000"):
        GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")


@pytest.mark.parametrize(
    "content",
    [
        "[" * 200_000,
        "[]",
        "3",
        '{"eos_token": 5}',
        '{"eos_token": {"content": []}}',
        '{"eos_token": ["a"]}',
        '{"eos_token": "\\ud800"}',
        "\udcff",
    ],
)
def test_a_hostile_tokenizer_config(tmp_path: Path, content: str) -> None:
    folder = fast(tmp_path / "t")
    (folder / "tokenizer_config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not valid JSON"):
        HuggingFaceTokenizer(folder)


@pytest.mark.parametrize(
    ("vocab", "merges"),
    [
        ("[" * 200_000, ""),
        ("{}", "#version: 0.2\na b\n"),
        ('{"a": -1}', ""),
        ('{"a": 1e99}', ""),
        ("\udcff", ""),
        ('{"a": 0}', "\udcff\udcff x\n"),
    ],
)
def test_hostile_gpt2_files(tmp_path: Path, vocab: str, merges: str) -> None:
    for name, content in (("vocab.json", vocab), ("merges.txt", merges)):
        (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"vocab\.json and .*merges\.txt are not a GPT-2 vocabulary and its merges"):
        GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_fifo_is_no_tokenizer(tmp_path: Path, name: str, kind: str) -> None:
    folder = fast(tmp_path / "t")
    (folder / "vocab.json").write_text('{"a": 0}')
    (folder / "merges.txt").write_text("")
    _become(folder / name, kind)
    with pytest.raises(
        DataError, match=rf"{name} (is not a file|is not valid JSON: it cannot be read: .*, not a file)"
    ):
        if name.startswith("tokenizer"):
            HuggingFaceTokenizer(folder)
        else:
            GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt")


def test_a_tokenizer_of_gigabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fast(tmp_path / "t")
    (folder / "chat_template.jinja").touch()
    os.truncate(folder / "chat_template.jinja", 1 << 40)
    with pytest.raises(DataError, match=r"chat_template\.jinja cannot be read: it has 1,099,511,627,776 bytes"):
        HuggingFaceTokenizer(folder)
    monkeypatch.setattr(tokenizer_module, "MAX_TOKENIZER_BYTES", 10)
    with pytest.raises(DataError, match=r"tokenizer\.json: it cannot be read: it has \d+ bytes"):
        HuggingFaceTokenizer(folder)


# Configurations


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[" * 600, "nested too deeply"),
        ("a: " + "{b: " * 600, "nested too deeply"),
        ('model: {tokenizer_model: "\\UFFFFFFFF"}', "cannot be understood|not valid YAML"),
        ('data: {data_cache_path: "a\\0b"}', "holds the character .u0000, which no path"),
        ('data: {data_cache_path: "a\\ud800b"}', "holds the character .ud800, which no path"),
        ("model: {num_layers: " + "9" * 5000 + "}", "num_layers"),
        ("? [a, b]\n: 1\n", "has a list or a mapping for a key"),
        ("&a [*a]", "an alias .* is inside of what it names"),
        ("model: &a {num_layers: *a}", "an alias .* is inside of what it names"),
        ("!!python/object/apply:os.system ['true']", "is not a mapping"),
        ("\x01", "is not valid YAML"),
    ],
)
def test_a_hostile_config(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rule) as caught:
        load_config(["--config", str(path)], require_training=False)
    assert "run.yaml" in str(caught.value)


def test_a_config_of_strangers_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"num_layerz_{i}: 1\n" for i in range(5000)))
    found = read_yaml_file(path)
    assert len(found.problems) == MAX_PROBLEMS and "--num-layers" in found.doubtful_flags


@pytest.mark.parametrize("kind", ["fifo", "device", "large", "not utf-8"])
def test_a_config_that_is_no_text_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.yaml"
    if kind == "large":
        path.write_text("# " + "x" * MAX_YAML_BYTES)
    elif kind == "not utf-8":
        path.write_bytes(b"\xff")
    else:
        _become(path, kind)
    (problem,) = read_yaml_file(path).problems
    assert problem.value == str(path) and problem.rule.startswith("cannot be read: ")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a: &a {x: 1}\nb: {<<: *a}", "uses an alias"),
        ("[" * 600, "nested too deeply|is no YAML"),
        ('dp: {net_name: "\\UFFFFFFFF"}', "range|is no YAML|large"),
        ("dp: {max_ctas: " + "9" * 5000 + "}", "Exceeds the limit|max_ctas"),
        ("\x01", "is no YAML"),
        ("3", "is not a table"),
    ],
)
def test_a_hostile_communicator_file(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    (problem,) = communicator_problems(ParallelConfig(nccl_communicator_config_path=str(path)))
    assert re.search(rule, problem.rule), problem


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_fifo_is_no_list_of_datasets(tmp_path: Path, kind: str) -> None:
    _become(tmp_path / "list", kind)
    config = RunConfig(data=DataConfig(data_args_path=str(tmp_path / "list")))
    assert [problem.rule for problem in preflight(config)] == [f"is a {kind.replace('fifo', 'FIFO')}, not a file"]
    assert with_absolute_paths(config).data.data_args_path == str(tmp_path / "list")
    with pytest.raises(DataError, match=r"--data-args-path .*list cannot be read: it is a (FIFO|device), not a file"):
        build_datasets(config, None, (1, 0, 0))
    _become(path := tmp_path / "nccl.yaml", kind)
    (problem,) = communicator_problems(ParallelConfig(nccl_communicator_config_path=str(path)))
    assert re.fullmatch("cannot be read: it is a (FIFO|device), not a file", problem.rule)


def test_a_list_of_datasets_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(b"\xff\xfe")
    config = RunConfig(data=DataConfig(data_args_path=str(tmp_path / "list")))
    with pytest.raises(DataError, match=r"--data-args-path .*list cannot be understood \(UnicodeDecodeError"):
        build_datasets(config, None, (1, 0, 0))


@pytest.mark.parametrize("name", ["vocab_file", "merge_file", "tokenizer_model"])
def test_tokenizer_files_are_looked_at_before_ranks_start(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "x")
    config = RunConfig(tokenizer=TokenizerConfig(**{name: str(tmp_path / "x")}))  # type: ignore[arg-type]
    assert "is a FIFO, not a file" in [problem.rule for problem in preflight(config)]


def test_token_files_of_another_kind_are_named_before_ranks_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.idx")
    config = RunConfig(data=DataConfig(data_path=(str(tmp_path / "x"),)))
    assert [problem.rule for problem in preflight(config)] == [
        f"cannot be read: {tmp_path}/x.idx is a FIFO, not a file"
    ]
    (tmp_path / "x.idx").unlink()
    there = f"does not exist: there is no {tmp_path}/x.idx and no {tmp_path}/x.bin"
    assert [problem.rule for problem in preflight(config)] == [there]


@pytest.mark.parametrize(
    "content",
    [
        "[" * 200_000,
        "[]",
        '{"name": "x", "ranks": [[{"kind": "F", "stage": 1e999, "micro_batch": 0, "start": 0, "end": 1}]]}',
        '{"ranks": 3}',
    ],
)
def test_a_hostile_timeline(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError, match=r"x\.json"):
        read_measured(tmp_path / "x.json")


def test_fifos_are_left_out_of_a_corpus_and_no_timelines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.py")
    assert corpus._read(tmp_path / "x.py") == ""
    with pytest.raises(PetatronError, match=", not a file"):
        read_measured(tmp_path / "x.py")


@pytest.mark.parametrize("code", [6, 7])
def test_token_files_of_floating_point_numbers_are_refused(
    tmp_path: Path, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    dtype = {6: np.dtype("<f8"), 7: np.dtype("<f4")}[code]
    np.full(20, np.nan, dtype).tofile(tmp_path / "data.bin")
    lengths, offsets = np.array([20], "<i4"), np.array([0], "<i8")
    head = HEADER.pack(MAGIC, 1, code, 1, 2)
    index = head + lengths.tobytes() + offsets.tobytes() + np.array([0, 1], "<i8").tobytes()
    (tmp_path / "data.idx").write_bytes(index)
    prefix = str(tmp_path / "data")
    for vocab_size in (257, None):
        run = RunConfig(model=ModelConfig(seq_length=8, vocab_size=vocab_size), data=DataConfig(data_path=(prefix,)))
        with pytest.raises(DataError, match=rf"data\.idx says that data\.bin holds {dtype} numbers, and token ids are"):
            build_datasets(run, None, (1, 0, 0))
    assert main(["data", "inspect", prefix, "--tokenizer-type", "ByteTokenizer"]) == 1
    assert "token ids are whole numbers" in capsys.readouterr().err
    assert main(["data", "inspect", prefix]) == 0
    assert "nan nan nan" in capsys.readouterr().out


def test_a_file_name_that_is_no_text_is_named_by_data_fetch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    with open(os.fsencode(folder) + b"/caf\xe9.jsonl", "w") as file:
        file.write('{"text": "a"}\n')
    words = ["--hub", str(tmp_path), "--files", "*.jsonl", "--output", str(tmp_path / "out")]
    assert main(["data", "fetch", "owner/name", *words]) == 1
    assert r"files whose names are not UTF-8: caf\udce9.jsonl. Rename them" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
