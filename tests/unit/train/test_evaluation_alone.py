"""Evaluation by Megatron's switches: without training, of whole sets, and of several sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from petatron.base.device import detect_device
from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.data.indexed_writer import IndexedWriter
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.build_run import build_loaders
from petatron.train.evaluate_loss import evaluated_batches
from petatron.train.report.log_records import MetricRecord
from petatron.train.state.train_state import TrainState
from petatron.train.training_loop import TrainLoop
from petatron.validate import load_config
from tests.parity.harness import tiny_run

SMALL = "--num-layers 1 --seq-length 8 --vocab-size 37 --train-iters 3 --lr-warmup-iters 1 --global-batch-size 4"
Prefixes = Callable[[str, int], str]


@pytest.fixture
def corpus(tmp_path: Path) -> Prefixes:
    """Writes a corpus of so many tokens, and returns its prefix."""

    def write(name: str, tokens: int) -> str:
        with IndexedWriter(str(tmp_path / name), "uint16") as writer:
            writer.add_document([(7 * index + len(name)) % 37 for index in range(tokens)])
        return str(tmp_path / name)

    return write


class _Records:
    def __init__(self) -> None:
        self.records: list[MetricRecord] = []

    def write(self, record: MetricRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def run_and_record(run: RunConfig) -> tuple[TrainState, list[MetricRecord]]:
    mesh, writer = ParallelMesh(Layout.from_config(run.parallel), 0), _Records()
    state = TrainState.build(run, mesh)
    TrainLoop(state, build_loaders(run, mesh), [writer], detect_device("cpu")).run()
    return state, [record for record in writer.records if record["kind"] in ("train", "valid")]


def test_skip_train_evaluates_and_changes_nothing(tmp_path: Path):
    run = tiny_run(f"{SMALL} --eval-iters 2 --skip-train --save {tmp_path / 'save'}")
    mesh = ParallelMesh(Layout.from_config(run.parallel), 0)
    before = {name: value.clone() for name, value in TrainState.build(run, mesh).model.module.named_parameters()}
    state, records = run_and_record(run)
    assert [(record["split"], record["iteration"]) for record in records] == [("valid", 0), ("test", 0)]
    assert all(torch.equal(value, before[name]) for name, value in state.model.module.named_parameters())
    assert not list((tmp_path / "save").glob("step-*"))
    _, trained = run_and_record(tiny_run(f"{SMALL} --eval-iters 2 --eval-interval 3"))
    assert {record.get("split", "train") for record in trained} == {"train", "valid", "test"}


def test_skip_train_needs_something_to_evaluate():
    with pytest.raises(ConfigError, match="--skip-train evaluates only, and --eval-iters 0 evaluates nothing"):
        tiny_run(f"{SMALL} --skip-train")


def test_full_validation_reads_a_set_once_and_whole(corpus: Prefixes):
    """25 samples are 6 batches of 4 and one of the 1 that is left; its loss is that of all of them in one batch."""
    paths = f"--train-data-path {corpus('t', 400)} --valid-data-path {corpus('v', 25 * 8 + 1)}"
    flags = f"{SMALL.replace('--vocab-size 37', '--vocab-size 37 --micro-batch-size 1')} {paths} --skip-train --full-validation"
    flags = f"{flags} --dataloader-type single --eval-iters 1"
    run = without_mock(flags)
    loaders = build_loaders(run, ParallelMesh(Layout.from_config(run.parallel), 0))
    assert len(loaders.valid[None].dataset) == 25
    batches = evaluated_batches(run, 25, all_samples=True)
    assert batches == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 4), (20, 4), (24, 1)]
    assert evaluated_batches(run, 25) == [(0, 4)]
    (_, records), (_, at_once) = (run_and_record(r) for r in (run, without_mock(f"{flags} --global-batch-size 25")))
    assert records[0]["lm_loss"] == pytest.approx(at_once[0]["lm_loss"], rel=1e-6)
    few = without_mock(flags.replace("--full-validation", ""))
    assert run_and_record(few)[1][0]["lm_loss"] != pytest.approx(records[0]["lm_loss"], rel=1e-4)


def without_mock(flags: str) -> RunConfig:
    words = [*TINY_WITHOUT_DATA, *flags.split()]
    return load_config(words).config


TINY_WITHOUT_DATA = (
    "--hidden-size 32 --num-attention-heads 4 --position-embedding-type rope --lr 1e-3 --device cpu --num-workers 0"
).split()


def test_validation_sets_by_a_switch_are_named_sets(corpus: Prefixes):
    web, code = corpus("web", 90), corpus("code", 90)
    flags = f"{SMALL} --train-data-path {corpus('t', 400)} --valid-data-path {web} {code} --multiple-validation-sets"
    assert without_mock(flags).data.valid_data_path == (f"web={web}", f"code={code}")
    run = without_mock(f"{flags} --validation-set-names a b --eval-iters 1 --skip-train")
    assert run.data.valid_data_path == (f"a={web}", f"b={code}")
    _, records = run_and_record(run)
    assert [(record["kind"], record["dataset"]) for record in records] == [("valid", "a"), ("valid", "b")]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "--valid-data-path x y --validation-set-names a",
            "--validation-set-names a is not one name for each of the 2 words",
        ),
        ("--valid-data-path 0.5 x 0.5 y", "--multiple-validation-sets needs a name of its own for each of the 4 words"),
        ("--valid-data-path d/x e/x", "--multiple-validation-sets needs a name of its own for each of the 2 words"),
        ("", "--multiple-validation-sets makes sets of the prefixes of --valid-data-path, which is not set"),
    ],
)
def test_sets_that_cannot_be_named(more: str, message: str):
    with pytest.raises(ConfigError) as caught:
        without_mock(f"{SMALL} --train-data-path t --multiple-validation-sets {more}")
    assert message in str(caught.value)


def test_a_batch_is_lowered_to_what_ranks_can_share():
    run = tiny_run(
        f"{SMALL} --micro-batch-size 2 --dp 3 --global-batch-size 16 --decrease-batch-size-if-needed", world_size=3
    )
    assert run.train.global_batch_size == 12
    with pytest.raises(
        ConfigError, match="--global-batch-size 16 is not a multiple of micro-batch 2 x data-parallel 3"
    ):
        tiny_run(f"{SMALL} --micro-batch-size 2 --dp 3 --global-batch-size 16", world_size=3)
