"""Special tokens by role and sentinels: those of transformers' own tokenizers, and of every kind of vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import DataError
from petatron.config.schema.data import TokenizerConfig
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.special_tokens import ROLES
from petatron.data.tokenizer import (
    ByteTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    Tokenizer,
    build_tokenizer,
    folder_tokenizer,
)
from tests.unit.data.vocabularies import (
    BERT_SPECIAL_TOKENS,
    PIECE_MODELS,
    piece_model,
    trained_tokens,
    write_bert_vocabulary,
    write_vocabulary,
)


def opened(path: Path, kind: Any, **settings: Any) -> Tokenizer:
    flag = "vocab_file" if kind.startswith("Bert") else "tokenizer_model"
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **{flag: str(path)}, **settings))


def saved(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """Returns the tokenizer that a folder with its files has."""
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
    config = folder_tokenizer(folder)
    assert config is not None
    return build_tokenizer(config)


def roles_of(theirs: Any) -> dict[str, int]:
    ids = {role: getattr(theirs, f"{role}_token_id") for role in ROLES}
    return {role: number for role, number in ids.items() if number is not None}


def bert() -> Any:
    from transformers import BertTokenizerFast

    return BertTokenizerFast(vocab={token: number for number, token in enumerate([*BERT_SPECIAL_TOKENS, "the"])})


def roberta() -> Any:
    from transformers import RobertaTokenizerFast

    vocab = ["<s>", "<pad>", "</s>", "<unk>", "a", "<mask>"]
    return RobertaTokenizerFast(vocab={token: number for number, token in enumerate(vocab)}, merges=[])


def t5() -> Any:
    """Its sentinels are counted downwards, as in the published vocabularies."""
    from transformers import T5TokenizerFast

    sentinels = [f"<extra_id_{number}>" for number in reversed(range(12))]
    pieces = ["<pad>", "</s>", "<unk>", "▁", "▁the", *sentinels]
    return T5TokenizerFast(vocab=[(piece, float(-number)) for number, piece in enumerate(pieces)], extra_ids=12)


@pytest.mark.parametrize("build", [bert, roberta, t5])
@pytest.mark.parametrize("names", ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"])
def test_roles_and_sentinels_are_those_of_transformers(build: Callable[[], Any], names: str, tmp_path: Path):
    """Whichever of a folder's files names the roles."""
    theirs = build()
    theirs.save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    if names != config.name:
        config.unlink()
    if names == "special_tokens_map.json":
        tokens = {name: {"content": value} for name, value in settings.items() if name.endswith("_token")}
        (tmp_path / names).write_text(json.dumps(tokens))
    ours = HuggingFaceTokenizer(tmp_path)
    assert ours.special_ids == roles_of(theirs) and set(ours.special_ids) >= {"unk", "pad"}
    sentinels = [f"<extra_id_{number}>" for number in range(12)] if build is t5 else []
    assert ours.sentinel_ids == tuple(theirs.convert_tokens_to_ids(sentinels))
    assert not ours.sentinel_ids or ours.sentinel_ids[:2] == (16, 15)


def test_a_role_that_the_settings_deny_is_absent(tmp_path: Path):
    roberta().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"cls_token": null, "eos_token": "<pad>", "bos_token": null}')
    (tmp_path / "special_tokens_map.json").write_text('{"cls_token": "<s>", "eos_token": "</s>", "mask_token": "a"}')
    ours = HuggingFaceTokenizer(tmp_path)
    assert ours.special_ids == {"eos": 1, "unk": 3, "sep": 2, "pad": 1, "mask": 4}
    assert (ours.eod, ours.bod) == (1, None)
    (tmp_path / "tokenizer_config.json").unlink()
    assert (HuggingFaceTokenizer(tmp_path).eod, HuggingFaceTokenizer(tmp_path).bod) == (2, 0)
    for wrong in ('{"pad_token": 3}', "[", '{"pad_token": "\\ud800"}'):
        (tmp_path / "special_tokens_map.json").write_text(wrong)
        with pytest.raises(DataError, match=r"special_tokens_map\.json is not valid JSON: it .*remove it"):
            HuggingFaceTokenizer(tmp_path)


