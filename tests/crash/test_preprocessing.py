"""Preprocessing is killed, run again, and killed again, until it has reached its end: the files are those of a job that nobody killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from petatron.config.schema.data import TokenizerConfig
from petatron.data.preprocess import PreprocessOptions, preprocess

ENDINGS = ("bin", "idx", "sources", "tokenizer")
WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
"""Between two of these events nothing happens to the names in a folder."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = Random(0)
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("a", "b", "c"):
        rows = [
            {"id": f"{name}{number}", "text": "word " * random.randrange(30), "title": "t" * random.randrange(3)}
            for number in range(60)
        ]
        lines = [*map(json.dumps, rows), "oops", ""]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected")
    preprocess(_options(corpus, folder, part_bytes=1 << 28))
    return _contents(folder)


def _options(corpus: Path, folder: Path, part_bytes: int = 4000) -> PreprocessOptions:
    return PreprocessOptions(
        inputs=(str(corpus),),
        output_prefix=str(folder / "out"),
        tokenizer=TokenizerConfig(tokenizer_type="ByteTokenizer"),
        json_keys=("text", "title"),
        append_eod=True,
        on_error="skip",
        part_bytes=part_bytes,
    )


def _contents(folder: Path) -> dict[str, bytes]:
    # A job that was killed after its last file was published may leave its empty folder, under a name that nobody looks for.
    paths = sorted(path for path in folder.iterdir() if not path.name.endswith(".tmp"))
    assert {path.name for path in paths} == {
        f"out_{key}_document.{end}" for key in ("text", "title") for end in ENDINGS
    }
    return {path.name: path.read_bytes() for path in paths}


def _life(
    options: PreprocessOptions, folder: Path, *, kill_at: int | None = None, kill_after_s: float | None = None
) -> bool:
    """Runs the job in a copy of this process, and returns whether it reached its end before it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if kill_at is not None:
                sys.addaudithook(_killer(folder, kill_at))
            preprocess(options)
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(status)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or os.waitstatus_to_exitcode(status) == 0
    return not killed


def _killer(folder: Path, kill_at: int) -> Callable[[str, tuple[object, ...]], None]:
    """Kills this process at an event (from 0) that is about a file of the folder."""
    seen = iter(range(kill_at))

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in WATCHED and str(arguments[0]).startswith(str(folder)) and next(seen, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _done(folder: Path) -> bool:
    """Whether a job that was killed had done all: nothing is left to continue, and a rerun would refuse to replace its output."""
    return not (folder / "out.parts").exists() and len(list(folder.glob("out_*.idx"))) == 2


def _killed_until_done(corpus: Path, folder: Path, kill: Callable[[int], dict[str, object]]) -> int:
    """Kills the job as `kill` says of the number of its life, until it has reached its end; returns how often it was killed."""
    folder.mkdir()
    kills = 0
    while not _done(folder) and not _life(_options(corpus, folder), folder, **kill(kills)):  # type: ignore[arg-type]
        kills += 1
        assert kills < 1000
    return kills


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.crash) for seed in range(3, 50))])
def test_killed_at_random_files_again_and_again(
    corpus: Path, tmp_path: Path, expected: dict[str, bytes], seed: int
) -> None:
    random = Random(seed)
    kills = _killed_until_done(
        corpus, tmp_path / "job", lambda number: {"kill_at": random.randrange(20 * (number + 1), 60 * (number + 1))}
    )
    assert kills >= 2
    assert _contents(tmp_path / "job") == expected


@pytest.mark.crash
def test_killed_at_every_file(corpus: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    """Once, and then run again; every name that is made, replaced or removed is a moment."""
    for moment in range(10_000):
        folder = tmp_path / str(moment)
        kills = _killed_until_done(
            corpus, folder, lambda number, moment=moment: {"kill_at": moment if not number else None}
        )
        assert _contents(folder) == expected, moment
        if not kills:
            break
    assert moment > 200


@pytest.mark.crash
def test_killed_at_random_times(corpus: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    random, total = Random(0), 0
    began = time.monotonic()
    assert _killed_until_done(corpus, tmp_path / "whole", lambda _: {}) == 0
    whole_s = time.monotonic() - began
    for attempt in range(200):
        folder = tmp_path / str(attempt)
        total += _killed_until_done(
            corpus, folder, lambda number: {"kill_after_s": random.uniform(0, 0.5) * whole_s * (1 + number / 10)}
        )
        assert _contents(folder) == expected
        if total >= 50:
            break
    assert total >= 50
