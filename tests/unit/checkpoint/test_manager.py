"""Saving and loading in one process: contents, layouts, and every way a checkpoint can be unfit."""

import itertools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.digested_file_io import check_writable
from petatron.checkpoint.files.step_folder import DamagedCheckpointError
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.mesh import ParallelMesh
from tests.unit.checkpoint.rewriting import rewrite_manifest, rewrite_table

STEP = "step-00000010"
FILE = "state/rank-00000.safetensors"


@pytest.fixture
def manager(tmp_path) -> CheckpointManager:
    return CheckpointManager(tmp_path / "save", ParallelMesh.single().world)


def whole(key: str, tensor: Tensor, *, primary: bool = True) -> Chunk:
    return Chunk(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor, primary)


def columns(key: str, tensor: Tensor, *cuts: int) -> list[Chunk]:
    """A matrix as chunks cut between columns; the chunks are views."""
    edges = [0, *cuts, tensor.shape[1]]
    shape = tuple(tensor.shape)
    return [Chunk(key, shape, (0, a), tensor[:, a:b]) for a, b in itertools.pairwise(edges)]


def rows(key: str, tensor: Tensor, *cuts: int) -> list[Chunk]:
    edges = [0, *cuts, tensor.shape[0]]
    shape = tuple(tensor.shape)
    return [Chunk(key, shape, (a, *(0,) * (tensor.dim() - 1)), tensor[a:b]) for a, b in itertools.pairwise(edges)]


def save(manager: CheckpointManager, chunks: list[Chunk], step: int = 10, **more) -> None:
    manager.save(step, chunks, **{"metadata": {}, "same_layout_key": "tp1", **more})


@pytest.fixture
def saved(manager):
    """A small checkpoint, and zeroed memory to load it into."""
    save(manager, [whole("model/w", torch.arange(12.0).reshape(3, 4)), whole("exp_avg/w", torch.ones(3, 4))])
    return torch.zeros(3, 4)


def change_manifest(manager: CheckpointManager, change) -> None:
    rewrite_manifest(manager._folder / STEP, change)


def change_table(manager: CheckpointManager, change) -> None:
    rewrite_table(manager._folder / STEP, change)


