"""Token files of sentences: megatron-core writes the same bytes, and reads ours back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.config.schema.data import TokenizerConfig
from petatron.data.sentences.sentence_splitter import SentenceSplitter
from petatron.data.tokenizer import build_tokenizer
from tests.megatron_core.run_core import ROOT, TIMEOUT_S, WHEEL
from tests.unit.data.megatron_tool import MegatronTool
from tests.unit.data.vocabularies import LINES, write_bert_vocabulary

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not WHEEL.is_dir(), reason=f"{WHEEL} has no megatron-core: make megatron-core fetches it"),
]
_PROGRAM = """
import json, sys
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
documents, size, theirs, ours = json.load(open(sys.argv[1]))
builder = IndexedDatasetBuilder(theirs + ".bin", dtype=DType.optimal_dtype(size))
for document in documents:
    builder.add_document([token for sentence in document for token in sentence], [len(sentence) for sentence in document])
builder.finalize(theirs + ".idx")
data = IndexedDataset(ours)
print("read " + json.dumps([data.document_indices.tolist(), [data[place].tolist() for place in range(len(data))]]))
"""


@pytest.mark.parametrize("append_eod", [False, True])
def test_files_of_sentences_are_those_of_megatron_core(append_eod: bool, tmp_path: Path):
    vocab, corpus = write_bert_vocabulary(tmp_path / "vocab.txt"), tmp_path / "corpus.jsonl"
    text = "The item is here. Read it, Dr. Open! Items?\n\nA title\n\n"
    corpus.write_text("".join(json.dumps({"text": text + line}) + "\n" for line in LINES))
    flags = ["--input", str(corpus), "--output-prefix", str(tmp_path / "ours"), "--workers", "1", "--split-sentences"]
    flags += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocab)]
    assert main(["data", "preprocess", *flags, *(["--append-eod"] if append_eod else [])]) == 0
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(vocab)))
    tool = MegatronTool(tokenizer=tokenizer, append_eod=append_eod, split=SentenceSplitter().split)
    documents = tool.documents(corpus.read_text().splitlines())
    job, ours = tmp_path / "job.json", tmp_path / "ours_text_sentence"
    job.write_text(json.dumps([documents, tokenizer.vocab_size, str(tmp_path / "theirs"), str(ours)]))
    environment = {**os.environ, "PYTHONPATH": str(WHEEL), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(job)]
    done = subprocess.run(words, cwd=ROOT / "tests", env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    for end in (".idx", ".bin"):
        assert ours.with_suffix(end).read_bytes() == (tmp_path / "theirs").with_suffix(end).read_bytes()
    printed = next(line for line in done.stdout.splitlines() if line.startswith("read "))
    borders, sequences = json.loads(printed.removeprefix("read "))
    assert sequences == [sentence for document in documents for sentence in document]
    assert borders == [sum(map(len, documents[:count])) for count in range(len(documents) + 1)]
