"""Images in chats, through OpenAI's client: answers are those of the engine for the same patches, and nothing unbounded is taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from petatron.data.image_text.image_prompt import ImagePrompts
from petatron.data.images.decode_image import ImageLimits
from petatron.infer.engine_options import EngineOptions
from petatron.infer.prompt_images import PromptImages
from petatron.infer.sampling_params import SamplingParams
from petatron.serve.engine_process import EngineProcess
from petatron.serve.open_engine import ModelSettings, model_settings, open_engine
from petatron.serve.serve_options import ServeLimits
from petatron.serve.served_model_properties import ModelCard
from tests.serve.fake_engine import FakeEngine
from tests.serve.image_model import data_url, png, write_llava, write_qwen
from tests.serve.live_server import LiveServer, live_server
from tests.unit.data.images.image_files import png_header

FLAGS = ["--max-patches", "200"]
OPTIONS = EngineOptions(max_sequences=4, num_pages=96, page_size=8, recorded_steps=False)
LIMITS = ServeLimits(max_images=3, max_image_bytes=1 << 16, max_body_bytes=1 << 20)
MODELS = {"llava": write_llava, "qwen2.5-vl": write_qwen}

pytestmark = pytest.mark.usefixtures("forked_engines")


@pytest.fixture(scope="module", params=MODELS)
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    folder = MODELS[request.param](tmp_path_factory.mktemp("images") / "model")
    return model_settings(folder, FLAGS, options=OPTIONS)


@pytest.fixture(scope="module")
def server(settings: ModelSettings, forked_engines: None) -> Iterator[LiveServer]:
    engine = EngineProcess(settings)
    card = ModelCard.of_engine(
        engine, name="vlm", created_s=1, stop_ids=engine.stop_ids, images=settings.image_prompts_or_reason()
    )
    with live_server(engine, card=card, limits=LIMITS) as live:
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=server.client(), max_retries=0)


def shown(*contents: bytes | str) -> list[dict[str, Any]]:
    """A message of images and texts."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": content}
        if isinstance(content, str)
        else {"type": "image_url", "image_url": {"url": data_url(content), "detail": "auto"}}
        for content in contents
    ]
    return [{"role": "user", "content": parts}]


def engine_answer(settings: ModelSettings, ids: list[int], images: list[bytes]) -> tuple[list[int], list[float]]:
    """What the engine answers in this process, greedily, for the ids that the server names and patches cut here."""
    prompts = settings.image_prompts()
    read = [prompts.read(image, ImageLimits(), name="an image") for image in images]
    patches, grids = zip(*read, strict=True)
    engine = open_engine(settings).engine
    params = SamplingParams(max_new_tokens=8, temperature=0.0, logprobs=0, stop_ids=settings.stop_ids)
    number = engine.submit(ids, params, images=PromptImages(np.concatenate(patches), np.concatenate(grids)))
    while engine.has_work:
        engine.step()
    answer = engine.take(number)
    engine.close()
    return answer.ids, [token.logprob for token in answer.logprobs]


def ask(client: openai.OpenAI, messages: list[dict[str, Any]], **options: Any) -> Any:
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    return client.chat.completions.create(
        model="vlm", messages=messages, temperature=0, max_tokens=8, logprobs=True, extra_body=extra, **options
    )


