"""The reasoning of an answer, apart from its content: models write it first, between the tags that their chat template shows.

think    <think> ... </think> (DeepSeek-R1, Qwen3, and most others)
mistral  [THINK] ... [/THINK] (Magistral)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

ReasoningFormat = Literal["think", "mistral"]
REASONING_FORMATS: tuple[ReasoningFormat, ...] = get_args(ReasoningFormat)
REASONING_TAGS: Mapping[ReasoningFormat, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


class ReasoningDelta(NamedTuple):
    """What new text brought of each."""

    reasoning: str = ""
    content: str = ""


def template_reasoning(template: str) -> ReasoningFormat | None:
    """Returns the format that a chat template shows; None if it shows none of these.

    >>> template_reasoning("{{ m.content.split('</think>')[-1] }}"), template_reasoning("{{ messages }}")
    ('think', None)
    """
    return next((form for form, tags in REASONING_TAGS.items() if any(tag in template for tag in tags)), None)


def opens_reasoning(prompt: str, form: ReasoningFormat) -> bool:
    """Whether a prompt ends inside reasoning: some templates write the first tag themselves."""
    return prompt.rstrip().endswith(REASONING_TAGS[form][0])


def count_reasoning_tokens(tokens: Sequence[bytes], form: ReasoningFormat, *, inside: bool = False) -> int:
    """Returns how many tokens of an answer lie between the tags, which do not count. inside: it begins as reasoning.

    >>> count_reasoning_tokens([b"<think>", b"Hm", b".", b"</think>", b"Yes"], "think")
    2
    """
    begin_tag, end_tag = (tag.encode() for tag in REASONING_TAGS[form])
    answer = b"".join(tokens)
    start = 0 if inside else len(answer) - len(answer.lstrip())
    if not inside:
        if not answer.startswith(begin_tag, start):
            return 0
        start += len(begin_tag)
    end_at = answer.find(end_tag, start)
    end = len(answer) if end_at < 0 else end_at
    count = place = 0
    for token in tokens:
        count += max(place, start) < min(place + len(token), end)
        place += len(token)
    return count


@dataclass(slots=True)
class ReasoningParser:
    """Reads one answer. inside: it begins as reasoning. White space around the tags belongs to neither part.

    >>> parser = ReasoningParser("think")
    >>> parser.feed("<think>\\nHm. </th"), parser.feed("ink>\\n\\nYes")
    (ReasoningDelta(reasoning='Hm.', content=''), ReasoningDelta(reasoning='', content='Yes'))
    """

    form: ReasoningFormat
    inside: bool = False
    _pending: str = field(default="", init=False)
    _state: Literal["start", "reasoning", "gap", "content"] = field(default="start", init=False)
    _begun: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._state = "reasoning" if self.inside else "start"

    @property
    def is_apart(self) -> bool:
        """Whether the text so far ends in reasoning, or in what parts it from content."""
        return self._state in ("reasoning", "gap")

    def feed(self, text: str, *, final: bool = False) -> ReasoningDelta:
        """Takes new text; `final` releases what may be the beginning of a tag."""
        self._pending += text
        reasoning = content = ""
        if self._state == "start":
            self._read_start(final=final)
        if self._state == "reasoning":
            reasoning = self._take_reasoning(final=final)
        if self._state == "gap":
            self._pending = self._pending.lstrip()
            self._state = "content" if self._pending else "gap"
        if self._state == "content":
            content, self._pending = self._pending, ""
        return ReasoningDelta(reasoning, content)

    def _read_start(self, *, final: bool) -> None:
        begin, text = REASONING_TAGS[self.form][0], self._pending.lstrip()
        if text.startswith(begin):
            self._pending, self._state = text[len(begin) :], "reasoning"
        elif final or not begin.startswith(text):
            self._state = "content"

    def _take_reasoning(self, *, final: bool) -> str:
        before, end, after = self._pending.partition(REASONING_TAGS[self.form][1])
        if end:
            self._pending, self._state = after, "gap"
            return self._stripped(before.rstrip())
        held = 0 if final else num_held(before, REASONING_TAGS[self.form][1])
        certain = before[: len(before) - held].rstrip() if not final else before.rstrip()
        self._pending = "" if final else before[len(certain) :]
        return self._stripped(certain)

    def _stripped(self, text: str) -> str:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return text


def num_held(text: str, tag: str) -> int:
    """Returns how many last characters of a text may be the beginning of a tag."""
    return next(size for size in range(len(tag) - 1, -1, -1) if text.endswith(tag[:size]))
