"""Compares an encoder-decoder with a decoder on missing words: the loss of each, in nats per word, beside that of word frequencies.

    python examples/t5/span_loss.py runs/walks-t5 runs/walks-decoder walks/held-out.jsonl

The encoder-decoder reads the whole text, with a sentinel in place of every missing word; the decoder reads what comes before each.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from math import log
from pathlib import Path
from random import Random

import numpy as np
import torch

import petatron
from petatron.data.masked.span_corruption import corrupt_spans
from petatron.data.tokenizer import Tokenizer
from petatron.kernels.attention.document_layout import Documents, KeySpans
from petatron.models.batch import Batch
from petatron.models.decoder import TOKEN_LOSSES
from petatron.serve.open_engine import load_model, model_settings

EVERY = 7
"""One of so many words is missing."""


def missing_words(length: int, number: int) -> list[int]:
    """Returns the places of missing words in a text, none of them beside another, first or last."""
    first = 1 + Random(number).randrange(EVERY)
    return list(range(first, length - 1, EVERY))


def losses(model: petatron.Model, batch: Batch) -> torch.Tensor:
    [outputs] = model.forward([batch], collect=[TOKEN_LOSSES])
    return outputs[TOKEN_LOSSES]


def encoder_decoder_loss(folder: str, texts: list[str]) -> tuple[float, int]:
    """Returns the mean loss of missing words, and how many there are."""
    settings = model_settings(folder)
    tokenizer, model = settings.required_tokenizer(), load_model(settings, dtype="float32")
    roles, sentinels = tokenizer.special_ids, tokenizer.sentinel_ids
    start, end, pad = roles.get("bos", roles["pad"]), roles["eos"], roles["pad"]
    rows = []
    for number, text in enumerate(texts):
        ids = np.array(tokenizer.encode(text))
        spans = [[at] for at in missing_words(len(ids), number)]
        corrupted = corrupt_spans(ids, spans, sentinels, decoder_room=2 * len(spans))
        rows.append((corrupted.encoder, [start, *corrupted.decoder], [*corrupted.decoder, end]))
    sources, tokens, labels = (padded([row[part] for row in rows], pad) for part in range(3))
    lengths = np.array([len(row[0]) for row in rows])
    batch = Batch(
        tokens,
        labels,
        torch.ones(labels.shape),
        arrays={"encoder_tokens": sources},
        source_documents=Documents.of_lengths(lengths, sources.shape[1]),
        key_spans=KeySpans.of_lengths(torch.from_numpy(lengths), tokens.shape[1]),
    )
    named = torch.tensor([*sentinels, end, pad])
    of_words = losses(model, batch)[~torch.isin(labels, named)]
    return of_words.mean().item(), of_words.numel()


def decoder_loss(folder: str, texts: list[str]) -> tuple[float, int]:
    settings = model_settings(folder)
    tokenizer, model = settings.required_tokenizer(), load_model(settings, dtype="float32")
    ids = [[tokenizer.eod, *tokenizer.encode(text)] for text in texts]
    tokens = padded([row[:-1] for row in ids], 0)
    labels = padded([row[1:] for row in ids], 0)
    of_words = losses(model, Batch(tokens, labels, torch.ones(labels.shape)))
    chosen = [of_words[number, at] for number, row in enumerate(ids) for at in missing_words(len(row) - 1, number)]
    return torch.stack(chosen).mean().item(), len(chosen)


def frequency_loss(tokenizer: Tokenizer, texts: list[str]) -> float:
    """Returns the loss of who knows how frequent each word is, and nothing else."""
    ids = [tokenizer.encode(text) for text in texts]
    counts = Counter(token for row in ids for token in row)
    missing = [row[at] for number, row in enumerate(ids) for at in missing_words(len(row), number)]
    return -sum(log(counts[token] / counts.total()) for token in missing) / len(missing)


def padded(rows: list[list[int]], pad: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("encoder_decoder")
    parser.add_argument("decoder")
    parser.add_argument("texts", type=Path)
    options = parser.parse_args()
    texts = [json.loads(line)["text"] for line in options.texts.read_text().splitlines()]
    frequency = frequency_loss(model_settings(options.decoder).required_tokenizer(), texts)
    of_decoder, number = decoder_loss(options.decoder, texts)
    of_both, of_words = encoder_decoder_loss(options.encoder_decoder, texts)
    assert number == of_words, "both predict the same words"
    print(f"{number:,} missing words of {len(texts):,} texts, nats per word")
    for name, loss in (("word frequencies", frequency), ("decoder", of_decoder), ("encoder-decoder", of_both)):
        print(f"  {name:18}{loss:.3f}")


if __name__ == "__main__":
    main()
