"""A writer of files that is a context: leaving it finishes the files, and an error removes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class FinishOrAbort(ABC):
    """What has to be finished, or leaves nothing behind."""

    @abstractmethod
    def finish(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()
