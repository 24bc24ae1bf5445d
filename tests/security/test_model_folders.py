"""Folders of Hugging Face models made by others: headers that lie, settings that claim a billion layers, pipes in the place of files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import petatron
from petatron.base.errors import CheckpointError, ConfigError, PetatronError
from petatron.checkpoint.files.safetensors_file import read_header
from petatron.cli.main import main
from petatron.config import CheckpointConfig
from petatron.pretrained.atomic_model_folder import check_not_inside_step
from petatron.pretrained.detect_model_format import detect_format
from petatron.pretrained.model_reader import open_model_reader
from petatron.pretrained.read_checkpoint_args import read_checkpoint_args
from tests.longform import diagonal
from tests.security.limits import limited

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-v3" / "step-00000003" / "model"
OWN = {"model_type": "petatron", "architectures": ["PetatronForCausalLM"], "dtype": "float32"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, **values: Any) -> None:
    content = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(content))


def assert_refused(folder: Path, *words: str) -> None:
    """By a conversion and by a model made of it, in time and memory."""
    for read in (open_model_reader, petatron.from_pretrained):
        with limited(), pytest.raises((CheckpointError, ConfigError)) as caught:
            read(folder)
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def error_of_opening(folder: Path) -> Exception | None:
    """What opening it raises, of whatever type."""
    with limited(10):
        try:
            open_model_reader(folder)
        except Exception as error:
            return error
    return None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_out_of_the_folder_is_not_followed(folder: Path, name: str):
    """Somebody's weights or settings would be in whatever is made of the folder."""
    (folder / name).rename(folder.parent / "private")
    (folder / name).symlink_to(Path("..") / "private")
    assert_refused(folder, f"{name} -> {folder.parent / 'private'}", "Put the files themselves there")
    (folder.parent / "private").rename(folder / "inside")
    (folder / name).unlink()
    (folder / name).symlink_to("inside")
    (folder.parent / "linked").symlink_to(folder)
    open_model_reader(folder.parent / "linked")


def test_each_file_is_opened_once_for_its_settings_and_once_for_its_header(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """A model of many files on a network disk takes as long as they are opened often."""
    opened: list[str] = []
    real = os.open

    def counting(path: Any, *args: Any, **options: Any) -> int:
        opened.append(Path(os.fsdecode(path)).name if isinstance(path, str | os.PathLike) else "")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", counting)
    open_model_reader(folder)
    assert (opened.count("config.json"), opened.count("model.safetensors")) == (1, 1)


# ---- Headers


def header(content: object, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


def slot(shape: Any, begin: Any = 0, end: Any = 4, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


NINES = int("9" * 4000)
MANY_NINES = b'{"dtype": "F32", "shape": [' + b",".join([b"9" * 4000] * 5000) + b'], "data_offsets": [0, 4]}'


@diagonal(3)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header(b'{"x": ' + MANY_NINES + b"}", bytes(4)), "misstates x"),  # their product would take minutes
        (header({f"x{n}": slot([NINES, NINES]) for n in range(100)}, bytes(4)), "misstates x0"),
        (header(b'{"x": {"dtype": "F32", "shape": [' + b"9" * 5000 + b']}}'), "cannot be understood|is damaged"),
        (header({"x": slot([1 << 62, 4])}, bytes(4)), "x does not lie inside it"),
        (header({"x": slot([1] * 65)}, bytes(4)), "misstates x"),
        (header({"x": slot([1], 0.0, 4)}, bytes(4)), "misstates x"),
        (header({"x": slot([True])}, bytes(4)), "misstates x"),
        (header({"x": slot([1], -4, 0)}, bytes(4)), "misstates x"),
        (header({"x": slot("1")}, bytes(4)), "misstates x"),
        (header({"x": slot([1], dtype=["F32"])}, bytes(4)), "misstates x"),
        (header({"x": [1]}, bytes(4)), "misstates x"),
        (header({"x": slot([1]), "y": slot([1])}, bytes(4)), "y begins at byte"),  # two tensors in the same bytes
        (header({"x": slot([1], 0, 4), "y": slot([1], 8, 12)}, bytes(12)), "y begins at byte"),
        (header({"x": slot([1])}, bytes(8)), "its tensors end at byte"),
        (header(b"[" * 200_000), "no text|nested"),
        (header(b"\xff\xff"), "no text"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "would be 9223372036854775808 bytes long"),
    ],
)  # fmt: skip
def test_headers_that_lie(folder: Path, content: bytes, words: str):
    (folder / "model.safetensors").write_bytes(content)
    with limited(), pytest.raises(CheckpointError, match=rf"model\.safetensors .*({words})"):
        open_model_reader(folder)


def test_a_header_of_a_sparse_terabyte(folder: Path):
    with (folder / "model.safetensors").open("r+b") as file:
        file.write((1 << 39).to_bytes(8, "little"))
        file.truncate(1 << 40)
    assert_refused(folder, "would be 549755813888 bytes long")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("thing", ["pipe", "device", "folder"])
