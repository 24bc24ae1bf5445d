"""Fingerprints: equal for one tokenizer in several forms and places, another for every change of what maps text to ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.config.schema.data import TokenizerConfig
from petatron.config.schema.sections.tokenizer_options import DEFAULT_SPECIAL_TOKENS
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.build_datasets import build_datasets
from petatron.data.indexed_writer import merge_datasets
from petatron.data.preprocess import PreprocessOptions, preprocess
from petatron.data.recorded_tokenizer import read_recorded_tokenizer, recorded_tokenizer_path
from petatron.data.tokenizer import (
    ByteTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    Tokenizer,
    build_tokenizer,
)
from petatron.data.tokenizer_fingerprint import TokenizerFingerprint
from petatron.validate import load_config
from tests.unit.data.vocabularies import (
    EXACT_MODELS,
    LINES,
    PIECE_MODELS,
    piece_model,
    trained_tokens,
    write_bert_vocabulary,
    write_vocabulary,
)


def opened(kind: Any, **settings: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **settings))


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
    return folder


def of_ordinary_text(fingerprint: TokenizerFingerprint) -> tuple[str, str]:
    return fingerprint.vocabulary, fingerprint.rules


@pytest.fixture
def bpe(tmp_path: Path) -> HuggingFaceTokenizer:
    return train_bpe(LINES * 3, 400, tmp_path / "bpe" / "tokenizer.json")


def test_gpt2_files_and_their_tokenizer_json_are_one_tokenizer(bpe: HuggingFaceTokenizer, tmp_path: Path):
    model = json.loads((tmp_path / "bpe" / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    ours = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert ours.fingerprint == HuggingFaceTokenizer(saved(ours, tmp_path / "again")).fingerprint
    assert of_ordinary_text(ours.fingerprint) == of_ordinary_text(bpe.fingerprint)
    assert ours.fingerprint.special_tokens != bpe.fingerprint.special_tokens, "GPT-2's encoder knows none in texts"
    assert str(ours.fingerprint) != str(bpe.fingerprint)


def test_tiktoken_files_and_their_tokenizer_json_are_one_tokenizer(tmp_path: Path):
    settings = {"tiktoken_num_special_tokens": 10}
    files = [write_vocabulary(tmp_path / name, trained_tokens(420)) for name in ("v.json", "v.tiktoken")]
    ours = [opened("TikTokenizer", tokenizer_model=str(file), **settings) for file in files]
    again = HuggingFaceTokenizer(saved(ours[0], tmp_path / "again"))
    assert ours[0].fingerprint == ours[1].fingerprint == again.fingerprint
    model = str(files[0])
    for change in ({"tiktoken_pattern": "v1"}, {"tiktoken_num_special_tokens": 11}):
        other = opened("TikTokenizer", tokenizer_model=model, **{**settings, **change})
        assert of_ordinary_text(other.fingerprint) != of_ordinary_text(ours[0].fingerprint)
    named = opened(
        "TikTokenizer", tokenizer_model=model, **settings, tokenizer_special_tokens=(*DEFAULT_SPECIAL_TOKENS, "<x>")
    )
    assert named.fingerprint != ours[0].fingerprint


def test_word_pieces_in_both_forms(tmp_path: Path):
    vocab = str(write_bert_vocabulary(tmp_path / "vocab.txt"))
    ours = opened("BertWordPieceLowerCase", vocab_file=vocab, vocab_extra_ids=2)
    assert HuggingFaceTokenizer(saved(ours, tmp_path / "again")).fingerprint == ours.fingerprint
    cased = opened("BertWordPieceCase", vocab_file=vocab, vocab_extra_ids=2)
    assert (
        cased.fingerprint.vocabulary == ours.fingerprint.vocabulary
        and cased.fingerprint.rules != ours.fingerprint.rules
    )
    sentinels = opened("BertWordPieceLowerCase", vocab_file=vocab).fingerprint
    assert of_ordinary_text(sentinels) == of_ordinary_text(ours.fingerprint) and sentinels != ours.fingerprint
    in_python = [
        opened(kind, vocab_file=vocab, tokenizer_hf_no_use_fast=True).fingerprint
        for kind in ("BertWordPieceLowerCase", "BertWordPieceCase")
    ]
    assert in_python[0] != in_python[1] and in_python[0] != sentinels
    assert in_python[0].has_rules_of(sentinels) and not in_python[0].has_rules_of(in_python[1])


@pytest.mark.parametrize("name", PIECE_MODELS)
def test_pieces_in_both_forms(tmp_path: Path, name: str):
    content = piece_model(name)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.model").write_bytes(content)
    ours, same = (opened("Llama2Tokenizer", tokenizer_model=str(tmp_path / folder / "x.model")) for folder in "ab")
    assert ours.fingerprint == same.fingerprint
    again = build_tokenizer(
        TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(saved(ours, tmp_path / "c")))
    )
    assert again.fingerprint == ours.fingerprint
    if name in EXACT_MODELS:
        as_json = HuggingFaceTokenizer(tmp_path / "c")
        assert of_ordinary_text(as_json.fingerprint) == of_ordinary_text(ours.fingerprint)
    others = {
        str(opened("Llama2Tokenizer", tokenizer_model=str(path)).fingerprint)
        for other in PIECE_MODELS
        if (path := tmp_path / f"{other}.model").write_bytes(piece_model(other))
    }
    assert len(others) == len(PIECE_MODELS)
    legacy = {"tokenizer_special_tokens": ("<x>",), "tokenizer_sentencepiece_legacy": True}
    for change in ({"vocab_extra_ids": 2}, legacy):
        other = opened("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "a" / "x.model"), **change)
        assert other.fingerprint != ours.fingerprint


def test_transformers_llama_has_the_fingerprint_of_its_model_file(tmp_path: Path):
    """The converted tokenizer lists the pairs of a merge in another order, of which none can matter."""
    content = json.loads(opened_llama(tmp_path).files()["tokenizer.json"])
    ours = opened_llama(tmp_path).fingerprint
    merges, groups = content["model"]["merges"], {}
    for pair in merges:
        groups.setdefault("".join(pair), []).append(pair)
    content["model"]["merges"] = [pair for group in groups.values() for pair in reversed(group)]
    assert content["model"]["merges"] != merges
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert of_ordinary_text(HuggingFaceTokenizer(tmp_path / "tokenizer.json").fingerprint) == of_ordinary_text(ours)


def opened_llama(folder: Path) -> Tokenizer:
    path = folder / "x.model"
    path.write_bytes(piece_model("llama"))
    return opened("Llama2Tokenizer", tokenizer_model=str(path))


def test_bytes_and_their_tokenizer_json(tmp_path: Path):
    again = HuggingFaceTokenizer(saved(ByteTokenizer(), tmp_path))
    assert of_ordinary_text(again.fingerprint) == of_ordinary_text(ByteTokenizer().fingerprint)
    assert NullTokenizer(9).fingerprint != NullTokenizer(8).fingerprint != ByteTokenizer().fingerprint


def swap_merges(fast: dict[str, Any]) -> None:
    merges = fast["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def swap_ids(fast: dict[str, Any]) -> None:
    vocab = fast["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def normalize(fast: dict[str, Any]) -> None:
    fast["normalizer"] = json.loads(normalizers.NFC().__getstate__())


def split_digits(fast: dict[str, Any]) -> None:
    parts = (pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False))
    fast["pre_tokenizer"] = json.loads(pre_tokenizers.Sequence(list(parts)).__getstate__())


def add_token(fast: dict[str, Any]) -> None:
    fast["added_tokens"].append({**fast["added_tokens"][0], "id": 400, "content": "<x>"})


CHANGES = (swap_merges, swap_ids, normalize, split_digits, add_token)


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_another_tokenizer(bpe: HuggingFaceTokenizer, tmp_path: Path, change: Callable[..., None]):
    content = json.loads((tmp_path / "bpe" / "tokenizer.json").read_text())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    other = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    assert other.fingerprint != bpe.fingerprint and str(other.fingerprint) != str(bpe.fingerprint)
    assert (of_ordinary_text(other.fingerprint) == of_ordinary_text(bpe.fingerprint)) == (change is add_token)


def test_what_decides_no_id_is_no_part_of_it(bpe: HuggingFaceTokenizer, tmp_path: Path):
    fast = FastTokenizer.from_file(str(tmp_path / "bpe" / "tokenizer.json"))
    fast.enable_truncation(5)
    fast.enable_padding()
    fast.decoder = None  # type: ignore[assignment]
    content = json.loads(fast.to_str())
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{**content["pre_tokenizer"], "trim_offsets": False}],
    }
    content["added_tokens"][0]["special"] = False
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert HuggingFaceTokenizer(tmp_path / "tokenizer.json").fingerprint == bpe.fingerprint
    assert len(str(bpe.fingerprint)) == 16
    assert str(ByteTokenizer().fingerprint) == "366e23f667c1ec72", "it is the same in every version and process"


def written(folder: Path, name: str, tokenizer: TokenizerConfig) -> str:
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line * 20}) + "\n" for line in LINES))
    options = PreprocessOptions(inputs=(str(text),), output_prefix=str(folder / name), tokenizer=tokenizer)
    (prefix,) = options.outputs
    preprocess(options)
    return prefix


def config_of(path: Path) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))


def train_on(prefix: str, tokenizer: Tokenizer | None, *flags: str) -> None:
    settings = (
        f"--data-path {prefix} --seq-length 16 --vocab-size 512 --train-iters 2 --global-batch-size 2 --lr 1e-3".split()
    )
    run = load_config([*settings, *flags], preset="tiny-llama").config
    build_datasets(run, tokenizer, (2, 0, 0))


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_with_another_tokenizer_is_refused_by_name(
    bpe: HuggingFaceTokenizer, tmp_path: Path, change: Callable[..., None], caplog: pytest.LogCaptureFixture
):
    prefix = written(tmp_path, "corpus", config_of(tmp_path / "bpe"))
    content = json.loads((tmp_path / "bpe" / "tokenizer.json").read_text())
    change(content)
    other_path = tmp_path / "tokenizer.json"
    other_path.write_text(json.dumps(content))
    other = HuggingFaceTokenizer(other_path)
    train_on(prefix, bpe)
    train_on(prefix, None)
    train_on(prefix, NullTokenizer(512))
    if change is add_token:  # no text of the file has it
        train_on(prefix, other)
        return
    with pytest.raises(DataError) as caught:
        train_on(prefix, other)
    what = "its ids stand for other tokens (400 ids then, 400 now)" if change is swap_ids else "divides texts otherwise"
    for part in (prefix, f"the tokenizer {tmp_path / 'bpe'}", f"{other_path} is another", what, "--force-tokenizer"):
        assert part in str(caught.value)
    with caplog.at_level(logging.WARNING):
        train_on(prefix, other, "--force-tokenizer")
    assert "--force-tokenizer: " in caplog.text and what in caplog.text
    recorded_tokenizer_path(prefix).unlink()
    train_on(prefix, other)


def test_the_record_survives_and_describes_what_is_there(
    bpe: HuggingFaceTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = config_of(tmp_path / "bpe")
    one, two = written(tmp_path, "one", config), written(tmp_path, "two", config)
    other = written(tmp_path, "other", TokenizerConfig(tokenizer_type="ByteTokenizer"))
    null = tmp_path / "null.jsonl"
    null.write_text('{"text": "1 2 3"}\n')
    record = read_recorded_tokenizer(one)
    assert record is not None and (record.name, record.vocab_size) == (str(tmp_path / "bpe"), 400)
    assert record.fingerprint == bpe.fingerprint
    merge_datasets([one, two], tmp_path / "merged")
    assert read_recorded_tokenizer(tmp_path / "merged") == record
    with pytest.raises(
        DataError, match=r"cannot be merged: .*one_text_document was made with the tokenizer .* which is another"
    ):
        merge_datasets([one, other], tmp_path / "merged")
    recorded_tokenizer_path(two).unlink()
    merge_datasets([two, one], tmp_path / "merged")
    assert read_recorded_tokenizer(tmp_path / "merged") is None, "what it said was of other files"
    assert main(["data", "inspect", one]) == 0
    assert f"tokenizer          {tmp_path / 'bpe'}, 400 ids, fingerprint {bpe.fingerprint}" in capsys.readouterr().out
    assert main(["data", "inspect", one, "--tokenizer-type", "ByteTokenizer"]) != 0
    assert "was made with the tokenizer" in capsys.readouterr().err
    numbers = PreprocessOptions(
        inputs=(str(null),),
        output_prefix=str(tmp_path / "null"),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer"),
        vocab_size=9,
    )
    preprocess(numbers)
    assert read_recorded_tokenizer(numbers.outputs[0]) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 2}',
        '{"version": 1, "name": 3}',
        '{"version": 1, "name": "x", "vocab_size": 3, "fingerprint": {}}',
    ],
)
def test_a_damaged_record_is_an_error(bpe: HuggingFaceTokenizer, tmp_path: Path, content: str):
    prefix = written(tmp_path, "corpus", config_of(tmp_path / "bpe"))
    recorded_tokenizer_path(prefix).write_text(content)
    with pytest.raises(DataError, match=r"corpus_text_document\.tokenizer"):
        train_on(prefix, bpe)


def test_an_added_token_with_other_spaces_is_another_tokenizer(bpe: HuggingFaceTokenizer, tmp_path: Path):
    fingerprints = set()
    for options in ({}, {"lstrip": True}, {"single_word": True}, {"normalized": False}):
        fast = FastTokenizer.from_file(str(tmp_path / "bpe" / "tokenizer.json"))
        fast.add_tokens([AddedToken("<x>", **options)])
        fast.save(str(tmp_path / "tokenizer.json"))
        fingerprints.add(HuggingFaceTokenizer(tmp_path / "tokenizer.json").fingerprint)
    assert len(fingerprints) == 4
