"""`petatron data train-tokenizer`: tokenizers that our own classes and transformers open, the sample they come from, and the report."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, normalizers, pre_tokenizers, trainers

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.config.schema.data import TokenizerConfig
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.inputs.expand_inputs import expand_inputs
from petatron.data.inputs.input_file import InputFile
from petatron.data.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer, open_tokenizer_files
from petatron.data.tokenizer_training import text_sample
from petatron.data.tokenizer_training.compression import measure_compression
from petatron.data.tokenizer_training.text_sample import SampleOptions, TextSample
from petatron.data.tokenizer_training.train_tokenizer import TokenizerTraining, train_tokenizer
from tests.unit.data.vocabularies import LINES, random_texts

TEXTS = [f"{line}\nnumber {number} of 12345 lines in {number * 7} files\n" for number in range(60) for line in LINES]
KINDS: dict[str, dict[str, Any]] = {
    "bpe": {"algorithm": "bpe"},
    "pieces": {"algorithm": "bpe", "byte_fallback": True},
    "unigram": {"algorithm": "unigram"},
    "unigram bytes": {"algorithm": "unigram", "byte_fallback": True},
    "wordpiece": {"algorithm": "wordpiece"},
    "wordpiece lower": {"algorithm": "wordpiece", "lowercase": True},
}


def trained(folder: Path, kind: str, **options: Any) -> Tokenizer:
    train_tokenizer(iter(TEXTS), TokenizerTraining(vocab_size=500, **{**KINDS[kind], **options}), folder)
    return open_tokenizer_files(folder)


@pytest.mark.parametrize("kind", ["bpe", "pieces", "unigram bytes"])
def test_any_text_is_restored(kind: str, tmp_path: Path):
    tokenizer = trained(tmp_path, kind)
    assert 400 < tokenizer.vocab_size <= 500
    for text, ids in zip(texts := random_texts(2000), tokenizer.encode_batch(texts), strict=True):
        restored = text if kind == "bpe" else text.replace("▁", " ")
        assert tokenizer.decode(ids) == restored, ascii(text)
    if kind != "bpe":  # the name of a byte's token is text like any other
        assert tokenizer.decode(tokenizer.encode("<0x41>")) == "<0x41>" and len(tokenizer.encode("<0x41>")) > 1
        assert measure_compression(tokenizer, ["𓀀𓀀"]).num_tokens == 8


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_ids(kind: str, tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = trained(tmp_path, kind, special_tokens=("<fim>", "<sep>"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    some = [*TEXTS[:6], *random_texts(200)]
    assert theirs(some, add_special_tokens=False)["input_ids"] == tokenizer.encode_batch(some)
    assert [len(tokenizer.encode(name)) for name in ("<fim>", "<sep>")] == [1, 1]
    assert theirs.eos_token_id == tokenizer.eod


def test_first_ids_are_special_tokens(tmp_path: Path):
    named = {"special_tokens": ("<fim>",)}
    bpe, pieces = trained(tmp_path / "bpe", "bpe", **named), trained(tmp_path / "pieces", "pieces", **named)
    assert [*bpe.encode("<|endoftext|><fim>"), bpe.eod] == [0, 1, 0]
    assert [*pieces.encode("<unk><s></s><fim>"), pieces.eod] == [0, 1, 2, 3, 2]
    assert pieces.encode("\x00") == [4] and pieces.vocab_size == 500
    word = trained(tmp_path / "word", "wordpiece", **named)
    assert word.encode("[PAD][UNK][CLS][SEP][MASK]<fim>") == [0, 1, 2, 3, 4, 5] and word.eod == 3


@pytest.mark.parametrize("kind", ["bpe", "pieces", "unigram", "unigram bytes"])
def test_every_digit_has_an_id_of_its_own(kind: str, tmp_path: Path):
    apart, together = trained(tmp_path / "a", kind, splits_digits=True), trained(tmp_path / "b", kind)
    assert len(apart.encode("12345")) == 5 > len(together.encode("12345"))
    assert apart.decode(apart.encode("in 12345 files")) == "in 12345 files"


@pytest.mark.parametrize("kind", ["bpe", "pieces", "wordpiece", "wordpiece lower"])
def test_training_is_repeatable(kind: str, tmp_path: Path):
    for name in ("first", "second"):
        trained(tmp_path / name, kind)
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()


def test_word_pieces_are_those_of_the_library_s_trainer(tmp_path: Path):
    """But for the order of equally frequent pairs, which differs from run to run there."""
    tokenizer = trained(tmp_path, "wordpiece lower", character_coverage=1.0)
    ours = set((tmp_path / "vocab.txt").read_text().splitlines())
    fast = FastTokenizer(models.WordPiece(unk_token="[UNK]"))
    fast.normalizer, fast.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, min_frequency=2, special_tokens=special, show_progress=False)
    fast.train_from_iterator(TEXTS, trainer)
    theirs = set(fast.get_vocab())
    assert len(ours) == tokenizer.vocab_size and abs(len(ours) - len(theirs)) < 9
    assert len(ours & theirs) > 0.85 * len(ours) and {piece for piece in ours ^ theirs if len(piece) == 1} == set()
    text = "the item reads every 12345"
    assert abs(len(fast.encode(text).ids) - len(tokenizer.encode(text))) <= 2


def test_a_vocab_txt_is_opened_by_its_type(tmp_path: Path):
    in_folder = trained(tmp_path, "wordpiece lower", special_tokens=("[EOS]",))
    config = TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase",
        vocab_file=str(tmp_path / "vocab.txt"),
        tokenizer_special_tokens=("[EOS]",),
    )
    named = build_tokenizer(config)
    some = random_texts(300)
    assert named.encode_batch(some) == in_folder.encode_batch(some) and named.eod == in_folder.eod


def test_rare_characters_have_no_id_of_their_own(tmp_path: Path):
    texts = [*["abc abd bcd " * 40] * 5, "☯"]
    for kind, expected in (("pieces", 3), ("unigram bytes", 3), ("unigram", 1), ("wordpiece", 1)):
        training = TokenizerTraining(vocab_size=300, character_coverage=0.99, **KINDS[kind])
        train_tokenizer(iter(texts), training, tmp_path)
        assert len(open_tokenizer_files(tmp_path).encode("☯")) == expected
        train_tokenizer(iter(texts), TokenizerTraining(vocab_size=300, character_coverage=1.0, **KINDS[kind]), tmp_path)
        assert measure_compression(open_tokenizer_files(tmp_path), ["☯"]).num_unknown == 0


def test_another_tokenizer_in_the_folder_is_replaced(tmp_path: Path):
    trained(tmp_path, "wordpiece")
    assert isinstance(trained(tmp_path, "bpe"), HuggingFaceTokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("bpe", 256, "needs more than 256 ids"),
        ("pieces", 260, "no room for pieces beside 3 special tokens and 256 bytes"),
        ("unigram", 4, "no room for pieces beside 3 special tokens"),
        ("wordpiece", 6, "no room for pieces beside 5 special tokens"),
    ],
)
def test_a_vocabulary_that_is_too_small(kind: str, size: int, message: str, tmp_path: Path):
    with pytest.raises(DataError, match=message):
        train_tokenizer(iter(TEXTS), TokenizerTraining(vocab_size=size, **KINDS[kind]), tmp_path)


def test_what_the_library_refuses_is_an_error_of_ours(tmp_path: Path):
    with pytest.raises(
        DataError, match="unigram tokenizer of 300 ids was not trained: the answer of the library cannot be understood"
    ):
        train_tokenizer(iter([3]), TokenizerTraining(vocab_size=300, algorithm="unigram"), tmp_path)  # type: ignore[list-item]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Cannot write the tokenizer"):
        train_tokenizer(iter(TEXTS), TokenizerTraining(vocab_size=300), tmp_path / "file")


def sample(*inputs: Path, **options: Any) -> TextSample:
    return TextSample(SampleOptions(**{"inputs": tuple(map(str, inputs)), "sample_bytes": 10**9, **options}))


def write(path: Path, texts: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_sample_holds_out_the_same_texts_whichever_files_have_them(tmp_path: Path):
    texts = [f"text number {number}" for number in range(500)]
    first = sample(write(tmp_path / "a.jsonl", texts))
    kept = list(first)
    assert sorted([*kept, *first.held_out]) == sorted(texts) and 2 <= len(first.held_out) <= 30
    assert (first.documents, first.num_bytes, first.from_training) == (500, sum(map(len, texts)), False)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    twice = sample(tmp_path / "*.jsonl*", tmp_path / "a.jsonl")
    assert set(twice) == set(kept) and twice.held_out == first.held_out * 2 and twice.documents == 1000


def test_a_sample_takes_its_share_of_every_file(tmp_path: Path):
    large = write(tmp_path / "large.jsonl", ["l" * 90 for _ in range(300)])
    small = write(tmp_path / "small.jsonl", ["s" * 90 for _ in range(100)])
    kept = list(sample(large, small, sample_bytes=9_000))
    assert [sum(text[0] == letter for text in kept) for letter in "ls"] == [75, 25]


def test_files_of_unknown_size_have_equal_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    large = write(tmp_path / "large.jsonl", ["l" * 90 for _ in range(300)])
    small = write(tmp_path / "small.jsonl", ["s" * 90 for _ in range(100)])

    def unknown_sizes(*args: Any) -> list[InputFile]:
        return [replace(file, size=None) for file in expand_inputs(*args)]

    monkeypatch.setattr(text_sample, "expand_inputs", unknown_sizes)
    kept = list(sample(large, small, sample_bytes=9_000))
    assert [sum(text[0] == letter for text in kept) for letter in "ls"] == [50, 50]


def test_a_malformed_row_is_named_by_its_line_in_the_file(tmp_path: Path):
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n\n{"text": 1}\n'))
    with pytest.raises(DataError, match=r"text\.jsonl\.gz:3: key 'text' holds neither a string"):
        list(sample(tmp_path / "text.jsonl.gz"))


def test_texts_of_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "a.jsonl", ["one", ["two", " ", "three"], "", "four"])
    few = sample(path)
    assert list(few) == few.held_out == ["one", "two", "three", "four"] and few.from_training
    path.write_text('{"text": "one"}\noops\n{"text": "\\ud800"}\n{"other": 1}\n\n{"text": "two"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: Expecting value.*--on-error skip"):
        list(sample(path))
    skipping = sample(path, on_error="skip")
    assert list(skipping) == ["one", "two"] and skipping.malformed == 3
    text = tmp_path / "book.txt"
    text.write_text("One\nline\n\nTwo\n")
    assert list(sample(text, input_format="text")) == ["One\nline", "Two"]
    assert list(sample(text, input_format="text-file")) == ["One\nline\n\nTwo"]
    (tmp_path / "table.csv").write_text('id,text\n1,"One\nline"\n2,Two\n')
    assert list(sample(tmp_path / "table.csv")) == ["One\nline", "Two"]
    monkeypatch.setattr(text_sample, "HELD_OUT_EVERY", 1)
    monkeypatch.setattr(text_sample, "MAX_HELD_OUT_BYTES", 4)
    rest = sample(text, input_format="text")
    assert list(rest) == ["Two"] and rest.held_out == ["One\nline"]


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), ("\n", "No text in"), ('{"text": " "}', "No text in")]
)
def test_inputs_without_text(tmp_path: Path, content: str | None, message: str):
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        list(sample(tmp_path / "a.jsonl"))


def gpt2_folder(folder: Path) -> Path:
    """Writes a folder with the two files that GPT-2 has."""
    folder.mkdir()
    model = json.loads(train_bpe(TEXTS[:10], 300, folder / "x.json").files()["tokenizer.json"])["model"]
    (folder / "x.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]))
    return folder


def test_the_report_compares_on_held_out_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    corpus, other = write(tmp_path / "corpus.jsonl", TEXTS), gpt2_folder(tmp_path / "gpt2")
    out = tmp_path / "out"
    made = ["data", "train-tokenizer", "--input", str(corpus), "--output", str(out), "--vocab-size", "400"]
    assert main([*made, "--compare", str(other)]) == 0
    printed = capsys.readouterr().out.splitlines()
    held = sample(corpus)
    list(held)
    assert printed[0].startswith("sample: 360 texts, ") and printed[0].endswith(
        f"; {len(held.held_out)} of them held out"
    )
    rows = {line.split()[0]: line.split()[1:] for line in printed if line.startswith(str(tmp_path))}
    for path in (out, other):
        tokenizer = open_tokenizer_files(path)
        tokens = sum(map(len, tokenizer.encode_batch(held.held_out)))
        expected = sum(len(text.encode()) for text in held.held_out) / tokens
        assert rows[str(path)] == [str(tokenizer.vocab_size), f"{tokens:,}", f"{expected:.3f}", "0.00%"]
    assert printed[-1] == f"use it: --tokenizer-model {out}"
    assert main([*made, "--algorithm", "wordpiece", "--lowercase", "--overwrite", "--special-tokens", "[EOS]"]) == 0
    flags = f"--tokenizer-type BertWordPieceLowerCase --vocab-file {out}/vocab.txt --tokenizer-special-tokens '[EOS]'"
    assert capsys.readouterr().out.splitlines()[-1] == f"use it: {flags}"


def test_little_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    corpus = write(tmp_path / "corpus.jsonl", ["a few words", "☯"])
    corpus.write_text(corpus.read_text() + "oops\n")
    made = ["data", "train-tokenizer", "--input", str(corpus), "--output", str(tmp_path / "out"), "--on-error", "skip"]
    assert main([*made, "--algorithm", "wordpiece"]) == 0
    printed = capsys.readouterr().out
    assert "sample: 2 texts" in printed and "0 of them held out" in printed and "1 malformed line skipped" in printed
    assert (
        "note: too few texts to hold any out" in printed
        and "ids, not 32,000: the sample has no further pairs" in printed
    )


def test_flags_that_contradict_each_other_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    corpus = write(tmp_path / "corpus.jsonl", TEXTS)
    made = ["data", "train-tokenizer", "--input", str(corpus), "--output", str(tmp_path)]
    (tmp_path / "vocab.txt").write_text("")
    flags = (
        "--algorithm wordpiece --byte-fallback --split-digits --vocab-size 0 --sample-bytes 0 --character-coverage 2"
    )
    assert main([*made, *flags.split(), "--special-tokens", "", "--input-format", "text", "--json-keys", "a", "b"]) == 2
    told = capsys.readouterr().err
    for text in (
        *("8 problems", "--byte-fallback is not for wordpiece", "--split-digits is not for wordpiece"),
        *(
            "--vocab-size 0 must be at least 1",
            "--sample-bytes 0 must be at least 1",
            "--character-coverage 2.0 must be above 0",
        ),
        *(
            "--special-tokens names an empty token",
            "--json-keys a b are several",
            f"--output {tmp_path} has a vocab.txt already",
        ),
    ):
        assert text in told
    assert main([*made, "--lowercase", "--overwrite"]) == 2
    assert "--lowercase is not for bpe" in capsys.readouterr().err
    assert main([*made, "--character-coverage", "0.9", "--vocab-size", "300", "--overwrite"]) == 0
    assert "note: --character-coverage has no effect" in capsys.readouterr().err
