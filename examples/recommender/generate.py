"""Makes a file like MovieLens's u.data up: users follow several series at once, each at a pace of their own.

    python examples/recommender/generate.py runs/u.data

Movies are in series, numbered by their year. A user follows two or three series in turn, and in each of them skips as many parts as that
user always does there, so that the next movie follows from the last two of the same series: neither from the last movie alone, which is of
another series, nor from the set of movies. Some movies are what everybody watches, some follow no rule.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

NUM_SERIES, PARTS = 24, 25
PACES = (1, 2, 3, 4)


def history_of(random: np.random.Generator, length: int, popularity: np.ndarray) -> list[int]:
    """Returns the movies of one user, each once."""
    threads = random.choice(NUM_SERIES, size=int(random.integers(2, 4)), replace=False)
    place = {int(series): int(random.integers(0, PARTS)) for series in threads}
    pace = {series: int(random.choice(PACES)) for series in place}
    seen: dict[int, None] = {}
    turn = 0
    while len(seen) < length:
        if random.random() < 0.15:
            movie = int(random.choice(len(popularity), p=popularity))
        else:
            series = list(place)[turn % len(place)]
            turn += 1
            movie = series * PARTS + place[series]
            place[series] = (place[series] + pace[series]) % PARTS
            if movie in seen:  # the series is through: the user begins another one
                del place[series]
                new = int(random.choice([number for number in range(NUM_SERIES) if number not in place]))
                place[new], pace[new] = int(random.integers(0, PARTS)), int(random.choice(PACES))
                continue
        seen.setdefault(movie)
    return list(seen)


def generate(num_users: int, seed: int) -> list[str]:
    """Returns the lines of the file, in the order of time."""
    random = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, NUM_SERIES * PARTS + 1) ** 0.8
    popularity = random.permutation(popularity / popularity.sum())
    rated = []
    for user in range(1, num_users + 1):
        time = 874_724_710 + int(random.integers(0, 15_000_000))
        for movie in history_of(random, int(random.integers(20, 61)), popularity):
            time += int(random.exponential(3_600)) + 1
            rated.append((time, user, movie + 1, int(random.integers(1, 6))))
    return [f"{user}\t{movie}\t{stars}\t{time}" for time, user, movie, stars in sorted(rated)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a file like u.data of MovieLens 100K up.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--users", type=int, default=943)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    lines = generate(args.users, args.seed)
    args.file.write_text("".join(f"{line}\n" for line in lines))
    print(f"{len(lines):,} ratings of {args.users:,} users in {args.file}")


if __name__ == "__main__":
    main()
