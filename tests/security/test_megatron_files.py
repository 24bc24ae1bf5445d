"""Megatron checkpoints made by others: pickles that take memory or time, tables that claim what is not there, trackers, pipes."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from petatron.base.errors import CheckpointError, ConfigError, PetatronError
from petatron.checkpoint.megatron import open_megatron
from petatron.checkpoint.megatron.pickle_interpreter import InertObject, PickleError, read_pickle
from petatron.checkpoint.megatron.read_megatron_pickles import load_dist_metadata, load_tensor_blob, load_torch_file
from tests.longform import diagonal
from tests.security.limits import limited
from tests.unit.checkpoint.megatron.megatron_files import WIDTH, Case, DistFile, write_dist, write_legacy

LLAMA = Case()
EMBEDDING = "embedding.word_embeddings.weight"


def assert_refused(folder: Path, *words: str, kind: type[Exception] = CheckpointError) -> None:
    with limited(), pytest.raises(kind) as caught:
        for lazy in open_megatron(folder).tensors.values():
            lazy.load()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


# ---- Pickles

TWO = b"\x80\x02"
NESTED = TWO + b")" + b"\x85" * 300_000  # a tuple in a tuple in a tuple ...
DOUBLING = TWO + b")" + b"q\x00h\x00\x86" * 60  # 2 ** 60 of them for whoever looks into each
AS_KEY = b"}q\x01"
ATTACKS: dict[str, bytes] = {
    "a memo of four billion places": TWO + b"Nr\xff\xff\xff\xff.",
    "a memo of half a billion places": TWO + b"N" + b"r\x00\x00\x00\x20" + b".",
    "a nested tuple": NESTED + b".",
    "a nested tuple as a key": TWO + b"}" + NESTED[2:] + b"Ns.",
    "a doubling tuple as a key": TWO + b"}" + DOUBLING[2:] + b"Ns.",
    "a doubling tuple in a set": TWO + b"\x8f(" + DOUBLING[2:] + b"\x90.",
    "a doubling tuple in a frozenset": TWO + b"(" + DOUBLING[2:] + b"\x91.",
    "half a million lists": TWO + b"]" * 500_000 + b".",
    "half a million marks": TWO + b"(" * 500_000 + b"t.",
    "a text of an exabyte": TWO + b"\x8d" + struct.pack("<Q", 1 << 60) + b".",
    "bytes of an exabyte": TWO + b"\x8e" + struct.pack("<Q", 1 << 60) + b".",
    "a bytearray of an exabyte": TWO + b"\x96" + struct.pack("<Q", 1 << 60) + b".",
    "a bytearray by a call": TWO + b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "a huge number": TWO + b"\x8b" + struct.pack("<i", 1 << 24) + b"\xff" * (1 << 24) + b".",
    "a decimal number": TWO + b"I" + b"9" * 1_000_000 + b"\n.",
    "a frame of an exabyte": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "shared arguments": TWO + b"(" + b"N" * 100_000 + b"tq\x00ccollections\nOrderedDict\nq\x01" + b"h\x01h\x00R0" * 1000 + b"N.",
    "a shared state": TWO + b"}(" + b"".join(b"X\x04\0\0\0" + b"%04d" % n + b"N" for n in range(9999)) + b"uq\x00"
    + b"cargparse\nNamespace\n)\x81q\x01" + b"h\x00b" * 200_000 + b".",
    "colliding keys": TWO + b"}(" + b"".join(b"\x8a\x11" + ((n * ((1 << 61) - 1)) << 4).to_bytes(17, "little") + b"N"
                                              for n in range(1, 60_000)) + b"u.",
    "colliding tuples": TWO + b"}(" + b"".join(b"(K\x01K\x02tN" for _ in range(10)) + b"u.",
    "nothing on the stack": TWO + b"\x86.",
    "below the mark": TWO + b"N(\x86.",
    "a memo that is empty": TWO + b"h\x07.",
    "an extension": TWO + b"\x82\x01.",
    "an instance": TWO + b"(ios\nsystem\n.",
    "an object": TWO + b"(cos\nsystem\no.",
    "a persistent name": TWO + b"Px\n.",
    "a persistent object": TWO + b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x007X\x03\0\0\0cpuK\x04tQ.",
    "a name without an end": TWO + b"c" + b"x" * 1_000_000 + b".",
    "a name of numbers": b"\x80\x04K\x01K\x02\x93.",
    "items of an object": TWO + b"cmegatron.core\nThing\n)\x81q\x00(" + b"h\x00" * 200_000 + b"e(" + b"h\x00" * 200_000 + b"u.",
    "items of a list": TWO + b"]NNs.",
    "appended to a dictionary": TWO + b"}Na.",
    "half an item": TWO + b"}(Nu.",
    "a call of a number": TWO + b"K\x01)R.",
    "a later protocol": b"\x80\x09N.",
    "no end": TWO + b"N",
    "text that is none": TWO + b"\x8c\x01\xff.",
    "a shape of shapes": TWO + b"ctorch\nSize\n)\x85\x85R.",
}  # fmt: skip


def saved_file(data: bytes, **members: bytes) -> bytes:
    """A file of torch.save with another pickle in it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
        for name, content in members.items():
            archive.writestr(f"archive/data/{name}", content)
    return made.getvalue()


