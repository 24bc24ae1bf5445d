"""The text of a growing list of ids: whole characters as soon as they are certain, and nothing of a stop text.

A character may be several tokens, and a token's text may depend on the one before it (a leading space). So the text of a token is what
decoding a few ids before it together with it adds. Text that may be the beginning of a stop text is held back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from petatron.data.tokenizer import Tokenizer
    from petatron.infer.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
_MAX_HELD_IDS = 16
"""An id that is no part of a character leaves a replacement character for good; after so many ids it is taken as that."""


class TextStream:
    """Without a tokenizer the text stays empty.

    >>> from petatron.data.tokenizer import ByteTokenizer
    >>> from petatron.infer.sampling_params import SamplingParams
    >>> stream = TextStream(ByteTokenizer(), SamplingParams(stop_strings=("end",)))
    >>> [stream.add(byte) for byte in "hé e".encode()]
    ['h', '', 'é', ' ', '']
    >>> [stream.add(byte) for byte in b"nd"], stream.stop
    (['', ''], 'end')
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        """params: say which texts stop it, whether such a text is its end or cut off, and which ids are left out of it."""
        self._tokenizer, self._stop_strings = tokenizer, params.stop_strings
        self._keep_stop, self._hidden_ids = params.keep_stop, frozenset(params.hidden_ids)
        self._ids: list[int] = []
        self._context, self._read = 0, 0  # ids from the first on are decoded; before the second their text is known
        self._held = ""
        self.text = ""
        self.stop: str | None = None

    def add(self, token: int) -> str:
        """Takes an id and returns the text that became certain; `stop` is set if a stop text is complete, which is cut off."""
        if self._tokenizer is None or token in self._hidden_ids:
            return ""
        self._ids.append(token)
        return self._release(self._decode_new(final=False), final=False)

    def finish(self) -> str:
        """Returns what was held back; no id comes after it."""
        return self._release(self._decode_new(final=True), final=True)

    def _decode_new(self, *, final: bool) -> str:
        if self._tokenizer is None:
            return ""
        before = self._tokenizer.decode(self._ids[self._context : self._read])
        text = self._tokenizer.decode(self._ids[self._context :])
        waits = text.endswith(_REPLACEMENT) and len(self._ids) - self._read < _MAX_HELD_IDS
        if len(text) <= len(before) or (waits and not final):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _release(self, new: str, *, final: bool) -> str:
        if self.stop is not None:
            return ""
        if not self._stop_strings:
            self.text += new
            return new
        pending = self._held + new
        matches = [(pending.index(stop), stop) for stop in self._stop_strings if stop in pending]
        if matches:
            position, self.stop = min(matches, key=lambda match: (match[0], len(match[1])))
            certain, self._held = pending[: position + len(self.stop) * self._keep_stop], ""
        else:
            kept = 0 if final else max(num_held(pending, stop) for stop in self._stop_strings)
            certain, self._held = pending[: len(pending) - kept], pending[len(pending) - kept :]
        self.text += certain
        return certain


def num_held(text: str, tag: str) -> int:
    """Returns how many last characters of a text may be the beginning of a tag."""
    return next(size for size in range(len(tag) - 1, -1, -1) if text.endswith(tag[:size]))