def test_an_answer_is_that_of_the_engine_also_as_a_stream(client: openai.OpenAI, settings: ModelSettings):
    first, second = png(1), png(2, width=10, height=30)
    messages = shown(first, "what is this?", second)
    answer = ask(client, messages)
    ids = answer.prompt_token_ids
    image_token = settings.loaded.config.model.image_token_id
    assert answer.usage.prompt_tokens == len(ids) and ids.count(image_token) > 2
    expected, logprobs = engine_answer(settings, ids, [first, second])
    assert answer.choices[0].token_ids == expected
    assert [token.logprob for token in answer.choices[0].logprobs.content] == pytest.approx(logprobs, abs=1e-4)
    pieces = list(ask(client, messages, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == answer.choices[0].message.content


def test_other_images_of_the_same_size_are_not_taken_from_the_prefix_cache(client: openai.OpenAI):
    first, again, other = (ask(client, shown(png(seed), "what is this? " * 4)) for seed in (3, 3, 4))
    assert first.prompt_token_ids == again.prompt_token_ids == other.prompt_token_ids
    numbers = [[token.logprob for token in answer.choices[0].logprobs.content] for answer in (first, again, other)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
    assert numbers[0][:1] != pytest.approx(numbers[2][:1], abs=1e-3)
    assert again.usage.prompt_tokens_details.cached_tokens > 0 == other.usage.prompt_tokens_details.cached_tokens


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "http": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a.example/a.png"}}]}],
        "Image 1 (messages.0.content.0) is a URL of http:. This server fetches nothing: send the image itself, as data:image/png;base64",
    ),
    "file": (
        [{"role": "user", "content": [{"type": "image", "image": "file:///etc/passwd"}]}],
        "is a URL of file:. This server fetches nothing",
    ),
    "path": ([{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}], "is no data URL of an image"),
    "bomb": (
        shown("a", png(1), png_header(30_000, 30_000)),
        "Image 2 (messages.0.content.2) has more than 33,554,432 pixels",
    ),
    "truncated": (shown(png(1)[:200]), "Image 1 (messages.0.content.0) cannot be decoded"),
    "no image": (shown(b"GIF89a, or so"), "Image 1 (messages.0.content.0)"),
    "other format": (shown(b"BM" + bytes(100)), "is no image of a known format (JPEG, PNG, WEBP, GIF)"),
    "empty": (shown(b""), "is empty"),
    "large": (shown(bytes(1 << 17)), "has 131,072 bytes, and an image may have 65,536"),
    "no base64": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,a*b"}}]}],
        "is not valid base64",
    ),
    "too many": (shown(*[png(1)] * 4), "The request has 4 images, more than the 3"),
    "no URL": ([{"role": "user", "content": [{"type": "image_url"}]}], "needs image_url, with the data URL"),
    "audio": (
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        "a part of type input_audio is not supported: messages have text and images alone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_refused_by_name(client: openai.OpenAI, name: str):
    messages, said = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, messages)
    content = error.value.body
    assert isinstance(content, dict) and set(content) == {"message", "type", "param", "code"}
    assert said in content["message"] and content["param"] == "messages"


def test_an_image_token_in_a_text_is_refused(client: openai.OpenAI, settings: ModelSettings, server: LiveServer):
    prompts = settings.image_prompts()
    for messages in (shown(png(1), prompts.placeholder), shown(prompts.placeholder)):
        with pytest.raises(openai.BadRequestError, match="image"):
            ask(client, messages)
    with pytest.raises(openai.BadRequestError, match="its 0 images need 0"):
        client.completions.create(model="vlm", prompt=[3, settings.loaded.config.model.image_token_id or 0])
    assert ask(client, shown("still here")).choices[0].finish_reason == "length"
    assert server.state.thread.failure is None


def test_fields_that_do_not_go_with_images_are_refused(client: openai.OpenAI):
    for field, value in (("use_beam_search", True), ("truncate_prompt_tokens", 4)):
        with pytest.raises(openai.BadRequestError, match=f"{field} does not go with images"):
            ask(client, shown(png(1)), extra_body={field: value})


def test_images_are_counted_by_tokenize(client: openai.OpenAI, server: LiveServer):
    messages = shown("what?", png(1))
    with server.client() as http:
        answer = http.post("/tokenize", json={"messages": messages})
    assert answer.json()["tokens"] == ask(client, messages).prompt_token_ids


def test_a_model_of_text_takes_no_images():
    with live_server(FakeEngine()) as live, live.client() as http:
        answer = http.post("/v1/chat/completions", json={"messages": shown(png(1))})
    assert answer.status_code == 400 and "This model reads no images" in answer.json()["error"]["message"]


def test_a_model_without_a_chat_template_shows_images_in_a_plain_dialogue(tmp_path: Path):
    settings = model_settings(write_llava(tmp_path / "model", template=None), FLAGS, options=OPTIONS)
    prompts = settings.image_prompts()
    assert isinstance(prompts, ImagePrompts)
    engine = FakeEngine(tokenizer=settings.tokenizer)
    card = ModelCard.of_engine(engine, name="vlm", created_s=1, images=prompts)
    with live_server(engine, card=card) as live, live.client() as http:
        body = {"messages": shown("this: ", png(1), " <b>"), "max_tokens": 1, "return_prompt_text": True}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.json()["prompt_text"] == "User: this: <image> <b>\nAssistant:"
    assert answer.json()["usage"]["prompt_tokens"] == len(engine.seen[0][0]) > 16
