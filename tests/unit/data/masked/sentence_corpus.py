"""A token file of sentences, a vocabulary of WordPiece for it, and the cases in which its samples are compared with Megatron's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.data.dataset_kinds import DatasetKind, DatasetRequest
from petatron.data.indexed_writer import IndexedWriter
from petatron.data.masked.masked_language_dataset import MaskedLanguage
from petatron.data.masked.span_corruption_dataset import SpanCorruption
from petatron.data.wordpiece_tokenizer import WordPieceOptions, WordPieceTokenizer
from tests.unit.data.vocabularies import BERT_SPECIAL_TOKENS

NUM_WORDS, NUM_SENTINELS, SEED = 60, 40, 1234
NUM_DOCUMENTS = 40
# Of each: the kind, its settings, the settings of Megatron's config, the lengths of the encoder and the decoder, and how many samples.
DEFAULTS: dict[str, Any] = {"mask_prob": 0.15, "short_seq_prob": 0.1}
MEGATRON: dict[str, Any] = {
    "masking_probability": 0.15,
    "short_sequence_probability": 0.1,
    "masking_max_ngram": 3,
    "masking_do_full_word": True,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
}
GEOMETRIC = {"masking_max_ngram": 10, "masking_use_geometric_distribution": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int, int, int]] = {
    "bert": ("bert", {}, {}, 64, 0, 150),
    "bert, no pairs": ("bert", {"has_pairs": False}, {"classification_head": False}, 48, 0, 150),
    "bert, long n-grams": (
        "bert",
        {"ngram_lengths": "long", "max_ngram": 4, "mask_prob": 0.3},
        {"masking_use_longer_ngrams": True, "masking_max_ngram": 4, "masking_probability": 0.3},
        40,
        0,
        100,
    ),
    "bert, geometric": ("bert", {"ngram_lengths": "geometric", "max_ngram": 10}, GEOMETRIC, 96, 0, 100),
    "bert, pieces": ("bert", {"whole_words": False}, {"masking_do_full_word": False}, 32, 0, 150),
    "bert, all short": ("bert", {"short_seq_prob": 1.0}, {"short_sequence_probability": 1.0}, 64, 0, 150),
    "bert, none short": ("bert", {"short_seq_prob": 0.0}, {"short_sequence_probability": 0.0}, 24, 0, 300),
    "t5": ("t5", {}, GEOMETRIC, 64, 40, 150),
    "t5, short n-grams": (
        "t5",
        {"ngram_lengths": "short", "max_ngram": 3, "mask_prob": 0.25},
        {"masking_probability": 0.25},
        96,
        64,
        100,
    ),
    "t5, pieces": (
        "t5",
        {"whole_words": False, "short_seq_prob": 0.5},
        {**GEOMETRIC, "masking_do_full_word": False, "short_sequence_probability": 0.5},
        48,
        40,
        150,
    ),
}
GOLDEN = {"bert": 24, "bert, geometric": 12, "bert, pieces": 12, "t5": 24, "t5, short n-grams": 12}
"""The cases of the golden arrays, with their numbers of samples."""
TYPES = (
    *BERT_SPECIAL_TOKENS,
    *(f"w{number}" for number in range(NUM_WORDS)),
    *(f"##p{number}" for number in range(20)),
)


def write_vocabulary(folder: Path) -> WordPieceTokenizer:
    path = folder / "vocab.txt"
    path.write_text("".join(f"{token}\n" for token in TYPES))
    options = WordPieceOptions(lowercase=True, special_tokens=("[BOS]", "[EOS]"), vocab_extra_ids=NUM_SENTINELS)
    return WordPieceTokenizer(path, options)


def documents() -> list[list[NDArray[np.int64]]]:
    """Documents of sentences: some of one sentence, some with a very long one."""
    random = np.random.RandomState(7)
    made = []
    for number in range(NUM_DOCUMENTS):
        lengths = random.randint(1, 20, size=random.randint(1, 14))
        if number % 9 == 4:
            lengths[0] = 600
        made.append([random.randint(5, len(TYPES), size=length) for length in lengths])
    return made


def write_corpus(folder: Path) -> str:
    with IndexedWriter(folder / "text", "uint16") as writer:
        for sentences in documents():
            writer.add_document(np.concatenate(sentences), sentence_lengths=[len(sentence) for sentence in sentences])
    return str(folder / "text")


def kind_of(name: str) -> DatasetKind:
    kind, settings, _, _, decoder, _ = CASES[name]
    if kind == "bert":
        return MaskedLanguage(**{**DEFAULTS, **settings})
    return SpanCorruption(**{**DEFAULTS, **settings}, decoder_seq_length=decoder)


def samples_of(
    prefix: str, tokenizer: WordPieceTokenizer, name: str, num_samples: int | None = None
) -> list[dict[str, NDArray[Any]]]:
    """Returns our samples of a case."""
    _, _, _, length, _, count = CASES[name]
    request = DatasetRequest(
        split="train",
        num_samples=num_samples or count,
        seq_length=length,
        seed=SEED,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
    )
    source = kind_of(name).open(prefix, request)
    dataset: Any = source.dataset(range(source.num_units), request)
    return [dataset[index] for index in range(len(dataset))]


def check_against(ours: list[dict[str, NDArray[Any]]], theirs: dict[str, NDArray[Any]], *, is_t5: bool) -> None:
    """Compares all samples with the arrays of Megatron's, one row for each; a label counts where the loss does."""
    assert len(ours) == len(theirs["labels"])
    names = (
        {"encoder_tokens": "text_enc", "tokens": "text_dec"} if is_t5 else {"tokens": "text", "token_types": "types"}
    )
    for name, their_name in names.items():
        stacked = np.stack([sample[name] for sample in ours])
        assert np.array_equal(stacked, theirs[their_name]), name
    counts = theirs["loss_mask"].astype(bool)
    assert np.array_equal(np.stack([sample["loss_mask"] for sample in ours]) > 0, counts)
    assert np.array_equal(np.stack([sample["labels"] for sample in ours])[counts], theirs["labels"][counts])
    if "sentence_order" in ours[0]:
        assert [int(sample["sentence_order"]) for sample in ours] == theirs["is_random"].tolist()
    if not is_t5:  # Megatron takes a word that was replaced by a random [PAD] for padding
        filled = [int(sample["num_tokens"]) for sample in ours]
        replaced = [int((sample["tokens"][:count] == 0).sum()) for sample, count in zip(ours, filled)]
        assert (theirs["padding_mask"].sum(axis=1) + replaced).tolist() == filled