def test_an_ordinary_token_has_no_role(tmp_path: Path):
    """A byte-level BPE whose only special token ends documents; `[PAD]` is added as text."""
    tokenizer = train_bpe(["the cat the dog"] * 8, 270, tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append(
        {**content["added_tokens"][0], "id": tokenizer.vocab_size, "content": "[PAD]", "special": False}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours = HuggingFaceTokenizer(tmp_path)
    assert ours.special_ids == tokenizer.special_ids == {"eos": 0} and ours.sentinel_ids == ()
    model = content["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    gpt2 = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert gpt2.special_ids == {"eos": 0} and gpt2.sentinel_ids == ()


@pytest.mark.parametrize("in_python", [False, True])
def test_word_pieces(tmp_path: Path, in_python: bool):
    vocab = write_bert_vocabulary(tmp_path / "v.txt")
    plain = opened(vocab, "BertWordPieceLowerCase", tokenizer_hf_no_use_fast=in_python)
    expected = {"eos": 3, "unk": 1, "sep": 3, "pad": 0, "cls": 2, "mask": 4}
    assert plain.special_ids == expected and plain.sentinel_ids == ()
    assert {role: number for role, number in expected.items() if role != "eos"} == roles_of(bert())
    size, settings = plain.vocab_size, {"tokenizer_special_tokens": ("[BOS]", "[EOS]"), "vocab_extra_ids": 3}
    ours = opened(vocab, "BertWordPieceCase", tokenizer_hf_no_use_fast=in_python, **settings)
    assert ours.special_ids == {**expected, "bos": size, "eos": size + 1}
    assert ours.sentinel_ids == (size + 2, size + 3, size + 4)
    for tokenizer in (plain, ours):
        again = saved(tokenizer, tmp_path)
        assert (again.special_ids, again.sentinel_ids) == (tokenizer.special_ids, tokenizer.sentinel_ids)


@pytest.mark.parametrize("name", PIECE_MODELS)
def test_pieces(tmp_path: Path, name: str):
    from sentencepiece import SentencePieceProcessor

    (tmp_path / "x.model").write_bytes(piece_model(name))
    real = SentencePieceProcessor(model_proto=piece_model(name))
    ours = opened(tmp_path / "x.model", "SentencePieceTokenizer")
    ids = {"bos": real.bos_id(), "eos": real.eos_id(), "unk": real.unk_id(), "pad": real.pad_id()}
    assert ours.special_ids == {role: number for role, number in ids.items() if number >= 0}
    assert ours.sentinel_ids == ()
    assert saved(ours, tmp_path).special_ids == ours.special_ids


def test_pieces_with_megatron_s_special_tokens(tmp_path: Path):
    (tmp_path / "x.model").write_bytes(piece_model("unigram"))
    ours = opened(tmp_path / "x.model", "SentencePieceTokenizer", vocab_extra_ids=3)
    size = ours.vocab_size - 5 - 3  # <CLS> <SEP> <EOD> <MASK> <PAD>, and three sentinels
    roles = {"bos": 1, "eos": 2, "unk": 0, "sep": size + 1, "pad": size + 4, "cls": size, "mask": size + 3}
    assert ours.special_ids == roles and ours.eod == size + 2
    assert ours.sentinel_ids == (size + 5, size + 6, size + 7)
    again = saved(ours, tmp_path)
    assert (again.special_ids, again.sentinel_ids) == (ours.special_ids, ours.sentinel_ids)


def test_names_that_a_piece_model_was_trained_with(tmp_path: Path):
    import io

    from sentencepiece import SentencePieceTrainer

    out = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat and the dog"] * 20),
        model_writer=out,
        minloglevel=2,
        vocab_size=30,
        hard_vocab_limit=False,
        control_symbols=["[CLS]", "[SEP]"],
        user_defined_symbols=["[MASK]", "<extra_id_1>", "<extra_id_0>"],
    )
    (tmp_path / "x.model").write_bytes(out.getvalue())
    ours = opened(tmp_path / "x.model", "SentencePieceTokenizer")
    assert ours.special_ids == {"bos": 1, "eos": 2, "unk": 0, "sep": 4, "cls": 3, "mask": 5}
    assert ours.sentinel_ids == (7, 6)


def test_tiktoken(tmp_path: Path):
    path = write_vocabulary(tmp_path / "vocab.json", trained_tokens(420))
    ours = opened(path, "TikTokenizer", tiktoken_num_special_tokens=10)
    assert ours.special_ids == {"bos": 1, "eos": 2, "unk": 0, "sep": 6, "pad": 4, "cls": 5, "mask": 3}
    assert ours.sentinel_ids == () and saved(ours, tmp_path).special_ids == ours.special_ids


def test_bytes_and_ids():
    assert ByteTokenizer().special_ids == {"eos": 256} and ByteTokenizer().sentinel_ids == ()
    assert NullTokenizer(9).special_ids == {"eos": 8} and NullTokenizer(9).sentinel_ids == ()


def test_saved_bytes_name_their_end(tmp_path: Path):
    assert saved(ByteTokenizer(), tmp_path).special_ids == {"eos": 256}
