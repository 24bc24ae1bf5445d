"""What goes along with a model's weights: nothing from outside its folder, and no names of code to run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import petatron
from petatron.base.errors import CheckpointError, DataError
from petatron.base.model_companion_files import COMPANION_FILES
from petatron.cli.main import main
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.tokenizer import HuggingFaceTokenizer
from petatron.mesh.mesh import ParallelMesh
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from tests.longform import diagonal

SECRET = "-----BEGIN PRIVATE KEY-----"
FLAGS = "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --vocab-size 300 --seq-length 8 --mock-data --lr 1e-3 --train-iters 1"
CODE = {
    "auto_map": {"AutoModelForCausalLM": "modeling.Model", "AutoTokenizer": ["tokenization.Tokenizer", None]},
    "trust_remote_code": True,
    "custom_pipelines": {"text-generation": {"impl": "pipeline.Pipeline"}},
    "attn_implementation": "someone/kernels",
}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "id_rsa"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with a tokenizer."""
    run = petatron.load("tiny-llama", FLAGS.split()).config
    built = petatron.build_model(run, ParallelMesh.single())
    built.save_pretrained(tmp_path / "model")
    train_bpe(["some text"], 300, tmp_path / "model" / "tokenizer.json")
    return tmp_path / "model"


@diagonal(2)
@pytest.mark.parametrize("name", COMPANION_FILES)
def test_a_link_to_a_secret_is_not_copied(tmp_path: Path, model: Path, secret: Path, name: str):
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(secret)
    before = sorted(tmp_path.iterdir())
    for to in ("huggingface", "petatron"):
        with pytest.raises(CheckpointError, match=rf"{name} -> {secret}\. Put the files themselves there"):
            convert(open_model_reader(model), tmp_path / to, ConversionOptions(target_format=to))
    with pytest.raises(CheckpointError, match="has links to files elsewhere"):
        petatron.from_pretrained(model)
    assert sorted(tmp_path.iterdir()) == before


