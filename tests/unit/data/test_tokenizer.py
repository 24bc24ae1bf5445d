from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from petatron.base.errors import DataError
from petatron.config.schema.data import TokenizerConfig
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.tokenizer import (
    ByteTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    build_tokenizer,
)

TEXTS = [
    "def read(path):\n    return open(path).read()\n",
    "for item in items: print(item)\n",
    "naïve café — 東京 🙂 \t x\x00y",
] * 8
TRICKY = [
    "",
    " ",
    "hello world",
    "  two  spaces",
    "naïve café",
    "東京 🙂",
    "it's we'll 123,456",
    "tab\tnew\nline\r\n",
    "\x00\x7f",
    "<|endoftext|>",
]


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(iter(TEXTS), 320, path)
    return path


def test_trained_bpe_round_trips_any_text(tokenizer_json: Path) -> None:
    tokenizer = HuggingFaceTokenizer(tokenizer_json)
    assert tokenizer.vocab_size <= 320 and tokenizer.eod == 0 and tokenizer.name == str(tokenizer_json)
    for text in TRICKY:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and all(0 <= number < tokenizer.vocab_size for number in ids)
    assert tokenizer.encode_batch(TRICKY) == [tokenizer.encode(text) for text in TRICKY]
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0].encode())


def test_training_is_deterministic(tokenizer_json: Path, tmp_path: Path) -> None:
    train_bpe(TEXTS, 320, tmp_path / "again" / "tokenizer.json")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == tokenizer_json.read_bytes()


def test_folder_and_eod_sources(tokenizer_json: Path, tmp_path: Path) -> None:
    data = json.loads(tokenizer_json.read_text())
    size = HuggingFaceTokenizer(tokenizer_json).vocab_size
    data["added_tokens"].append({**data["added_tokens"][0], "id": size, "content": "<stop>"})
    data["added_tokens"].append({**data["added_tokens"][0], "id": size + 1, "content": "</s>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert HuggingFaceTokenizer(tmp_path).eod == 0
    assert HuggingFaceTokenizer(tmp_path).vocab_size == size + 2
    for form in ("<stop>", {"content": "<stop>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": form}))
        assert HuggingFaceTokenizer(tmp_path).eod == size
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert HuggingFaceTokenizer(tmp_path).eod == 0
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not valid JSON"):
        HuggingFaceTokenizer(tmp_path)


def test_stored_truncation_padding_and_special_tokens_do_not_touch_documents(
    tokenizer_json: Path, tmp_path: Path
) -> None:
    fast = FastTokenizer.from_file(str(tokenizer_json))
    fast.enable_truncation(2)
    fast.enable_padding(length=50)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert HuggingFaceTokenizer(tmp_path).encode(TEXTS[0]) == HuggingFaceTokenizer(tokenizer_json).encode(TEXTS[0])


def test_gpt2_files_give_gpt2_ids(tokenizer_json: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = json.loads(tokenizer_json.read_text())["model"]
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps(model["vocab"]))
    merges.write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n")
    ours = GPT2BPETokenizer(vocab, merges)
    theirs = transformers.GPT2Tokenizer(vocab=str(vocab), merges=str(merges))
    assert ours.eod == model["vocab"]["<|endoftext|>"] and ours.vocab_size == len(model["vocab"])
    for text in TRICKY[:-1]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode_batch(TRICKY) == [ours.encode(text) for text in TRICKY]
    assert ours.eod not in ours.encode("<|endoftext|>") and ours.decode([ours.eod]) == "<|endoftext|>"
    vocab.write_text("not json")
    with pytest.raises(DataError, match="not a GPT-2 vocabulary"):
        GPT2BPETokenizer(vocab, merges)
    with pytest.raises(DataError, match=r"nothing does not exist. Check --merge-file"):
        GPT2BPETokenizer(vocab, tmp_path / "nothing")


def test_byte_level_ids_decode_as_the_library_decodes_them(tokenizer_json: Path, tmp_path: Path) -> None:
    """Whole characters, parts of some, added tokens of any text, and ids that no token has."""
    fast = FastTokenizer.from_file(str(tokenizer_json))
    fast.add_tokens(["two words", "naïve 🙂", "café"])
    fast.add_special_tokens(["<|im_start|>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    ours, chance = HuggingFaceTokenizer(tmp_path), random.Random(0)
    ids = range(ours.vocab_size + 3)
    for some in (*([one] for one in ids), *(chance.choices(ids, k=chance.randint(2, 12)) for _ in range(500))):
        assert ours.decode(some) == fast.decode(some, skip_special_tokens=False), some
    with pytest.raises(DataError, match="Token ids for the tokenizer"):
        ours.decode([-1])


def test_other_decoders_are_the_library_s(tokenizer_json: Path, tmp_path: Path) -> None:
    fast = FastTokenizer.from_file(str(tokenizer_json))
    fast.decoder = decoders.Metaspace()
    fast.save(str(tmp_path / "tokenizer.json"))
    ids = fast.encode(TEXTS[0], add_special_tokens=False).ids
    assert HuggingFaceTokenizer(tmp_path).decode(ids) == fast.decode(ids)
    with pytest.raises(DataError, match="Token ids for the tokenizer"):
        HuggingFaceTokenizer(tmp_path).decode([-1])


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(["a", "é"]) == [[97], [195, 169]]
    assert tokenizer.decode([104, 256, 255]) == "h\ufffd\ufffd" and tokenizer.eod == 256 and tokenizer.vocab_size == 257


def test_null() -> None:
    tokenizer = NullTokenizer(50)
    assert tokenizer.encode_batch(["3 4", "", " 49 "]) == [[3, 4], [], [49]]
    assert tokenizer.decode([3, 4]) == "3 4" and tokenizer.eod == 49
    with pytest.raises(DataError, match="token ids separated by spaces"):
        tokenizer.encode("3 x")
    with pytest.raises(DataError, match=r"3\.\.50 are outside"):
        tokenizer.encode("3 50")
    with pytest.raises(DataError, match="positive --vocab-size"):
        NullTokenizer(0)


def test_build_tokenizer(tokenizer_json: Path, tmp_path: Path) -> None:
    assert isinstance(build_tokenizer(TokenizerConfig(tokenizer_model=str(tokenizer_json))), HuggingFaceTokenizer)
    assert isinstance(build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer")), ByteTokenizer)
    assert build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer"), vocab_size=9).vocab_size == 9
    for config, message in (
        (TokenizerConfig(), "No tokenizer is given"),
        (TokenizerConfig(tokenizer_type="NullTokenizer"), "NullTokenizer needs --vocab-size"),
        (TokenizerConfig(tokenizer_type="HuggingFaceTokenizer"), "needs --tokenizer-model"),
        (TokenizerConfig(merge_file="x"), "GPT2BPETokenizer needs --vocab-file"),
        (TokenizerConfig(vocab_file="x"), "GPT2BPETokenizer needs --merge-file"),
        (TokenizerConfig(tokenizer_model=str(tmp_path / "none")), "does not exist.*not downloaded"),
        (TokenizerConfig(tokenizer_model=str(tmp_path)), r"tokenizer\.json does not exist"),
    ):
        with pytest.raises(DataError, match=message):
            build_tokenizer(config)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path)))


def test_train_bpe_refusals(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more than 256 ids"):
        train_bpe(TEXTS, 256, tmp_path / "x.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Cannot write the tokenizer"):
        train_bpe(TEXTS, 300, tmp_path / "file" / "x.json")
