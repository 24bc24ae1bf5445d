"""`--weights ema`: whatever opens a checkpoint opens the average of its weights, as `checkpoint convert` exports it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import SamplingParams
from petatron.serve.engine_process import EngineProcess
from petatron.serve.open_engine import CheckpointEngine, model_settings
from tests.cli.text_model import train_text_model

PROMPT = ["--prompt", "Once", "--max-tokens", "4", "--temperature", "0", "--logprobs", "1"]
OPTIONS = EngineOptions(num_pages=8, max_sequences=2)
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, `run`, and the average of its last step, `ema`."""
    folder = tmp_path_factory.mktemp("weights")
    average = ["--ema-decay", "0.5", "--lr", "1e-1", "--train-iters", "2", "--save-interval", "1"]
    train_text_model(folder / "run", *average)
    convert = ["checkpoint", "convert", f"{folder}/run", f"{folder}/ema", "--to", "huggingface", "--weights", "ema"]
    assert main(convert) == 0
    (folder / "text.txt").write_text("the cat sat on the mat")
    return folder


def generate(capsys: Captured, *words: object) -> str:
    capsys.readouterr()
    assert main(["generate", *map(str, words), *PROMPT]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_generate_continues_with_the_average(folder: Path, capsys: Captured):
    averaged = generate(capsys, folder / "run", "--weights", "ema")
    assert averaged == generate(capsys, folder / "ema") != generate(capsys, folder / "run")
    first = generate(capsys, folder / "run" / "step-00000001", "--weights", "ema")
    assert first not in (averaged, generate(capsys, folder / "run"))


@pytest.mark.usefixtures("forked_ranks")
def test_eval_measures_the_average_on_any_number_of_ranks(folder: Path):
    def loss(checkpoint: str, *words: str) -> float:
        out = folder / "out.json"
        task = ["--task", "text", "--data", str(folder / "text.txt"), "--out", str(out)]
        assert main(["eval", str(folder / checkpoint), *task, *words]) == 0
        [found] = json.loads(out.read_text())["checkpoints"]
        assert found.get("weights") == (words[1] if words else None)
        return found["results"]["text"]["metrics"]["loss"]["value"]

    exported = loss("ema")
    assert loss("run", "--weights", "ema") == exported != loss("run")
    assert loss("run", "--weights", "ema", "--tp", "2") == pytest.approx(exported, rel=1e-6)


@pytest.mark.usefixtures("forked_engines")
def test_a_served_run_stays_with_the_average_when_it_is_reloaded(folder: Path):
    def answer(engine: CheckpointEngine | EngineProcess) -> Completion:
        request = engine.submit(list(b"Once"), SamplingParams(max_new_tokens=4, temperature=0.0, logprobs=1))
        while engine.has_work:
            engine.step()
        return engine.take(request)

    expected = answer(CheckpointEngine(model_settings(folder / "ema", options=OPTIONS)))
    engine = EngineProcess(model_settings(folder / "run" / "step-00000001", options=OPTIONS, weights="ema"))
    before = answer(engine)
    assert answer(engine.reload(folder / "run" / "step-00000002")).logprobs == expected.logprobs != before.logprobs
    engine.close()


@pytest.mark.parametrize(
    "command", ["generate {} --prompt a", "eval {} --task text --data {folder}/text.txt", "serve {}"]
)
def test_weights_that_are_not_there_are_refused_before_a_model_is_opened(folder: Path, command: str, capsys: Captured):
    def refused(checkpoint: str, weights: str) -> str:
        assert main([*command.format(folder / checkpoint, folder=folder).split(), "--weights", weights]) in (1, 2)
        return capsys.readouterr().err

    assert "Its kinds of state are ema, exp_avg, exp_avg_sq, model" in refused("run", "eam")
    assert "--weights ema chooses among the state of a checkpoint, and a huggingface model" in refused("ema", "ema")
