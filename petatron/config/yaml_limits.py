"""Limits what untrusted YAML costs: how deeply brackets nest, and how much its aliases stand for.

PyYAML's time for each token grows with the brackets around it. An alias (`*name`) repeats an anchored value (`&name`), and nine lines of
aliases of aliases stand for gigabytes: PyYAML shares the value, but whoever walks through it, prints it or merges it (`<<`) pays for
every repetition. So the size of what aliases repeat is counted while the document is composed, before anything is built of it.
"""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 20
"""Nested brackets; a config has two."""
MAX_ALIASED_SIZE = 1 << 20
"""Values and characters that aliases may stand for together; a config with shared defaults has some hundreds."""


def limited_loader() -> Any:
    """Returns PyYAML's safe loader (a class) with these limits. `yaml` is slow to import, so it is imported here.

    >>> import yaml
    >>> yaml.load("a: &a [1, 2]\\nb: [*a, *a]", limited_loader())
    {'a': [1, 2], 'b': [[1, 2], [1, 2]]}
    >>> yaml.load("[" * 30 + "]" * 30, limited_loader())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    yaml.error.MarkedYAMLError: it is nested too deeply
    ...
    """
    import yaml

    class LimitedLoader(yaml.SafeLoader):
        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self._size, self._aliased_size = 0, 0
            self._sizes: dict[int, int] = {}  # of finished nodes, by identity

        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            if self.flow_level >= MAX_DEPTH:
                raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=self.get_mark())
            super().fetch_flow_collection_start(TokenClass)

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            is_alias, mark, before = self.check_event(yaml.AliasEvent), self.peek_event().start_mark, self._size
            node = super().compose_node(parent, index)
            if is_alias:
                if id(node) not in self._sizes:
                    raise yaml.MarkedYAMLError(problem="an alias (*name) is inside of what it names", problem_mark=mark)
                self._aliased_size += self._sizes[id(node)]
                self._size += self._sizes[id(node)]
            else:
                self._size += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
                self._sizes[id(node)] = self._size - before
            if self._aliased_size > MAX_ALIASED_SIZE:
                problem = f"its aliases (*name) stand for more than {MAX_ALIASED_SIZE:,} values and characters"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
            return node

    return LimitedLoader
