"""`petatron checkpoint`: everything that can be wrong with a checkpoint is one error that
names the file and what to do, here and when a run loads it."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.digested_file_io import BLOCK_BYTES, Disk, digest_file
from petatron.checkpoint.files.manifest import VERSION
from petatron.checkpoint.inspect import diff_checkpoints
from petatron.checkpoint.inspect.verify_checkpoint import verify_checkpoint
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.cli.main import main
from petatron.mesh.mesh import ParallelMesh
from petatron.train.state.train_state import TrainState
from petatron.validate import load_config
from tests.golden.make_checkpoint import FOLDER, MODEL, RUN, STEP
from tests.golden.reader import read_checkpoint
from tests.heard import heard
from tests.longform import diagonal
from tests.unit.checkpoint.rewriting import TABLE, rewrite_manifest, rewrite_table, tables

STATE = "state/rank-00000.safetensors"
WEIGHTS = "model/model.safetensors"
NEWEST = "step-00000009"


def _ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    output = capsys.readouterr()
    return code, output.out, output.err


def _table_of(step: Path, key: str) -> str:
    """The table in which a tensor's first box is."""
    return next(name for name, table in tables(step).items() if key in table["tensors"])


def _set_step(head: dict[str, Any], step: int) -> None:
    head["step"] = head["facts"]["facts"]["progress"]["iteration"] = step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three steps of a run, made from one."""
    for step in (STEP, 6, 9):
        target = tmp_path / "run" / step_folder.step_name(step)
        shutil.copytree(FOLDER / step_folder.step_name(STEP), target)
        rewrite_manifest(target, lambda head, step=step: _set_step(head, step))
    (tmp_path / "run" / "latest").write_text(f"{NEWEST}\n")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def state() -> TrainState:
    """A run that can load it."""
    run = load_config(f"{MODEL} {RUN}".split(), preset="tiny-gpt").config
    return TrainState.build(run, ParallelMesh.single())


# What damage looks like: (what is done to the newest step, the file to blame, words of the verdict, words of a load's)


def _flip(name: str) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        content = bytearray((step / name).read_bytes())
        content[-100] ^= 1
        (step / name).write_bytes(content)

    return change


def _truncate(step: Path) -> None:
    content = (step / STATE).read_bytes()
    (step / STATE).write_bytes(content[:-40])


def _edit_manifest(step: Path) -> None:
    text = (step / "manifest.json").read_text()
    (step / "manifest.json").write_text(text.replace('"consumed_samples": 12', '"consumed_samples": 99'))


def _break_manifest(step: Path) -> None:
    text = (step / "manifest.json").read_text()
    (step / "manifest.json").write_text(text[: len(text) // 2])


def _other_version(step: Path) -> None:
    text = (step / "manifest.json").read_text()
    (step / "manifest.json").write_text(text.replace(f'"version": {VERSION}', '"version": 99'))


def _edit_config(step: Path) -> None:
    path = step / "model" / "config.json"
    path.write_text(path.read_text().replace('"n_head": 4', '"n_head": 2'))


def _wrong_config(step: Path) -> None:
    """Another model's config.json, with a table to match."""
    _edit_config(step)
    found = digest_file(step / "model" / "config.json")
    row = [found.size_bytes, list(found.block_digests)]
    rewrite_table(step, lambda table: table["files"].update({"model/config.json": row}))


def _wrong_table(step: Path) -> None:
    key = "exp_avg/layers.0.mlp.up.weight"
    rewrite_table(step, lambda table: table["tensors"][key]["boxes"].pop(), _table_of(step, key))


def _wrong_entry(step: Path) -> None:
    def change(table: dict[str, Any]) -> None:
        for box in table["tensors"]["model/embedding.weight"]["boxes"]:
            box[1] = "wte"

    rewrite_table(step, change)


def _wrong_dtype(step: Path) -> None:
    def change(table: dict[str, Any]) -> None:
        for key in (key for key in table["tensors"] if key.startswith("mod")):
            table["tensors"][key]["dtype"] = "F16"

    rewrite_table(step, change)


def _foreign_file(step: Path) -> None:
    """A table that would have other files of the machine read."""
    rewrite_table(step, lambda table: table["files"].update({"model/../../../x": [1, ["00000000"]]}))


