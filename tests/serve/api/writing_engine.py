"""An engine that answers a given text, and a server whose answers and chat template a test sets."""

from __future__ import annotations

from petatron.serve.served_model_properties import ModelCard
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer


class WritingEngine(FakeEngine):
    """Answers a given text, and then the end."""

    def __init__(self, text: str = "") -> None:
        super().__init__(max_length=1000)
        self.write(text)

    def write(self, text: str) -> None:
        self._script = [*text.encode(), 256]

    def _draw(self, request) -> int:
        return self._script[len(request.completion.ids)]


def set_answer(server: LiveServer, text: str, template: str, *, reasoning_format: str = "auto") -> WritingEngine:
    """Makes the server answer a text, under a chat template."""
    engine = server.engine
    assert isinstance(engine, WritingEngine)
    engine.write(text)
    server.state.model = ModelCard.of_engine(engine, name="fake", created_s=1, chat_template=template)
    object.__setattr__(server.state.options, "reasoning_format", reasoning_format)
    return engine