def test_no_files(folder: Path, name: str, thing: str):
    path = folder / name
    path.unlink(missing_ok=True)
    if thing == "pipe":
        os.mkfifo(path)
    elif thing == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with limited():
        try:
            open_model_reader(folder, model_format="huggingface")
        except PetatronError as error:
            assert str(folder) in str(error)
        else:
            assert name.endswith("index.json")  # beside one file for all, an index is a leftover


def test_a_pipe_beside_the_shards(folder: Path):
    os.mkfifo(folder / "model-00002-of-00002.safetensors")
    with (
        limited(),
        pytest.raises(CheckpointError, match=r"00002\.safetensors cannot be read: it is a FIFO, not a file"),
    ):
        open_model_reader(folder)


def test_a_pipe_that_is_asked_whether_it_is_a_checkpoint(tmp_path: Path):
    os.mkfifo(tmp_path / "manifest.json")
    with limited():
        check_not_inside_step(tmp_path / "new", "new")
        with pytest.raises(CheckpointError, match="holds no model"):
            detect_format(tmp_path)


# ---- Settings


@pytest.mark.parametrize("layers", [10**9, 10**18, 10**30, 99_999, NINES])
def test_a_billion_layers(folder: Path, layers: int):
    change(folder, n_layer=layers)
    assert_refused(folder)


def test_layers_are_compared_with_the_tensors(folder: Path):
    change(folder, n_layer=99_999)
    assert_refused(folder, "config.json says 99999 layers, and 28 tensors are stored")


def test_layers_of_our_own_config(folder: Path):
    """Also as text, which a config file would take for a number."""
    for layers in (10**9, "1000000000", 10.0, None, [2]):
        (folder / "config.json").write_text(json.dumps({**OWN, "model": {"num_layers": layers}}))
        assert_refused(folder, "config.json says")
    read = {**OWN, "model": {"num_layers": 2}, "moe": {"num_experts": 10**9}}
    (folder / "config.json").write_text(json.dumps(read))
    assert_refused(folder, "1000000000 experts")


def test_experts_are_compared_with_the_tensors(folder: Path):
    values = {
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "vocab_size": 32,
    }
    values |= {
        "intermediate_size": 16,
        "num_experts_per_tok": 1,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16,
    }
    for experts in (10**9, 50_000):
        (folder / "config.json").write_text(json.dumps(values | {"num_local_experts": experts}))
        assert_refused(folder, str(experts))


def test_many_layers_without_experts(folder: Path):
    """Each layer was looked for in a list of all: a hundred thousand times 200,000 steps."""
    values = {"model_type": "qwen3_moe", "num_hidden_layers": 100_000, "mlp_only_layers": list(range(200_000))}
    keys = ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size", "num_experts", "num_experts_per_tok",
            "moe_intermediate_size", "num_key_value_heads", "max_position_embeddings", "head_dim")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values | dict.fromkeys(keys, 4)))
    assert_refused(folder)


@pytest.mark.parametrize("size", [10**6, 10**9, 10**15])
def test_a_model_larger_than_its_files(folder: Path, size: int):
    """Refused before there is memory for it."""
    change(folder, n_embd=size, n_inner=4 * size)
    assert_refused(folder)


def test_checkpoint_args_of_a_billion_layers(folder: Path):
    for layers in (10**9, 99_999):
        change(folder, n_layer=layers)
        with limited(), pytest.raises((CheckpointError, ConfigError), match=str(layers)):
            read_checkpoint_args(CheckpointConfig(load=str(folder), finetune=True))


ODD: list[Any] = [None, True, -1, 0, 1e400, "x", "", [], {}, [[]], {"a": {}}, NINES, float("nan"), "\0", "\x1b[31m"]
KEYS = (
    "model_type", "architectures", "n_layer", "n_embd", "n_head", "n_inner", "vocab_size", "n_positions", "resid_pdrop",
    "layer_norm_epsilon", "activation_function", "tie_word_embeddings", "initializer_range", "quantization_config", "dtype",
)  # fmt: skip


@diagonal(3)
@pytest.mark.parametrize("key", KEYS)
def test_settings_of_any_type(folder: Path, key: str):
    """A model, or one error: no TypeError, no OverflowError."""
    for value in ODD:
        change(folder, **{key: value})
        error = error_of_opening(folder)
        assert error is None or isinstance(error, PetatronError), f"{key}={str(value)[:20]!r}: {error!r}"


ROPE = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "sliding_window",
    "layer_types",
    "head_dim",
)


@diagonal(2)
@pytest.mark.parametrize("key", ROPE)
def test_rotary_settings_of_any_type(folder: Path, key: str):
    base = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "vocab_size": 32,
            "intermediate_size": 16, "num_key_value_heads": 4, "max_position_embeddings": 16, "head_dim": 2,
            "use_sliding_window": True}  # fmt: skip
    odd = [*ODD, {"rope_type": "yarn", "factor": "x"}, {"rope_type": "llama3", "factor": 0, "low_freq_factor": [],
           "high_freq_factor": 1}, {"rope_type": "yarn", "original_max_position_embeddings": -1, "factor": 1e400}]  # fmt: skip
    for value in odd:
        (folder / "config.json").write_text(json.dumps(base | {key: value}))
        with limited(10), pytest.raises(PetatronError):
            open_model_reader(folder)


