"""A real server on a free port, in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn
from fastapi import FastAPI

from petatron.serve.engine_thread import EngineThread, ServedEngine
from petatron.serve.http.app import build_app
from petatron.serve.http.limited_protocol import limited_protocol
from petatron.serve.http.server_state import ServerState
from petatron.serve.serve_options import ServeLimits, ServeOptions
from petatron.serve.served_model_properties import ModelCard
from tests.load_deadline import Deadline, scaled

TEMPLATE = (
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class LiveServer:
    url: str
    engine: ServedEngine
    app: FastAPI

    @property
    def state(self) -> ServerState:
        return self.app.state.petatron

    @property
    def thread(self) -> EngineThread:
        return self.state.thread

    def client(self, **settings) -> httpx.Client:
        # Reading certificates would take most of a test's time.
        return httpx.Client(base_url=self.url, timeout=scaled(60), verify=False, trust_env=False, **settings)

    def wait_until(self, holds, *, timeout_s: float = 30.0) -> None:
        deadline = Deadline(timeout_s)
        while not holds():
            assert not deadline.is_over, "waited in vain"
            time.sleep(0.005)

    def is_idle(self) -> bool:
        return self.thread.num_open == 0 and not self.engine.has_work


@contextmanager
def live_server(
    engine: ServedEngine, *, card: ModelCard | None = None, background=None, **options
) -> Iterator[LiveServer]:
    options.setdefault("limits", ServeLimits())
    model = card or ModelCard.of_engine(engine, name="fake", created_s=1, chat_template=TEMPLATE)
    app = build_app(engine, model, ServeOptions(**options), background=background)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY on such
    listener.bind(("127.0.0.1", 0))
    protocol = limited_protocol(options["limits"])
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, log_level="error", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield LiveServer(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, app)
    finally:
        server.should_exit = True
        thread.join(scaled(10))
        listener.close()
