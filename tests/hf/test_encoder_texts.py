"""What an encoder of transformers says of texts is said here: `petatron generate --fill-mask`, and `/v1/embeddings` of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from petatron.cli.main import main
from petatron.serve.open_engine import CheckpointEngine, model_settings
from petatron.serve.served_model_properties import ModelCard
from tests.hf.encoder_zoo import ENCODERS, encoder_truth
from tests.hf.variant_zoo import VOCABULARY
from tests.serve.live_server import LiveServer, live_server

TEXTS = ["w20 w21 [MASK] w23", "[MASK] w9 w10 [MASK] w14 w15 w16", "[MASK]"]
NAMES = [
    name for name in ENCODERS if not name.startswith("roberta")
]  # its positions count a padding id that texts have


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of transformers with a vocabulary of WordPieces."""
    root = tmp_path_factory.mktemp("encoders")
    special = "[PAD] [UNK] [CLS] [SEP] [MASK]".split()
    (root / "vocab.txt").write_text("\n".join([*special, *(f"w{number}" for number in range(5, VOCABULARY))]))
    tokenizer = transformers.BertTokenizerFast(str(root / "vocab.txt"))
    for name in NAMES:
        encoder_truth(name).model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in NAMES}


def _tokenizer(folder: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", NAMES)
def test_masks_are_filled_as_in_transformers(folders: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]):
    texts = [word for text in TEXTS for word in ("--fill-mask", text)]
    assert main(["generate", str(folders[name]), *texts, "--top-k", "3"]) == 0
    printed = capsys.readouterr().out
    tokenizer, model, wanted = _tokenizer(folders[name]), encoder_truth(name).model.eval(), []
    for number, text in enumerate(TEXTS):
        inputs = tokenizer(text, return_tensors="pt")
        output = model(**inputs)
        logits = output.prediction_logits if "prediction_logits" in output else output.logits
        places = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten().tolist()
        wanted += [""] * (number > 0) + [text]
        for count, place in enumerate(places, start=1):
            values, ids = logits[0, place].softmax(0).topk(3)
            wanted += [f"mask {count}"] * (len(places) > 1)
            wanted += [f"  {value:.4f}  {tokenizer.decode([token])}" for value, token in zip(values, ids)]
    for line, text in zip(printed.splitlines(), wanted, strict=True):
        probability, _, token = line.strip().partition("  ")
        value, _, name = text.strip().partition("  ")
        assert token == name and (probability == value or abs(float(probability) - float(value)) < 1.5e-4)


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[LiveServer]:
    engine = CheckpointEngine(model_settings(folders["bert"]))
    with live_server(engine, card=ModelCard.of_engine(engine, name="bert", created_s=1)) as live:
        yield live
    engine.close()


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_embeddings_are_those_of_transformers(server: LiveServer, folders: dict[str, Path], pooling: str):
    body = {"input": TEXTS, "pooling": pooling, "use_activation": False}
    with server.client() as http:
        answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    inputs = _tokenizer(folders["bert"])(TEXTS, return_tensors="pt", padding=True)
    states = encoder_truth("bert").model.eval().bert(**inputs).last_hidden_state
    counts = inputs["attention_mask"].sum(1)
    mean = (states * inputs["attention_mask"][..., None]).sum(1) / counts[:, None]
    wanted = {"mean": mean, "first": states[:, 0], "last": states[torch.arange(3), counts - 1]}[pooling]
    vectors = torch.tensor([entry["embedding"] for entry in answer.json()["data"]])
    torch.testing.assert_close(vectors, wanted, atol=2e-5, rtol=1e-5)
    assert answer.json()["usage"]["prompt_tokens"] == int(counts.sum())


def test_a_long_text_is_cut_before_the_token_that_ends_it(server: LiveServer):
    text, short = " ".join(["w7"] * 60), " ".join(["w7"] * 8)
    with server.client() as http:
        refused = http.post("/v1/embeddings", json={"input": text})
        cut = http.post(
            "/v1/embeddings", json={"input": text, "truncate_prompt_tokens": 10, "truncation_side": "right"}
        )
        same = http.post("/v1/embeddings", json={"input": short})
        plain = http.post("/v1/embeddings", json={"input": short, "add_special_tokens": False})
    assert refused.status_code == 400 and "29" in refused.json()["error"]["message"]
    assert cut.json()["usage"] == same.json()["usage"] and cut.json()["usage"]["prompt_tokens"] == 10
    assert cut.json()["data"] == same.json()["data"] != plain.json()["data"]
    assert plain.json()["usage"]["prompt_tokens"] == 8


def test_an_encoder_continues_no_text(server: LiveServer, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    with server.client() as http:
        answer = http.post("/v1/completions", json={"prompt": "w9", "max_tokens": 3})
    assert answer.status_code == 400 and "does not continue text" in answer.json()["error"]["message"]
    assert "does not continue text: its attention layers" in refused(capsys, folders["bert"], "--prompt", "w9")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["generate", *map(str, arguments)]) != 0
    return capsys.readouterr().err


def test_what_cannot_be_filled_is_told(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = folders["bert"]
    assert "'w9' has no mask. Write [MASK] where" in refused(capsys, folder, "--fill-mask", "w9")
    several = refused(capsys, folder, "--fill-mask", "[MASK]", "--max-tokens", "3", "--prompt", "w9")
    assert "--max-tokens is for texts that are continued" in several and "--prompt is for" in several
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    ).save_pretrained(tmp_path)
    _tokenizer(folder).save_pretrained(tmp_path)
    null = refused(capsys, folder, "--fill-mask", "5", "--tokenizer-type", "NullTokenizer", "--force-tokenizer")
    assert "has a tokenizer that names no mask" in null
    assert "is a model of the type decoder, and masks" in refused(capsys, tmp_path, "--fill-mask", "[MASK]")
