"""A manifest whose digests fit and which means harm: wrong types, places outside of tensors, digests left out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import CheckpointError, PetatronError
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.manifest import table_digest
from petatron.checkpoint.inspect.diff_checkpoints import diff_checkpoints
from petatron.checkpoint.inspect.verify_checkpoint import verify_checkpoint
from petatron.cli.main import main
from petatron.config import CheckpointConfig
from petatron.config.schema.run import RunConfig
from petatron.pretrained.model_reader import open_model_reader
from petatron.pretrained.read_checkpoint_args import read_checkpoint_args
from tests.longform import diagonal
from tests.security.limits import limited
from tests.unit.checkpoint.rewriting import rewrite_manifest, rewrite_table

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-v3"
KEY = "model/embedding.weight"
WEIGHTS_FILE = "model/model.safetensors"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "run")
    return tmp_path / "run" / "step-00000003"


def assert_refused(step: Path, *words: str) -> None:
    """Verification finds it, and whoever would read the tensors refuses it, with one error that names the file."""
    with limited():
        report = verify_checkpoint(step)
        assert not report.is_valid
        with pytest.raises(CheckpointError) as caught:
            open_model_reader(step)
    for text in (report.findings[0].text, str(caught.value)):
        assert str(step) in text
        for word in words:
            assert word in text, f"{word!r} is not in: {text}"


def box(change: Callable[[list[Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda body: change(body["tensors"][KEY]["boxes"][0])


def put(at: int, value: Any) -> Callable[[dict[str, Any]], object]:
    return box(lambda found: found.__setitem__(at, value))


def tensor(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["tensors"][KEY].update(values)


def file(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["files"].update({WEIGHTS_FILE: value})


BOX, TENSOR, FILE = f"a box of {KEY}", f"shape, dtype or boxes of {KEY}", f"size and digests of {WEIGHTS_FILE}"


@diagonal(3)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put(4, [-8, 0]), BOX),  # the weights of the tensor before it
        (put(4, [0, 1 << 70]), BOX),
        (put(4, [0, 0, 0]), BOX),
        (put(4, []), BOX),
        (put(4, "00"), BOX),
        (put(2, [-1, 0]), BOX),
        (put(2, [0.0, 0]), BOX),
        (put(2, [True, 0]), BOX),
        (put(3, [33, 8]), BOX),
        (put(3, [32, -8]), BOX),
        (put(3, [32]), BOX),
        (put(5, 1), BOX),
        (put(0, 7), BOX),
        (put(1, None), BOX),
        (box(lambda found: found.append(0)), BOX),
        (box(lambda found: found.append([])), BOX),
        (box(lambda found: found.append([0, 1])), BOX),
        (box(lambda found: found.append([5, 2])), BOX),
        (box(lambda found: found.append([True, 2])), BOX),
        (box(lambda found: found.append([0, 1 << 70])), BOX),
        (box(lambda found: found.extend([[0, 2], 7])), BOX),
        (lambda body: body["tensors"][KEY].update(boxes=["abcdef"]), BOX),
        (lambda body: body["tensors"][KEY].update(boxes=[7]), BOX),
        (tensor(dtype="F7"), TENSOR),
        (tensor(dtype=["BF16"]), TENSOR),
        (tensor(shape=[1 << 40, 1 << 40]), TENSOR),
        (tensor(shape=[int("9" * 4000)] * 64), TENSOR),
        (tensor(shape=[1] * 100_000), TENSOR),
        (tensor(shape=None), TENSOR),
        (tensor(boxes={}), TENSOR),
        (lambda body: body["tensors"].update({KEY: []}), TENSOR),
        (file([5960, []]), "0 digests for the 5960 bytes"),
        (file([-1, []]), FILE),
        (file([5960, ["a8f3654g"]]), FILE),
        (file([5960, ["A8F3654C"]]), FILE),
        (file([5960, "a"]), FILE),
        (file(5960), FILE),
        (lambda body: body["local"].update({"local/0/cpu": ["state/rank-00000.safetensors"]}), "the file of local/0/cpu"),
        (lambda body: body.update(files=[]), "its files"),
        (lambda body: body["files"].update({"model/\0": [0, []]}), "not one of the checkpoint's files"),
    ],
)  # fmt: skip
def test_a_table_that_misstates_something(step: Path, change: Callable[[dict[str, Any]], object], words: str):
    rewrite_table(step, change)
    assert_refused(step, words)


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([[0, 16], [8, 16]], "is there twice"),
        ([[0, 16], [17, 15]], "8 of 256 elements are missing"),
        ([], "256 of 256 elements are missing"),
    ],
)
def test_boxes_that_are_not_the_tensor(step: Path, boxes: list[list[int]], words: str):
    """Overlaps as large as the gap they hide, gaps, and nothing at all."""
    place = [WEIGHTS_FILE, "transformer.wte.weight"]
    rows = [[*place, [begin, 0], [size, 8], [begin, 0], False] for begin, size in boxes]
    rewrite_table(step, tensor(boxes=rows))
    report = verify_checkpoint(step)
    assert any(words in found.text and KEY in found.text for found in report.findings)
    with pytest.raises(CheckpointError, match=words):
        diff_checkpoints(step, step)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(step=-1), "its step"),
        (lambda body: body.update(step=True), "its step"),
        (lambda body: body.update(step="3"), "its step"),
        (lambda body: body.update(step=10**30), "its step"),
        (lambda body: body.update(layout=3), "its layout"),
        (lambda body: body.update(facts=[]), "its facts"),
        (lambda body: body.update(tables={}), "it names no table"),
        (lambda body: body.update(tables=[]), "its tables"),
        (lambda body: body["tables"].update({"state/x.json": [1]}), "size and digest of state/x.json"),
        (lambda body: body["tables"].update({"state/x.json": [-1, "0" * 64]}), "size and digest of state/x.json"),
        (lambda body: body["tables"].update({"state/x.json": [1, "0" * 63]}), "size and digest of state/x.json"),
        (lambda body: body["tables"].update({"state/x.json": {}}), "size and digest of state/x.json"),
    ],
)
def test_a_manifest_that_misstates_something(step: Path, change: Callable[[dict[str, Any]], object], words: str):
    rewrite_manifest(step, change)
    assert_refused(step, "manifest.json", words)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[" * 100_000, b'{"format": "petatron checkpoint", "version": ' + b"9" * 5000 + b"}", b"NaN", b"7"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["manifest.json", "state/rank-00001.table.json"])
def test_files_that_are_no_table(step: Path, content: bytes, name: str):
    (step / name).write_bytes(content)
    if name != "manifest.json":
        row = [len(content), table_digest(content)]
        rewrite_manifest(step, lambda body: body["tables"].update({name: row}))
    assert_refused(step, name.partition("/")[2] or name)


def test_a_manifest_larger_than_any(step: Path):
    with (step / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # without a byte on disk
    assert_refused(step, "1,099,511,627,776 bytes")


@pytest.mark.parametrize("name", ["manifest.json", "state/rank-00000.table.json", "model/config.json", WEIGHTS_FILE])
def test_pipes_and_devices_in_the_place_of_files(step: Path, name: str):
    path = step / name
    path.unlink()
    os.mkfifo(path)
    with limited(), pytest.raises(PetatronError):
        step_folder.read_manifest(step)
        step_folder.check_sizes(step, step_folder.read_manifest(step).files)
    path.unlink()
    path.symlink_to("/dev/zero")
    with limited(), pytest.raises(PetatronError):
        step_folder.read_manifest(step)
        step_folder.check_sizes(step, step_folder.read_manifest(step).files)


@pytest.mark.parametrize(
    "content", [b"step-" + b"1" * 5000, b"\xff", b"step-00000003\n" * 10**6, "step-٠٠٠٠٠٠٠٣".encode()]
)
def test_a_tracker_that_names_no_step(step: Path, content: bytes):
    """It counts as none: the highest step is the newest then."""
    (step.parent / "latest").write_bytes(content)
    assert step_folder.latest_step(step.parent) == 3
    (step.parent / "latest").unlink()
    os.mkfifo(step.parent / "latest")
    with limited():
        assert step_folder.latest_step(step.parent) == 3


FACTS: list[Any] = [
    None, 7, [], {}, {"progress": 7}, {"progress": {"iteration": "x"}}, {"config": 7}, {"config": {"model": 7}},
    {"config": {"parallel": {"tensor_model_parallel_size": "x", "world_size": []}}}, {"model": [1]}, {"config": {"x": {"y": {}}}},
]  # fmt: skip


@diagonal(3)
@pytest.mark.parametrize("facts", FACTS)
def test_facts_of_any_form(step: Path, facts: Any, capsys: pytest.CaptureFixture[str]):
    """They are not ours to judge: every subcommand does with them what it can, or refuses, and none raises anything else."""
    rewrite_manifest(step, lambda body: body["facts"].update(facts=facts))
    for subcommand in (["inspect"], ["inspect", "--json"], ["verify"]):
        assert main(["checkpoint", subcommand[0], str(step), *subcommand[1:]]) in (0, 1)
    assert main(["checkpoint", "diff", str(step), str(GOLDEN / "step-00000003")]) in (0, 1)
    assert main(["checkpoint", "diff", str(GOLDEN / "step-00000003"), str(step), "--json"]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err
    try:
        read_checkpoint_args(CheckpointConfig(load=str(step.parent)))
    except PetatronError as error:
        assert str(step) in str(error)


@pytest.mark.parametrize("model", [{"num_layers": 10**12}, {"num_layers": "9" * 9}, {"num_layers": []}])
def test_checkpoint_args_of_a_model_that_is_not_there(step: Path, model: dict[str, Any]):
    rewrite_manifest(step, lambda body: body["facts"]["facts"]["config"]["model"].update(model))
    with limited(), pytest.raises(CheckpointError, match=r"manifest\.json says .* layers"):
        read_checkpoint_args(CheckpointConfig(load=str(step.parent)))


def test_weights_that_the_config_does_not_describe(step: Path):
    """A tensor that the table leaves out, or has in another shape, is one error and no KeyError later."""
    rewrite_table(step, lambda body: body["tensors"].pop(KEY))
    with pytest.raises(CheckpointError, match=r"config\.json describes: embedding\.weight"):
        open_model_reader(step)


def test_a_run_with_impossible_progress(step: Path):
    from petatron.mesh.mesh import ParallelMesh
    from petatron.train.state.train_state import TrainState
    from petatron.validate import load_config
    from tests.golden.make_checkpoint import MODEL, RUN

    rewrite_manifest(step, lambda body: body["facts"]["facts"]["progress"].update(iteration="soon"))
    run: RunConfig = load_config(f"{MODEL} {RUN}".split(), preset="tiny-gpt").config
    state = TrainState.build(run, ParallelMesh.single())
    with pytest.raises(CheckpointError, match="its progress is"):
        state.load(str(step.parent))
    rewrite_manifest(step, lambda body: body["facts"].update(optimizer={"updates": "many"}))
    with pytest.raises(CheckpointError, match="run cannot be understood"):
        state.load(str(step.parent))


def test_sound_ones_stay_sound(step: Path):
    assert verify_checkpoint(step).is_valid
    rewrite_table(step, lambda body: None)
    assert verify_checkpoint(step).is_valid and json.loads((step / "manifest.json").read_text())["version"] == 3
