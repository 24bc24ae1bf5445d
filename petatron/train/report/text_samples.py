"""Generates text samples during training: the model continues the same prompts every so often, so that a reader sees it learn.

A prompt is a line of text, or a JSON object with `messages` (and `tools`), which the model answers as its chat template asks it to.

Generation is imported where it is used: most runs have no samples and start without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import DataError, TrainError
from petatron.base.untrusted_files import read_limited_bytes, reading_untrusted
from petatron.config import RunConfig
from petatron.config.required_settings import known_vocab_size
from petatron.config.schema.log import LogConfig
from petatron.data.conversations.end_of_turn import end_of_turn_id
from petatron.data.data_file_error import data_file_error
from petatron.data.prompt.prompt_encoder import PromptEncoder, check_messages
from petatron.data.tokenizer import Tokenizer
from petatron.models.stage_interface import StageModule
from petatron.parallel.parallel_model import ParallelModel

_MAX_FILE_BYTES = 1 << 20
_MAX_PROMPTS = 64
"""All ranks wait for the samples."""


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt and its token ids; of a chat, the last message."""

    text: str
    ids: tuple[int, ...]
    is_chat: bool = False


def read_prompts(run: RunConfig, tokenizer: Tokenizer | None) -> list[SamplePrompt]:
    """Reads `--sample-prompts`, one prompt per line, and checks that each can be continued; raises `DataError` with every problem."""
    if run.log.sample_prompts is None or tokenizer is None:
        return []
    from petatron.infer.check_request import check_prompt

    path = Path(run.log.sample_prompts)
    with reading_untrusted(path, data_file_error):
        lines = read_limited_bytes(path, _MAX_FILE_BYTES).decode().splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not 1 <= len(numbered) <= _MAX_PROMPTS:
        raise DataError(
            f"--sample-prompts {path} has {len(numbered):,} prompts. Give it 1 to {_MAX_PROMPTS}, one on each line."
        )
    prompts: list[SamplePrompt] = []
    problems: list[str] = []
    for number, line in numbered:
        try:
            text, ids, is_chat = _encode_prompt(line, tokenizer)
            check_prompt(
                ids,
                run.log.sample_tokens,
                positions=run.model.max_position_embeddings,
                vocab_size=known_vocab_size(run.model),
            )
        except DataError as error:
            problems.append(f"--sample-prompts {path}, line {number}: {error}")
        else:
            prompts.append(SamplePrompt(text, tuple(ids), is_chat))
    if problems:
        raise DataError("\n".join(problems))
    return prompts


def _encode_prompt(line: str, tokenizer: Tokenizer) -> tuple[str, list[int], bool]:
    """Returns the text that a sample shows of a prompt, its ids, and whether it is a chat."""
    try:
        chat = json.loads(line)
    except ValueError:
        chat = None
    if not isinstance(chat, dict) or "messages" not in chat:
        return line, tokenizer.encode(line), False
    messages, tools = check_messages(chat["messages"]), chat.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError("tools is not a list of objects, as OpenAI's API takes them.")
    last = messages[-1]["content"]
    shown = last if isinstance(last, str) else json.dumps(last)
    return shown, PromptEncoder(tokenizer).encode_messages(messages, tools=tools), True


class TextSampler:
    """Continues prompts with the model as it is now. Every rank calls it, and all get the same text."""

    def __init__(
        self,
        model: ParallelModel,
        tokenizer: Tokenizer,
        prompts: Sequence[SamplePrompt],
        settings: LogConfig,
        *,
        seed: int,
    ) -> None:
        if type(model.module).logits is StageModule.logits:
            raise TrainError(
                f"--sample-prompts {settings.sample_prompts} cannot be continued: {type(model.module).__name__} has no logits of the "
                "next token. Leave it out."
            )
        self._model, self._tokenizer, self._prompts = model, tokenizer, prompts
        self._settings, self._seed = settings, seed
        self._end = end_of_turn_id(tokenizer) if any(prompt.is_chat for prompt in prompts) else None

    def is_due(self, iteration: int) -> bool:
        interval = self._settings.sample_interval
        return interval is not None and iteration % interval == 0

    def sample(self) -> list[dict[str, str]]:
        """Returns each prompt with its continuation, by the same random numbers every time."""
        return [{"prompt": prompt.text, "text": self._continue(prompt)} for prompt in self._prompts]

    def _continue(self, prompt: SamplePrompt) -> str:
        from petatron.infer.generate import generate

        eod = self._tokenizer.eod
        ids = generate(
            self._model,
            prompt.ids,
            max_new_tokens=self._settings.sample_tokens,
            temperature=self._settings.sample_temperature,
            seed=self._seed,
            eod=eod,
        )
        ids = ids[: ids.index(self._end)] if self._end in ids else ids
        return self._tokenizer.decode(ids[:-1] if ids and ids[-1] == eod else ids)