def _unlike_tables(step: Path) -> None:
    """Two ranks that do not agree about the shape of a tensor."""
    key = "exp_avg/layers.0.mlp.up.weight"
    rewrite_table(step, lambda table: table["tensors"][key].update(shape=[16, 9]), _table_of(step, key))


DAMAGE = {
    "flipped bit in the state": (_flip(STATE), STATE, "digest differs in bytes 0 to", "its digest differs"),
    "flipped bit in the weights": (
        _flip(WEIGHTS),
        WEIGHTS,
        "digest differs in bytes 0 to",
        None,
    ),  # master weights are read
    "truncated shard": (_truncate, STATE, "bytes where", "bytes where"),
    "missing file": (lambda step: (step / STATE).unlink(), STATE, "is missing", "is missing"),
    "missing document": (
        lambda step: (step / "model/config.json").unlink(),
        "model/config.json",
        "is missing",
        "is missing",
    ),
    "extra file": (
        lambda step: (step / "model/extra.safetensors").write_bytes(b""),
        "model/extra.safetensors",
        "the manifest does not name it. Move it elsewhere",
        None,
    ),
    "manifest edited": (_edit_manifest, "manifest.json", "does not match its own digest", "its own digest"),
    "manifest cut": (_break_manifest, "manifest.json", "is damaged", "is damaged"),
    "unknown version": (_other_version, "manifest.json", "Use the version of Petatron that saved it", "version 99"),
    "config edited": (_edit_config, "model/config.json", "digest differs", None),
    "wrong config": (_wrong_config, "model/config.json", "num_attention_heads is 2 there and 4 in the manifest", None),
    "a tensor not described": (_wrong_table, "manifest.json", "does not describe all of exp_avg", "does not describe"),
    "an entry that is not there": (_wrong_entry, WEIGHTS, "lacks wte", None),
    "another dtype": (_wrong_dtype, WEIGHTS, "in BF16 where F16 was saved", None),
    "a path that leads out": (_foreign_file, TABLE, "not one of the checkpoint's files", "names the file"),
    "flipped bit in a table": (_flip(TABLE), TABLE, "its digest differs", "its digest differs"),
    "missing table": (lambda step: (step / TABLE).unlink(), TABLE, "is missing", "is missing"),
    "tables at odds": (_unlike_tables, "manifest.json", "names tables that do not", "names tables that do not"),
}


@diagonal(2)
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_error_with_file_and_remedy(
    name: str, folder: Path, state: TrainState, capsys: pytest.CaptureFixture[str]
):
    change, file, words, at_load = DAMAGE[name]
    change(folder / NEWEST)
    code, out, _ = _ask(capsys, "verify", folder)
    lines = out.splitlines()
    assert code == 1 and lines[0].endswith("BROKEN"), out
    assert len(lines) == 3, "one finding between verdict and advice"
    assert str(folder / NEWEST / file) in lines[1] and words in lines[1]
    assert any(remedy in lines[1] for remedy in ("Restore it from a copy", "Move it elsewhere", "Use the version"))
    assert lines[2] == f"The newest good step is 6: --load {folder} --ckpt-step 6"
    if at_load is None:  # a load does not read that file, or does not need to believe it
        with heard("petatron.checkpoint.inspect.check_model_folder") as warnings:
            assert state.load(str(folder))
        assert len(warnings) == (words.startswith("digest differs"))
        goes_on = f"Training goes on from the master weights in {folder / NEWEST / 'state'}, which are sound"
        assert all(str(folder / NEWEST / file) in text and goes_on in text for text in warnings)
        return
    with pytest.raises(CheckpointError, match=at_load) as failure:
        state.load(str(folder))
    assert file in str(failure.value)
    advice = f"take another step with --ckpt-step (there are: 3, 6; the newest of them is {folder / 'step-00000006'})"
    assert advice in str(failure.value) or "Use the version" in str(failure.value)


def test_a_run_in_float32_warns_of_the_damaged_copy_too(folder: Path):
    """It reads the master weights like a run in 16 bits."""
    _flip(WEIGHTS)(folder / NEWEST)
    run = load_config(f"{MODEL} {RUN} --no-fp16".split(), preset="tiny-gpt").config
    with heard("petatron.checkpoint.inspect.check_model_folder") as warnings:
        assert TrainState.build(run, ParallelMesh.single()).load(str(folder))
    assert len(warnings) == 1 and "digest differs" in warnings[0] and WEIGHTS in warnings[0]


