"""The interface of the engine that a server drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from petatron.data.tokenizer import Tokenizer
from petatron.infer.completion import Completion, EngineStats, TokenEvent
from petatron.infer.sampling_params import SamplingParams


class ServedEngine(Protocol):
    """An engine of `infer/`, or one of a test. One thread calls all but `wake`."""

    @property
    def max_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def stats(self) -> EngineStats: ...
    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Returns the request's id; raises `DataError` or `ConfigError` for what cannot be served. What is found later, such as a
        constraint that cannot be compiled, is what `take` raises."""
        ...

    def cancel(self, request: int) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def wake(self) -> None:
        """Makes a `step` return that only waits for another process; called by any thread."""
        ...

    def take(self, request: int) -> Completion:
        """Returns a finished request, and forgets it; raises the `PetatronError` of one that failed."""
        ...

    def check_alive(self) -> None:
        """Raises `LaunchError` if the engine has ended by itself; asked while there is no work, which would notice it."""
        ...

    def close(self) -> None: ...
