"""`petatron generate --image`: the answer is that of transformers for the same ids and pixels, and what does not fit is said first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from petatron.cli.main import main
from petatron.data.images.decode_image import ImageLimits
from petatron.serve.open_engine import model_settings
from tests.serve.image_model import png, write_llava

PROMPT = "USER: <image> what is this? ASSISTANT:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_llava(tmp_path_factory.mktemp("llava") / "model")
    (folder / "a.png").write_bytes(png(1))
    (folder / "broken.png").write_bytes(png(1)[:90])
    return folder


def test_an_image_is_answered_as_transformers_answers_it(folder: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["generate", str(folder), "--image", str(folder / "a.png"), "--prompt", PROMPT]
    assert main([*argv, "--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--fp32"]) == 0
    printed = capsys.readouterr().out.strip("\n")
    settings = model_settings(folder)
    tokenizer, prompts = settings.required_tokenizer(), settings.image_prompts()
    patches, _ = prompts.read(png(1), ImageLimits(), name="a")
    config = settings.loaded.config.model
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (config.vision_pixel_mean, config.vision_pixel_std))
    image = torch.from_numpy(patches).view(4, 4, 3, 2, 2).permute(2, 0, 3, 1, 4).reshape(3, 8, 8)
    ids = [tokenizer.bod, *tokenizer.encode(PROMPT.replace("<image>", "<image>" * 16))]
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    pixels = ((image.float() / 255 - mean) / std)[None]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    answer = model.generate(**inputs, pixel_values=pixels, **options)[0, len(ids) :].tolist()
    assert printed == tokenizer.decode(answer).strip("\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--image", "a.png", "--image", "a.png", "--prompt", PROMPT], "has 1 tags <image>, and 2 images are given"),
        (["--image", "a.png", "--prompt", "a", "--prompt", "b"], "is an image of one prompt, and there are several"),
        (["--image", "a.png", "--prompts", "a.jsonl", "--out", "b"], "is an image of one prompt"),
        (["--image", "a.png", "--prompt", "a", "--beam-width", "2"], "--image"),
        (["--image", "none.png", "--prompt", "a"], "none.png is missing"),
        (["--image", "broken.png", "--prompt", "a"], "broken.png cannot be decoded"),
        (["--image", "a.png", "--image", "a.png", "--prompt", "a"], "have 34 patches, and the model reads 17"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
):
    monkeypatch.chdir(folder)
    assert main(["generate", str(folder), *words]) != 0
    assert said in capsys.readouterr().err


def test_a_model_of_text_reads_no_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    words = ["--tokenizer-type", "ByteTokenizer", "--image", "a.png", "--prompt", "a"]
    assert main(["generate", str(tmp_path), *words]) != 0
    assert "This model reads no images" in capsys.readouterr().err
