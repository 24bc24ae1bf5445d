"""`examples/recommender`: MovieLens's formats, baselines worked out by hand, and a model that beats them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from petatron.base.errors import DataError
from petatron.data.recommendation.history_file import ItemHistories, read_histories
from petatron.data.recommendation.item_names_file import names_path, read_item_names
from tests.load_deadline import scaled

FOLDER = Path(__file__).parents[2] / "examples/recommender"
sys.path.insert(0, str(FOLDER))
import baselines  # noqa: E402
import generate  # noqa: E402
import movielens  # noqa: E402

RATINGS = [("5", "10", "4", 30), ("5", "7", "3.5", 20), ("2", "10", "1", 5), ("5", "300", "5", 20)]
FORMATS = {
    "u.data": "".join(f"{user}\t{item}\t{stars}\t{time}\n" for user, item, stars, time in RATINGS),
    "ratings.dat": "".join(f"{user}::{item}::{stars}::{time}\r\n" for user, item, stars, time in RATINGS),
    "ratings.csv": f"{movielens.CSV_HEADER}\n"
    + "".join(f"{user},{item},{stars},{time}\n" for user, item, stars, time in RATINGS),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_histories(tmp_path: Path, name: str):
    path, prefix = tmp_path / name, tmp_path / "out" / "movies"
    path.write_text(FORMATS[name])
    movies = movielens.read_movies(path)
    movielens.write_movies(movies, prefix)
    histories = read_histories(prefix)
    assert read_item_names(names_path(prefix)) == movies.names == ["7", "10", "300"]
    assert movies.users == ["2", "5"]
    assert [histories.user(user).tolist() for user in range(2)] == [[1], [0, 2, 1]]  # equal times: as in the file
    assert histories.times is not None and histories.times.tolist() == [5, 20, 20, 30]
    assert movies.summary()[1] == "1 users have one item, which predicts nothing"
    assert not (tmp_path / "out" / "movies.rejected.txt").exists()


WRONG_LINES = {
    "1\t2\t3": "another number of fields than 4",
    "1\t2\t3\t4\t5": "another number of fields than 4",
    "x\t2\t3\t4": "a user or an item that is no number",
    "1\t\t3\t4": "a user or an item that is no number",
    "1\t-2\t3\t4": "a user or an item that is no number",
    "1\t2\tgood\t4": "a rating that is no number",
    "1\t2\tnan\t4": "a rating that is no number",
    "1\t2\t3\t-4": "a time that is no number of seconds",
    "1\t2\t3\t99999999999999999999999": "a time that is no number of seconds",
}


def test_lines_that_are_no_ratings_are_counted_named_and_written(tmp_path: Path):
    path, prefix = tmp_path / "u.data", tmp_path / "movies"
    path.write_text(FORMATS["u.data"] + "\n" + "\n".join(WRONG_LINES) + "\n")
    movies = movielens.read_movies(path)
    movielens.write_movies(movies, prefix)
    rejected = [line.split("\t", 2) for line in Path(f"{prefix}.rejected.txt").read_text().splitlines()]
    assert [(reason, line) for _, reason, line in rejected] == [(reason, line) for line, reason in WRONG_LINES.items()]
    assert [int(number) for number, *_ in rejected] == list(range(6, 15))
    assert len(movies.histories.items) == 4
    assert "lines that are no rating: 3 have a user or an item that is no number" in "\n".join(movies.summary())


def test_items_that_a_model_does_not_know_are_counted_and_named(tmp_path: Path):
    path = tmp_path / "u.data"
    path.write_text(FORMATS["u.data"])
    movies = movielens.read_movies(path, known=["300", "7"])
    assert movies.users == ["5"] and movies.histories.user(0).tolist() == [1, 0]
    assert movies.summary()[-1] == "2 interactions are with 1 unknown items, left out: 10 (2)"


def test_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "movies.dat"
    path.write_text("1|Toy Story|1995\n")
    with pytest.raises(DataError, match="which is none of MovieLens"):
        movielens.read_movies(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        movielens.read_movies(path)


# The last two of each are left out of training.
HISTORIES = ItemHistories.of_users([[0, 1, 2, 3], [0, 1, 3, 2], [4, 1, 0, 5, 5], [2]], None, num_items=6)


def test_baselines_are_fitted_to_training_alone():
    assert baselines.popularity(HISTORIES)(torch.tensor([0])).tolist() == [3, 3, 1, 0, 1, 0]
    chain = baselines.markov_chain(HISTORIES)(torch.tensor([3, 0]))
    assert chain.argmax() == 1 and int(chain[1]) == 2 and chain[4] > chain[3]
    similar = baselines.item_knn(HISTORIES)(torch.tensor([0]))
    assert similar[1] == pytest.approx(1.0) and similar[4] == pytest.approx(3**-0.5) and similar[0] == similar[2] == 0


def test_items_of_the_history_are_not_recommended():
    hits, gains = baselines.evaluate(lambda history: torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0]), HISTORIES, k=1)
    assert hits == gains == pytest.approx(2 / 3)  # 3 and 2 after all of 0, 1, 2 and 3; not 5, which the user has had


def test_made_up_users_have_each_movie_once():
    lines = [line.split("\t") for line in generate.generate(30, 3)]
    pairs = {(user, movie) for user, movie, *_ in lines}
    assert len(pairs) == len(lines) and lines == sorted(lines, key=lambda line: int(line[3]))
    assert lines == [line.split("\t") for line in generate.generate(30, 3)]


@pytest.mark.docs
@pytest.mark.timeout(900)
def test_a_model_beats_item_knn(tmp_path: Path):
    """By the commands of its page."""
    data, movies = str(tmp_path / "u.data"), str(tmp_path / "movies")
    for words in (["generate.py", data], ["movielens.py", data, movies], ["train.py", movies]):
        done = subprocess.run(
            [sys.executable, str(FOLDER / words[0]), *words[1:]], capture_output=True, text=True, timeout=scaled(600)
        )
        assert done.returncode == 0, done.stderr
    rows = {name: float(hits) for name, hits in re.findall(r"^(\S.*?)\s+(0\.\d+)\s+0\.\d+$", done.stdout, re.MULTILINE)}
    assert rows["model"] > 1.1 * rows["item-kNN"] > rows["popularity"]