@diagonal(3)
@pytest.mark.parametrize("attack", ATTACKS)
def test_pickles_that_take_memory_or_time(tmp_path: Path, attack: str):
    """In all three places: refused, or harmless because nothing looks into what was made."""
    path = tmp_path / "file"
    for content, load in ((ATTACKS[attack], load_dist_metadata), (saved_file(ATTACKS[attack]), load_torch_file)):
        path.write_bytes(content)
        with limited(seconds=10, growth_bytes=1 << 30):
            try:
                load(path)
            except CheckpointError as error:
                assert str(path) in str(error)
    with limited(seconds=10), pytest.raises(CheckpointError, match=str(path)):
        load_tensor_blob(torch.frombuffer(bytearray(saved_file(ATTACKS[attack])), dtype=torch.uint8), path)


class Names:
    """All names stand for stand-ins."""

    def find_class(self, full: str) -> Any:
        from petatron.checkpoint.megatron.pickle_interpreter import GlobalName

        return GlobalName(full)

    def call(self, name: Any, arguments: Any) -> Any:
        return InertObject(name.full, arguments)

    def persistent_load(self, identity: Any) -> Any:
        return identity


VALUES: list[Any] = [
    None, True, False, 0, 255, 256, 65_535, 65_536, -1, -(1 << 31), 1 << 31, 1 << 200, 1.5,
    "", "a", "ä" * 300, b"x", b"x" * 300, (), (1,), (1, 2),
    (1, 2, 3), (1, 2, 3, 4), [], [1], [1, [2, [3]]], {}, {"a": 1, 2: ["b"]}, {"same": (shared := [1, 2]), "again": shared},
]  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_pickle_writes_is_read(protocol: int):
    for value in (*VALUES, VALUES):
        found = read_pickle(pickle.dumps(value, protocol), Names())
        if protocol == 2 and isinstance(value, bytes):
            assert isinstance(found, InertObject)  # written as a call that makes them of text
        elif value is not VALUES:
            assert found == value and type(found) is type(value)
    found = read_pickle(pickle.dumps(Case(layers=7), protocol), Names())
    assert found.fields["layers"] == 7 and found.name.endswith((".Case", "__newobj__"))


