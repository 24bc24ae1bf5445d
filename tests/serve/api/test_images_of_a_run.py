"""`petatron serve` of a run that was trained on images: they are shown, and chats are written, as in its training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openai
import pytest

from petatron.cli.main import main
from petatron.data.tokenizer import HuggingFaceTokenizer
from petatron.serve.open_engine import model_settings
from tests.serve.image_model import data_url, png
from tests.unit.data.image_text.small_tokenizer import token_id, write_tokenizer
from tests.unit.data.images.image_files import png_header

SHAPE = (
    "--model-type vlm --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 192 --position-embedding-type rope "
    "--normalization RMSNorm --activation swiglu --vision-num-layers 1 --vision-hidden-size 32 --vision-num-attention-heads 2 "
    "--vision-patch-size 8 --vision-image-size 32 --mock-data --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --train-iters 1 "
    "--live off --dataset-settings images=pad image_markup=llava chat_format=llama3"
).split()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "run"
    tokenizer = write_tokenizer(folder.parent / "tokenizer")
    number = str(token_id(HuggingFaceTokenizer(tokenizer), "<image>"))
    words = ["--tokenizer-model", str(tokenizer), "--image-token-id", number, "--save", str(folder)]
    assert main(["train", *SHAPE, *words]) == 0
    return folder


def test_a_run_shows_images_as_it_was_trained_unless_flags_say_otherwise(run_folder: Path):
    prompts = model_settings(run_folder).image_prompts()
    template = prompts.chat_template() or ""
    assert (prompts.markup, prompts.chat_format) == ("llava", "llama3") and "start_header_id" in template
    flags = ["--dataset-settings", "chat_format=vicuna"]
    assert "USER: " in (model_settings(run_folder, flags).image_prompts().chat_template() or "")


@pytest.mark.slow
def test_a_served_run_answers_chats_with_images(run_folder: Path):
    command = [sys.executable, "-m", "petatron", "serve", str(run_folder), "--port", "0", "--max-patches", "64"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        url = next(part for part in line.split() if part.startswith("http"))
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)

        def ask(*images: bytes) -> str:
            parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
            content = [*parts, {"type": "text", "text": "what?"}]
            answer = client.chat.completions.create(
                model="run",
                messages=[{"role": "user", "content": content}],  # type: ignore[list-item]
                max_tokens=4,
                extra_body={"return_prompt_text": True},
            )
            return answer.prompt_text  # type: ignore[attr-defined]

        assert "user<|end_header_id|>\n\n<image><image>what?<|eot_id|>" in ask(png(1), png(2))
        with pytest.raises(openai.BadRequestError, match="has more than 33,554,432 pixels"):
            ask(png_header(30_000, 30_000))
        with pytest.raises(openai.BadRequestError, match="have 80 patches, and the model reads 64"):
            ask(*[png(1)] * 5)
    finally:
        server.terminate()
        assert server.wait(30) == 0
