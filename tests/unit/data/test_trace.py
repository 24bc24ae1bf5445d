"""`petatron data trace` names the documents that runs have trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petatron.cli.main import main
from petatron.data.batch_loader import BatchLoader
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.tokenizer import ByteTokenizer
from petatron.models.batch import Batch
from petatron.train.build_run import build_loaders
from petatron.validate import load_config

MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --lr 1e-3 "
    "--tokenizer-type ByteTokenizer --eval-iters 0 --log-interval 1 --device cpu --live off --num-workers 0 --split 90,10,0"
).split()
RAMP = "--train-iters 9 --global-batch-size 8 --rampup-batch-size 2 2 18".split()


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, str]:
    """Two datasets of different texts, with the lines that documents come from."""
    prefixes = {}
    for name in ("web", "code"):
        lines = [json.dumps({"text": f"{name} text number {n} " * (1 + n % 4), "id": f"{name}-{n}"}) for n in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        prefix = str(tmp_path / name)
        files = ["--input", f"{prefix}.jsonl", "--output-prefix", prefix, "--workers", "1"]
        assert main(["data", "preprocess", *files, "--tokenizer-type", "ByteTokenizer", "--append-eod"]) == 0
        prefixes[name] = f"{prefix}_text_document"
    return prefixes


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[np.ndarray]]:
    """The ids of every global batch that runs in this process train on, in their order."""
    steps: list[np.ndarray] = []
    plain = BatchLoader.next_step

    def recorded(self: BatchLoader, global_batch_size: int, consumed_samples: int) -> list[Batch]:
        batches = plain(self, global_batch_size, consumed_samples)
        steps.append(ids_of(batches))
        return batches

    monkeypatch.setattr(BatchLoader, "next_step", recorded)
    yield steps


def ids_of(batches: list[Batch]) -> np.ndarray:
    """Returns samples, with the last label."""
    pairs = [np.concatenate([batch.tokens.numpy(), batch.labels.numpy()[:, -1:]], 1) for batch in batches]
    return np.concatenate(pairs)


def trace(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["data", "trace", *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def read_again(step: dict[str, Any]) -> np.ndarray:
    """Returns the ids of a traced batch, from the token files."""
    rows = []
    for sample in step["samples"]:
        dataset = IndexedDataset(sample["dataset"])
        parts = [dataset.get_document(d["document"], d["first_token"], d["num_tokens"]) for d in sample["documents"]]
        rows.append(np.concatenate(parts))
    return np.stack(rows).astype(np.int64)


def blend(corpora: dict[str, str]) -> list[str]:
    return ["--data-path", "0.7", corpora["web"], "0.3", corpora["code"]]


@pytest.mark.parametrize("order", [[], ["--dataloader-type", "cyclic"]], ids=["single", "cyclic"])
def test_documents_are_those_of_the_run(
    corpora: dict[str, str],
    tmp_path: Path,
    trained: list[np.ndarray],
    capsys: pytest.CaptureFixture[str],
    order: list[str],
) -> None:
    save = ["--save", str(tmp_path / "run"), "--save-interval", "4"]
    assert main(["train", *MODEL, *RAMP, *blend(corpora), *save, *order]) == 0
    assert [len(batch) for batch in trained[:9]] == [2, 2, 2, 4, 4, 6, 8, 8, 8], "the batch grows"
    for iteration in (1, 2, 5, 9):
        step = trace(capsys, str(tmp_path / "run"), "--iteration", str(iteration))
        assert np.array_equal(read_again(step), trained[iteration - 1]) and not step["data_changed"]
        assert step["consumed_samples"] == sum(map(len, trained[: iteration - 1]))
    assert {Path(sample["dataset"]).name for sample in step["samples"]} == {"web_text_document", "code_text_document"}
    source = step["samples"][0]["documents"][0]["source"]
    number = step["samples"][0]["documents"][0]["document"]
    name = Path(step["samples"][0]["dataset"]).name.partition("_")[0]
    assert (source["line"], source["id"]) == (number + 1, f"{name}-{number}") and source["file"].endswith(
        f"{name}.jsonl"
    )
    assert main(["data", "trace", str(tmp_path / "run"), "--iteration", "9"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("iteration 9: 8 samples, 36 to 43\nsample 36: ")
    assert f"document {number}: tokens " in printed and f"jsonl:{number + 1} (id {name}-{number})" in printed


@dataclass
class _Axis:
    rank: int
    size: int


class _Mesh:
    """What loaders ask of a mesh."""

    device = torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.rank, self.dp = rank, _Axis(rank, 2)


def test_two_data_parallel_ranks_have_its_samples(corpora: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL, *RAMP, *blend(corpora), "--micro-batch-size", "1"]
    config = load_config(flags).config
    loaders = [build_loaders(config, _Mesh(rank), ByteTokenizer()) for rank in (0, 1)]  # type: ignore[arg-type]
    step = trace(capsys, "tiny-llama", "--iteration", "7", *flags[: flags.index("--num-layers")], *flags[2:])
    ranks = [ids_of(of_rank.train.next_step(8, step["consumed_samples"])) for of_rank in loaders]
    assert len(ranks[0]) == len(ranks[1]) == 4
    together = np.stack(ranks, 1).reshape(8, -1)
    assert np.array_equal(read_again(step), together)


def test_a_run_that_went_on_with_another_batch_size(
    corpora: dict[str, str], tmp_path: Path, trained: list[np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = ["--data-path", corpora["web"]], str(tmp_path / "run")
    run = [*MODEL, *data, "--save", folder, "--save-interval", "3", "--lr-decay-iters", "9"]
    assert main(["train", *run, "--train-iters", "3", "--global-batch-size", "2"]) == 0
    del trained[3:]
    assert main(["train", *run, "--load", folder, "--train-iters", "6", "--global-batch-size", "4"]) == 0
    assert [len(batch) for batch in trained[:6]] == [2, 2, 2, 4, 4, 4]
    step = trace(capsys, folder, "--iteration", "5")
    assert np.array_equal(read_again(step), trained[4]) and step["consumed_samples"] == 10
    assert main(["data", "trace", folder, "--iteration", "2"]) == 1
    assert "consumed 6 samples, and by these settings it would be 12" in capsys.readouterr().err
    step = trace(capsys, folder, "--iteration", "2", "--global-batch-size", "2")
    assert np.array_equal(read_again(step), trained[1])
    (tmp_path / "run" / "config.yaml").unlink()
    step = trace(capsys, str(tmp_path / "run" / "step-00000006"), "--iteration", "5")
    assert np.array_equal(read_again(step), trained[4]), "a checkpoint alone is enough"
    assert main(["data", "trace", folder, "--iteration", "5", "--seed", "7"]) == 0
    assert "WARNING: the data or its order is not what" in capsys.readouterr().out


def test_refusals(corpora: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL[2:], "--data-path", corpora["web"]]
    for words, text in (
        (["--iteration", "0", "--train-iters", "4"], "--iteration 0 is no iteration"),
        (["--iteration", "5", "--train-iters", "4"], "--iteration 5 is after the last iteration of the run, 4"),
        (["--iteration", "5"], "--train-iters is not set"),
        (["--iteration", "1", "--train-iters", "4", "--no-such-flag"], "--no-such-flag"),
        (["--iteration", "1", "--train-iters", "4", "--data-path", "gone"], "there is no gone.idx"),
    ):
        assert main(["data", "trace", "tiny-llama", *flags, *words]) == 2
        assert text in capsys.readouterr().err
    mock = ["--mock-data", "--train-iters", "4"]
    assert main(["data", "trace", "tiny-llama", "--iteration", "1", *mock]) == 1
    assert "Samples of MockDataset cannot be traced" in capsys.readouterr().err
    assert main(["data", "trace", "nowhere", "--iteration", "1"]) == 2


def test_documents_that_are_divided_are_told(
    corpora: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<|endoftext|>"]
    learned = ["data", "train-tokenizer", "--input", str(tmp_path / "web.jsonl"), "--output", str(tmp_path / "bytes")]
    assert main([*learned, "--vocab-size", "300", "--special-tokens", *tokens[:4]]) == 0
    fill = ["--fim-data", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "bytes")]
    flags = [*MODEL[2:], "--data-path", corpora["web"], "--train-iters", "4", *fill, "--force-tokenizer"]
    step = trace(capsys, "tiny-llama", "--iteration", "1", *flags)
    assert "divided by --fim-data" in step["samples"][0]["change"]
