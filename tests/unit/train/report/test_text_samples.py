"""Text samples during training: they only look, are the same in every layout, and what cannot be sampled is said before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.base.device import detect_device
from petatron.base.errors import DataError, TrainError
from petatron.config import RunConfig
from petatron.data.tokenizer import NullTokenizer
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.decoder import Decoder
from petatron.models.stage_interface import StageModule
from petatron.train.build_run import build_loaders
from petatron.train.report.text_samples import TextSampler, read_prompts
from petatron.train.state.train_state import TrainState
from petatron.train.training_loop import TrainLoop
from petatron.validate import load_config, resolve_config
from petatron.validate.preflight import preflight
from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import tiny_run
from tests.unit.train.test_loop import SMALL, Memory, weights

PROMPTS = "3 1 4\n\n1 5 9 2\n"
SAMPLED = f"{SMALL} --train-iters 4 --sample-interval 2 --sample-tokens 3 --num-query-groups 1 --init-method-std 0.3"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "prompts.txt"
    path.write_text(PROMPTS)
    return path


def _train(run: RunConfig, *, sample: bool = True) -> tuple[list[tuple[int, list[str]]], list[float], torch.Tensor]:
    """Returns samples by iteration, losses and weights of a run."""
    rank, tokenizer = dist.get_rank() if dist.is_initialized() else 0, NullTokenizer(37)
    mesh = ParallelMesh(Layout.from_config(run.parallel), rank)
    state, writer = TrainState.build(run, mesh), Memory()
    read = read_prompts(run, tokenizer)
    sampler = TextSampler(state.model, tokenizer, read, run.log, seed=1) if sample else None
    loop = TrainLoop(state, build_loaders(run, mesh), [writer], detect_device("cpu"), sampler=sampler)
    loop.run()
    assert (loop.totals.seconds.get("sampling", 0) > 0) == sample
    samples = [record for record in writer.records if record["kind"] == "sample"]
    texts = [(record["iteration"], [each["text"] for each in record["samples"]]) for record in samples]
    return texts, writer.column("lm_loss"), weights(state)


@pytest.mark.parametrize("temperature", ["0", "1.5"])
def test_samples_change_nothing(prompts: Path, temperature: str):
    flags = f"{SAMPLED} --hidden-dropout 0.2 --attention-dropout 0.2 --sample-prompts {prompts}"
    run = tiny_run(f"{flags} --sample-temperature {temperature}")
    samples, losses, sampled = _train(run)
    _, expected, plain = _train(run, sample=False)
    assert [at for at, _ in samples] == [2, 4] and losses == expected and torch.equal(sampled, plain)
    assert all(len(text.split()) == 3 or text == "" for _, texts in samples for text in texts)


@diagonal(3)
@pytest.mark.parametrize(
    "layout",
    [
        "--tp 2 --sequence-parallel",
        "--dp 2 --use-distributed-optimizer --overlap-param-gather",
        "--dp 2 --data-parallel-sharding-strategy optim_grads_params",
    ],
)
def test_every_layout_samples_the_same(ranks: RankPool, prompts: Path, layout: str):
    flags = f"{SAMPLED} --sample-prompts {prompts}"
    expected, losses, _ = _train(tiny_run(flags, dtype="float64"))
    assert len({str(texts) for _, texts in expected}) == 2, "the model must have learned something in between"
    for found, same_losses, _ in ranks.run(_train, 2, tiny_run(f"{flags} {layout}", world_size=2, dtype="float64")):
        assert found == expected and same_losses == pytest.approx(losses, rel=1e-10)


def test_experts_on_two_ranks_sample_the_same(ranks: RankPool, prompts: Path):
    flags = f"{SAMPLED} --sample-prompts {prompts} --num-experts 4 --moe-router-topk 2"
    expected, _, _ = _train(tiny_run(flags, dtype="float64"))
    run = tiny_run(f"{flags} --dp 2 --ep 2", world_size=2, dtype="float64")
    assert [found for found, _, _ in ranks.run(_train, 2, run)] == [expected, expected]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--pp 2 --sample-prompts f --sample-interval 2",
            "--sample-prompts f needs whole sequences and all layers on every",
        ),
        ("--cp 2 --sample-prompts f --sample-interval 2", "but --context-parallel-size is 2. Leave it out"),
        ("--sample-prompts f", "--sample-prompts f needs --sample-interval"),
        ("--sample-interval 2", "--sample-interval 2 needs --sample-prompts"),
        ("--sample-prompts f --sample-interval 0 --sample-tokens 0", "--sample-interval 0 is below 1"),
        ("--sample-prompts f --sample-interval 2 --sample-tokens 0", "--sample-tokens 0 is below 1"),
        ("--sample-prompts f --sample-interval 2 --sample-temperature -1", "--sample-temperature -1.0 is below 0"),
    ],
)
def test_what_cannot_be_sampled_is_refused(flags: str, message: str):
    words = f"--mock-data --lr 1e-3 --train-iters 4 --num-layers 4 --global-batch-size 4 {flags}".split()
    problems = resolve_config(words, preset="tiny-llama")[1]
    assert any(message in str(problem) for problem in problems), problems


def test_a_model_without_logits_is_refused_before_the_first_step(prompts: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Decoder, "logits", StageModule.logits)
    with pytest.raises(TrainError, match="cannot be continued: Decoder has no logits"):
        _train(tiny_run(f"{SAMPLED} --sample-prompts {prompts}"))


def test_settings_of_samples_without_prompts_have_no_effect():
    words = "--mock-data --lr 1e-3 --train-iters 4 --sample-tokens 5".split()
    assert (
        "--sample-tokens has no effect: it is for --sample-prompts" in load_config(words, preset="tiny-llama").notices
    )


def _run_with(path: Path) -> RunConfig:
    words = f"--mock-data --lr 1e-3 --train-iters 4 --sample-prompts {path} --sample-interval 1".split()
    return load_config(words, preset="tiny-llama").config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n  \n", "has 0 prompts. Give it 1 to 64"),
        (b"1\n" * 65, "has 65 prompts"),
        (b"\xff\xfe", "cannot be understood"),
        (b"1 2\nword\n9999\n", r"(?s)line 2: NullTokenizer expects.*line 3: Token ids 9999"),
        (b"7 " * 100, "line 1: A prompt of 100 tokens leaves room for 29 new ones"),
    ],
)
def test_prompts_that_cannot_be_used_are_named_with_their_lines(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_prompts(_run_with(path), NullTokenizer(1024))


def test_a_missing_file_of_prompts_is_found_before_anything_starts(tmp_path: Path):
    (problem,) = preflight(_run_with(tmp_path / "none.txt"))
    assert str(problem).startswith("--sample-prompts") and "does not exist" in str(problem)
