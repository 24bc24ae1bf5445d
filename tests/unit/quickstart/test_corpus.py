"""The corpus: which files, in which part, and what is said when there are too few."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from petatron.base.errors import DataError
from petatron.quickstart.corpus import Corpus, is_held_out, read_corpus, standard_library, write_jsonl

PLENTY = 1 << 30


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def paths(corpus: Corpus) -> list[str]:
    return sorted(file.path for file in (*corpus.train, *corpus.held_out))


def test_the_standard_library_is_enough() -> None:
    corpus = read_corpus(standard_library(), max_bytes=10_000_000)
    size = sum(len(file.text.encode()) for file in corpus.train)
    held_out = sum(len(file.text.encode()) for file in corpus.held_out)
    assert 5_000_000 < size < 10_000_000
    assert 0.02 < held_out / size < 0.10
    assert {"json/decoder.py", "argparse.py"} <= set(paths(corpus))


def test_tests_tables_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    kept = {"a.py": "x = 1\n", "pkg/b.py": "y = 2\n", "pkg/test_like.py": "z = 3\n"}
    left_out = {
        "site-packages/torch.py": "1",
        "test/test_a.py": "1",
        "pkg/tests/test_b.py": "1",
        "encodings/cp1.py": "1",
        "pkg/__pycache__/b.py": "1",
        "README.txt": "1",
        "empty.py": "",
        "latin.py": "# caf\xe9".encode("latin-1"),
    }
    write(tmp_path, {**kept, **left_out})
    assert paths(read_corpus(tmp_path, max_bytes=PLENTY, min_files=1)) == sorted(kept)


def test_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "x = 1\n"})
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    assert paths(read_corpus(tmp_path, max_bytes=PLENTY, min_files=1)) == ["a.py"]


def test_a_part_is_decided_by_the_path_alone(tmp_path: Path) -> None:
    names = [f"pkg{number % 7}/module{number}.py" for number in range(400)]
    write(tmp_path / "many", {name: f"value = {name!r}\n" for name in names})
    write(tmp_path / "few", {name: f"other = {name!r}\n" for name in names[::3]})
    many = read_corpus(tmp_path / "many", max_bytes=PLENTY)
    few = read_corpus(tmp_path / "few", max_bytes=PLENTY, min_files=1)
    assert 8 <= len(many.held_out) <= 36, "one file in twenty, give or take three standard deviations"
    assert {file.path for file in few.held_out} == {file.path for file in many.held_out} & set(names[::3])
    assert all(is_held_out(file.path) for file in many.held_out)
    assert not {file.path for file in many.train} & {file.path for file in many.held_out}


def test_a_size_limit_is_kept_and_takes_files_from_everywhere(tmp_path: Path) -> None:
    write(tmp_path, {f"{letter}/m{number}.py": "x" * 100 for letter in "abcdefgh" for number in range(25)})
    corpus = read_corpus(tmp_path, max_bytes=10_050, min_files=1)
    assert len(paths(corpus)) == 100
    assert {path[0] for path in paths(corpus)} == set("abcdefgh")
    assert corpus == read_corpus(tmp_path, max_bytes=10_050, min_files=1)


def test_line_ends_of_windows_make_no_difference(tmp_path: Path) -> None:
    write(tmp_path / "unix", {"a.py": "x = 1\ny = 2\n"})
    write(tmp_path / "windows", {"a.py": "x = 1\r\ny = 2\r\n"})
    unix, windows = (read_corpus(tmp_path / name, max_bytes=PLENTY, min_files=1) for name in ("unix", "windows"))
    assert unix.digest == windows.digest


def test_the_digest_sees_every_change(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "x = 1\n", "b.py": "y = 2\n"})
    before = read_corpus(tmp_path, max_bytes=PLENTY, min_files=1)
    moved = Corpus(before.train[1:], (*before.held_out, *before.train[:1]))
    write(tmp_path, {"b.py": "y = 3\n"})
    after = read_corpus(tmp_path, max_bytes=PLENTY, min_files=1)
    assert len({before.digest, moved.digest, after.digest}) == 3


@pytest.mark.parametrize("name", ["few", "missing"])
def test_too_few_files_say_what_to_do(tmp_path: Path, name: str) -> None:
    write(tmp_path / "few", {"a.py": "x = 1\n"})
    with pytest.raises(DataError, match=r"Only [01] readable Python files lie in .*200 are needed.*archive"):
        read_corpus(tmp_path / name, max_bytes=PLENTY)


def test_lines_hold_path_and_text(tmp_path: Path) -> None:
    write(tmp_path / "lib", {"a.py": 'x = "\u00e9\u2028"\n', "b.py": "y\n"})
    corpus = read_corpus(tmp_path / "lib", max_bytes=PLENTY, min_files=1)
    files = (*corpus.train, *corpus.held_out)
    write_jsonl(files, tmp_path / "new" / "corpus.jsonl")
    lines = (tmp_path / "new" / "corpus.jsonl").read_text().split("\n")
    assert [json.loads(line) for line in lines if line] == [{"path": f.path, "text": f.text} for f in files]


def test_a_corpus_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="Cannot write the corpus"):
        write_jsonl([], tmp_path / "file" / "corpus.jsonl")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="a superuser may read everything")
def test_files_that_may_not_be_read_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "x\n", "b.py": "y\n"})
    (tmp_path / "b.py").chmod(0)
    assert paths(read_corpus(tmp_path, max_bytes=PLENTY, min_files=1)) == ["a.py"]
