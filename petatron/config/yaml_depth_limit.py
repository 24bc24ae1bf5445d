"""Limits the nesting depth of untrusted YAML: PyYAML's time for each token grows with the brackets around it."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 20
"""Nested brackets; a config has two."""


def depth_limited_loader() -> Any:
    """Returns PyYAML's safe loader (a class) that refuses deeper nesting. `yaml` is slow to import, so it is imported here.

    >>> import yaml
    >>> yaml.load("[" * 3 + "]" * 3, depth_limited_loader())
    [[[]]]
    >>> yaml.load("[" * 30 + "]" * 30, depth_limited_loader())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    yaml.error.MarkedYAMLError: it is nested too deeply
    ...
    """
    import yaml

    class ShallowLoader(yaml.SafeLoader):
        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            if self.flow_level >= MAX_DEPTH:
                raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=self.get_mark())
            super().fetch_flow_collection_start(TokenClass)

    return ShallowLoader
