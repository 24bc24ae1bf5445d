"""The first lines of a run: what is not the default is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
from torch import Tensor

from petatron import Batch, DatasetKind, LossSpec, Objective
from petatron.base.device import detect_device
from petatron.config import RunConfig
from petatron.data import dataset_kinds
from petatron.estimate.memory.forecast import recompute_plans
from petatron.models import objective
from petatron.train.build_run import RunLength
from petatron.train.report.run_header import RunHeader
from petatron.validate import load_config

MOCK = "--mock-data --lr 1e-3 --train-iters 4 --vocab-size 64".split()


@dataclass(frozen=True)
class Smoothed(Objective):
    epsilon: float = 0.1
    z: float = 1e-4

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return LossSpec("smoothed loss"), LossSpec("z loss", weight=self.z)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class Lines(DatasetKind):
    upper: bool = False

    def open(self, source: str, request: dataset_kinds.DatasetRequest) -> dataset_kinds.DataSource:
        raise NotImplementedError


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(objective._KINDS, "smoothed", Smoothed)
    monkeypatch.setitem(dataset_kinds._KINDS, "lines", Lines)
    yield


def header(*flags: str) -> dict[str, str]:
    run: RunConfig = load_config([*MOCK, *flags], preset="tiny-llama").config
    lines = RunHeader(run, detect_device("cpu"), recompute_plans(run, device="cpu")).lines(RunLength(4, 4), None)
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}


@pytest.mark.usefixtures("plugins")
def test_objective_and_dataset_are_named_with_their_settings():
    chosen = "--objective smoothed --objective-settings epsilon=0.2 --dataset-type lines --dataset-settings upper=true"
    lines = header(*chosen.split())
    assert lines["objective"] == "smoothed (epsilon 0.2, z 0.0001); loss weights: z loss 0.0001"
    assert lines["data"] == "made-up (--mock-data), dataset lines (upper True); no tokenizer"


def test_defaults_are_not_named():
    lines = header()
    assert "objective" not in lines and lines["data"] == "made-up (--mock-data); no tokenizer"
