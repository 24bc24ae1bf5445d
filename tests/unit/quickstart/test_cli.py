"""The whole quickstart, small: two ranks, a few steps, everything it promises to leave behind and to print."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import time
from pathlib import Path

import pytest
import torch

from petatron.base.errors import ConfigError, LaunchError
from petatron.cli.main import main
from petatron.cli.quickstart import NUM_STEPS, next_commands, quickstart
from petatron.quickstart import stages
from petatron.quickstart.options import MODEL, QuickstartOptions
from petatron.quickstart.stages import Workspace
from petatron.validate import load_config

ROOT = Path(__file__).resolve().parents[3]
TINY_MODEL = {**MODEL, "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32}


@pytest.fixture(autouse=True)
def _two_small_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def options(tmp_path: Path) -> QuickstartOptions:
    return QuickstartOptions(
        out=str(tmp_path / "quick"),
        steps=12,
        corpus_bytes=700_000,
        min_files=10,
        vocab_size=400,
        batch_size=4,
        new_tokens=12,
        model=TINY_MODEL,
    )


@pytest.mark.usefixtures("forked_ranks")
def test_from_nothing_through_a_time_limit_to_a_sample_and_again(
    options: QuickstartOptions, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    assert quickstart(dataclasses.replace(options, minutes=1e-4)) == 0
    cut = capfd.readouterr().out
    assert (
        "stopping at iteration 2: --exit-duration-in-mins 0.0001 is over (12 were asked for)" in cut
        and "this model" in cut
    )

    assert quickstart(options) == 0
    said = capfd.readouterr().out
    space = Workspace(options.out)
    assert "goes on from the checkpoint of iteration 2" in said
    assert [f"[{number}/{NUM_STEPS}]" in said for number in range(1, NUM_STEPS + 1)] == [True] * NUM_STEPS
    assert f"petatron train --config {space.settings} --tp 2 --exit-duration-in-mins 2." in said
    assert "iteration       12/      12" in said, "the run's own log lines are shown"
    assert "this model" in said and "unigram" in said and "import os" in said and "Try next:" in said

    for path in (space.corpus("train"), space.corpus("held_out"), space.tokenizer, space.settings, space.summary):
        assert path.is_file()
    for name in ("metrics.jsonl", "config.yaml", "step-00000012"):
        assert (space.training / name).exists()

    found = json.loads(space.summary.read_text())
    held_out = found["held_out"]
    assert found["iterations"] == 12 and found["vocab_size"] == 400
    assert held_out["model_loss"] < math.log(400), "twelve steps beat a uniform guess"
    assert held_out["unigram_loss"] < math.log(400)
    assert held_out["beats_unigram"] == (held_out["model_loss"] < held_out["unigram_loss"])
    samples = (found["held_out_tokens"] - 1) // 32
    assert held_out["tokens"] == samples // 4 * 4 * 32, "every held-out token that fills a batch, once"
    assert set(found["step_seconds"]) == {"corpus", "tokenizer", "data", "training", "evaluation", "a sample"}

    # The run evaluated its first batches at tp 2; the whole set in one process must be near that.
    records = [json.loads(line) for line in (space.training / "metrics.jsonl").read_text().splitlines()]
    assert held_out["model_loss"] == pytest.approx([r for r in records if r["kind"] == "valid"][-1]["lm_loss"], rel=0.1)

    starts = [record for record in records if "environment" in record]
    assert len(starts) == 2 and starts[1]["environment"]["torch"] == torch.__version__
    assert starts[1]["origins"]["parallel.tensor_model_parallel_size"] == "--tp"

    assert quickstart(options) == 0
    again = capfd.readouterr().out
    assert again.count("kept from the last time") == 3 and "finished before; --fresh trains again" in again
    repeated = json.loads(space.summary.read_text())
    assert repeated["held_out"] == held_out and repeated["sample"] == found["sample"]
    assert torch.get_num_threads() == threads


def test_a_failed_training_ends_the_quickstart(
    options: QuickstartOptions, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petatron.mesh.launch.local_launcher.run_ranks", lambda *args, **kwargs: 7)
    assert quickstart(options) == 7
    assert "[5/6]" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("event", "code", "told"),
    [
        ("stopping at iteration 5: received SIGINT", 130, "the same command goes on from there"),
        ("stopping at iteration 5: --exit-duration-in-mins 4 is over", 0, "4 is over (12 were asked for)"),
    ],
)
def test_training_that_stops_early(
    options: QuickstartOptions,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    event: str,
    code: int,
    told: str,
) -> None:
    from petatron.cli.quickstart import _train

    space = Workspace(options.out)
    space.open()
    space.set_stage_key("data", "any")

    def stop(*args: object, **kwargs: object) -> int:
        (space.training / "step-00000005").mkdir(parents=True)
        (space.training / "step-00000005" / "manifest.json").write_text("{}")
        records = [{"kind": "event", "message": message} for message in (event, "saved checkpoint of iteration 5")]
        (space.training / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return 0

    monkeypatch.setattr("petatron.mesh.launch.local_launcher.run_ranks", stop)
    assert _train(space, options, {}, started_s=time.monotonic()) == code
    assert told in capfd.readouterr().out


def test_the_next_commands_are_commands(options: QuickstartOptions, tmp_path: Path) -> None:
    options = dataclasses.replace(options, out=str(tmp_path / "with space"))
    space = Workspace(options.out)
    space.open()
    space.set_stage_key("data", "any")
    stages.prepare_settings(space, options, steps=12)
    lines = [shlex.split(line) for line in next_commands(space, options, steps=12).splitlines() if "petatron" in line]
    assert [line[1] for line in lines] == ["generate", "chat", "verify", "train", "config", "data", "doctor"]
    assert lines[0][2] == lines[1][2] == str(space.training)
    train = load_config(lines[3][2:]).config
    assert train.parallel.world_size == train.parallel.data_parallel_size == 2
    assert train.train.train_iters == 24 and train.checkpoint.load == str(space.training)
    assert Path(str(train.checkpoint.save)).parent == tmp_path
    assert main(lines[4][1:]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", "5"], "--tensor-model-parallel-size 5 does not divide --num-attention-heads"),
        (["--tp", "0", "--steps", "0"], "2 problems"),
        (["--steps", "1"], "--steps 1 is less than 2"),
        (["--minutes", "0"], "--minutes 0.0 is no time at all"),
        (["--minutes", "nan"], "--minutes nan"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], message: str, tmp_path: Path) -> None:
    from petatron.cli import quickstart as subcommand

    with pytest.raises(ConfigError, match=message):
        subcommand.main([*flags, "--out", str(tmp_path / "never")])
    assert not (tmp_path / "never").exists()


def test_it_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch, options: QuickstartOptions) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(LaunchError, match="starts its own ranks"):
        quickstart(options)


def test_help_needs_no_library(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["quickstart", "--help"])
    assert ended.value.code == 0 and "nothing is downloaded" in capsys.readouterr().out.lower()
