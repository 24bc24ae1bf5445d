"""Parts as tasks of Ray, on a cluster of two nodes on this machine: the files are those of one process, also when workers are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from petatron.base.errors import DataError
from petatron.data import preprocess as module
from petatron.data.parts.part_report import PartReport
from petatron.data.preprocess import PreprocessOptions, preprocess, tokenize_part
from petatron.data.preprocess_report import PreprocessProgress
from tests.unit.data.inputs.corpora import BYTES, jsonl, run
from tests.unit.data.inputs.test_engines import check_output

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'petatron[ray]'")
ROWS = [{"id": str(number), "text": f"text {number} " * (number % 9)} for number in range(120)]
pytestmark = pytest.mark.timeout(600)  # a cluster starts some processes of its own


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Two nodes of one core each."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus.jsonl").write_bytes(jsonl(ROWS))
    run(tmp_path, tmp_path / "corpus.jsonl", name="expected")
    return tmp_path / "corpus.jsonl"


def options(corpus: Path, address: str | None) -> PreprocessOptions:
    return PreprocessOptions(
        inputs=(str(corpus),),
        output_prefix=str(corpus.parent / "out"),
        tokenizer=BYTES,
        engine="ray",
        address=address,
        part_bytes=1500,
    )


def test_ray_does_the_parts(corpus: Path, tmp_path: Path, cluster: str) -> None:
    seen: list[PreprocessProgress] = []
    report = preprocess(options(corpus, cluster), seen.append)
    assert report.parts == len(seen) == 5 and seen[-1].bytes_read == corpus.stat().st_size
    check_output(tmp_path)


def killed_once(options: PreprocessOptions, part: int) -> PartReport:
    """Kills the worker in the first attempt at some parts: before the part, after its files, or when it is done."""
    marks = Path(options.output_prefix).parent / "marks"
    kind = int((marks / "seed").read_text()) + part
    first = not (marks / str(part)).exists()
    (marks / str(part)).touch()
    if first and kind % 4 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    report = tokenize_part(options, part)
    if first and kind % 4 == 1:
        Path(f"{options.output_prefix}.parts/{part:05d}.json").unlink()
    if first and kind % 4 < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return report


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.crash) for seed in range(1, 5))])
def test_killed_workers(corpus: Path, tmp_path: Path, cluster: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marks").mkdir()
    (tmp_path / "marks" / "seed").write_text(str(Random(seed).randrange(4)))
    monkeypatch.setattr(module, "tokenize_part", killed_once)
    preprocess(options(corpus, cluster))
    check_output(tmp_path)


def failing(options: PreprocessOptions, part: int) -> PartReport:
    raise ZeroDivisionError("an error of the library")


def dying(options: PreprocessOptions, part: int) -> PartReport:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_a_problem_ends_the_job(corpus: Path, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "tokenize_part", failing)
        with pytest.raises(DataError, match=r"Part \d failed on Ray: .*an error of the library"):
            preprocess(options(corpus, cluster))
    corpus.write_bytes(corpus.read_bytes() + b"oops\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl:121: not JSON"):
        preprocess(options(corpus, cluster))


def test_a_part_that_is_always_lost(corpus: Path, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petatron.data.parts.ray_engine._MAX_ATTEMPTS", 2)
    monkeypatch.setattr(module, "tokenize_part", dying)
    with pytest.raises(DataError, match=r"Part \d was lost on Ray 2 times"):
        preprocess(options(corpus, cluster))


def test_a_cluster_that_is_not_there(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"No Ray cluster at --address 127\.0\.0\.1:1 can be used"):
        preprocess(options(corpus, "127.0.0.1:1"))


def test_a_connection_of_the_caller_stays(corpus: Path, tmp_path: Path, cluster: str) -> None:
    ray.init(address=cluster, log_to_driver=False)
    try:
        preprocess(options(corpus, None))
        assert ray.is_initialized()
    finally:
        ray.shutdown()
    check_output(tmp_path)
