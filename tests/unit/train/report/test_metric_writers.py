"""Every record reaches every writer that was asked for, and a kill loses none."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import ConfigError, TrainError
from petatron.config.schema.log import LogConfig
from petatron.history.metrics_file import METRICS_FILE
from petatron.train.report.console import ConsoleWriter
from petatron.train.report.log_records import event_record, sample_record, validation_record
from petatron.train.report.metric_writers import (
    JsonlWriter,
    TensorBoardWriter,
    WandbWriter,
    build_writers,
    tagged_scalars,
)
from tests.forked_python import run_forked
from tests.unit.train.report.records import log_record


class FakeRun:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.finished = False

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(**options))
        return runs[-1]

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.Table = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_keeps_kinds_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "new" / METRICS_FILE
    writer = JsonlWriter(path)
    writer.write(log_record().as_record())
    writer.write(validation_record(iteration=100, lm_loss=2.0, consumed_samples=800))
    writer.write(event_record("saved", iteration=100, path="step-100"))
    found = lines(path)  # before close: each line is out as soon as it is written
    writer.close()
    writer.close()
    assert [record["kind"] for record in found] == ["train", "valid", "event"]
    assert {record["schema"] for record in found} == {1}
    assert found[0]["lm_loss"] == 6.123456 and found[0]["mfu"] == 0.405
    assert found[2]["path"] == "step-100"


def test_jsonl_is_strict_json_even_with_nan(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / METRICS_FILE)
    writer.write({"kind": "train", "iteration": 1, "lm_loss": math.nan, "list": [math.inf, {"x": -math.inf}]})
    text = (tmp_path / METRICS_FILE).read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert math.isnan(float(found["lm_loss"])) and found["list"] == ["inf", {"x": "-inf"}]


def test_jsonl_appends_and_repairs_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"kind": "train", "iteration": 1}\n{"kind": "tr')
    JsonlWriter(path).write(event_record("resumed at iteration 0", iteration=0))
    first, torn, last = path.read_text().splitlines()
    assert json.loads(first)["iteration"] == 1
    assert torn == '{"kind": "tr'
    assert json.loads(last)["message"] == "resumed at iteration 0"


def test_a_killed_process_has_lost_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom petatron.train.report.metric_writers import JsonlWriter\n"
        "writer = JsonlWriter(Path(sys.argv[1]))\n"
        "for i in range(100): writer.write({'kind': 'train', 'iteration': i})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / METRICS_FILE
    assert run_forked([sys.executable, "-c", code, str(path)], cwd=tmp_path).returncode == -signal.SIGKILL
    assert [record["iteration"] for record in lines(path)] == list(range(100))


def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="choose a writable --log-dir"):
        JsonlWriter(tmp_path / "file" / METRICS_FILE)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    writer, full = JsonlWriter(tmp_path / METRICS_FILE), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._file)
    os.close(full)
    with pytest.raises(TrainError, match="No space left on device"):
        writer.write(event_record("x", iteration=0))


def test_scalars_use_megatrons_tags() -> None:
    values = tagged_scalars(log_record(mfu=None).as_record())
    assert values["lm loss"] == 6.123456
    assert values["iteration-time"] == pytest.approx(0.51234)
    assert {"learning-rate", "batch-size", "loss-scale", "grad-norm", "throughput"} <= values.keys()
    assert "mfu" not in values and "num-zeros" not in values
    valid = tagged_scalars(validation_record(iteration=1, lm_loss=0.0, consumed_samples=1))
    assert valid == {"lm loss validation": 0.0, "lm loss validation ppl": 1.0}
    assert "lm loss test" in tagged_scalars(
        validation_record(iteration=1, lm_loss=0.0, consumed_samples=1, split="test")
    )
    assert tagged_scalars(event_record("x", iteration=1)) == {}


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = TensorBoardWriter(
        str(tmp_path), config_values={"num_layers": 2, "lr": 1e-3, "save": None, "split": (9, 1)}
    )
    writer.write(log_record().as_record())
    writer.write(validation_record(iteration=100, lm_loss=2.0, consumed_samples=800))
    writer.write(sample_record([{"prompt": "Once", "text": " upon\na time"}], iteration=100))
    writer.write(event_record("saved", iteration=100))
    writer.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    (loss,) = events.Scalars("lm loss")
    assert (loss.step, loss.value) == (100, pytest.approx(6.123456))
    assert events.Scalars("lm loss validation")[0].value == 2.0
    (text,) = events.Tensors("sample/1/text_summary")
    assert text.tensor_proto.string_val == [b"    Once\n    =>  upon\n    a time\n"]
    stored = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"num_layers" in stored and b"(9, 1)" in stored


def test_wandb(tmp_path: Path, wandb_runs: list[FakeRun]) -> None:
    writer = WandbWriter("project", name="first", directory=tmp_path, config_values={"num_layers": 2})
    writer.write(log_record().as_record())
    writer.write(event_record("saved", iteration=100))
    writer.write(sample_record([{"prompt": "Once", "text": " upon"}], iteration=100))
    writer.write({"kind": "summary", "iteration": 100, "steps": 100, "mfu": None, "next_commands": []})
    writer.close()
    (run,) = wandb_runs
    assert run.options == {
        "project": "project",
        "entity": None,
        "name": "first",
        "dir": str(tmp_path),
        "config": {"num_layers": 2},
    }
    (at, values), (_, sampled) = run.logged
    assert at == 100 and values["lm loss"] == 6.123456
    assert sampled["samples"] == {"columns": ["iteration", "prompt", "text"], "data": [[100, "Once", " upon"]]}
    assert run.summary == {"run/iteration": 100, "run/steps": 100}
    assert run.finished


def test_wandb_entity_and_folder_of_its_own(tmp_path: Path, wandb_runs: list[FakeRun]) -> None:
    config = LogConfig(wandb_project="p", wandb_entity="team", wandb_save_dir=str(tmp_path / "w"), live="off")
    for writer in build_writers(config, tmp_path, rank=0, console=False):
        writer.close()
    assert (wandb_runs[0].options["entity"], wandb_runs[0].options["dir"]) == ("team", str(tmp_path / "w"))


def test_all_writers_at_once(tmp_path: Path, wandb_runs: list[FakeRun], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    config = LogConfig(tensorboard_dir=str(tmp_path / "tb"), wandb_project="p", live="off")
    writers = build_writers(config, tmp_path, 0)
    assert [type(writer) for writer in writers] == [JsonlWriter, TensorBoardWriter, WandbWriter, ConsoleWriter]
    for writer in writers:
        writer.write(log_record().as_record())
        writer.close()
    assert len(lines(tmp_path / METRICS_FILE)) == 1
    assert list((tmp_path / "tb").iterdir())
    assert len(wandb_runs[0].logged) == 1
    assert "lm loss: 6.123456E+00" in capsys.readouterr().out


def test_the_line_leaves_out_throughput_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = build_writers(LogConfig(live="off", log_throughput=False), tmp_path, 0)[-1]
    console.write(log_record().as_record())
    assert "throughput per GPU" not in capsys.readouterr().out


def test_a_cpu_has_no_throughput_per_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_writers(LogConfig(live="off"), tmp_path, 0, on_gpu=False)[-1].write(log_record().as_record())
    assert "throughput per GPU" not in capsys.readouterr().out


def test_details_are_for_the_log_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for writer in build_writers(LogConfig(live="off"), tmp_path, 0):
        writer.write(event_record("stage 0: recompute: nothing", iteration=0, detail=True))
    assert capsys.readouterr().out == ""
    assert lines(tmp_path / METRICS_FILE)[0]["message"] == "stage 0: recompute: nothing"


def test_samples_on_a_console_have_a_bar_before_every_further_line(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleWriter().write(sample_record([{"prompt": "Once", "text": " upon\na time"}], iteration=7))
    assert capsys.readouterr().out == "samples at iteration 7\n  > Once =>  upon\n  | a time\n"


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    assert build_writers(LogConfig(), tmp_path, 1) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "library"),
    [
        (LogConfig(tensorboard_dir="tb"), "torch.utils.tensorboard"),
        (LogConfig(wandb_project="p"), "wandb"),
        (LogConfig(live="on"), "rich.console"),
    ],
)
def test_a_missing_library_names_the_extra(
    config: LogConfig, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=r"not installed.*pip install 'petatron\[log\]'"):
        build_writers(config, tmp_path, 0)


def test_several_losses_have_a_tag_each() -> None:
    named = {"lm loss": 3.0, "aux loss": 15.0}
    values = tagged_scalars(log_record(lm_loss=4.0, named_losses=named).as_record())
    assert (values["total loss"], values["lm loss"], values["aux loss"]) == (4.0, 3.0, 15.0)
    valid = validation_record(iteration=1, lm_loss=4.0, consumed_samples=1, named_losses=named)
    assert tagged_scalars(valid) == {
        "total loss validation": 4.0,
        "lm loss validation": 3.0,
        "aux loss validation": 15.0,
    }
