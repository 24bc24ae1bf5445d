"""`--dataloader-type external`: micro-batches of a user's own code, alone and on two ranks, with and without a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import petatron
from petatron import Batch, DataloaderRequest, register_dataloader
from petatron.base.errors import CheckpointError, ConfigError, DataError, PetatronError
from petatron.cli.main import main
from petatron.data import external_loader
from petatron.data.external_loader import registered_dataloader
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.check_and_open_run import check_start, open_run
from petatron.validate import load_config
from tests.dist import RankPool

SIZE, SEQUENCE = 64, 8
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24 --hidden-dropout 0 --attention-dropout 0 --vocab-size 64 "
    "--seq-length 8 --lr 1e-2 --lr-decay-iters 100 --micro-batch-size 2 --fp64 --log-interval 1"
).split()


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    external_loader._REGISTERED.clear()
    yield
    external_loader._REGISTERED.clear()


def sample(number: int) -> np.ndarray:
    return np.random.default_rng([7, number]).integers(0, SIZE, SEQUENCE + 1)


def micro_batch(numbers: Sequence[int]) -> dict[str, Any]:
    ids = np.stack([sample(number) for number in numbers])
    mask = np.ones((len(numbers), SEQUENCE), np.float32)
    mask[:, 0] = 0.0
    return {"tokens": ids[:, :-1], "labels": torch.from_numpy(ids[:, 1:].copy()), "loss_mask": mask}


def in_the_order_of_petatron(request: DataloaderRequest) -> Iterator[dict[str, Any]]:
    """Knows its place from consumed_samples alone."""
    offset = {"train": 0, "valid": 10_000, "test": 20_000}[request.split]
    first = offset + request.consumed_samples + request.dp_rank * request.micro_batch_size
    while True:
        yield micro_batch(range(first, first + request.micro_batch_size))
        first += request.dp_size * request.micro_batch_size


class RandomWalk:
    """Has a state of its own, which no number of samples tells."""

    def __init__(self, request: DataloaderRequest) -> None:
        self.request, self.number, self.steps = request, 100 * request.dp_rank, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            numbers = range(self.number, self.number + self.request.micro_batch_size)
            self.steps += 1
            self.number = self.number * 3 % 1009 + self.steps
            yield micro_batch(numbers)  # nothing after it would be in a state that is saved now

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.steps = state["number"], state["steps"]


class Losses:
    """A writer of metrics that keeps the losses of training."""

    def __init__(self) -> None:
        self.of_steps: list[float] = []

    def write(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "train":
            self.of_steps.append(record["lm_loss"])

    def close(self) -> None: ...


def losses(flags: Sequence[str], iterations: int, *, layout: str = "") -> list[float]:
    torch.set_num_threads(1)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    argv = [*MODEL, *layout.split(), "--dataloader-type", "external", *flags, "--train-iters", str(iterations)]
    loaded = load_config(argv, world_size=ranks)
    opened = open_run(check_start(loaded), ParallelMesh(Layout.from_config(loaded.config.parallel), rank))
    written = Losses()
    opened.build_loop([written]).run()
    return written.of_steps


def on_ranks(name: str, flags: Sequence[str], iterations: int, layout: str) -> list[float]:
    external_loader._REGISTERED.clear()
    register_dataloader(BUILDERS[name])
    return losses(flags, iterations, layout=layout)


BUILDERS: dict[str, Callable[..., Any]] = {"numbers": in_the_order_of_petatron, "walk": RandomWalk}
BATCH = ["--global-batch-size", "8", "--eval-iters", "0"]


@pytest.mark.parametrize("name", BUILDERS)
def test_a_run_resumes_bit_equal(name: str, tmp_path: Path):
    register_dataloader(BUILDERS[name])
    kept = ["--save", str(tmp_path), "--load", str(tmp_path)]
    whole = losses(BATCH, 6)
    assert len(set(whole)) == 6
    assert [*losses([*BATCH, *kept], 2), *losses([*BATCH, *kept], 6)] == whole


@pytest.mark.parametrize("name", BUILDERS)
def test_two_ranks_have_data_of_their_own_and_resume_bit_equal(name: str, tmp_path: Path, ranks: RankPool):
    kept = ["--save", str(tmp_path), "--load", str(tmp_path)]
    whole, same = ranks.run(on_ranks, 2, name, BATCH, 4, "--dp 2")
    assert whole == same
    (first, _), (rest, _) = (ranks.run(on_ranks, 2, name, [*BATCH, *kept], count, "--dp 2") for count in (2, 4))
    assert [*first, *rest] == whole
    alone = on_ranks(name, BATCH, 4, "")
    if name == "numbers":
        assert np.allclose(alone, whole, rtol=1e-12, atol=0)
        with_tp, _ = ranks.run(on_ranks, 2, name, BATCH, 4, "--tp 2")
        assert np.allclose(with_tp, whole, rtol=1e-12, atol=0)
        return
    assert alone != whole
    with pytest.raises(
        CheckpointError, match=r"for each of 2 data-parallel ranks, and this run has 1\. Resume with as many"
    ):
        on_ranks(name, [*BATCH, *kept], 6, "")


def test_another_number_of_ranks_continues_by_the_number_of_samples(tmp_path: Path, ranks: RankPool):
    kept = [*BATCH, "--save", str(tmp_path), "--load", str(tmp_path)]
    whole = on_ranks("numbers", BATCH, 4, "")
    first, _ = ranks.run(on_ranks, 2, "numbers", kept, 2, "--dp 2")
    assert np.allclose([*first, *on_ranks("numbers", kept, 4, "")], whole, rtol=1e-12, atol=0)


def test_every_evaluation_begins_at_the_first_sample():
    register_dataloader(in_the_order_of_petatron, splits=("train", "valid"))
    flags = [*BATCH[:2], "--eval-iters", "2", "--eval-interval", "2"]
    run = petatron.load("tiny-llama", [*MODEL, "--dataloader-type", "external", "--train-iters", "4", *flags])
    list(run.train())
    evaluated = [record["lm_loss"] for record in run.records if record["kind"] == "valid"]
    assert len(evaluated) == 2
    assert run.evaluate().loss == run.evaluate().loss == evaluated[1]
    with pytest.raises(DataError, match="This run has no test data"):
        run.evaluate("test")


def test_a_loop_of_your_own_resumes_the_state(tmp_path: Path):
    register_dataloader(RandomWalk)

    def tokens(save_after: int = 0) -> list[list[int]]:
        flags = [
            *MODEL,
            *BATCH,
            "--dataloader-type",
            "external",
            "--train-iters",
            "5",
            "--save",
            str(tmp_path),
            "--load",
            str(tmp_path),
        ]
        run = petatron.load("tiny-llama", flags)
        model = petatron.build_model(run, petatron.launch(run))
        optimizer = petatron.build_optimizer(run, model)
        state = petatron.restore(run, model, optimizer)
        seen = []
        for batches in petatron.build_loader(run, model.mesh, state=state):
            seen.append([int(batch.tokens[0, 0]) for batch in batches])
            state.advance(batches)
            if state.progress.iteration == save_after:
                petatron.save_checkpoint(tmp_path, step=save_after, model=model, optimizer=optimizer, state=state)
                break
        return seen

    whole = tokens()
    assert len(whole) == 5
    assert [*tokens(2), *tokens()] == whole


def one_batch(**changes: Any) -> Callable[[DataloaderRequest], Any]:
    """Returns a builder whose first micro-batch has other arrays; None removes one."""

    def build(request: DataloaderRequest) -> Iterator[Any]:
        arrays = {**micro_batch(range(request.micro_batch_size)), **changes}
        yield {name: array for name, array in arrays.items() if array is not None}

    return build


class Unsaved(RandomWalk):
    def state_dict(self) -> dict[str, Any]:
        return {"random": torch.zeros(2)}


IDS = torch.zeros(2, SEQUENCE, dtype=torch.int64)
WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "keys": (
        one_batch(tokens=None, labels=None, input_ids=IDS),
        r"micro-batch 1 has loss_mask, input_ids and lacks tokens, labels\. A model of text takes tokens, labels \(the",
    ),
    "shape": (
        one_batch(labels=IDS[:, 1:]),
        r"has labels of shape \[2, 7\]\. It takes \[2, 8\]: --micro-batch-size x --seq-length",
    ),
    "rows": (
        one_batch(tokens=IDS[:1]),
        r"has tokens of shape \[1, 8\]\. The first dimension is that of samples, --micro-batch-size: 2",
    ),
    "scalar": (one_batch(weight=torch.ones(())), r"has weight of shape \[\]\. The first dimension"),
    "type": (one_batch(tokens=IDS.float()), r"has tokens of type torch\.float32\. Token ids are torch\.int64"),
    "ignored": (
        one_batch(labels=IDS - 100),
        r"has labels from -100 to -100\. Ids are from 0 to 63; a position that does not count has loss_mask 0",
    ),
    "beyond": (one_batch(tokens=IDS + 64), r"has tokens from 64 to 64\. Ids are from 0 to 63"),
    "value": (one_batch(text="hello"), r"has 'text', a str\. Its values are tensors or numpy arrays"),
    "list": (
        lambda request: iter([[1, 2]]),
        r"micro-batch 1 is a list and no mapping of arrays by name\. Yield dictionaries",
    ),
    "early": (
        one_batch(),
        r"it ended after 1 micro-batches since it began, and this step takes 3 more\. Let it begin again at its end",
    ),
    "iterated": (lambda request: 3, r"it returned a int, which cannot be iterated\. Return an iterator"),
    "state": (Unsaved, r"it has a state_dict that is no value of JSON \(.*\)\. Return numbers, texts, lists"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_micro_batch_is_told(case: str):
    build, text = WRONG[case]
    register_dataloader(build)
    with pytest.raises(DataError, match=text) as caught:
        losses(BATCH, 1)
    assert "(split train, data-parallel rank 0 of 1)" in str(caught.value)
    assert f"The external loader {registered_dataloader().name} " in str(caught.value)


def test_documents_are_refused_and_a_batch_is_taken():
    def build(request: DataloaderRequest) -> Iterator[Batch]:
        arrays = {name: torch.as_tensor(array) for name, array in micro_batch(range(request.micro_batch_size)).items()}
        yield Batch(arrays=arrays)
        yield Batch(arrays=arrays, documents=object())  # type: ignore[arg-type]

    register_dataloader(build)
    with pytest.raises(DataError, match=r"micro-batch 2 has documents\. Leave them out"):
        losses(["--global-batch-size", "4", "--eval-iters", "0"], 1)
    one_step = ["--global-batch-size", "2", "--eval-iters", "0"]
    assert len(losses(one_step, 1)) == 1


def test_a_state_that_nobody_takes_is_an_error(tmp_path: Path):
    kept = [*BATCH, "--save", str(tmp_path), "--load", str(tmp_path)]
    register_dataloader(RandomWalk)
    losses(kept, 1)
    external_loader._REGISTERED.clear()
    register_dataloader(in_the_order_of_petatron)
    with pytest.raises(
        DataError, match=r"it has no load_state_dict, and the checkpoint has a state of it\. Use the module"
    ):
        losses(kept, 2)


def test_registrations():
    with pytest.raises(ConfigError, match=r"has no loader: no module has registered one\. Add --import MODULE"):
        losses(BATCH, 1)
    for splits in ((), ("valid",), ("train", "dev")):
        with pytest.raises(ConfigError, match=r"Name train, valid, test"):
            register_dataloader(in_the_order_of_petatron, splits=splits)  # type: ignore[arg-type]
    register_dataloader(in_the_order_of_petatron)
    register_dataloader(in_the_order_of_petatron, splits=("train", "test"))
    assert registered_dataloader().splits == {"train", "test"}
    with pytest.raises(
        ConfigError,
        match=r"has a loader already, in_the_order_of_petatron of test_external_loader\.py\. Import one module",
    ):
        register_dataloader(RandomWalk)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--mock-data"], "--dataloader-type external brings batches of its own, and --mock-data is about datasets"),
        (["--data-path", "corpus"], "and --data-path is about datasets that Petatron reads. Leave one of the two out"),
        (["--dataset-type", "gpt"], "--dataset-type is about datasets"),
        (["--reset-position-ids", "--tokenizer-type", "ByteTokenizer"], "--reset-position-ids is about datasets"),
        (["--full-validation"], "does not say how many samples it has, and --full-validation evaluates all"),
    ],
)
def test_settings_of_datasets_are_refused(flags: list[str], text: str):
    with pytest.raises(PetatronError) as caught:
        load_config([*MODEL, "--train-iters", "2", "--dataloader-type", "external", *flags])
    assert text in str(caught.value)


def test_samples_of_other_code_cannot_be_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = [*MODEL, "--train-iters", "2", "--dataloader-type", "external"]
    assert main(["data", "trace", "tiny-llama", "--iteration", "1", *flags]) == 1
    assert "The samples of --dataloader-type external cannot be traced" in capsys.readouterr().err


MODULE = """
import numpy as np
import petatron


def counted(request):
    ids = np.arange(request.seq_length + 1) % request.vocab_size
    rows = np.tile(ids, (request.micro_batch_size, 1))
    while True:
        yield {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


petatron.register_dataloader(counted)
"""


def test_a_module_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.py").write_text(MODULE)
    flags = [*MODEL, *BATCH, "--dataloader-type", "external", "--train-iters", "2"]
    assert main(["train", *flags, "--import", str(tmp_path / "mine.py")]) == 0
    said = capsys.readouterr()
    assert "external, counted of mine.py" in said.out + said.err, said