NUMBERS = ("rope_theta", "rms_norm_eps", "attention_dropout", "initializer_range", "max_position_embeddings", "sliding_window",
           "partial_rotary_factor", "pretraining_tp", "num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id")  # fmt: skip
ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "original_max_position_embeddings",
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The folder of a Llama, as transformers writes it."""
    words = "--vocab-size 32 --num-layers 1 --hidden-size 8 --ffn-hidden-size 8 --num-attention-heads 2".split()
    words += "--num-query-groups 2 --seq-length 8".split()
    run = petatron.load(
        "tiny-llama", [*words, "--mock-data", "--lr", "1e-3", "--train-iters", "1", "--device", "cpu"]
    ).config
    petatron.save_checkpoint(str(tmp_path / "run"), step=1, model=petatron.build_model(run, petatron.launch(run)))
    folder = tmp_path / "run" / "step-00000001" / "model"
    return Path(shutil.copytree(folder, tmp_path / "llama"))


def assert_not_converted(folder: Path, target: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "convert", str(folder), str(target), "--to", "huggingface"]) == 2
    assert key in (told := capsys.readouterr().err) and "Traceback" not in told and not target.exists()


@diagonal(3)
@pytest.mark.parametrize(
    "value", ["x", "1e6", "", True, [], {}, float("nan"), 1e999, NINES], ids=lambda value: repr(value)[:8]
)
def test_numbers_of_another_type_are_refused_and_not_copied(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
):
    """Also where another key counts: `rope_parameters` does, and what is beside it was copied as it was."""
    original = (llama / "config.json").read_text()
    for key in NUMBERS:
        if key.endswith("token_id") and value == []:
            continue
        change(llama, **{key: value})
        assert_not_converted(llama, tmp_path / "new", key, capsys)
        (llama / "config.json").write_text(original)
    for table in ("rope_parameters", "rope_scaling"):
        for key in ROPE_NUMBERS:
            change(llama, **{table: {"rope_type": "default", key: value}})
            assert_not_converted(llama, tmp_path / "new", f"{table}.{key}", capsys)
            (llama / "config.json").write_text(original)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("tie_word_embeddings", "false", "is not true or false"),
        ("mlp_bias", 0, "is not true or false"),
        ("rope_scaling", "", "is not a table of settings"),
        ("rope_parameters", [], "is not a table of settings"),
        ("max_position_embeddings", 64.0, "is not a whole number"),
        ("eos_token_id", [2, "x"], "is not the id of a token, nor a list of them"),
        ("eos_token_id", [None], "is not the id of a token, nor a list of them"),
    ],
)
def test_what_is_expected_is_said(llama: Path, key: str, value: Any, rule: str):
    change(llama, **{key: value})
    assert_refused(llama, f"{key} {value!r}"[:40], rule, "Take config.json from the model's own folder")


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 10000, "eos_token_id": [1, 2], "pad_token_id": -1, "rope_scaling": None, "sliding_window": None},
        {
            "head_dim": None,
            "attention_dropout": None,
            "bos_token_id": None,
            "pretraining_tp": 1,
            "num_key_value_heads": None,
        },
    ],
)
def test_numbers_as_other_programs_write_them_are_read(llama: Path, tmp_path: Path, values: dict[str, Any]):
    change(llama, **values)
    assert main(["checkpoint", "convert", str(llama), str(tmp_path / "new"), "--to", "huggingface"]) == 0
    assert json.loads((tmp_path / "new" / "config.json").read_text()).items() >= values.items()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff\xfe\0", b"[" * 100_000, b'{"a":' * 50_000, b"7", b'"x"', b"9" * 5000]
)
def test_configs_that_are_none(folder: Path, content: bytes):
    (folder / "config.json").write_bytes(content)
    assert_refused(folder, "config.json", "Take it from the model's own folder")


def test_a_config_larger_than_any(folder: Path):
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 34)
    assert_refused(folder, "config.json cannot be read: it has 17,179,869,184 bytes")


@pytest.mark.parametrize("content", [{}, [], {"weight_map": 7}, {"weight_map": {"a": {}}}, {"weight_map": {"a": "\0"}},
                                     {"weight_map": {"a": "x" * 5000}}])  # fmt: skip
def test_an_index_that_is_none(folder: Path, content: Any):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_model_reader(folder)


def test_sound_ones_are_read(folder: Path):
    assert read_header(folder / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    open_model_reader(folder)
    petatron.from_pretrained(folder)


def test_tensors_at_odd_bytes_are_read(folder: Path):
    """Writers other than safetensors' own do not pad the header."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    before = petatron.from_pretrained(folder)
    path.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])
    after = petatron.from_pretrained(folder)
    for first, second in zip(before.module.parameters(), after.module.parameters(), strict=True):
        assert torch.equal(first, second)