def error_of_reading(folder: Path) -> Exception | None:
    """What reading every tensor raises, of whatever type."""
    with limited():
        try:
            for lazy in open_megatron(folder).tensors.values():
                lazy.load()
        except Exception as error:
            return error
    return None


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is as it should be, to be copied."""
    made = write_dist(tmp_path_factory.mktemp("sound"), LLAMA)
    made.finish(LLAMA.args())
    assert error_of_reading(made.step) is None
    return made.step


@diagonal(3)
@pytest.mark.parametrize("place", range(40))
def test_damaged_pickles_are_one_error(sound: Path, tmp_path: Path, place: int):
    """Or none, where the change makes no difference to what is read."""
    step = shutil.copytree(sound, tmp_path / "step")
    content = bytearray((step / ".metadata").read_bytes())
    content[len(content) * place // 40] ^= 0x11 << (place % 4)
    (step / ".metadata").write_bytes(content)
    error = error_of_reading(step)
    assert error is None or isinstance(error, PetatronError), repr(error)
    assert error is None or str(tmp_path) in str(error), "it names the file"


# ---- Files of torch.save


def tensor_pickle(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], key: str = "0", storage: str = "Float"
) -> bytes:
    """{"model": tensor}, put together by hand."""

    def number(value: int) -> bytes:
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    text = b"X" + struct.pack("<I", len(key)) + key.encode()
    identity = b"(X\x07\0\0\0storagectorch\n" + storage.encode() + b"Storage\n" + text + b"X\x03\0\0\0cpuK\x04tQ"
    arguments = b"(" + identity + number(offset) + numbers(shape) + numbers(strides) + b"\x89N" + b"t"
    return TWO + b"}X\x05\0\0\0modelctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs."


def test_a_tensor_put_together_by_hand(tmp_path: Path):
    """So that what is refused below is refused for its numbers."""
    path = tmp_path / "file"
    path.write_bytes(aligned(saved_file(tensor_pickle(1, (2,), (2,)), **{"0": struct.pack("<4f", 1, 2, 3, 4)})))
    assert load_torch_file(path)["model"].tolist() == [2.0, 4.0]


def aligned(archive: bytes) -> bytes:
    """The storage of a small archive begins at a multiple of 4."""
    for comment in range(4):
        made = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(made, "w") as new:
            for info in old.infolist():
                padding = (
                    b"" if info.filename != "archive/data/0" else struct.pack("<HH", 0x4246, comment) + bytes(comment)
                )
                fresh = zipfile.ZipInfo(info.filename)
                fresh.extra = padding
                new.writestr(fresh, old.read(info.filename))
        content = made.getvalue()
        if content.index(struct.pack("<4f", 1, 2, 3, 4)) % 4 == 0:
            return content
    raise AssertionError("no padding aligns it")


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(3, (2,), (1,)), (0, (5,), (1,)), (-1, (1,), (1,)), (0, (-1,), (1,)), (0, (2,), (-1,)), (0, (1 << 62, 1 << 62), (1, 1)),
     (0, (2, 2), (1,)), (1 << 62, (1,), (1,)), (0, (1,) * 65, (1,) * 65), (0, (2,), (1 << 62,))],
)  # fmt: skip
def test_tensors_outside_of_their_storage(
    tmp_path: Path, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
):
    path = tmp_path / "file"
    data = saved_file(tensor_pickle(offset, shape, strides), **{"0": struct.pack("<4f", 1, 2, 3, 4)})
    path.write_bytes(aligned(data))
    with limited(), pytest.raises(CheckpointError, match=f"{path} cannot be understood"):
        load_torch_file(path)


def test_a_tensor_that_repeats_one_value_a_trillion_times(tmp_path: Path):
    """It takes no memory until it is copied, so it must not be taken for a weight."""
    name = "decoder.final_layernorm.weight"
    write_legacy(tmp_path, LLAMA, edit=lambda content: content["model"].update({name: torch.ones(1).expand(1 << 40)}))
    assert_refused(tmp_path, f"{name} has more values than the file has bytes for")


def zipped(change: Callable[[zipfile.ZipFile], object], method: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        change(archive)
    return made.getvalue()


def bomb(archive: zipfile.ZipFile) -> None:
    archive.writestr("archive/data.pkl", TWO + b"N" * 50_000_000 + b".")


def test_archives_that_lie(tmp_path: Path):
    good = saved_file(TWO + b"}.")
    end = good.rindex(b"PK\5\6")
    directory = good.index(b"PK\1\2")
    path = tmp_path / "file"
    for content, words in (
        (zipped(bomb, zipfile.ZIP_DEFLATED), "compressed"),
        (zipped(lambda archive: archive.writestr("other", b"x")), "no file of torch.save"),
        (zipped(lambda archive: [archive.writestr(f"{n}/data.pkl", b"N.") for n in "ab"]), "no file of torch.save"),
        (b"", "empty file"),
        (b"PK\5\6", "cut short"),
        (good[:-30], "torch.save|directory"),
        (good[: end + 12] + struct.pack("<II", 1 << 31, 0) + good[end + 20 :], "directory"),
        (good[: end + 12] + struct.pack("<II", 100, 1 << 31) + good[end + 20 :], "directory"),
        (good[: directory + 24] + struct.pack("<I", 1 << 30) + good[directory + 28 :], "compressed"),
        (good[: directory + 20] + struct.pack("<II", 1 << 30, 1 << 30) + good[directory + 28 :], "not where"),
        (good[: directory + 42] + struct.pack("<I", 1 << 30) + good[directory + 46 :], "not at all"),
        (good[: directory + 42] + struct.pack("<I", 7) + good[directory + 46 :], "not where"),
    ):
        path.write_bytes(content)
        with limited(), pytest.raises(CheckpointError, match=rf"{path} cannot be .*({words})"):
            load_torch_file(path)
    path.write_bytes(good)
    assert load_torch_file(path) == {}


# ---- Files of torch.save from before its archives


def old_file(value: bytes, keys: bytes = b"\x80\x02].", storages: bytes = b"", machine: str = "little") -> bytes:
    """The row of pickles, of which the fourth is the value; then storages."""
    head = [
        0x1950A86A20F9469CFC6C,
        1001,
        {"protocol_version": 1001, "little_endian": machine == "little", "type_sizes": {}},
    ]
    return b"".join(pickle.dumps(part, protocol=2) for part in head) + value + keys + storages


@diagonal(3)
@pytest.mark.parametrize("attack", ATTACKS)
def test_pickles_that_take_memory_or_time_in_old_files(tmp_path: Path, attack: str):
    path = tmp_path / "file"
    path.write_bytes(old_file(ATTACKS[attack]))
    with limited(seconds=10, growth_bytes=1 << 30):
        try:
            load_torch_file(path)
        except CheckpointError as error:
            assert str(path) in str(error)


def test_old_files_that_lie(tmp_path: Path):
    path, value = tmp_path / "file", tensor_pickle(0, (2,), (1,))
    keys, storage = pickle.dumps(["0"], protocol=2), struct.pack("<q2f", 2, 1, 2)
    path.write_bytes(old_file(value, keys, storage))
    assert load_torch_file(path)["model"].tolist() == [1.0, 2.0]
    for content, words in (
        (old_file(value, keys, storage, "big"), "byte order"),
        (old_file(value, keys, struct.pack("<q2f", 1 << 60, 1, 2)), "cut short"),
        (old_file(value, keys, struct.pack("<q2f", -1, 1, 2)), "cut short"),
        (old_file(value, keys, struct.pack("<qf", 1, 1)), "larger than its storage"),
        (old_file(value, keys, b"ab"), "cannot be understood"),
        (old_file(value, pickle.dumps(["0", "0"], protocol=2), storage * 2), "cut short"),
        (old_file(value, pickle.dumps(["7"], protocol=2), storage), "none of its tensors"),
        (old_file(value, pickle.dumps({}, protocol=2), storage), "no storages"),
        (old_file(value, pickle.dumps([], protocol=2), storage), "cannot be understood|no file|dictionary"),
        (old_file(b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R."), "posix.system|os.system"),
        (old_file(value, keys, storage).replace(b"\x1a\x0a", b"\x8a\x0a")[:30], "cannot be understood"),
    ):
        path.write_bytes(content)
        with limited(), pytest.raises(CheckpointError, match=rf"{path}.*({words})"):
            load_torch_file(path)


@diagonal(3)
@pytest.mark.parametrize("place", range(60))
def test_damaged_old_files_are_one_error(tmp_path: Path, place: int):
    made = io.BytesIO()
    torch.save({"model": {"a": torch.ones(4), "b": torch.ones(3)[1:]}}, made, _use_new_zipfile_serialization=False)
    content, path = bytearray(made.getvalue()), tmp_path / "file"
    content[len(content) * place // 60] ^= 0x11 << (place % 4)
    path.write_bytes(content)
    with limited():
        try:
            load_torch_file(path)
        except CheckpointError as error:
            assert str(path) in str(error)


# ---- What a table claims


def dist(tmp_path: Path, case: Case = LLAMA, edit: Callable[[DistFile], object] = lambda made: None) -> Path:
    made = write_dist(tmp_path, case)
    edit(made)
    return made.finish(case.args())


def chunks(made: DistFile, name: str, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Says that a tensor has these chunks, each in the bytes of its first."""
    place = next(info for index, info in made.places.items() if index.fqn == name)
    for index in [index for index in made.places if index.fqn == name]:
        del made.places[index]
    made.table[name].chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in boxes]
    for start, _ in boxes:
        made.places[MetadataIndex(name, torch.Size(start))] = place


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((0, 0), (28, WIDTH)), ((14, 0), (28, WIDTH))], "is there twice"),  # as many values as there should be
        ([((0, 0), (28, WIDTH)), ((27, 0), (29, WIDTH))], "is there twice"),
        ([((0, 0), (28, WIDTH)), ((29, 0), (27, WIDTH))], "elements are missing"),
        ([((0, 0), (57, WIDTH))], "reaches outside"),
        ([((0,), (56,))], "reaches outside"),
        ([], "elements are missing"),
    ],
)
def test_chunks_that_do_not_tile(tmp_path: Path, boxes: list[Any], words: str):
    """What was counted twice hid what was never filled."""
    assert_refused(dist(tmp_path, edit=lambda made: chunks(made, EMBEDDING, *boxes)), ".metadata", EMBEDDING, words)