def test_every_dtype_and_shape_comes_back_bitwise(manager):
    torch.manual_seed(0)
    tensors = {
        "model/matrix": torch.randn(5, 7),
        "model/scalar": torch.tensor(3.5),
        "model/half": torch.randn(3).half(),
        "model/brain": torch.randn(2, 3, 4).bfloat16(),
        "model/double": torch.randn(3, dtype=torch.float64),
        "model/tiny": torch.randn(5).to(torch.float8_e4m3fn),
        "model/flags": torch.tensor([True, False, True]),
        "model/counts": torch.tensor([1, -(2**40)]),
        "model/bytes": torch.arange(11, dtype=torch.uint8),
        "model/nothing": torch.zeros(0, 4),
    }
    save(manager, [whole(key, tensor) for key, tensor in tensors.items()])
    loaded = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    manager.load(10, [whole(key, tensor) for key, tensor in loaded.items()])
    for key, tensor in tensors.items():
        left, right = loaded[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        assert torch.equal(left, right), key


def test_every_tensor_is_aligned_to_its_element_size(manager, tmp_path):
    dtypes = [torch.uint8, torch.float16, torch.float64, torch.bool, torch.float32]
    save(manager, [whole(f"model/{n}", torch.ones(3, dtype=dtype)) for n, dtype in enumerate(dtypes)])
    content = (tmp_path / "save" / STEP / FILE).read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    for n, dtype in enumerate(dtypes):
        assert (8 + header_bytes + header[f"model/{n}@0"]["data_offsets"][0]) % dtype.itemsize == 0


def test_files_are_plain_safetensors(manager, saved, tmp_path):
    content = load_file(tmp_path / "save" / STEP / FILE)
    assert torch.equal(content["model/w@0,0"], torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize(("save_as", "load_as"), [(columns, rows), (rows, columns), (rows, rows)])
def test_any_cut_loads_into_any_other(manager, save_as, load_as):
    source = torch.arange(70.0).reshape(7, 10)
    save(manager, save_as("model/w", source, 2, 3, 6))
    target = torch.zeros(7, 10)
    manager.load(None, load_as("model/w", target, 1, 5))
    assert torch.equal(target, source)


def test_strided_memory_and_part_of_a_tensor(manager):
    buffer = torch.arange(48.0).reshape(6, 8)
    save(manager, [whole("model/w", buffer.t()[::2])])
    parameter = torch.nn.Parameter(torch.zeros(9, 9))
    view = parameter[1:3, 2:8].t()  # rows 1..6 of the first 4, as a transposed view of a leaf that needs gradients
    manager.load(
        10, [Chunk("model/w", (4, 6), (1, 0), parameter[1:7, 2:4].t()), Chunk("model/w", (4, 6), (0, 4), view[:4])]
    )
    expected = torch.zeros(9, 9)
    expected[1:7, 2:4] = buffer.t()[::2][1:3].t()
    expected[1:3, 2:6] = buffer.t()[::2][:, 4:].t()
    assert torch.equal(parameter.detach(), expected)


def test_floating_dtypes_are_converted(manager, saved):
    target = torch.zeros(3, 4, dtype=torch.bfloat16)
    manager.load(10, [whole("model/w", target)])
    assert torch.equal(target, torch.arange(12.0).reshape(3, 4).bfloat16())


def test_facts_and_local_tensors(manager):
    facts = {"iteration": 10, "lr": 0.1 + 0.2, "scaler": {"value": 2.0**32}, "names": ["a", "b"]}
    states = {"cpu": torch.get_rng_state()}
    save(manager, [], metadata=facts, local=states, same_layout_key="tp2-dp1")
    same = manager.load(10, [], same_layout_key="tp2-dp1")
    assert (same.step, same.metadata) == (10, facts)
    assert same.local is not None and torch.equal(same.local["cpu"], states["cpu"])
    assert manager.load(10, [], same_layout_key="tp1-dp2").local is None
    assert manager.load(10, []).local is None


def test_replicas_are_loaded_but_not_saved(manager, tmp_path):
    first, second = torch.ones(3), torch.ones(3)
    save(manager, [whole("model/w", first), whole("model/w", second, primary=False)])
    assert len(load_file(tmp_path / "save" / STEP / FILE)) == 1
    first.zero_(), second.zero_()
    manager.load(10, [whole("model/w", first), whole("model/w", second, primary=False)])
    assert first.sum() == second.sum() == 3


def test_latest_follows_the_newest_save_and_can_be_moved_by_hand(manager, tmp_path):
    assert manager.latest() is None
    for step, value in ((5, 5.0), (123456789, 9.0), (7, 7.0)):
        save(manager, [whole("model/w", torch.full((2,), value))], step=step)
        assert manager.latest() == step
    latest = tmp_path / "save" / "latest"
    latest.write_text("step-00000005")
    target = torch.zeros(2)
    assert manager.load(None, [whole("model/w", target)]).step == 5 and target[0] == 5
    for nonsense in ("step-00000006", "", "../../etc"):
        latest.write_text(nonsense)
        assert manager.latest() == 123456789
    latest.write_bytes(b"\xff\xfe")
    assert manager.latest() == 123456789


def test_saving_a_step_again_replaces_it(manager, tmp_path):
    for value in (1.0, 2.0):
        save(manager, [whole("model/w", torch.full((2,), value))])
    target = torch.zeros(2)
    manager.load(10, [whole("model/w", target)])
    assert target[0] == 2.0
    assert sorted(path.name for path in (tmp_path / "save").iterdir()) == ["latest", STEP]


def test_weights_alone_can_be_loaded(manager, saved):
    manager.load(10, [whole("model/w", saved)])
    assert saved.sum() == 66


# Unfit checkpoints


def test_no_checkpoint(manager, tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.*--load"):
        manager.load(None, [])


def test_no_such_step(manager, saved):
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 11; it has: 10\. Choose one of these"):
        manager.load(11, [])


def test_missing_key(manager, saved):
    with pytest.raises(
        CheckpointError, match=r"(?s)step-00000010 does not fit.*model/v is not in the checkpoint.*Use the"
    ):
        manager.load(10, [whole("model/w", saved), whole("model/v", torch.zeros(2))])
    assert saved.sum() == 0, "a load that is refused must not change anything"


def test_missing_key_in_a_lenient_load(manager, saved):
    other = torch.full((2,), 4.0)
    result = manager.load(10, [whole("model/w", saved), whole("model/v", other)], strict=False)
    assert result.missing_keys == ("model/v",) and saved.sum() == 66 and other[0] == 4.0


def test_surplus_key_of_a_kind_that_is_loaded(manager):
    save(manager, [whole("model/layers.0", torch.ones(2)), whole("model/layers.1", torch.ones(2))])
    with pytest.raises(CheckpointError, match=r"model/layers\.1 is in the checkpoint, but not in this run"):
        manager.load(10, [whole("model/layers.0", torch.zeros(2))])
    assert manager.load(10, [whole("model/layers.0", torch.zeros(2))], strict=False).missing_keys == ()


def test_wrong_shape(manager, saved):
    with pytest.raises(CheckpointError, match=r"model/w has shape \[3, 4\] there and \[3, 5\] in this run"):
        manager.load(10, [whole("model/w", torch.zeros(3, 5))])


def test_wrong_kind_of_dtype(manager, saved):
    with pytest.raises(CheckpointError, match=r"model/w holds F32 there and torch\.int64 in this run"):
        manager.load(10, [whole("model/w", torch.zeros(3, 4, dtype=torch.int64))])


def test_many_problems_are_summed_up(manager, saved):
    chunks = [whole(f"model/v{n}", torch.zeros(2)) for n in range(9)]
    with pytest.raises(CheckpointError, match="and 5 more"):  # 9 missing, 1 surplus, 5 shown
        manager.load(10, chunks)


def test_truncated_file(manager, saved, tmp_path):
    path = tmp_path / "save" / STEP / FILE
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=rf"{FILE} has \d+ bytes where \d+ were saved.*Restore"):
        manager.load(10, [whole("model/w", saved)])


def test_missing_file_names_other_steps(manager, saved, tmp_path):
    save(manager, [whole("model/w", torch.ones(3, 4))], step=20)
    (tmp_path / "save" / STEP / FILE).unlink()
    other = rf"{tmp_path}/save/step-00000020"
    with pytest.raises(
        CheckpointError, match=rf"{FILE} is missing.*step \(there are: 20; the newest of them is {other}\)"
    ):
        manager.load(10, [whole("model/w", saved)])


def test_flipped_bit(manager, saved, tmp_path):
    path = tmp_path / "save" / STEP / FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{FILE} does not have the content that was saved"):
        manager.load(10, [whole("model/w", saved)])


def test_fallback_takes_the_newest_sound_step(manager, saved, tmp_path, caplog):
    for step in (20, 30):
        save(manager, [whole("model/w", torch.full((3, 4), float(step)))], step=step)
        path = tmp_path / "save" / f"step-{step:08d}" / FILE
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="step-00000030"):
        manager.load(None, [whole("model/w", saved)])
    assert manager.load(None, [whole("model/w", saved)], fallback=True).step == 10
    assert saved.sum() == 66
    assert "Falling back to step 20" in caplog.text and "Falling back to step 10" in caplog.text
    (tmp_path / "save" / STEP / FILE).unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{STEP}.*is missing"):
        manager.load(None, [whole("model/w", saved)], fallback=True)


@pytest.mark.parametrize("layout", [None, "tp1"])
def test_unreadable_header(manager, tmp_path, layout):
    weight = torch.ones(3)
    save(manager, [whole("model/w", weight)], local={"cpu": torch.zeros(4, dtype=torch.uint8)})
    path = tmp_path / "save" / STEP / FILE
    content = bytearray(path.read_bytes())
    content[8:12] = b"\0\0\0\0"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{FILE} is damaged"):
        manager.load(10, [] if layout else [whole("model/w", weight)], strict=False, same_layout_key=layout)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "other"}', b"\xff\xff"])
