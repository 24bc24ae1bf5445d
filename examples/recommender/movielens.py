"""Reads MovieLens in its own formats, and writes the histories that `--dataset-type item-histories` trains on.

    python examples/recommender/movielens.py ml-1m/ratings.dat runs/movies

    ml-100k    u.data        user <tab> item <tab> rating <tab> timestamp
    ml-1m      ratings.dat   user::item::rating::timestamp
    ml-latest  ratings.csv   userId,movieId,rating,timestamp, the first line says so

Every rating is an interaction, whatever its stars; a user's are in the order of their times, equal times in that of the file. A line that
is none of these is in NAME.rejected.txt with its number and the reason, and the summary counts such lines by reason. With a file of names
(--names), as for histories of a model that is trained already, items that are not in it are left out, counted and named too.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from petatron.base.errors import DataError
from petatron.data.recommendation.history_file import ItemHistories, write_histories
from petatron.data.recommendation.item_names_file import read_item_names

CSV_HEADER = "userId,movieId,rating,timestamp"
MAX_TIME = 1 << 60


@dataclass(frozen=True)
class Interaction:
    user: str
    item: str
    time: int


@dataclass
class Rejected:
    """Lines that are no interaction, or whose item is unknown: number, reason and the line itself."""

    lines: list[tuple[int, str, str]] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        return Counter(reason for _, reason, _ in self.lines)


def separator_of(first: str) -> str:
    """Returns what separates the fields of a file, from its first line."""
    if first == CSV_HEADER:
        return ","
    found = next((separator for separator in ("::", "\t") if separator in first), None)
    if found is None:
        raise DataError(
            f"The first line is {first[:60]!r}, which is none of MovieLens: give u.data, ratings.dat or ratings.csv, whose first line is "
            f"{CSV_HEADER}."
        )
    return found


def parse_line(line: str, separator: str) -> Interaction | str:
    """Returns an interaction, or the reason why the line is none."""
    fields = line.split(separator)
    if len(fields) != 4:
        return "another number of fields than 4"
    user, item, rating, time = (text.strip() for text in fields)
    if not (user.isdecimal() and item.isdecimal()):
        return "a user or an item that is no number"
    try:
        is_rating = math.isfinite(float(rating))
    except ValueError:
        is_rating = False
    if not is_rating:
        return "a rating that is no number"
    if not time.isdecimal() or int(time) > MAX_TIME:
        return "a time that is no number of seconds"
    return Interaction(user, item, int(time))


def read_interactions(path: Path, rejected: Rejected) -> Iterator[Interaction]:
    """Yields the interactions of a file."""
    separator = None
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            line = line.rstrip("\r\n")
            if not line.strip():
                continue
            if separator is None:
                separator = separator_of(line)
                if separator == ",":
                    continue
            parsed = parse_line(line, separator)
            if isinstance(parsed, str):
                rejected.lines.append((number, parsed, line))
            else:
                yield parsed
    if separator is None:
        raise DataError(f"{path} is empty. Give u.data, ratings.dat or ratings.csv of MovieLens.")


@dataclass(frozen=True)
class Movies:
    histories: ItemHistories
    names: list[str]
    users: list[str]
    rejected: Rejected
    unknown_items: Counter[str]

    def summary(self) -> list[str]:
        lengths = self.histories.lengths
        lines = [
            f"{len(self.histories.items):,} interactions of {len(self.users):,} users with {len(self.names):,} items, "
            f"{int(lengths.min()) if len(lengths) else 0} to {int(lengths.max()) if len(lengths) else 0} each"
        ]
        alone = int((lengths == 1).sum())
        lines += [f"{alone:,} users have one item, which predicts nothing"] * (alone > 0)
        counts = self.rejected.counts().most_common()
        lines += [f"lines that are no rating: {count:,} have {reason}" for reason, count in counts]
        if self.unknown_items:
            most = ", ".join(f"{item} ({count:,})" for item, count in self.unknown_items.most_common(5))
            total = sum(self.unknown_items.values())
            lines.append(f"{total:,} interactions are with {len(self.unknown_items):,} unknown items, left out: {most}")
        return lines


def read_movies(path: Path, known: Sequence[str] | None = None) -> Movies:
    """Reads a file; items are numbered by their ids, or have the places that they have among the known ones."""
    rejected, by_user = Rejected(), dict[str, list[Interaction]]()
    for interaction in read_interactions(path, rejected):
        by_user.setdefault(interaction.user, []).append(interaction)
    present = {interaction.item for interactions in by_user.values() for interaction in interactions}
    names = sorted(present, key=int) if known is None else list(known)
    number = {name: index for index, name in enumerate(names)}
    unknown = Counter(x.item for interactions in by_user.values() for x in interactions if x.item not in number)
    users, items, times = [], [], []
    for user in sorted(by_user, key=int):
        ordered = sorted((x for x in by_user[user] if x.item in number), key=lambda x: x.time)
        if ordered:
            users.append(user)
            items.append([number[x.item] for x in ordered])
            times.append([x.time for x in ordered])
    histories = ItemHistories.of_users(items, times, num_items=len(names))
    return Movies(histories, names, users, rejected, unknown)


def write_movies(movies: Movies, prefix: Path) -> None:
    """Writes histories, the names of items, and the rejected lines, if there are any."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_histories(prefix, movies.histories, movies.names)
    rejected = Path(f"{prefix}.rejected.txt")
    rejected.unlink(missing_ok=True)
    if movies.rejected.lines:
        rejected.write_text("".join(f"{number}\t{reason}\t{line}\n" for number, reason, line in movies.rejected.lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn a file of MovieLens into histories.")
    parser.add_argument("file", type=Path, help="u.data, ratings.dat or ratings.csv")
    parser.add_argument("histories", type=Path, help="the file to write")
    parser.add_argument("--names", type=Path, help="the names of known items, a line each: others are left out")
    args = parser.parse_args()
    movies = read_movies(args.file, None if args.names is None else read_item_names(args.names))
    write_movies(movies, args.histories)
    print("\n".join(movies.summary()))


if __name__ == "__main__":
    main()
