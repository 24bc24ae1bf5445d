"""`petatron data build-index` leaves nothing to build to the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.data import blended_dataset, gpt_dataset

from .conftest import MakeDataset

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --vocab-size 300 --lr 1e-3 "
    "--train-iters 5 --global-batch-size 4 --eval-iters 2 --eval-interval 4 --log-interval 1 --device cpu --live off --split 80,10,10"
).split()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


@pytest.fixture
def flags(make_dataset: MakeDataset, tmp_path: Path) -> list[str]:
    first = make_dataset([list(range(20 * n, 20 * n + 12)) for n in range(14)], "first")
    second = make_dataset([list(range(5 * n, 5 * n + 9)) for n in range(30)], "second")
    return [*FLAGS, "--data-path", "0.7", first, "0.3", second, "--data-cache-path", str(tmp_path / "cache")]


def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an index is built")

    monkeypatch.setattr(gpt_dataset, "build_sample_indices", refuse)
    monkeypatch.setattr(blended_dataset, "blend_indices", refuse)


def arrays(folder: Path) -> list[str]:
    """The files of indices; digests of the data are written when these are some seconds old."""
    return sorted(path.name for path in folder.glob("*.npy"))


def test_a_run_builds_nothing_and_says_so(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "build-index", "tiny-llama", *flags]) == 0
    printed = capsys.readouterr().out
    files = arrays(tmp_path / "cache")
    stems = {name.partition("-")[0] for name in files}
    assert printed.startswith(f"sample indices: {len(stems)} built; ") and len(stems) == 9
    assert "20 training samples of 5 iterations, order " in printed
    nothing_is_built(monkeypatch)
    assert main(["train", "tiny-llama", *flags, "--log-dir", str(tmp_path / "run")]) == 0
    assert f"sample indices: {len(stems)} found" in capsys.readouterr().err
    assert arrays(tmp_path / "cache") == files
    assert main(["data", "build-index", str(tmp_path / "run")]) == 0
    assert f"sample indices: {len(stems)} found; " in capsys.readouterr().out


def test_ranks_of_the_run_decide_a_batch_size_that_is_not_given(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    at = flags.index("--global-batch-size")
    derived = [*flags[:at], *flags[at + 2 :]]
    assert main(["data", "build-index", "tiny-llama", *derived, "--world-size", "8"]) == 0
    assert "40 training samples" in capsys.readouterr().out


def test_files_of_others_are_compared_and_replaced(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "build-index", "tiny-llama", *flags]) == 0
    order = next((tmp_path / "cache").glob("*-order.npy"))
    order.write_bytes(order.read_bytes()[:-4] + b"\x01\x00\x00\x00")
    capsys.readouterr()
    assert main(["train", "tiny-llama", *flags, "--log-dir", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err
    assert "8 found, 1 built" in told and "is not the index of this data" in told.replace(
        "are not the index", "is not the index"
    )


def test_refusals(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "build-index", "tiny-llama", *FLAGS, "--mock-data"]) == 1
    assert "--mock-data has no files, and no indices" in capsys.readouterr().err
    assert main(["data", "build-index", "tiny-llama", *FLAGS, "--data-path", "gone"]) == 2
    assert "there is no gone.idx" in capsys.readouterr().err
