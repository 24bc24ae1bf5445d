"""The preprocessing commands of Megatron's guides, as they are typed there, on a small corpus: for BERT, for GPT, and for T5."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from petatron.config.schema.data import TokenizerConfig
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.sentences.sentence_splitter import SentenceSplitter
from petatron.data.tokenizer import GPT2BPETokenizer, Tokenizer, build_tokenizer
from tests.load_deadline import scaled
from tests.unit.data.megatron_tool import MegatronTool
from tests.unit.data.vocabularies import write_bert_vocabulary

ROOT = Path(__file__).parents[2]
CORPUS = [
    {"src": "www.nvidia.com", "text": "The quick brown fox", "type": "Eng", "id": "0", "title": "First Part"},
    {
        "src": "The Internet",
        "text": "jumps over the lazy dog. It opens items!",
        "type": "Eng",
        "id": "42",
        "title": "Second Part",
    },
]
BERT = """
python tools/preprocess_data.py \\
  --input my-corpus.json \\
  --output-prefix my-bert \\
  --vocab-file bert-vocab.txt \\
  --tokenizer-type BertWordPieceLowerCase \\
  --split-sentences
"""
GPT = """
python tools/preprocess_data.py \\
  --input my-corpus.json \\
  --output-prefix my-gpt2 \\
  --vocab-file gpt2-vocab.json \\
  --tokenizer-type GPT2BPETokenizer \\
  --merge-file gpt2-merges.txt \\
  --append-eod
"""
T5 = """
python tools/preprocess_data.py \\
  --input my-corpus.json \\
  --output-prefix my-t5 \\
  --vocab-file bert-vocab.txt \\
  --tokenizer-type BertWordPieceCase \\
  --vocab-extra-ids 100 \\
  --split-sentences \\
  --workers 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the corpus and the vocabularies; tools/ is that of the repository."""
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "my-corpus.json").write_text("".join(json.dumps(record) + "\n" for record in CORPUS))
    write_bert_vocabulary(tmp_path / "bert-vocab.txt")
    texts = [record["text"] for record in CORPUS] * 4
    model = json.loads(train_bpe(texts, 300, tmp_path / "tokenizer.json").files()["tokenizer.json"])["model"]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "gpt2-merges.txt").write_text(
        "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])])
    )
    return tmp_path


def opened(folder: Path, name: str) -> Tokenizer:
    if name == "my-gpt2":
        return GPT2BPETokenizer(folder / "gpt2-vocab.json", folder / "gpt2-merges.txt")
    kind, extra_ids = ("BertWordPieceLowerCase", None) if name == "my-bert" else ("BertWordPieceCase", 100)
    vocab = str(folder / "bert-vocab.txt")
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, vocab_file=vocab, vocab_extra_ids=extra_ids))  # type: ignore[arg-type]


@pytest.mark.parametrize(("command", "name"), [(BERT, "my-bert"), (GPT, "my-gpt2"), (T5, "my-t5")])
def test_a_command_runs_as_typed(folder: Path, command: str, name: str):
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=scaled(120)
    )
    assert done.returncode == 0, done.stderr
    splits = "--split-sentences" in command
    prefix = folder / f"{name}_text_{'sentence' if splits else 'document'}"
    assert f"{prefix.name}.bin" in done.stdout
    tool = MegatronTool(
        tokenizer=opened(folder, name),
        append_eod="--append-eod" in command,
        split=SentenceSplitter().split if splits else None,
    )
    index, tokens = tool.files((folder / "my-corpus.json").read_text().splitlines())
    assert prefix.with_suffix(".idx").read_bytes() == index and prefix.with_suffix(".bin").read_bytes() == tokens
    data = IndexedDataset(prefix)
    assert (data.num_documents, data.num_sequences) == (2, 3 if splits else 2)
