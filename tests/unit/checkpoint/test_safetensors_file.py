"""Headers that lie are refused before a byte of a tensor is read; what we write, the library reads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.safetensors_file import DTYPES, read_header, serialize_tensors


def _write(path, tensors):
    path.write_bytes(b"".join(bytes(part) for part in serialize_tensors(tensors)))
    return path


def test_the_library_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    tensors = {
        "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "a": torch.randn(3, 4).t(),
        "scalar": torch.tensor(4, dtype=torch.int64),
        "none": torch.empty(0, 5),
        "flag": torch.tensor([True, False]),
    }
    ours = load_file(_write(tmp_path / "ours", tensors))
    assert ours.keys() == tensors.keys()
    assert all(torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype for name, tensor in tensors.items())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        content = path.read_bytes()
        for name, slot in read_header(path).items():
            assert slot.shape == tuple(tensors[name].shape) and DTYPES[slot.dtype] == tensors[name].dtype
            if slot.end > slot.begin:
                values = torch.frombuffer(bytearray(content[slot.begin : slot.end]), dtype=DTYPES[slot.dtype])
                assert torch.equal(values.view(slot.shape), tensors[name])


def _header(content: object) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "header would be"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "header would be 1099511627776 bytes long"),
        (_header(b"{\x80}"), "no text"),
        (_header(b"{"), "Expecting property name"),
        (_header([1]), "no table"),
        (_header({"x": {"dtype": "F32", "shape": [1]}}), "misstates x"),
        (_header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), "x does not lie inside it"),
        (_header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + bytes(8), "x does not lie inside it"),
        (_header({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}) + bytes(8), "misstates x"),
        (_header({"x": {"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4), "dtype 'F9'"),
    ],
)
def test_a_header_that_lies(tmp_path, content, why):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=why):
        read_header(tmp_path / "file")


def test_a_dtype_without_a_word():
    with pytest.raises(CheckpointError, match=r"x has dtype torch\.complex64.*Save it as torch\.float32"):
        list(serialize_tensors({"x": torch.zeros(1, dtype=torch.complex64)}))


def test_a_tensor_at_an_odd_byte_is_read_from_others_and_refused_in_a_checkpoint(tmp_path):
    head = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    head += b" " * (-len(head) % 8 + 1)
    (tmp_path / "file").write_bytes(len(head).to_bytes(8, "little") + head + torch.tensor([1.0, 2.0]).numpy().tobytes())
    (slot,) = read_header(tmp_path / "file").values()
    with pytest.raises(ValueError, match=f"x begins at byte {slot.begin}, which is no multiple of its element size"):
        read_header(tmp_path / "file", aligned=True)
