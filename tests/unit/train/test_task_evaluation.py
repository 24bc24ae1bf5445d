"""`--eval-tasks`: tasks at their intervals in every writer, that change nothing of the run, also of one that is resumed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import petatron
from petatron.base.errors import ConfigError, DataError
from petatron.cli.main import main
from petatron.evaluate.score_sequences import score_sequences
from petatron.train.report.format_records import format_record
from petatron.train.report.metric_writers import tagged_scalars
from petatron.validate import resolve_config
from petatron.validate.preflight import preflight

MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 32 --hidden-dropout 0.1 "
    "--tokenizer-type ByteTokenizer --mock-data --lr 1e-2 --eval-iters 0 --num-workers 0 --device cpu --global-batch-size 2 "
    "--log-interval 1 --live off"
)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "text.txt").write_text("Some text that is longer than a window.")
    (folder / "lambada.jsonl").write_text('{"text": "a b c"}\n{"text": "d e f"}\n')
    (folder / "tasks.yaml").write_text(
        "- {task: text, data: text.txt, name: held out}\n- {task: lambada, data: lambada.jsonl, every: 2}\n"
    )
    return folder / "tasks.yaml"


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def train(folder: Path, *flags: str) -> None:
    assert main(["train", *MODEL.split(), "--save", str(folder), *flags]) == 0


def values(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(record["iteration"], record["task"], record["metrics"]) for record in found]


def test_tasks_run_at_their_intervals_change_nothing_and_survive_a_resume(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    measured = ["--eval-tasks", str(tasks), "--eval-tasks-interval", "1"]
    train(tmp_path / "plain", "--train-iters", "3")
    capsys.readouterr()
    train(tmp_path / "whole", "--train-iters", "3", *measured)
    said = capsys.readouterr().out
    found = records(tmp_path / "whole", "eval")
    due = [(1, "held out"), (2, "held out"), (2, "lambada"), (3, "held out"), (3, "lambada")]
    assert [(record["iteration"], record["task"]) for record in found] == due, "all at the end, each once"
    assert " held out at iteration 1 | loss: " in said and " lambada at iteration 2 | accuracy: 0.0000 [0.0000" in said
    assert found[0]["metrics"]["loss"]["value"] != found[-2]["metrics"]["loss"]["value"]
    assert found[0]["counts"] == {"documents": 1, "tokens": 39, "bytes": 39}
    assert set(tagged_scalars(found[0])) == {
        f"eval/held out/{name}" for name in ("loss", "perplexity", "bits_per_byte")
    }
    losses = [record["lm_loss"] for record in records(tmp_path / "whole", "train")]
    assert losses == [record["lm_loss"] for record in records(tmp_path / "plain", "train")]

    train(tmp_path / "parts", "--train-iters", "3", "--exit-interval", "2", *measured)
    train(tmp_path / "parts", "--train-iters", "3", *measured, "--load", str(tmp_path / "parts"))
    assert values(records(tmp_path / "parts", "eval")) == values(found)
    assert [record["lm_loss"] for record in records(tmp_path / "parts", "train")] == losses


def test_a_run_in_python_has_the_numbers_of_the_evaluation_room(tasks: Path):
    flags = [*MODEL.split(), "--train-iters", "2", "--eval-tasks", str(tasks), "--eval-interval", "2"]
    run = petatron.load(None, flags)
    list(run.train())
    text = [run.tokenizer.eod, *b"Some text"[:8]]  # pyright: ignore[reportOptionalMemberAccess]
    score = score_sequences(run.state.model, [text])[0]
    found = {record["task"]: record for record in run.records if record["kind"] == "eval"}
    assert list(found) == ["held out"], "lambada is due at every second evaluation"
    # The first of five windows: the mean of all is within the interval of their resampling.
    assert found["held out"]["metrics"]["loss"]["low"] <= found["held out"]["metrics"]["loss"]["value"]
    assert -score.logprobs.mean() == pytest.approx(found["held out"]["metrics"]["loss"]["value"], rel=0.2)


def test_a_signal_ends_a_task(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scoring = sys.modules["petatron.evaluate.eval_task"]
    score = score_sequences

    def interrupted(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return score(*args, **options)

    monkeypatch.setattr(scoring, "score_sequences", interrupted)
    train(tmp_path, "--train-iters", "3", "--eval-tasks", str(tasks), "--eval-tasks-interval", "1")
    messages = [record["message"] for record in records(tmp_path, "event")]
    assert "the task held out was interrupted and reports nothing" in messages
    assert "stopping at iteration 1: received SIGTERM" in messages and not records(tmp_path, "eval")
    assert (tmp_path / "step-00000001").is_dir()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--eval-tasks f", "--eval-tasks f needs --eval-tasks-interval or --eval-interval"),
        ("--eval-tasks-interval 2", "--eval-tasks-interval 2 needs --eval-tasks"),
        ("--eval-tasks f --eval-tasks-interval 0", "--eval-tasks-interval 0 is below 1"),
        ("--eval-tasks f --eval-interval 2 --vocab-size 99", "--eval-tasks f needs a tokenizer"),
    ],
)
def test_what_cannot_be_run_is_refused(flags: str, message: str):
    model = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8"
    problems = resolve_config(f"{model} --data-path x --lr 1e-3 --train-iters 4 {flags}".split())[1]
    assert any(message in str(problem) for problem in problems), problems


def test_a_wrong_list_is_refused_before_anything_is_built(tasks: Path, tmp_path: Path):
    wrong = tmp_path / "tasks.yaml"
    wrong.write_text("- {task: text, data: none.txt}")
    words = [*MODEL.split(), "--train-iters", "1", "--eval-tasks-interval", "1", "--eval-tasks"]
    with pytest.raises(ConfigError, match=r"none\.txt is not a file"):
        _ = petatron.load(None, [*words, str(wrong)]).state
    wrong.write_text(f"- {{task: piqa, data: {tasks.parent / 'lambada.jsonl'}}}")
    with pytest.raises(DataError, match=r'task piqa: .*lambada\.jsonl:1: the key "sol1" is missing'):
        _ = petatron.load(None, [*words, str(wrong)]).state
    run = petatron.load(None, [*words, str(tmp_path / "gone.yaml")])
    assert [str(problem).partition(" does")[0] for problem in preflight(run.config)] == [
        f"--eval-tasks {tmp_path / 'gone.yaml'}"
    ]


def test_a_number_that_is_not_finite_is_printed():
    record = {
        "kind": "eval",
        "iteration": 3,
        "task": "text",
        "metrics": {"loss": {"value": "nan", "low": None, "high": None}},
    }
    assert format_record(record) == " text at iteration 3 | loss: nan | "
