"""The tokenizers that the arguments of a Megatron checkpoint name."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from sentencepiece import SentencePieceTrainer

from petatron.checkpoint.megatron.arguments import config_from_arguments, tokenizer_values
from petatron.cli.main import main
from petatron.data.sentencepiece_tokenizer import SentencePieceTokenizer
from tests.unit.checkpoint.megatron.megatron_files import VOCAB, Case, write_legacy


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    out = io.BytesIO()
    kind = {
        "model_type": "bpe",
        "vocab_size": 20,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    }
    SentencePieceTrainer.train(sentence_iterator=iter(["abc abc cab bca"] * 9), model_writer=out, minloglevel=2, **kind)
    path = tmp_path / "small.model"
    path.write_bytes(out.getvalue())
    return path


def test_arguments_are_settings_of_a_tokenizer():
    named = {
        "tokenizer_type": "TikTokenizer",
        "tokenizer_model": "v.json",
        "tiktoken_pattern": "v1",
        "tiktoken_num_special_tokens": 9,
        "tokenizer_special_tokens": ["<s>"],
        "vocab_extra_ids": 0,
    }
    values = tokenizer_values({**named, "vocab_file": None, "tokenizer_sentencepiece_legacy": False, "num_layers": 2})
    assert values == {**named, "tokenizer_special_tokens": ("<s>",), "tokenizer_sentencepiece_legacy": False}
    odd = {"tiktoken_pattern": "v9", "tiktoken_num_special_tokens": "9", "tokenizer_special_tokens": [1]}
    assert tokenizer_values({**named, **odd}).keys() == {"tokenizer_type", "tokenizer_model", "vocab_extra_ids"}
    for without in ("tokenizer_model", "tokenizer_type"):
        assert tokenizer_values({**named, without: None}) == {}
    assert tokenizer_values({**named, "tokenizer_type": "NullMultimodalTokenizer"}) == {}


def test_a_tokenizer_of_tiktoken_has_a_size_of_its_own():
    arguments = {**vars(Case().args()), "vocab_size": None, "tokenizer_type": "TikTokenizer"}
    model, _, problems = config_from_arguments(arguments, None)
    assert not problems and model["vocab_size"] == 131_072


def test_conversion_puts_it_beside_the_weights(pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    case = Case(extra={"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(pieces)})
    source = tmp_path / "megatron"
    write_legacy(source, case)
    assert main(["checkpoint", "convert", str(source), str(tmp_path / "out"), "--to", "huggingface"]) == 0
    assert (
        f"note: the tokenizer that the checkpoint's arguments name ({pieces}) is beside the weights"
        in capsys.readouterr().out
    )
    for name, content in SentencePieceTokenizer(pieces).files().items():
        assert (tmp_path / "out" / name).read_bytes() == content
    assert main(["generate", str(tmp_path / "out"), "--prompt", "abc", "--max-tokens", "3", "--temperature", "0"]) == 0
    assert (
        main(
            [
                "checkpoint",
                "convert",
                str(source),
                str(tmp_path / "own"),
                "--to",
                "huggingface",
                "--tokenizer",
                str(pieces),
            ]
        )
        == 0
    )
    assert (tmp_path / "own" / "tokenizer.model").read_bytes() == pieces.read_bytes()
    pieces.unlink()
    capsys.readouterr()
    assert main(["checkpoint", "convert", str(source), str(tmp_path / "gone"), "--to", "huggingface"]) == 0
    told = (
        f"note: the checkpoint's arguments name the tokenizer {pieces}, which is not here; --tokenizer puts one beside"
    )
    assert told in capsys.readouterr().out
    assert not (tmp_path / "gone" / "tokenizer.json").exists()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from tests.unit.data.vocabularies import piece_model

    large = tmp_path / "large.model"
    large.write_bytes(piece_model("llama"))
    source = tmp_path / "megatron"
    write_legacy(source, Case(extra={"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(large)}))
    assert main(["checkpoint", "convert", str(source), str(tmp_path / "out"), "--to", "huggingface"]) == 1
    assert f"has 420 ids, and the model in {source} has {VOCAB}" in capsys.readouterr().err
