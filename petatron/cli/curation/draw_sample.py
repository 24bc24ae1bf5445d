"""Draws samples token by token: in colors, or plain with a bar between tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from petatron.base.terminal_escape import printable

if TYPE_CHECKING:
    from petatron.data.tokenizer import Tokenizer

_BACKGROUNDS = ("\x1b[30;48;5;153m", "\x1b[30;48;5;223m")
_MASKED_BACKGROUND, _BORDER, _RESET = "\x1b[30;48;5;250m", "\x1b[2m", "\x1b[0m"
_LINE_END, _TAB, END_OF_DOCUMENT = "\u23ce", "\u21e5", "<end of document>"


@dataclass(frozen=True, slots=True)
class ShownToken:
    """Text of a token, or of several that are one character; how many ids they are, and how many have a loss."""

    text: str
    num_ids: int
    num_with_loss: int

    @property
    def is_masked(self) -> bool:
        return self.num_with_loss < self.num_ids


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """Tokens of one document in a sample."""

    title: str
    tokens: tuple[ShownToken, ...]


def shown_tokens(
    ids: Sequence[int], has_loss: Sequence[bool], tokenizer: Tokenizer | None, *, end: str = END_OF_DOCUMENT
) -> Iterator[ShownToken]:
    """Yields the tokens of one document; ids that are parts of a character are shown together. `end` stands for the last token."""
    if tokenizer is None:
        yield from (ShownToken(str(number), 1, int(loss)) for number, loss in zip(ids, has_loss))
        return
    from petatron.infer.sampling_params import SamplingParams
    from petatron.infer.text_stream import TextStream

    def stream() -> TextStream:
        return TextStream(tokenizer, SamplingParams())

    reader, held, held_loss = stream(), 0, 0
    for number, loss in zip(ids, has_loss):
        if number == tokenizer.eod:
            if held:
                yield ShownToken(reader.finish(), held, held_loss)
            yield ShownToken(end, 1, int(loss))
            reader, held, held_loss = stream(), 0, 0
            continue
        held, held_loss = held + 1, held_loss + loss
        if text := reader.add(number):
            yield ShownToken(text, held, held_loss)
            held = held_loss = 0
    if held:
        yield ShownToken(reader.finish(), held, held_loss)


def drawn(parts: Sequence[DocumentPart], *, colored: bool) -> Iterator[str]:
    """Yields the text of a sample; control characters of documents are shown, not obeyed."""
    number = 0
    for part in parts:
        yield f"{_BORDER}-- {part.title} --{_RESET}\n" if colored else f"-- {part.title} --\n"
        for token in part.tokens:
            lines = token.text.split("\n")
            style = _MASKED_BACKGROUND if token.is_masked else _BACKGROUNDS[number % 2]
            before = style if colored else "|" + "~" * token.is_masked
            for line in lines[:-1]:
                yield f"{before}{_visible(line)}{_LINE_END}{_RESET if colored else ''}\n"
                before = style if colored else ""
            if lines[-1]:
                yield f"{before}{_visible(lines[-1])}{_RESET if colored else ''}"
            number += 1
        yield "\n"


def _visible(text: str) -> str:
    return printable(text.replace("\t", _TAB))
