"""Parts as tasks of Ray, on a cluster of two nodes: the files are those of one process, also when a worker or a node is killed."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.data import preprocess as module
from petatron.data.preprocess import PreprocessOptions, preprocess, tokenize_part
from petatron.data.preprocess_parts.part_report import PartReport
from petatron.data.preprocess_parts.part_writer import PartWriter
from petatron.data.preprocess_report import PreprocessProgress
from tests.load_deadline import wait_until
from tests.unit.data.inputs.corpora import BYTES, jsonl, run
from tests.unit.data.inputs.test_engines import ROWS, check_output
from tests.unit.data.inputs.two_ray_nodes import SECOND_NODE, TwoRayNodes

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'petatron[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]  # a cluster is a dozen processes


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoRayNodes]:
    nodes = TwoRayNodes()
    try:
        yield nodes
    finally:
        nodes.stop()


@pytest.fixture
def address(nodes: TwoRayNodes) -> str:
    nodes.start_second()
    return nodes.address


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus.jsonl").write_bytes(jsonl(ROWS))
    run(tmp_path, tmp_path / "corpus.jsonl", name="expected")
    (tmp_path / "attempts").mkdir()
    return tmp_path / "corpus.jsonl"


def options(corpus: Path, address: str | None, part_bytes: int = 1500) -> PreprocessOptions:
    return PreprocessOptions(
        inputs=(str(corpus),),
        output_prefix=str(corpus.parent / "out"),
        tokenizer=BYTES,
        engine="ray",
        address=address,
        part_bytes=part_bytes,
    )


def test_ray_tokenizes_the_parts(corpus: Path, tmp_path: Path, address: str) -> None:
    seen: list[PreprocessProgress] = []
    report = preprocess(options(corpus, address), seen.append)
    assert report.parts == len(seen) == 5 and seen[-1].bytes_read == corpus.stat().st_size
    check_output(tmp_path)


def test_the_command_of_the_guide(corpus: Path, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[4] / "docs" / "data.md").read_text()
    (line,) = (line for line in guide.splitlines() if line.startswith("petatron") and "--engine ray" in line)
    monkeypatch.chdir(tmp_path)
    run(Path(), "corpus.jsonl", name="expected", append_eod=True)
    words = line.replace("head:6379", address).split()[1:]
    assert main([*words, "--part-bytes", "1500"]) == 0
    check_output(tmp_path)


def test_a_connection_of_the_caller_stays(corpus: Path, tmp_path: Path, address: str) -> None:
    ray.init(address=address, log_to_driver=False)
    try:
        preprocess(options(corpus, None))
        assert ray.is_initialized()
    finally:
        ray.shutdown()
    check_output(tmp_path)


# Kills


def kill_worker(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def kill_raylet() -> NoReturn:
    """Kills the second node, whose raylet is the parent of its workers and ends them."""
    assert Path(f"/proc/{os.getppid()}/comm").read_text() == "raylet\n"
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
    raise AssertionError


def killed_once(options: PreprocessOptions, part: int) -> PartReport:
    """Tokenizes a part in a worker, and notes the attempt; kills as `kill` says, at the first attempt."""
    folder = Path(options.output_prefix).parent
    (folder / "attempts" / f"{part}.{os.getpid()}").touch()
    moment, killed_part = (folder / "kill").read_text().split()
    mark = folder / "killed"
    if moment == "node":
        if SECOND_NODE not in os.environ:
            wait_until(mark.exists, "a kill of the other node", 120)
        elif not mark.exists():
            mark.touch()
            kill_raylet()
    elif part == int(killed_part) and not mark.exists():
        mark.touch()
        if moment == "before":
            kill_worker()
        if moment == "unpublished":
            PartWriter.finish = kill_worker  # type: ignore[method-assign]
        report = tokenize_part(options, part)
        if moment == "unreported":
            Path(f"{options.output_prefix}.parts/{part:05d}.json").unlink()
        kill_worker(report)
    return tokenize_part(options, part)


@pytest.mark.parametrize("kill", ["before 0", "unpublished 1", "unreported 4", "finished 2", "node -1"])
def test_a_loss_costs_one_part(
    corpus: Path, tmp_path: Path, address: str, nodes: TwoRayNodes, kill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kill").write_text(kill)
    monkeypatch.setattr(module, "tokenize_part", killed_once)
    preprocess(options(corpus, address))
    check_output(tmp_path)
    assert (tmp_path / "killed").exists()
    attempts = Counter(path.stem for path in (tmp_path / "attempts").iterdir())
    assert sorted(attempts.values()) == [1, 1, 1, 1, 2]
    if kill == "node -1":
        nodes.wait_for_loss()


def dying(options: PreprocessOptions, part: int) -> PartReport:
    kill_worker()


def test_a_part_that_is_always_lost(corpus: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petatron.data.preprocess_parts.ray_engine._MAX_ATTEMPTS", 2)
    monkeypatch.setattr(module, "tokenize_part", dying)
    with pytest.raises(DataError, match=r"Part 0 was lost on Ray 2 times"):
        preprocess(options(corpus, address, 1 << 28))


# Errors


def failing(options: PreprocessOptions, part: int) -> PartReport:
    raise ZeroDivisionError("an error of the library")


def test_an_error_of_a_part_ends_the_job(corpus: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "tokenize_part", failing)
        with pytest.raises(DataError, match=r"Part 0 failed on Ray: an error of the library"):
            preprocess(options(corpus, address, 1 << 28))
    corpus.write_bytes(corpus.read_bytes() + b"oops\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl:121: not JSON"):
        preprocess(options(corpus, address))


def test_a_cluster_that_is_not_there(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"No Ray cluster at --address 127\.0\.0\.1:1 can be used"):
        preprocess(options(corpus, "127.0.0.1:1"))
