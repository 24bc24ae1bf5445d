"""Tokenizers of tiktoken and SentencePiece wherever one is named: data, training, generation, conversion, ported scripts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.config.schema.data import TokenizerConfig
from petatron.data.tokenizer import Tokenizer, build_tokenizer
from tests.unit.data.vocabularies import (
    LINES,
    piece_model,
    trained_tokens,
    write_bert_vocabulary,
    write_vocabulary,
)

MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --untie-embeddings-and-output-weights --lr 1e-3 --train-iters 2 --eval-iters 0 "
    "--global-batch-size 2 --num-workers 0 --live off --device cpu --split 1,0,0"
).split()
KINDS = {
    "tiktoken": "--tokenizer-type TikTokenizer --tokenizer-model vocab.json --tiktoken-pattern v1 --tiktoken-num-special-tokens 9",
    "bpe": "--tokenizer-type Llama2Tokenizer --tokenizer-model llama.model",
    "unigram": "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model unigram.model",
    "legacy": "--tokenizer-model llama.model --tokenizer-sentencepiece-legacy --tokenizer-special-tokens <x> <y>",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_vocabulary(tmp_path / "vocab.json", trained_tokens(420))
    for name in ("llama", "unigram"):
        (tmp_path / f"{name}.model").write_bytes(piece_model(name))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in LINES * 3))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(kind: str) -> Tokenizer:
    config = {
        "tiktoken": TokenizerConfig(
            tokenizer_type="TikTokenizer",
            tokenizer_model="vocab.json",
            tiktoken_pattern="v1",
            tiktoken_num_special_tokens=9,
        ),
        "bpe": TokenizerConfig(tokenizer_model="llama.model"),
        "unigram": TokenizerConfig(tokenizer_model="unigram.model"),
        "legacy": TokenizerConfig(tokenizer_model="llama.model", tokenizer_special_tokens=("<x>", "<y>")),
    }
    return build_tokenizer(config[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_from_text_to_generated_text(files: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    """The files move away after training: a run and its exported model have what they need."""
    flags, tokenizer = KINDS[kind].split(), opened(kind)
    made = ["--input", "text.jsonl", "--output-prefix", "data", "--workers", "1", "--append-eod", "--overwrite"]
    assert main(["data", "preprocess", *made, *flags]) == 0
    assert main(["data", "inspect", "data_text_document", *flags, "--document", "1"]) == 0
    assert LINES[1] in capsys.readouterr().out
    assert main(["train", *MODEL, *flags, "--data-path", "data_text_document", "--save", "run"]) == 0
    said = capsys.readouterr().err
    assert ("transformers finds a model without a tokenizer" in said) == (kind in ("unigram", "legacy"))
    step = Path("run/step-00000002")
    settings = json.loads((step / "model" / "config.json").read_text())
    assert (settings["vocab_size"], settings["eos_token_id"]) == (tokenizer.vocab_size, tokenizer.eod)
    ask = ["--prompt", "The item", "--max-tokens", "8", "--temperature", "0"]
    assert main(["generate", "run", *ask]) == 0
    with_files = capsys.readouterr().out
    for name in ("vocab.json", "llama.model", "unigram.model"):
        (files / name).rename(files / f"moved-{name}")
    shutil.copytree(step / "model", "exported")
    for folder in ("run", "exported"):
        assert main(["generate", folder, *ask]) == 0
        assert capsys.readouterr().out == with_files
    assert main(["checkpoint", "convert", "run", "converted", "--to", "huggingface"]) == 0
    kept = "tokenizer.json" if kind in ("tiktoken", "bpe") else "tokenizer.model"
    assert (Path("converted") / kept).read_bytes() == (step / "model" / kept).read_bytes()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_constrained_text_of_a_vocabulary_in_its_own_file(files: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    flags = [*KINDS[kind].split(), "--mock-data", "--train-iters", "1", "--save", "run"]
    assert main(["train", *MODEL, *flags]) == 0
    capsys.readouterr()
    words = ["--prompt", "The", "--regex", " (item|open) [a-c]{3}", "--max-tokens", "20", "--temperature", "0"]
    assert main(["generate", "run", *words]) == 0
    text = capsys.readouterr().out.strip()
    assert text.split()[0] in ("item", "open") and set(text.split()[1]) <= set("abc") and len(text.split()[1]) == 3


def test_settings_that_contradict_each_other_are_told_together(files: Path, capsys: pytest.CaptureFixture[str]):
    cases = {
        "--tokenizer-type TikTokenizer": ["--tokenizer-type TikTokenizer needs --tokenizer-model"],
        "--tokenizer-type Llama2Tokenizer": ["--tokenizer-type Llama2Tokenizer needs --tokenizer-model"],
        "--tokenizer-type TikTokenizer --tokenizer-model vocab.json --tiktoken-num-special-tokens 0": [
            "--tiktoken-num-special-tokens 0 is below 1"
        ],
        "--tokenizer-model vocab.json --tiktoken-pattern v2 --tiktoken-num-special-tokens 3": [
            "are 7, and --tiktoken-num-special-tokens 3 are reserved. Reserve 7 or more, or name fewer."
        ],
        "--tokenizer-model llama.model --tokenizer-special-tokens <x> --vocab-extra-ids 2": [
            "--tokenizer-special-tokens <x> are found in texts with --tokenizer-sentencepiece-legacy alone",
            "--vocab-extra-ids 2 has special tokens of its own",
        ],
        "--tokenizer-model llama.model --no-tokenizer-sentencepiece-ignore-extra-whitespaces --vocab-extra-ids 2": [
            "is for plain text, without --vocab-extra-ids"
        ],
        "--vocab-file a --merge-file b --tokenizer-special-tokens <x>": [
            "--tokenizer-special-tokens <x> names tokens that a GPT2BPETokenizer has in its own files"
        ],
    }
    for flags, expected in cases.items():
        for command in (
            ["train", *MODEL, "--mock-data"],
            ["data", "preprocess", "--input", "text.jsonl", "--output-prefix", "x"],
        ):
            assert main([*command, *flags.split()]) == 2
            told = capsys.readouterr().err
            assert [text for text in expected if text not in told] == [], flags
    assert main(["data", "inspect", "x", "--tokenizer-type", "MultimodalTokenizer"]) in (1, 2)
    assert main(["train", *MODEL, "--mock-data", "--tokenizer-model", "gone.model"]) == 2
    assert "--tokenizer-model gone.model does not exist" in capsys.readouterr().err
    assert (
        main(["train", *MODEL, "--mock-data", "--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "vocab.json"])
        == 1
    )
    assert "vocab.json is not a SentencePiece model" in capsys.readouterr().err


def test_flags_that_another_tokenizer_does_not_read_are_told(files: Path, capsys: pytest.CaptureFixture[str]):
    made = ["data", "preprocess", "--input", "text.jsonl", "--output-prefix", "bytes", "--workers", "1"]
    assert main([*made, "--tokenizer-type", "ByteTokenizer", "--tiktoken-pattern", "v2"]) == 0
    assert "--tiktoken-pattern has no effect: no other tokenizer than tiktoken's reads it" in capsys.readouterr().err


def test_a_script_that_names_them_is_ported(files: Path, capsys: pytest.CaptureFixture[str]):
    script = Path("run.sh")
    script.write_text(
        "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
        "--lr 1e-3 --train-iters 2 --mock-data --tokenizer-type TikTokenizer --tokenizer-model /gone/multi.json --tiktoken-pattern v2\n"
    )
    assert main(["port", "run.sh", "--out", "gone.yaml"]) == 0
    told = capsys.readouterr().out
    assert "/gone/multi.json does not exist" in told and "not in this version" not in told
    script.write_text(script.read_text().replace("/gone/multi.json", "vocab.json --tiktoken-num-special-tokens 9"))
    assert main(["port", "run.sh", "--out", "here.yaml"]) == 0
    assert main(["train", "--config", "here.yaml", "--device", "cpu", "--live", "off", "--eval-iters", "0"]) == 0
    assert "429 ids" in capsys.readouterr().out


WORDPIECE = "--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt --vocab-extra-ids 5".split()


def test_word_pieces_from_text_to_generated_text(files: Path, capsys: pytest.CaptureFixture[str]):
    """A model has rows for the tokenizer's ids and for those of --extra-vocab-size, and its folder has the tokenizer."""
    write_bert_vocabulary(files / "vocab.txt")
    made = ["--input", "text.jsonl", "--output-prefix", "data", "--workers", "1", "--append-eod"]
    assert main(["data", "preprocess", *made, *WORDPIECE, "--extra-vocab-size", "9"]) == 0
    assert "note: --extra-vocab-size has no effect" in capsys.readouterr().err
    assert main(["data", "inspect", "data_text_document", *WORDPIECE, "--document", "1"]) == 0
    assert "for item in items" in (printed := capsys.readouterr().out) and "[SEP]" in printed
    given = [*MODEL, *WORDPIECE, "--extra-vocab-size", "7", "--data-path", "data_text_document", "--save", "run"]
    assert main(["train", *given]) == 0
    model = Path("run/step-00000002/model")
    config = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file="vocab.txt", vocab_extra_ids=5)
    tokenizer = build_tokenizer(config)
    settings = json.loads((model / "config.json").read_text())
    assert (settings["vocab_size"], settings["eos_token_id"]) == (tokenizer.vocab_size + 7, tokenizer.eod)
    assert (model / "vocab.txt").read_bytes() == Path("vocab.txt").read_bytes()
    Path("vocab.txt").unlink()
    capsys.readouterr()
    assert main(["generate", "run", "--prompt", "The item", "--max-tokens", "4", "--temperature", "0"]) == 0
    assert main(["checkpoint", "convert", "run", "converted", "--to", "huggingface"]) == 0
    assert (Path("converted") / "vocab.txt").is_file()


