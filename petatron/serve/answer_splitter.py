"""An answer as it grows, in its parts: reasoning, content, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from petatron.serve.reasoning import ReasoningParser
from petatron.serve.tool_calls import ToolCall, ToolCallParser


class AnswerParts(NamedTuple):
    """What new text brought."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


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
            reasoning, text = self.reasoning.feed(text, final=final)
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