def test_every_link_is_named_at_once(tmp_path: Path, model: Path, secret: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("chat_template.jinja", "merges.txt"):
        (model / name).symlink_to(Path("..") / secret.name)
    assert main(["checkpoint", "convert", str(model), str(tmp_path / "out"), "--to", "huggingface"]) == 1
    assert f"chat_template.jinja -> {secret}, merges.txt -> {secret}" in capsys.readouterr().err


def test_a_tokenizer_that_is_put_beside_a_model(tmp_path: Path, model: Path, secret: Path):
    (tmp_path / "tokenizer").mkdir()
    (model / "tokenizer.json").rename(tmp_path / "tokenizer" / "tokenizer.json")
    (tmp_path / "tokenizer" / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(DataError, match="has links to files elsewhere"):
        HuggingFaceTokenizer(tmp_path / "tokenizer")
    words = ["--to", "huggingface", "--tokenizer", str(tmp_path / "tokenizer")]
    assert main(["checkpoint", "convert", str(model), str(tmp_path / "out"), *words]) == 1
    HuggingFaceTokenizer(tmp_path / "tokenizer" / "tokenizer.json")  # that file alone is asked for
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    assert main(["checkpoint", "convert", str(model), str(tmp_path / "out"), *words]) == 0


def test_a_link_in_a_step_is_not_copied(tmp_path: Path, model: Path, secret: Path):
    (model / "chat_template.jinja").write_text(SECRET)
    convert(open_model_reader(model), tmp_path / "run", ConversionOptions(target_format="petatron"))
    place = next((tmp_path / "run").glob("step-*")) / "model" / "chat_template.jinja"
    place.unlink()
    place.symlink_to(secret)
    with pytest.raises(CheckpointError, match="has links to files elsewhere"):
        open_model_reader(tmp_path / "run")


def hub_cache(model: Path, hub: Path) -> Path:
    """The snapshot of a model as the hub's client keeps it."""
    cache = hub / "models--someone--model"
    snapshot = cache / "snapshots" / "0123abcd"
    for folder in (cache / "blobs", snapshot):
        folder.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(cache / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_the_hub_cache_consists_of_links(tmp_path: Path, model: Path):
    tokenizer = (model / "tokenizer.json").read_bytes()
    (model / "inside").write_text("hello")
    (model / "chat_template.jinja").symlink_to("inside")
    convert(open_model_reader(model), tmp_path / "inside its folder", ConversionOptions(target_format="huggingface"))
    (model / "chat_template.jinja").unlink()
    (tmp_path / "cache").mkdir()
    (tmp_path / "hub").symlink_to(tmp_path / "cache")
    snapshot = hub_cache(model, tmp_path / "hub")
    convert(open_model_reader(snapshot), tmp_path / "new", ConversionOptions(target_format="huggingface"))
    copy = tmp_path / "new" / "tokenizer.json"
    assert copy.read_bytes() == tokenizer and not copy.is_symlink()
    assert petatron.from_pretrained(snapshot).companion_files is not None
    HuggingFaceTokenizer(snapshot)


@pytest.mark.parametrize("what", ["blobs", "blob", "another model", "a deeper place", "the name alone"])
def test_a_folder_that_only_looks_like_the_hub_cache(tmp_path: Path, model: Path, secret: Path, what: str):
    snapshot = hub_cache(model, tmp_path / "hub")
    cache, place = snapshot.parent.parent, snapshot / "chat_template.jinja"
    place.symlink_to("../../blobs/id_rsa")
    if what == "blobs":
        for path in (cache / "blobs").iterdir():
            path.rename(secret.parent / path.name)
        (cache / "blobs").rmdir()
        (cache / "blobs").symlink_to(secret.parent)
    elif what == "blob":
        (cache / "blobs" / "id_rsa").symlink_to(secret)
    else:
        place.unlink()
        far = {
            "another model": tmp_path / "hub" / "models--me--private" / "blobs" / "id_rsa",
            "a deeper place": cache / "blobs" / "deeper" / "id_rsa",
            "the name alone": tmp_path / "blobs" / "id_rsa",
        }[what]
        far.parent.mkdir(parents=True)
        far.write_text(SECRET)
        place.symlink_to(os.path.relpath(far, snapshot))
    assert place.read_text() == SECRET, "the attack is in place"
    with pytest.raises(CheckpointError, match="has links to files elsewhere"):
        convert(open_model_reader(snapshot), tmp_path / "new", ConversionOptions(target_format="huggingface"))
    assert not (tmp_path / "new").exists()


# Code


def names_code(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.json") if any(f'"{name}"' in path.read_text() for name in CODE)]


def test_no_code_is_named_after_a_conversion(tmp_path: Path, model: Path):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | CODE | {"nested": [CODE]}))
    for name in ("tokenizer_config.json", "generation_config.json"):
        text = json.dumps({"kept": 1, **CODE, "nested": CODE}).replace('"auto_map"', '"auto\\u005fmap"', 1)
        (model / name).write_text(text)
    (model / "modeling.py").write_text("raise SystemExit('ran')")
    convert(open_model_reader(model), tmp_path / "new", ConversionOptions(target_format="huggingface"))
    convert(open_model_reader(model), tmp_path / "run", ConversionOptions(target_format="petatron"))
    petatron.from_pretrained(model).save_pretrained(tmp_path / "saved")
    (tmp_path / "beside").mkdir()
    for name, content in HuggingFaceTokenizer(model).files().items():
        (tmp_path / "beside" / name).write_bytes(content)
    for place in ("new", "run", "saved", "beside"):
        assert names_code(tmp_path / place) == [] and not list((tmp_path / place).rglob("*.py")), place
    for place in ("new", "saved", "beside"):
        kept = json.loads((tmp_path / place / "tokenizer_config.json").read_text())
        assert kept == {"kept": 1, "nested": {}}
    assert json.loads((tmp_path / "new" / "config.json").read_text())["nested"] == [{}]


def test_other_settings_stay_byte_for_byte(tmp_path: Path, model: Path):
    text = '{"eos_token":   "x", "odd": 1e400,\n"auto_map_": 1}'
    (model / "tokenizer_config.json").write_text(text)
    convert(open_model_reader(model), tmp_path / "new", ConversionOptions(target_format="huggingface"))
    assert (tmp_path / "new" / "tokenizer_config.json").read_text() == text


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000], ids=["cut", "deep", "deeper"])
def test_a_config_that_cannot_be_read(tmp_path: Path, model: Path, text: str):
    (model / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not valid JSON"):
        convert(open_model_reader(model), tmp_path / "new", ConversionOptions(target_format="huggingface"))
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.tmp").exists()
