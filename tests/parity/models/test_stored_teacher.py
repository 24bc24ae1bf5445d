"""A teacher's likeliest tokens, live or stored: the same losses and gradients in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import petatron
from petatron.base.errors import ConfigError, DataError
from petatron.cli.main import main
from petatron.config import LoadedConfig, RunConfig
from petatron.data.stored_outputs import StoredOutputs, unit_keys
from petatron.data.tokenizer import ByteTokenizer
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.distillation import (
    TOP_IDS,
    TOP_LOG_PROBS,
    TopLogProbs,
    divergence,
    top_log_probs,
    truncated_divergence,
)
from petatron.models.objective import ModelRole, StoredRole
from petatron.train.build_run import build_loaders
from petatron.train.check_and_open_run import OpenedRun, check_start, open_run
from petatron.train.stored_role_outputs import dataset_sizes, describe_rows, fill_store
from petatron.train.train_step import train_step
from petatron.validate import load_config
from tests.dist import RankPool
from tests.parity.harness import TINY, tiny_run, train

TOP_K = 5
_TEXT = "--vocab-size 257 --tokenizer-type ByteTokenizer --make-vocab-size-divisible-by 1 --fp64 --train-iters 3"


@pytest.mark.parametrize("mix", [0.0, 0.3, 0.9])
def test_the_divergence_of_truncated_distributions(mix: float):
    """By its definition: a teacher that gives other tokens no probability."""
    generator = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(2, 3, 11, dtype=torch.float64, generator=generator) for _ in range(2))
    results = []
    for compute in (truncated, by_definition):
        leaf = student.clone().requires_grad_()
        loss = compute(leaf, teacher, mix)
        loss.sum().backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
    top = top_log_probs(teacher, 11)
    of_all = truncated_divergence(student, *top.values(), mix, 2.0)
    torch.testing.assert_close(of_all, divergence(student, teacher, mix, 2.0), rtol=1e-12, atol=1e-12)


def truncated(student: Tensor, teacher: Tensor, mix: float) -> Tensor:
    return truncated_divergence(student, *top_log_probs(teacher, 4).values(), mix, 2.0)


def by_definition(student: Tensor, teacher: Tensor, mix: float) -> Tensor:
    kept = teacher >= teacher.topk(4, dim=-1).values[..., -1:]
    p, q = torch.softmax(torch.where(kept, teacher, -torch.inf) / 2.0, -1), torch.softmax(student / 2.0, -1)
    m = mix * p + (1 - mix) * q if mix else q
    log_p = torch.where(kept, p, 1.0).log()
    of_teacher = torch.where(kept, p * (log_p - m.log()), 0.0).sum(-1)
    return of_teacher if mix == 0 else mix * of_teacher + (1 - mix) * (q * (q.log() - m.log())).sum(-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, a text, and what is stored of the one for the other."""
    place = tmp_path_factory.mktemp("distillation")
    run = tiny_run(f"{_TEXT} --seed 7", dtype="float64")
    petatron.save_checkpoint(place / "teacher", step=1, model=petatron.build_model(run, ParallelMesh.single()))
    lines = (" ".join(str(number * number) for number in range(60 * part, 60 * part + 60)) for part in range(20))
    (place / "text.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    encode = "--tokenizer-type ByteTokenizer --append-eod"
    words = f"data preprocess --input {place}/text.jsonl --output-prefix {place}/text {encode}"
    assert main(words.split()) == 0
    assert store(place, "stored", "--log-prob-precision fp64") == 0
    return place


def data(folder: Path) -> str:
    return f"{TINY} {_TEXT} --split 80,20,0 --data-path {folder}/text_text_document".replace("--mock-data ", "")


def store(folder: Path, name: str, flags: str = "") -> int:
    words = f"data teacher {folder}/teacher --out {folder / name} --top-k {TOP_K} {data(folder)} {flags}"
    return main(words.split())


def load(folder: Path, settings: str, flags: str = "", world_size: int = 1) -> LoadedConfig:
    sizes = "" if "--dp 2" in flags else "--micro-batch-size 4"
    words = f"{data(folder)} --objective distill --objective-settings mix=0.4 {settings} {sizes} {flags}"
    return load_config(words.split(), world_size=world_size)


def open_here(loaded: LoadedConfig) -> OpenedRun:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return open_run(check_start(loaded), ParallelMesh(Layout.from_config(loaded.config.parallel), rank))


def steps(loaded: LoadedConfig) -> list[float]:
    """Returns how many teachers are in memory, the losses, agreements and gradient norms of three steps, and those of an evaluation."""
    torch.set_num_threads(1)
    opened = open_here(loaded)
    values: list[float] = [len(opened.state.model.role_models)]
    for number in range(3):
        metrics = train_step(opened.state, opened.loaders.train.next_step(8, 8 * number))
        values += [
            float(metrics.loss),
            float(metrics.grad_norm or 0.0),
            *map(float, (metrics.objective_metrics or {}).values()),
        ]
    for loader in opened.loaders.valid.values():
        sums, counts = opened.state.model.evaluate_objective(loader.next_step(8, 0))
        values += (sums / counts).tolist()
    return values


LAYOUTS = {
    "": 1,
    "--eval-iters 1 --eval-interval 3": 1,
    "--cp 2": 2,
    "--pp 2": 2,
    "--tp 2 --sequence-parallel": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stored_teacher_trains_as_a_live_one(ranks: RankPool, folder: Path, layout: str):
    evaluates = layout if layout.startswith("--eval") else ""
    if evaluates:
        store(folder, "stored", f"--log-prob-precision fp64 {evaluates}")
    live = steps(load(folder, f"teacher={folder}/teacher top_k={TOP_K}", evaluates))
    run = load(folder, f"stored={folder}/stored", layout, LAYOUTS[layout])
    parts = ranks.run(steps, LAYOUTS[layout], run) if LAYOUTS[layout] > 1 else [steps(run)]
    for part in parts:
        assert (live[0], part[0]) == (1, 0)
        assert part[1:] == pytest.approx(live[1:], rel=1e-10, abs=1e-13)
    assert live[1] > 1e-3


def test_half_precision_is_close_and_a_quarter_of_the_bytes(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert store(folder, "half") == 0
    assert "24 rows of 16 tokens, 5 of each" in capsys.readouterr().out
    exact, half = (steps(load(folder, f"stored={folder}/{name}")) for name in ("stored", "half"))
    assert half[1:] == pytest.approx(exact[1:], rel=3e-3)
    [ids], [log_probs] = (list((folder / "half").glob(f"*-teacher.top_{name}.npy")) for name in ("ids", "log_probs"))
    assert ids.stat().st_size - 128 == 2 * (log_probs.stat().st_size - 128) == 24 * 16 * TOP_K * 4


def test_what_is_there_is_not_computed_again(folder: Path):
    before = sorted((folder / "stored").iterdir())
    assert store(folder, "stored", "--log-prob-precision fp64") == 0
    assert sorted((folder / "stored").iterdir()) == before


def stored_in(loaded: LoadedConfig, teacher: str, place: str) -> int:
    """Stores what a teacher says of the data of a run, in its layout; returns how many rows."""
    torch.set_num_threads(1)
    run = loaded.config
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    model = petatron.from_pretrained(teacher, mesh, flags=sharding_flags(run), dtype="float64", gradients=False)
    loaders = build_loaders(run, mesh, ByteTokenizer(), train_samples=24)
    role = StoredRole("row", (TOP_IDS, TOP_LOG_PROBS), place, ModelRole(""), TopLogProbs(TOP_K, torch.float64))
    outputs = StoredOutputs(Path(place), describe_rows(run, model))
    return fill_store(outputs, role, model, dataset_sizes(run, loaders, 24), lambda: model, role="teacher")


def sharding_flags(run: RunConfig) -> list[str]:
    strategy = run.parallel.data_parallel_sharding_strategy
    return ["--data-parallel-sharding-strategy", strategy]


@pytest.mark.parametrize("layout", list(LAYOUTS)[3:])
def test_every_layout_stores_the_same(ranks: RankPool, folder: Path, tmp_path: Path, layout: str):
    run = load(folder, f"stored={folder}/stored", layout, 2)
    assert ranks.run(stored_in, 2, run, str(folder / "teacher"), str(tmp_path / "stored")) == [24, 24]
    there, alone = StoredOutputs.open(tmp_path / "stored"), StoredOutputs.open(folder / "stored")
    dataset = open_here(load(folder, f"stored={folder}/stored")).loaders.train.dataset
    rows = torch.tensor(np.stack([dataset[number] for number in range(24)]))
    keys = unit_keys(petatron.Batch(rows[:, :-1]), "row")
    ours, theirs = (outputs.arrays(keys, [TOP_IDS, TOP_LOG_PROBS]) for outputs in (there, alone))
    assert np.array_equal(ours[TOP_IDS], theirs[TOP_IDS])
    np.testing.assert_allclose(ours[TOP_LOG_PROBS], theirs[TOP_LOG_PROBS], rtol=1e-12)


@pytest.mark.parametrize("layout", ["--cp 2", "--pp 2"])
def test_a_live_teacher_of_a_few_tokens_is_the_same_in_every_layout(ranks: RankPool, folder: Path, layout: str):
    settings = f"teacher={folder}/teacher top_k={TOP_K}"
    alone = steps(load(folder, settings))
    for part in ranks.run(steps, 2, load(folder, settings, layout, 2)):
        assert part == pytest.approx(alone, rel=1e-10, abs=1e-13)


REFUSED = {
    "stored={folder}/stored --seq-length 8": r"has no outputs for . of 4 texts",
    "stored={folder}/stored --reset-attention-mask": r"was stored with reset-attention-mask False, and this run has True",
    "stored={folder}": r"has no stored-outputs\.json. Give a folder that `petatron data teacher` wrote",
    "stored=a teacher=b": r"are one too many, or one too few",
    "mix=1 top_k=3 teacher=a": r"is infinite beside the likeliest tokens alone",
    "stored=a top_k=3": r"is that of what is stored",
    "teacher=a top_k=-1": r"is below 0",
}


@pytest.mark.parametrize("words", REFUSED)
def test_other_rows_and_settings_are_refused(folder: Path, words: str):
    settings, *flags = words.format(folder=folder).split(" --")
    with pytest.raises((ConfigError, DataError), match=REFUSED[words]):
        open_here(load(folder, settings, "".join(f" --{flag}" for flag in flags))).loaders.train.next_step(8, 0)


COMMANDS = {
    "--top-k 0": "is below 1",
    "--context-parallel-size 2": "shares rows, and they are stored whole",
    "--log-prob-precision fp32": "was stored with another precision",
}


@pytest.mark.parametrize("flags", COMMANDS)
def test_the_command_says_what_it_cannot_do(folder: Path, flags: str, capsys: pytest.CaptureFixture[str]):
    assert store(folder, "stored", flags) != 0
    assert COMMANDS[flags] in capsys.readouterr().err


def test_a_loop_of_ones_own_is_told(folder: Path):
    with pytest.raises(DataError, match=r"is not in the batch\. `petatron train` reads it for rows of files"):
        train(load(folder, f"stored={folder}/stored").config)
