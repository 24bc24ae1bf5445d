"""Splits a growing answer into its parts: reasoning, content, and tool calls.

Models write their reasoning first, between the tags that their chat template shows:

think    <think> ... </think> (DeepSeek-R1, Qwen3, and most others)
mistral  [THINK] ... [/THINK] (Magistral)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from petatron.infer.text_stream import num_held
from petatron.infer.tool_calls import AnswerParts, ToolCallParser

ReasoningFormat = Literal["think", "mistral"]
REASONING_FORMATS: tuple[ReasoningFormat, ...] = get_args(ReasoningFormat)
REASONING_TAGS: Mapping[ReasoningFormat, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


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
    >>> parser.feed("<think>\\nHm. </th")[:2], parser.feed("ink>\\n\\nYes")[:2]
    (('Hm.', ''), ('', 'Yes'))
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

    def feed(self, text: str, *, final: bool = False) -> AnswerParts:
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
        return AnswerParts(reasoning, content)

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


@dataclass(slots=True)
class AnswerSplitter:
    """Splits one answer; without parsers all of it is content. max_calls: further calls are dropped."""

    reasoning: ReasoningParser | None = None
    tools: ToolCallParser | None = None
    max_calls: int | None = None
    num_calls: int = 0

    def feed(self, text: str, *, final: bool = False) -> AnswerParts:
        """Takes new text; `final`: there is no more, so nothing is held back."""
        reasoning = ""
        if self.reasoning is not None:
            reasoning, text, _ = self.reasoning.feed(text, final=final)
        if self.tools is None:
            return AnswerParts(reasoning, text)
        deltas = [self.tools.feed(text)]
        if final:
            deltas.append(self.tools.finish())
        calls = [call for delta in deltas for call in delta.calls]
        if self.max_calls is not None:
            calls = calls[: max(0, self.max_calls - self.num_calls)]
        self.num_calls += len(calls)
        return AnswerParts(reasoning, "".join(delta.content for delta in deltas), tuple(calls))
