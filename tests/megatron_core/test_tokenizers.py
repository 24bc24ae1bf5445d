"""Megatron-Core's own tokenizers of tiktoken vocabularies, SentencePiece models and WordPiece, beside those of the same flags here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from petatron.config.schema.data import TokenizerConfig
from petatron.data.tokenizer import build_tokenizer
from tests.megatron_core.run_core import ROOT, TIMEOUT_S, WHEEL
from tests.unit.data.vocabularies import (
    bert_texts,
    piece_model,
    random_texts,
    trained_tokens,
    write_bert_vocabulary,
    write_vocabulary,
)

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not WHEEL.is_dir(), reason=f"{WHEEL} has no megatron-core: make megatron-core fetches it"),
]
TEXTS = random_texts(1000)
MORE = ["<fim>", "<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
TIKTOKEN, PIECES = "tiktoken_tokenizer.TikTokenTokenizer", "sentencepiece_tokenizer.SentencePieceTokenizer"
# Megatron-Core's class and its arguments, our settings, and the size of the vocabulary.
CASES = {
    "v1": (TIKTOKEN, {"pattern": "v1", "num_special_tokens": 1000}, {"tiktoken_pattern": "v1"}, 1420),
    "v2 cut": (TIKTOKEN, {"pattern": "v2", "num_special_tokens": 9}, {"tiktoken_num_special_tokens": 9}, 400),
    "named": (
        TIKTOKEN,
        {"special_tokens": MORE, "num_special_tokens": 20},
        {"tiktoken_num_special_tokens": 20, "tokenizer_special_tokens": tuple(MORE)},
        440,
    ),
    "llama": (PIECES, {}, {}, None),
    "unigram": (PIECES, {}, {}, None),
    "t5": (PIECES, {}, {}, None),
    "t5 spaces": (
        PIECES,
        {"ignore_extra_whitespaces": False},
        {"tokenizer_sentencepiece_ignore_extra_whitespaces": False},
        None,
    ),
    "llama legacy": (
        PIECES,
        {"legacy": True, "special_tokens": ["<x>", "</s>", "<mask>"]},
        {"tokenizer_sentencepiece_legacy": True, "tokenizer_special_tokens": ("<x>", "</s>", "<mask>")},
        None,
    ),
}
_PROGRAM = """
import importlib, json, sys
name, path, arguments, texts = json.load(open(sys.argv[1]))
module, _, kind = name.partition(".")
found = importlib.import_module("megatron.core.tokenizers.text.libraries." + module)
real = getattr(found, kind)(path, **arguments)
print("ids " + json.dumps([real.vocab_size, [real.text_to_ids(text) for text in texts]]))
"""


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_megatron_core(name: str, tmp_path: Path) -> None:
    kind, arguments, settings, size = CASES[name]
    if kind == TIKTOKEN:
        path = write_vocabulary(tmp_path / "v.json", trained_tokens(420))
        arguments, given = {**arguments, "vocab_size": size}, {**settings, "tokenizer_type": "TikTokenizer"}
    else:
        path = tmp_path / "x.model"
        path.write_bytes(piece_model(name.split()[0]))
        given = {**settings, "tokenizer_type": "GPTSentencePieceTokenizer"}
    ours = build_tokenizer(TokenizerConfig(tokenizer_model=str(path), **given), vocab_size=size)
    real_size, real_ids = _ids_of_core(_PROGRAM, [kind, str(path), arguments, TEXTS], tmp_path)
    assert ours.vocab_size == real_size
    for text, ids, real in zip(TEXTS, ours.encode_batch(TEXTS), real_ids, strict=True):
        assert ids == real, text


_WORDPIECE_PROGRAM = """
import json, sys
from megatron.core.tokenizers.text.libraries import megatron_hf_tokenizer as library
name, folder, arguments, texts = json.load(open(sys.argv[1]))
library.MEGATRON_CONFIG_MAP[name]["tokenizer_name"] = folder  # it would be downloaded
real = library.MegatronHFTokenizer(name, vocab_file=folder + "/vocab.txt", include_special_tokens=False, **arguments)
print("ids " + json.dumps([real.vocab_size, real.eod, [real.text_to_ids(text) for text in texts]]))
"""


@pytest.mark.parametrize(("kind", "extra_ids"), [("BertWordPieceLowerCase", 0), ("BertWordPieceCase", 100)])
def test_ids_of_word_pieces_are_those_of_megatron_core(kind: str, extra_ids: int, tmp_path: Path) -> None:
    """It takes the case from the published model's tokenizer_config.json, and the cased one has 100 sentinels."""
    vocab = write_bert_vocabulary(tmp_path / "vocab.txt")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": kind == "BertWordPieceLowerCase"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    given = TokenizerConfig(tokenizer_type=kind, vocab_file=str(vocab), vocab_extra_ids=extra_ids)  # type: ignore[arg-type]
    texts = bert_texts(1000)
    arguments = {"additional_special_tokens": [f"<extra_id_{number}>" for number in range(extra_ids)]}
    size, eod, real_ids = _ids_of_core(_WORDPIECE_PROGRAM, [kind, str(tmp_path), arguments, texts], tmp_path)
    ours = build_tokenizer(given)
    assert (ours.vocab_size, ours.eod) == (size, eod)
    for text, ids, real in zip(texts, ours.encode_batch(texts), real_ids, strict=True):
        assert ids == real, ascii(text)


def _ids_of_core(program: str, job: list[Any], folder: Path) -> list[Any]:
    """Runs a program with megatron-core that prints ids."""
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    environment = {**os.environ, "PYTHONPATH": str(WHEEL), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", "-c", program, str(path)]
    done = subprocess.run(words, cwd=ROOT / "tests", env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = next(line for line in done.stdout.splitlines() if line.startswith("ids "))
    return json.loads(printed.removeprefix("ids "))