def test_settings_of_word_pieces_that_contradict_each_other(files: Path, capsys: pytest.CaptureFixture[str]):
    cases = {
        "--tokenizer-type BertWordPieceCase": "--tokenizer-type BertWordPieceCase needs --vocab-file. Give the vocab.txt",
        "--tokenizer-type BertWordPieceCase --vocab-file v.txt --merge-file m": "--merge-file m is no file of a BertWordPieceCase",
        "--vocab-file v.txt": "For a vocab.txt of WordPiece, use --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase.",
        "--vocab-file v.json": "needs --vocab-file and --merge-file. Give both.",
    }
    for flags, expected in cases.items():
        for command in (
            ["train", *MODEL, "--mock-data"],
            ["data", "preprocess", "--input", "text.jsonl", "--output-prefix", "x"],
        ):
            assert main([*command, *flags.split()]) == 2
            assert expected in capsys.readouterr().err, flags
    made = ["data", "preprocess", "--input", "text.jsonl", "--output-prefix", "bytes", "--workers", "1"]
    assert main([*made, "--tokenizer-type", "ByteTokenizer", "--tokenizer-hf-no-use-fast"]) == 0
    assert "--tokenizer-hf-no-use-fast has no effect: only WordPiece" in capsys.readouterr().err
    capsys.readouterr()
    assert (
        main(["train", *MODEL, "--vocab-size", "300", "--data-path", "bytes_text_document", "--extra-vocab-size", "3"])
        == 0
    )
    assert "--extra-vocab-size has no effect: there is no tokenizer" in capsys.readouterr().err