def test_chunks_without_the_bytes_for_them(tmp_path: Path):
    def grow(made: DistFile) -> None:
        made.table[EMBEDDING].size = torch.Size((1 << 40, WIDTH))
        chunks(made, EMBEDDING, ((0, 0), (1 << 40, WIDTH)))

    assert_refused(dist(tmp_path, edit=grow), EMBEDDING, "bytes")


def test_chunks_that_share_their_bytes(tmp_path: Path):
    """A thousand chunks in the bytes of one: more memory than there are bytes."""

    def grow(made: DistFile) -> None:
        made.table[EMBEDDING].size = torch.Size((56_000, WIDTH))
        chunks(made, EMBEDDING, *(((n * 56, 0), (56, WIDTH)) for n in range(1000)))

    assert_refused(dist(tmp_path, edit=grow), "is cut short")


@pytest.mark.parametrize("shape", [(1 << 40, 0), (1 << 62, 0), (1_000_001, 0)])
def test_a_trillion_layers_without_a_value(tmp_path: Path, shape: tuple[int, ...]):
    def grow(made: DistFile) -> None:
        made.add("decoder.layers.mlp.extra.weight", shape, [((0, 0), torch.empty(1, 0))])
        chunks(made, "decoder.layers.mlp.extra.weight", ((0, 0), shape))

    assert_refused(dist(tmp_path, edit=grow), ".metadata", "weights, more than any model")


