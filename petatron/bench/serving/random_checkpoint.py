"""A checkpoint of random weights in the shapes of a run's flags, with a tokenizer of as many ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from petatron.bench.measure.timing import free_cached_memory
from petatron.bench.peers import BenchSpec
from petatron.bench.peers.engines import build_weights
from petatron.config.required_settings import known_vocab_size
from petatron.data.tokenizer import HuggingFaceTokenizer
from petatron.train.own_loop import save_checkpoint


def save_random_checkpoint(spec: BenchSpec, folder: Path) -> None:
    """Saves the initial weights of a run in its precision, as step 1."""
    tokenizer = word_tokenizer(known_vocab_size(spec.run.model), folder / "tokenizer.json")
    model = build_weights(spec)
    save_checkpoint(str(folder), step=1, model=model, random_states=False, tokenizer=tokenizer)
    del model
    free_cached_memory(spec.device)


def word_tokenizer(vocab_size: int, path: Path) -> HuggingFaceTokenizer:
    """Returns a tokenizer each of whose ids is a word of text: every token that is streamed becomes an event."""
    fast = FastTokenizer(models.BPE(vocab={f"Ġw{number}": number for number in range(vocab_size)}, merges=[]))
    fast.decoder = decoders.ByteLevel()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fast.to_str(), encoding="utf-8")
    return HuggingFaceTokenizer(path)
