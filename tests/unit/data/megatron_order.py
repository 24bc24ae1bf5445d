"""Megatron's order of samples, slowly: loops over tokens and samples, written from its published rules and sharing no code of ours.

A split of a file are some of its sequences. All of them, repeated for as many epochs as the samples wanted need, are shuffled and
concatenated; sample k is the S + 1 tokens from k S on; samples are shuffled. The last epoch is shuffled by itself, twice, where fewer
than 80 % of its samples are wanted. Of each dataset of a blend with weights its share is wanted, rounded up, and half a percent more,
rounded up; of a blend without weights one epoch. A blend takes the next sample of the dataset that is furthest behind its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Sequences = Sequence[Sequence[int]]
Samples = list[list[int]]


def of_one_dataset(sequences: Sequences, wanted: int | None, seq_length: int, seed: int) -> Samples:
    """All samples of one dataset, in order; `wanted` None is one epoch."""
    tokens = sum(map(len, sequences))
    epochs = 1
    while wanted is not None and epochs * tokens < wanted * seq_length + 1:
        epochs += 1
    total, before_last = ((each * tokens - 1) // seq_length for each in (epochs, epochs - 1))
    apart = False
    if wanted is not None and epochs > 1:
        apart = wanted - before_last < int(0.8 * ((tokens - 1) // seq_length))
    random = np.random.RandomState(seed)
    stream: list[int] = []
    for repeats in (epochs - 1, 1) if apart else (epochs,):
        order = np.array(list(range(len(sequences))) * repeats, dtype=np.int32)
        random.shuffle(order)
        for number in order:
            stream.extend(sequences[number])
    samples: Samples = []
    for first, last in ((0, before_last), (before_last, total)) if apart else ((0, total),):
        order = np.arange(first, last, dtype=np.uint32)
        random.shuffle(order)
        samples += [stream[int(k) * seq_length : (int(k) + 1) * seq_length + 1] for k in order]
    return samples


def normalized(weights: Sequence[float]) -> list[float]:
    total = np.sum(np.array(weights, dtype=np.float64))
    return [float(weight / total) for weight in np.array(weights, dtype=np.float64)]


def blended(datasets: Sequence[Samples], weights: Sequence[float], size: int) -> Samples:
    """`size` samples, each of the dataset furthest behind its share, the first of those."""
    shares, counts, samples = normalized(weights), [0] * len(datasets), []
    for number in range(size):
        behind = [share * max(float(number), 1.0) - float(count) for share, count in zip(shares, counts)]
        chosen = behind.index(max(behind))
        samples.append(datasets[chosen][counts[chosen]])
        counts[chosen] += 1
    return samples


def of_split(
    parts: Sequence[Sequences],
    weights: Sequence[float] | None,
    size: int,
    seq_length: int,
    seed: int,
    *,
    own_blend: bool,
) -> Samples:
    """The first `size` samples of a split; `own_blend`: its files are for this split alone. Fewer, where a blend has no weights."""
    if len(parts) == 1 and (weights is None or own_blend):
        return of_one_dataset(parts[0], size, seq_length, seed)[:size]
    if weights is None:
        datasets = [of_one_dataset(part, None, seq_length, seed) for part in parts]
        sizes = list(map(len, datasets))
        return blended(datasets, sizes, min(size, sum(sizes)))
    once = normalized(weights)
    wanted = [math.ceil(math.ceil(size * share) * 1.005) for share in once]
    datasets = [of_one_dataset(part, number, seq_length, seed) for part, number in zip(parts, wanted)]
    return blended(datasets, once, size)