@pytest.mark.parametrize("name", ["offset", "length"])
@pytest.mark.parametrize("value", [-1, 1 << 70, "x", None, 1.5])
def test_places_that_are_none(tmp_path: Path, name: str, value: Any):
    def edit(made: DistFile) -> None:
        info = next(info for index, info in made.places.items() if index.fqn == EMBEDDING)
        info.__dict__[name] = value

    assert_refused(dist(tmp_path, edit=edit), ".metadata")


@pytest.mark.parametrize("name", [7, None, "a\0b", "..", ".", "", "/etc/passwd", "a/b"])
def test_names_of_files_that_are_none(tmp_path: Path, name: Any):
    def edit(made: DistFile) -> None:
        for index, info in made.places.items():
            if index.fqn == EMBEDDING:
                info.__dict__["relative_path"] = name

    assert_refused(dist(tmp_path, edit=edit))


@pytest.mark.parametrize(
    "edit",
    [
        lambda made: setattr(made.table[EMBEDDING], "size", 7),
        lambda made: setattr(made.table[EMBEDDING], "size", (1.5, 2)),
        lambda made: setattr(made.table[EMBEDDING], "size", (1,) * 100),
        lambda made: setattr(made.table[EMBEDDING], "chunks", 7),
        lambda made: setattr(made.table[EMBEDDING], "chunks", [7]),
        lambda made: setattr(made.table[EMBEDDING], "properties", 7),
        lambda made: made.table.update({EMBEDDING: 7}),
        lambda made: made.table.update({"decoder.layers." + "9" * 5000 + ".x": made.table[EMBEDDING]}),
        lambda made: made.places.clear(),
    ],
)
def test_tables_of_any_type(tmp_path: Path, edit: Callable[[DistFile], object]):
    assert_refused(dist(tmp_path, edit=edit))


# ---- What arguments claim