def test_corrupt_manifest(manager, saved, tmp_path, content):
    (tmp_path / "save" / STEP / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: .*Restore"):
        manager.load(10, [whole("model/w", saved)])


def test_changed_manifest(manager, saved, tmp_path):
    path = tmp_path / "save" / STEP / "manifest.json"
    path.write_text(path.read_text().replace('"step": 10', '"step": 11'))
    with pytest.raises(CheckpointError, match="does not match its own digest"):
        manager.load(10, [])


def test_unreadable_manifest(manager, saved, tmp_path, monkeypatch):
    def refuse(path, most_bytes):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("petatron.checkpoint.files.step_folder.read_limited_bytes", refuse)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: Permission denied"):
        manager.load(10, [])


@pytest.mark.parametrize("field", ["step", "tables"])
def test_manifest_without_a_field(manager, saved, field):
    change_manifest(manager, lambda body: body.pop(field))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: it lacks or misstates its "):
        manager.load(10, [whole("model/w", saved)])


@pytest.mark.parametrize("field", ["tensors", "files", "local"])
def test_table_without_a_field(manager, saved, field):
    change_table(manager, lambda body: body.pop(field))
    with pytest.raises(CheckpointError, match=r"rank-00000\.table\.json is damaged: it lacks or misstates its "):
        manager.load(10, [whole("model/w", saved)])


def test_unknown_version(manager, saved):
    change_manifest(manager, lambda body: body.update(version=99))
    with pytest.raises(CheckpointError, match=r"format version 99; this version of Petatron reads 2 to 4\. Use"):
        manager.load(10, [])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes where"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"F32", b"F16")), "its digest differs"),
    ],
)
def test_a_table_that_is_not_what_was_saved(manager, saved, tmp_path, change, why):
    change(tmp_path / "save" / STEP / "state" / "rank-00000.table.json")
    with pytest.raises(DamagedCheckpointError, match=rf"rank-00000\.table\.json .*{why}"):
        manager.load(10, [whole("model/w", saved)])


