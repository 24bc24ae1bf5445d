"""`ServerState`, what all routes share: the engine's thread, the model, limits and counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi import Request

from petatron.serve.engine_thread import EngineThread
from petatron.serve.generation_handle import Generation
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.metrics import ServerMetrics
from petatron.serve.isolation.limited_worker_pool import Isolation
from petatron.serve.serve_options import ServeOptions
from petatron.serve.served_model_properties import ModelCard


@dataclass(slots=True)
class ServerState:
    """One for each app; `model` is replaced when the engine is."""

    thread: EngineThread
    model: ModelCard
    options: ServeOptions
    metrics: ServerMetrics
    isolation: Isolation

    def replace_model(self, model: ModelCard) -> None:
        self.model = replace(model, isolation=self.isolation)

    async def check_constraints(self, generations: Sequence[Generation]) -> None:
        """Raises `DataError` for a constraint that cannot be compiled within limits: before the engine sees it."""
        for constraint, owner in {
            (generation.params.constraint, generation.params.owner) for generation in generations
        }:
            if constraint is not None:
                await self.isolation.check_constraint(constraint, owner=owner)

    def check_model(self, name: str | None) -> ModelCard:
        """Returns the served model, with the adapter that the name is of; raises 404 for another name."""
        if name in self.options.adapters:
            return replace(self.model, name=str(name), adapter=str(name))
        if name not in (None, "", self.model.name):
            others = f" and its adapters {', '.join(self.options.adapters)}" if self.options.adapters else ""
            text = f"This server serves {self.model.name!r}{others} and no other model."
            raise ApiError(404, text, param="model", code="model_not_found")
        return self.model


def state_of(request: Request) -> ServerState:
    return request.app.state.petatron