def arguments(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["args"].__dict__.update(values)


@pytest.mark.parametrize("layers", [10**12, 10**30, 100_001])
def test_a_trillion_layers(tmp_path: Path, layers: int):
    write_legacy(tmp_path / "legacy", LLAMA, edit=arguments(num_layers=layers))
    assert_refused(tmp_path / "legacy", "--num-layers", kind=ConfigError)
    made = write_dist(tmp_path / "dist", LLAMA)
    args = LLAMA.args()
    args.num_layers = layers
    assert_refused(made.finish(args), "--num-layers", kind=ConfigError)


def test_layers_and_experts_are_compared_with_the_weights(tmp_path: Path):
    write_legacy(tmp_path / "a", LLAMA, edit=arguments(num_layers=9_999))
    assert_refused(tmp_path / "a", "says 9999 layers, and 15 tensors are stored")
    mixed = replace(LLAMA, experts=4)
    write_legacy(tmp_path / "b", mixed, edit=arguments(num_experts=99_999))
    assert_refused(tmp_path / "b", "says 99999 experts")
    write_legacy(tmp_path / "c", mixed, edit=arguments(num_experts=10**9))
    assert_refused(tmp_path / "c", "--num-experts", kind=ConfigError)


def test_experts_that_are_rows_of_nothing(tmp_path: Path):
    mixed = replace(LLAMA, experts=4, expert_names="products")
    name = "decoder.layers.0.mlp.experts.weight1"

    def edit(content: dict[str, Any]) -> None:
        content["model"][name] = torch.empty(WIDTH, 0)
        content["args"].num_experts = 90_000

    write_legacy(tmp_path, mixed, edit=edit)
    assert_refused(tmp_path)


@pytest.mark.parametrize(
    "sizes", [(10**8, 1, 1), (1, 10**8, 1), (1, 1, 10**8), (10**6, 10**6, 10**6), (-1, -1, 1), (10**30, 1, 1)]
)
def test_a_hundred_million_ranks(tmp_path: Path, sizes: tuple[int, int, int]):
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    write_legacy(tmp_path, LLAMA, edit=arguments(**dict(zip(names, sizes))))
    assert_refused(tmp_path, "is incomplete", "Copy all folders")


def doubling() -> tuple[Any, ...]:
    value: tuple[Any, ...] = ("x",)
    for _ in range(60):
        value = (value, value)
    return value


ODD: list[Any] = [doubling(), [[]], {}, -1, 1 << 300, "\0", float("inf"), torch.ones(2), [None], b"x", "x" * 100_000]
NAMES = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size", "norm_epsilon",
    "vocab_size", "position_embedding_type", "rotary_base", "window_size", "num_experts", "moe_layer_freq", "normalization",
    "multi_latent_attention", "tensor_model_parallel_size", "swiglu", "add_bias_linear", "seq_length",
)  # fmt: skip


@diagonal(3)
@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_any_type(tmp_path: Path, name: str):
    """A model, or one error that is short enough to read."""
    for number, value in enumerate(ODD):
        write_legacy(tmp_path / str(number), LLAMA, edit=arguments(group_query_attention=True, **{name: value}))
        with limited():
            try:
                open_megatron(tmp_path / str(number))
            except PetatronError as error:
                assert len(str(error)) < 3000


@pytest.mark.parametrize(("name", "value"), [("iteration", -7), ("iteration", float("nan")), ("iteration", "x"), ("iteration", 1 << 80),
                                             ("checkpoint_version", "x"), ("checkpoint_version", [3]), ("args", 7)])  # fmt: skip
def test_heads_of_any_type(tmp_path: Path, name: str, value: Any):
    write_legacy(tmp_path, LLAMA, edit=lambda content: content.update({name: value}))
    assert_refused(tmp_path, str(tmp_path))


def test_models_nested_in_models(tmp_path: Path):
    def edit(content: dict[str, Any]) -> None:
        for _ in range(2000):
            content["model"] = {"m": content["model"]}

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    write_legacy(tmp_path, LLAMA, edit=edit)
    sys.setrecursionlimit(before)
    assert_refused(tmp_path, "nested too deeply")


# ---- Trackers, pipes, devices


@pytest.mark.parametrize(
    "content", [b"9" * 4000, b"9" * 5000, b"\xff\xfe", b"x" * (1 << 20), "٣٠".encode(), b"-1", b"../.."]
)
def test_trackers_that_name_no_step(tmp_path: Path, content: bytes):
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(content)
    assert_refused(tmp_path, "latest_checkpointed_iteration.txt")


@pytest.mark.parametrize("name", ["iter_0000030/mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt"])
def test_no_files_in_a_legacy_checkpoint(tmp_path: Path, name: str):
    write_legacy(tmp_path, LLAMA)
    assert_no_file_is_opened(tmp_path / name, lambda: open_megatron(tmp_path))


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_no_files_in_a_distributed_checkpoint(tmp_path: Path, name: str):
    step = dist(tmp_path)
    assert_no_file_is_opened(step / name, lambda: open_megatron(step))


def assert_no_file_is_opened(path: Path, read: Callable[[], object]) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
        path.unlink()
        make(path)
        with limited(), pytest.raises(PetatronError, match=str(path.parent)):
            read()
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
            path.touch()


def test_what_the_interpreter_says():
    with pytest.raises(PickleError, match="opcode 0x2a"):
        read_pickle(b"*.", Names())
    with pytest.raises(PickleError, match="cut short"):
        read_pickle(b"N", Names())
    with pytest.raises(PickleError, match="nested too deeply"):
        read_pickle(b"(" * 2000 + b".", Names())