def test_a_table_that_is_no_table(manager, saved):
    change_table(manager, lambda body: body.update(format="petatron checkpoint"))
    with pytest.raises(DamagedCheckpointError, match="it is not a table of a Petatron checkpoint"):
        manager.load(10, [whole("model/w", saved)])


def test_a_manifest_that_names_a_table_elsewhere(manager, saved):
    change_manifest(manager, lambda body: body["tables"].update({"../x.table.json": [1, "0" * 64]}))
    with pytest.raises(DamagedCheckpointError, match=r"names the file '\.\./x\.table\.json', which is not one of"):
        manager.load(10, [whole("model/w", saved)])


def test_incomplete_tensor(manager):
    save(manager, rows("model/w", torch.ones(4, 2), 1))
    change_table(manager, lambda body: body["tensors"]["model/w"]["boxes"].pop())
    with pytest.raises(CheckpointError, match=r"does not describe all of model/w: 6 of 8 elements are missing"):
        manager.load(10, [whole("model/w", torch.zeros(4, 2))])


@pytest.mark.parametrize("name", ["other.safetensors", "../escape.safetensors"])
def test_table_that_names_a_strange_file(manager, saved, name):
    change_table(manager, lambda body: body["local"].update({"local/0/x": name}))
    with pytest.raises(CheckpointError, match="not one of the checkpoint's files"):
        manager.load(10, [])
    change_table(manager, lambda body: (body["local"].clear(), body["files"].update({"a/b": [1, ["00000000"]]})))
    with pytest.raises(CheckpointError, match="'a/b', which is not one of"):
        manager.load(10, [])


def test_unexpected_failure_while_reading_is_a_checkpoint_error(manager, saved, monkeypatch):
    def explode(*_):
        raise RuntimeError("surprise")

    monkeypatch.setattr("petatron.checkpoint.load.reshard_reads.execute_reads", explode)
    with pytest.raises(CheckpointError, match="could not be read: RuntimeError: surprise"):
        manager.load(10, [whole("model/w", saved)])


# Saves that must be refused


def test_chunks_that_do_not_tile(manager, saved):
    for chunks, why in (
        (rows("model/w", torch.ones(4, 2), 1)[:1], "6 of 8 elements are missing"),
        ([whole("model/w", torch.ones(4))] * 2, "is there twice"),
    ):
        with pytest.raises(
            CheckpointError, match=rf"model/w are not the whole tensor: .*{why}.*primary on exactly one"
        ):
            save(manager, chunks, step=11)
    assert manager.latest() == 10


def test_chunks_that_disagree(manager):
    with pytest.raises(CheckpointError, match="the same logical shape and dtype"):
        save(manager, [whole("model/w", torch.ones(4)), whole("model/w", torch.ones(4).half())])
    assert manager.latest() is None


def test_dtype_without_a_code(manager):
    for chunks, local in (
        ([whole("model/w", torch.ones(4, dtype=torch.complex64))], {}),
        ([], {"x": torch.ones(1) * 1j}),
    ):
        with pytest.raises(CheckpointError, match=r"torch\.complex64, which a checkpoint cannot hold"):
            save(manager, chunks, local=local)


def test_facts_that_are_not_json(manager, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"step 10 could not be saved.*TypeError.*earlier checkpoints are untouched"
    ):
        save(manager, [], metadata={"bad": object()})
    assert not (tmp_path / "save").exists(), "nothing was begun"


def test_chunk_outside_its_tensor():
    with pytest.raises(AssertionError, match="is not inside"):
        Chunk("model/w", (4,), (2,), torch.zeros(3))


# The folder


def test_check_writable(tmp_path, monkeypatch):
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*file.*--save"):
        check_writable(tmp_path / "file" / "below")

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        check_writable(tmp_path)


def test_folder_that_vanished_is_made_again(manager, saved, tmp_path):
    shutil.rmtree(tmp_path / "save")
    assert manager.latest() is None
    save(manager, [])
    assert manager.latest() == 10
