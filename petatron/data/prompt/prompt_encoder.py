"""Prompts as a model expects them: a text with the ids that its tokenizer puts before one, or messages through its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.base.untrusted_files import reading_untrusted
from petatron.data.prompt.chat_template import (
    ChatTemplate,
    special_token,
    tokenizer_chat_template,
    tokenizer_settings,
)
from petatron.data.tokenizer import Tokenizer, vocabulary_json
from petatron.data.tokenizers_library import load_fast

PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n"
    "{% else %}{{ 'User' if m.role == 'user' else 'Assistant' }}: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For models without a template of their own: a dialogue as plain text."""
PLAIN_STOP_STRINGS = ("\nUser:",)


class PromptEncoder:
    """Encodes prompts of a model.

    A tokenizer of a pretrained model may put an id before every text (its tokenizer.json has a post-processor that does), without which
    the model has never seen a text. A chat template writes it itself.

    >>> from petatron.data.tokenizer import ByteTokenizer
    >>> encoder = PromptEncoder(ByteTokenizer())
    >>> encoder.encode("hi"), encoder.has_template
    ([104, 105], False)
    """

    def __init__(
        self, tokenizer: Tokenizer, *, template: ChatTemplate | None = None, is_read_whole: bool = False
    ) -> None:
        """`template` replaces the tokenizer's own. is_read_whole: an encoder reads the prompt, with the ids after a text too."""
        self._tokenizer = tokenizer
        template = template or tokenizer_chat_template(tokenizer)
        self.has_template = template is not None
        self._template = template or ChatTemplate(PLAIN_TEMPLATE)
        self.prefix_ids, suffix_ids = surrounding_ids(tokenizer)
        self.suffix_ids = suffix_ids if is_read_whole else ()

    def encode(self, text: str) -> list[int]:
        """Returns a text's ids; `DataError` if it is not valid Unicode, as bytes of another encoding are not."""
        return [*self.prefix_ids, *self._tokenizer.encode(check_unicode(text)), *self.suffix_ids]

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Returns a dialogue's prompt for the next answer; `DataError` where the template refuses it."""
        text = check_unicode(self._template.render(messages, tools=tools))
        return self._tokenizer.encode(text) if self.has_template else self.encode(text)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """What ends an answer to messages besides the model's stop ids."""
        return () if self.has_template else PLAIN_STOP_STRINGS


def check_unicode(text: str) -> str:
    """Returns the text; `DataError` if it has surrogates, which stand for bytes that were not UTF-8, or for half a character.

    >>> check_unicode("\\ud800")
    Traceback (most recent call last):
    petatron.base.errors.DataError: The text is not valid Unicode at character 1. Save it as UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"The text is not valid Unicode at character {error.start + 1}. Save it as UTF-8.") from error
    return text


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Returns the messages of a foreign file; `DataError` if they are none."""
    if not isinstance(messages, list) or not messages:
        raise DataError('messages is not a list such as [{"role": "user", "content": "Hello"}].')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError('A message is not an object with "role" and "content".')
    return messages


def prefix_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids that a tokenizer puts before every text."""
    return surrounding_ids(tokenizer)[0]


def surrounding_ids(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ids that a tokenizer puts before and after every text: around one that is read, and not continued."""
    content = tokenizer.files().get("tokenizer.json")
    if content is None:
        return (), ()
    with reading_untrusted(
        Path(tokenizer.name), lambda path, why: DataError(f"The tokenizer {path} {why}. Check its files.")
    ):
        fast = load_fast(content)
        plain, with_special = (fast.encode("a", add_special_tokens=special).ids for special in (False, True))
    starts = [at for at in range(len(with_special) - len(plain) + 1) if with_special[at : at + len(plain)] == plain]
    if not starts or not plain:
        return (), ()
    return tuple(with_special[: starts[0]]), tuple(with_special[starts[0] + len(plain) :])


def bos_ids(tokenizer: Tokenizer, *, add: bool | None = None) -> tuple[int, ...]:
    """Returns the ids before a text that is scored: None means what the tokenizer puts there, True its BOS token in any case.

    Raises `DataError` if a BOS token is asked for and the tokenizer names none.
    """
    if add is False:
        return ()
    prefix = prefix_ids(tokenizer)
    if prefix or add is None:
        return prefix
    token = special_token(tokenizer_settings(tokenizer), "bos_token")
    ids = [] if token is None else _ids_of_token(tokenizer, token)
    if len(ids) != 1:
        raise DataError(
            f"The tokenizer {tokenizer.name} names no BOS token (bos_token in tokenizer_config.json) to put before a text. "
            "Leave out what asks for one."
        )
    return tuple(ids)


def _ids_of_token(tokenizer: Tokenizer, token: str) -> list[int]:
    """Returns the id of a token by its name, which is text to some tokenizers, else those of its text."""
    content = vocabulary_json(tokenizer)
    number = None if content is None else load_fast(content).token_to_id(token)
    return tokenizer.encode(token) if number is None else [number]


def with_bos(ids: Sequence[int], bos: Sequence[int]) -> list[int]:
    """Puts `bos` before ids, unless they begin with it already, as the text of a chat template does.

    >>> with_bos([5, 6], (1,)), with_bos([1, 5], (1,)), with_bos([5], ())
    ([1, 5, 6], [1, 5], [5])
    """
    return list(ids) if list(ids[: len(bos)]) == list(bos) else [*bos, *ids]


def document_start(tokenizer: Tokenizer, bos: Sequence[int]) -> int | None:
    """Returns the id that the first token of a document is predicted from: BOS, else the end of another document; None without."""
    return bos[-1] if bos else tokenizer.eod
