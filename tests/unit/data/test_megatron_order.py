"""Samples of random blends, splits and lengths, bit for bit in Megatron's order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest

from petatron.config.schema.data import DataConfig
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.run import RunConfig
from petatron.config.schema.training import TrainConfig
from petatron.data.batch_loader import SampleDataset
from petatron.data.blended_dataset import normalize_once, samples_to_build
from petatron.data.build_datasets import build_datasets
from petatron.data.indexed_writer import IndexedWriter
from tests.longform import diagonal

from . import megatron_order

NUM_FILES = 5


@dataclass(frozen=True)
class TokenFile:
    prefix: str
    sequences: list[list[int]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[TokenFile]:
    """Files with token ids of their own; the last has documents of several sequences, or of none."""
    folder, random, made = tmp_path_factory.mktemp("files"), Random(7), []
    for number in range(NUM_FILES):
        lengths = [random.randint(1, 24) for _ in range(random.randint(20, 60))]
        ids = iter(range(number * 1000, 10_000))
        sequences = [[next(ids) for _ in range(length)] for length in lengths]
        prefix = str(folder / f"file{number}")
        with IndexedWriter(prefix, "uint16") as writer:
            place = 0
            while place < len(sequences):
                size = random.randint(0, 4) if number == NUM_FILES - 1 else 1
                group = sequences[place : place + size]
                writer.add_document([token for part in group for token in part], [len(part) for part in group])
                place += len(group)
        made.append(TokenFile(prefix, sequences))
    return made


def draw_weights(random: Random, count: int) -> list[float]:
    kind = random.choice(["whole", "percent", "any"])
    if kind == "whole":
        return [float(random.randint(1, 9)) for _ in range(count)]
    return [round(random.uniform(0.01, 1), 2) if kind == "percent" else random.uniform(1e-3, 10) for _ in range(count)]


def taken(dataset: SampleDataset | None, size: int) -> list[list[int]]:
    assert dataset is not None
    return [np.asarray(dataset[index]).tolist() for index in range(size)]


@diagonal(4)
@pytest.mark.parametrize("number", range(60))
def test_random_blend(files: list[TokenFile], number: int, tmp_path: Path):
    random = Random(number)
    chosen = [random.choice(files) for _ in range(random.randint(1, 4))]
    weights = None if number % 6 == 5 else draw_weights(random, len(chosen))
    size, seq_length, seed = random.randint(1, 300), random.choice([4, 7, 16]), random.randint(0, 10_000)
    words = [file.prefix for file in chosen]
    if weights is not None:
        words = [word for weight, prefix in zip(weights, words) for word in (repr(weight), prefix)]
    own_blend = number % 4 == 3
    if weights is None and len(chosen) > 1:  # as far as one epoch goes; Megatron ends there
        size = min(size, sum((sum(map(len, file.sequences)) - 1) // seq_length for file in chosen) // 2)
    given = {"train_data_path": tuple(words)} if own_blend else {"data_path": tuple(words), "split": "70,30,0"}
    config = RunConfig(
        model=ModelConfig(seq_length=seq_length, vocab_size=10_000),
        data=DataConfig(data_cache_path=str(tmp_path), **given),  # pyright: ignore[reportArgumentType]
        train=TrainConfig(seed=seed, eval_iters=4, global_batch_size=1),
    )
    wanted = (size, 0 if own_blend else random.randint(4, 40), 0)  # four at a time
    built = build_datasets(config, None, wanted)
    for split, dataset in ((0, built.train), (1, built.valid))[: 1 if own_blend else 2]:
        cuts = [round(0.7 * len(file.sequences)) for file in chosen]
        parts = [
            file.sequences if own_blend else file.sequences[cut:] if split else file.sequences[:cut]
            for file, cut in zip(chosen, cuts)
        ]
        expected = megatron_order.of_split(parts, weights, wanted[split], seq_length, seed, own_blend=own_blend)
        assert len(expected) == wanted[split] or (split == 1 and weights is None and len(expected) >= 4)
        assert taken(dataset, len(expected)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_weights_are_normalized_twice(seed: int):
    """To the last bit, whatever a second normalization changes."""
    weights = [Random(seed).uniform(1e-3, 10) for _ in range(seed % 5 + 2)]
    twice = megatron_order.normalized(megatron_order.normalized(weights))
    assert megatron_order.normalized(normalize_once(weights)) == twice
    assert normalize_once(weights) == (
        weights if twice == megatron_order.normalized(weights) else megatron_order.normalized(weights)
    )


def test_a_blend_that_takes_more_than_its_share_gets_it():
    assert samples_to_build([1.0, 1.0], 10, [5, 8], surplus=0.005) == [6, 8]
    assert samples_to_build([3.0, 1.0], 80, [60, 20], surplus=0.0) == [60, 20]
    assert samples_to_build([3.0, 1.0], 80, [60, 20], surplus=0.2) == [72, 24]


EARLIER = {  # fingerprints of a version that built exactly what a blend takes, normalized weights once and shuffled whole documents
    "one file": (("web",), 80, "0cf242d83b92ae4f5f72f3b13e5b12ee", True),
    "no weights": (("web", "code"), 40, "280bb45cfdb6662a6fdb58adbca15a56", True),
    "as many epochs": (("3", "web", "1", "code"), 80, "8c450e886696d82342585fc3060a71b1", True),
    "another epoch": (("3", "web", "1", "code"), 96, "5d509f11bea43a67caa2db3b1713ffa0", False),
    "a last bit": (("0.3", "web", "2.6", "code", "1.5", "third"), 80, "a49e23b83cb0b30c495acbc6a06888d2", False),
    "several sequences": (("multi",), 20, "b70bf3b55a45e51706e2ee06db63cb3c", False),
}


@pytest.mark.parametrize(("words", "size", "earlier", "same"), EARLIER.values(), ids=EARLIER)
def test_fingerprints_of_earlier_runs(words: tuple[str, ...], size: int, earlier: str, same: bool, tmp_path: Path):
    """A run that resumes is warned exactly where its order is another, and no index is found under another order's name."""
    for name, base, documents in (("web", 0, 20), ("code", 500, 20), ("third", 300, 10)):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            for number in range(documents):
                writer.add_document(range(base + 10 * number, base + 10 * number + 10))
    with IndexedWriter(tmp_path / "multi", "uint16") as writer:
        writer.add_document(range(30), [10, 20])
        writer.add_document(range(30, 50), [5, 15])
    path = tuple(word if word[0].isdigit() else str(tmp_path / word) for word in words)
    config = RunConfig(
        model=ModelConfig(seq_length=8, vocab_size=1000),
        data=DataConfig(data_path=path, split="1", data_cache_path=str(tmp_path / "cache")),
        train=TrainConfig(seed=1),
    )
    train = build_datasets(config, None, (size, 0, 0)).train
    assert train is not None
    assert (train.fingerprint == earlier) is same