def test_advice_names_the_flag_of_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _flip(WEIGHTS)(folder / NEWEST)
    code, _, err = _ask(capsys, "convert", folder, tmp_path / "out", "--to", "huggingface")
    assert code == 1 and "Restore it from a copy, or take another step with --step (there are: 3, 6; " in err
    assert _ask(capsys, "convert", folder, tmp_path / "out", "--to", "huggingface", "--step", 6)[0] == 0


def test_a_run_of_another_model_is_refused(folder: Path):
    run = load_config(f"{MODEL} {RUN} --num-attention-heads 2 --kv-channels 4".split(), preset="tiny-gpt").config
    with pytest.raises(CheckpointError, match=r"another model.*num_attention_heads: 4 then, 2 now.*--finetune"):
        TrainState.build(run, ParallelMesh.single()).load(str(folder))


def test_verify_of_sound_steps(folder: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = _ask(capsys, "verify", folder, "--all")
    assert code == 0 and out.count("good: 11 files") == 3
    code, out, _ = _ask(capsys, "verify", folder, "--step", 6, "--json")
    assert code == 0 and json.loads(out)["sound"] and "step-00000006" in json.loads(out)["checkpoints"][0]["checkpoint"]
    assert json.loads(out)["newest_good"] == str(folder / NEWEST), "of the folder, whichever was asked for"
    assert _ask(capsys, "verify", folder / NEWEST)[0] == 0


def test_verify_names_everything_and_the_newest_good_step(folder: Path, capsys: pytest.CaptureFixture[str]):
    _flip(STATE)(folder / NEWEST)
    _flip(WEIGHTS)(folder / NEWEST)
    _truncate(folder / "step-00000006")
    code, out, _ = _ask(capsys, "verify", folder, "--json")
    found = json.loads(out)
    assert code == 1 and len(found["checkpoints"]) == 1
    files = {Path(finding["file"]).name for finding in found["checkpoints"][0]["findings"]}
    assert files == {Path(STATE).name, Path(WEIGHTS).name}
    assert found["newest_good"] == str(folder / "step-00000003")
    shutil.rmtree(folder / "step-00000003")
    code, out, _ = _ask(capsys, "verify", folder, "--all")
    assert code == 1 and out.count("BROKEN") == 2 and "No step of this folder is good." in out


def test_verify_sees_a_step_without_manifest(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / NEWEST / "manifest.json").unlink()
    code, out, _ = _ask(capsys, "verify", folder)
    assert code == 1 and f"{folder / NEWEST / 'manifest.json'} cannot be read" in out and "newest good step is 6" in out
    for step in ("step-00000003", "step-00000006"):
        (folder / step / "manifest.json").unlink()
    code, out, _ = _ask(capsys, "verify", folder)
    assert code == 1 and out.count("BROKEN") == 3


def test_verify_sees_a_manifest_of_another_step(folder: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copy(folder / "step-00000006/manifest.json", folder / NEWEST)
    code, out, _ = _ask(capsys, "verify", folder)
    assert code == 1 and "manifest.json is that of step 6" in out


def test_every_block_of_a_large_file_is_read(tmp_path: Path):
    manager = CheckpointManager(tmp_path, ParallelMesh.single().world)
    values = torch.arange(5 * (BLOCK_BYTES // 8) + 3, dtype=torch.float64)
    manager.save(1, [Chunk("model/w", (len(values),), (0,), values)], metadata={}, same_layout_key="")
    step, told = tmp_path / "step-00000001", []
    assert verify_checkpoint(step, lambda done, total: told.append((done, total))).is_valid
    assert told[-1][0] == told[-1][1] and len(told) == 7, "six blocks and the table"
    content = bytearray((step / STATE).read_bytes())
    for block in (1, 4):
        content[block * BLOCK_BYTES + 5] ^= 4
    (step / STATE).write_bytes(content)
    [finding] = verify_checkpoint(step).findings
    assert f"bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES} and 1 more blocks of 6" in finding.text
    assert verify_checkpoint(step, read_content=False).is_valid


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("inspect {}/none", "is not a folder"),
        ("inspect {}", "holds no checkpoint"),
        ("inspect {}/run --step 4", "no complete checkpoint of step 4; it has: 3, 6, 9"),
        ("verify {}/run/step-00000003 --step 3", "Leave out --step"),
        ("inspect {}/run/step-00000003/model", "is a part of a checkpoint. Give"),
        ("inspect {}/model", "convert"),
        ("prune {}/run/step-00000003 --keep 1", "is one checkpoint. Give"),
    ],
)
def test_a_path_beside_the_mark(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, says: str
):
    shutil.copytree(folder / NEWEST / "model", tmp_path / "model")
    code, _, err = _ask(capsys, *words.format(tmp_path).split())
    assert code == 1 and says in err


def test_inspect_says_what_there_is(folder: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = _ask(capsys, "inspect", folder, "--step", 6)
    assert code == 0
    for words in (
        "step              6",
        "time of files     2",
        "tp 2, dp 2, optim sharded, 4 ranks",
        "consumed samples  12",
        "model.num_layers",
    ):
        assert words in out
    assert "exp_avg_sq/" in out and "layers.0.mlp.up.weight" not in out
    code, out, _ = _ask(capsys, "inspect", folder, "--tensors")
    assert "exp_avg/layers.0.mlp.up.weight" in out and "[16, 8]" in out
    code, out, _ = _ask(capsys, "inspect", folder, "--json")
    found = json.loads(out)
    assert (found["step"], found["config"]["model"]["hidden_size"], found["progress"]["iteration"]) == (9, 8, 9)
    assert {"name": "model/embedding.weight", "shape": [32, 8], "dtype": "BF16", "bytes": 512} in found["tensors"]


def _save_whole(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The tensors in one piece each, by a program that is no training run."""
    chunks = [Chunk(key, tuple(value.shape), (0,) * value.dim(), value) for key, value in tensors.items()]
    CheckpointManager(folder, ParallelMesh.single().world).save(STEP, chunks, metadata={}, same_layout_key="mine")
    return folder / step_folder.step_name(STEP)


def test_a_checkpoint_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    step = _save_whole(tmp_path, {"model/w": torch.ones(3)})
    assert _ask(capsys, "verify", step)[0] == 0
    code, out, _ = _ask(capsys, "inspect", step)
    assert code == 0 and "mine" in out and "configuration" not in out


def test_diff_across_layouts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr(diff_checkpoints, "_BATCH_ELEMENTS", 400)  # so that tensors are cut anywhere
    tensors = read_checkpoint(folder / NEWEST)
    whole = _save_whole(tmp_path / "whole", tensors)
    code, out, _ = _ask(capsys, "diff", folder, whole)
    assert code == 0 and f"{len(tensors)} of {len(tensors)} tensors are equal" in out and "only in" not in out
    tensors["exp_avg/layers.1.mlp.down.weight"][3, 5] += 1.0
    tensors["model/layers.0.attention.q.weight"][1, 1] = float("nan")
    tensors["router/extra"] = torch.ones(2)
    del tensors["exp_avg_sq/embedding.weight"]
    tensors["model/position.weight"] = torch.ones(3, 3)
    changed = _save_whole(tmp_path / "changed", tensors)
    code, out, _ = _ask(capsys, "diff", folder, changed, "--json")
    found = json.loads(out)
    assert code == 1 and found["only_second"][0] == "router/extra"
    assert "exp_avg_sq/embedding.weight" in found["only_first"]
    first, second, third = found["tensors"][:3]
    assert (first["key"], first["differing"]) == ("model/layers.0.attention.q.weight", 1)
    assert first["relative"] is None, "JSON has no infinity"
    assert (second["key"], second["differing"]) == ("exp_avg/layers.1.mlp.down.weight", 1)
    assert second["largest"] == pytest.approx(1.0) and third["relative"] == 0
    code, out, _ = _ask(capsys, "diff", folder, changed, "--top", 1)
    assert code == 1 and "only in B: router/extra" in out and "and 1 more; --top 2 lists all" in out
    num_weights = sum(key.startswith("model/") for key in tensors) - 1  # without the one of another shape
    assert f"\nweights: {num_weights - 1} of {num_weights} equal; " in out and "exp_avg: " in out
    assert "exp_avg/layers.1.mlp.down.weight" not in out


def test_diff_bounds_settings_and_shapes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tensors = read_checkpoint(folder / NEWEST)
    tensors["master/embedding.weight"] *= 1 + 1e-4
    near = _save_whole(tmp_path / "near", tensors)
    assert _ask(capsys, "diff", folder, near)[0] == 1
    code, out, _ = _ask(capsys, "diff", folder, near, "--rtol", 1e-3)
    assert code == 0 and "are equal within 0.001" in out and "progress.iteration" in out
    tensors["master/embedding.weight"] = torch.ones(3)
    tensors["exp_avg/embedding.weight"] = torch.ones(32, 8, dtype=torch.int64)
    code, out, _ = _ask(capsys, "diff", _save_whole(tmp_path / "unlike", tensors), folder)
    assert code == 1 and "master/embedding.weight is [3] in the first and [32, 8] in the second" in out
    assert "exp_avg/embedding.weight is I64 in the first and F32 in the second" in out
    assert _ask(capsys, "diff", folder, folder, "--rtol", -1)[0] == 2


def test_diff_of_two_precisions_compares_the_wider_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    values = torch.randn(40, 3)
    low = _save_whole(tmp_path / "low", {"model/w": values.bfloat16(), "master/w": values})
    full = _save_whole(tmp_path / "full", {"model/w": values})
    for pair in ((low, full), (full, low)):
        code, out, _ = _ask(capsys, "diff", *pair, "--json")
        found = {(t["key"], t["second_key"]): t["relative"] for t in json.loads(out)["tensors"]}
        assert code == 1 and 0.0 in found.values() and found["model/w", "model/w"] > 1e-4
        assert not json.loads(out)["only_first"] and not json.loads(out)["only_second"]


def test_diff_of_a_damaged_checkpoint_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]):
    _flip(STATE)(folder / NEWEST)
    code, _, err = _ask(capsys, "diff", folder / "step-00000006", folder / NEWEST)
    assert code == 1 and STATE in err and "digest differs" in err
    _wrong_table(folder / "step-00000006")
    code, _, err = _ask(capsys, "diff", folder / "step-00000006", folder / "step-00000003")
    assert code == 1 and "does not describe all of" in err


def test_prune(folder: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = _ask(capsys, "prune", folder, "--keep", 1, "--dry-run")
    assert (
        code == 0
        and "would remove 3, 6 (" in out
        and "would keep 9" in out
        and len(step_folder.list_steps(folder)) == 3
    )
    code, out, _ = _ask(capsys, "prune", folder, "--keep", 1, "--retain-interval", 6)
    assert code == 0 and "removed 3 (" in out and list(step_folder.list_steps(folder)) == [6, 9]
    code, out, _ = _ask(capsys, "prune", folder, "--keep", 5)
    assert code == 0 and "nothing to remove" in out
    assert _ask(capsys, "verify", folder, "--all")[0] == 0


def test_prune_refuses(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert _ask(capsys, "prune", folder, "--keep", 0)[0] == 2
    assert _ask(capsys, "prune", folder, "--keep", 1, "--retain-interval", 0)[0] == 2
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, _, err = _ask(capsys, "prune", folder, "--keep", 1)
    assert code == 1 and "Another run is writing" in err
    _truncate(folder / NEWEST)
    code, _, err = _ask(capsys, "prune", folder, "--keep", 1)
    assert code == 1 and "Nothing was removed" in err and STATE in err and len(step_folder.list_steps(folder)) == 3


def test_prune_of_a_folder_that_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fail(self: Disk, old: Path, new: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Disk, "rename", fail)
    code, _, err = _ask(capsys, "prune", folder, "--keep", 1)
    assert code == 1 and f"{folder} cannot be pruned: Read-only file system. Make it writable" in err
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()  # cannot be opened for writing, by anyone
    code, _, err = _ask(capsys, "prune", folder, "--keep", 1)
    assert code == 1 and f"{folder / '.lock'} cannot be opened" in err and "Is a directory. Remove it" in err
    assert len(step_folder.list_steps(folder)) == 3


def test_help_needs_no_torch():
    program = """
import sys
from petatron.cli.main import main
for subcommand in ([], ["inspect"], ["verify"], ["diff"], ["prune"], ["convert"]):
    try:
        main(["checkpoint", *subcommand, "--help"])
    except SystemExit as error:
        assert error.code == 0, subcommand
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
