"""`ServeOptions`: the limits of a server, its keys, and where it listens."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal

from petatron.base.errors import Problem, raise_problems
from petatron.base.loopback_address import is_loopback
from petatron.data.images.decode_image import HIGHEST_MAX_PIXELS
from petatron.infer.split_answer_parts import ReasoningFormat, template_reasoning
from petatron.infer.tool_calls import ToolCallFormat, template_format
from petatron.mesh.launch.environment import API_KEY_VARIABLE
from petatron.serve.item_names import ItemNames

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
MIN_KEY_LENGTH = 16
HIGHEST_MAX_BODY_BYTES = 1 << 30
BODY_BYTES_WITH_IMAGES = 1 << 25
"""The default of `max_body_bytes` for a model that reads images, in base64 a third longer than they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """The most that a request, and all of them together, may ask for.

    max_body_bytes: of one request. max_prompt_tokens, max_tokens: of one sequence; None: what the model has positions for.
    max_batch: prompts of one request. max_n: answers to one prompt. max_open: sequences accepted and not finished.
    max_logprobs: log-probabilities in the answer to one request. max_images: of one request. max_image_bytes, max_image_pixels: of one
    image; pixels are known from its header, before any is decoded.
    max_connections: connections, and requests that are answered at once. max_connections_per_address: connections of one client's
    address, which may be that of a proxy. max_header_bytes, max_headers, header_timeout_s: of one request, before its key is checked.
    request_timeout_s: from the first byte of a request to the last of its answer. drain_timeout_s: after SIGTERM, for what is open.
    isolation_timeout_s, isolation_memory_bytes: of one grammar or chat template, which run in processes of their own
    (`serve/isolation`).
    """

    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    max_batch: int = 128
    max_n: int = 16
    max_open: int = 512
    max_logprobs: int = 1 << 16
    max_images: int = 16
    max_image_bytes: int = 1 << 24
    max_image_pixels: int = 1 << 25
    max_connections: int = 1024
    max_connections_per_address: int = 512
    max_header_bytes: int = 1 << 16
    max_headers: int = 128
    header_timeout_s: float = 15.0
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    isolation_timeout_s: float = 10.0
    isolation_memory_bytes: int = 1 << 30

    def problems(self) -> Iterator[Problem]:
        for name in (limit.name for limit in fields(self)):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield Problem(flag_of(name), str(value), "allows nothing", "Use a number above 0.")
        if self.max_image_pixels > HIGHEST_MAX_PIXELS:
            rule, fix = "is more than images are decoded of", f"Use at most {HIGHEST_MAX_PIXELS}."
            yield Problem("--max-image-pixels", str(self.max_image_pixels), rule, fix)
        if self.max_body_bytes > HIGHEST_MAX_BODY_BYTES:
            rule, fix = "is more than one request may take of memory", f"Use at most {HIGHEST_MAX_BODY_BYTES}."
            yield Problem("--max-body-bytes", str(self.max_body_bytes), rule, fix)
        if self.max_batch > self.max_open:
            rule = f"is more than --max-open {self.max_open}, so that such a request could never be accepted"
            yield Problem("--max-batch", str(self.max_batch), rule, "Raise --max-open, or lower --max-batch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where a server listens, who may use it, under which name, and its limits.

    allowed_hosts: names by which browsers may reach the server, besides its own; `*`: any.
    adapters: names of the adapters that requests may give as their model.
    share_prefixes: equal beginnings of prompts are computed once for all keys, and not for each: `cached_tokens` and the time of
    an answer then tell one key's owner what another has sent.
    tool_call_format: in which the model calls tools (`tool_calls.py`); auto: the one that its chat template shows. reasoning_format: of the
    tags around reasoning (`split_answer_parts.py`), alike. item_names: of a recommender; None: clients know items by their numbers.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_name: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    share_prefixes: bool = False
    tool_call_format: ToolCallFormat | Literal["auto", "none"] = "auto"
    reasoning_format: ReasoningFormat | Literal["auto", "none"] = "auto"
    item_names: ItemNames | None = field(default=None, repr=False)
    limits: ServeLimits = field(default_factory=ServeLimits)

    def check(self) -> None:
        """Raises `ConfigError` with all problems."""
        problems = list(self.limits.problems())
        if not 0 <= self.port < 1 << 16:
            problems.append(Problem("--port", str(self.port), "is not a port", "Use 0 (any free one) to 65535."))
        if not is_address(self.host):
            problems.append(Problem("--host", self.host, "is not an address", f"Use one such as {DEFAULT_HOST}."))
        elif not self.api_keys and not is_loopback(self.host):
            rule = "is reachable from other machines, and no API key is set"
            fix = f"Add --api-key-file FILE or set {API_KEY_VARIABLE}, or listen on {DEFAULT_HOST}."
            problems.append(Problem("--host", self.host, rule, fix))
        if any(len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() for key in self.api_keys):
            rule = f"is shorter than {MIN_KEY_LENGTH} characters, or has some that cannot be sent in a header"
            fix = "Make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            problems.append(Problem("API key", "", rule, fix))
        raise_problems(problems)

    def tool_format(self, template: str) -> ToolCallFormat | None:
        """Returns the format of calls under a chat template; None: answers are text alone."""
        given = self.tool_call_format
        return template_format(template) if given == "auto" else None if given == "none" else given

    def reasoning_tags(self, template: str) -> ReasoningFormat | None:
        """Returns the format of reasoning under a chat template; None: it is part of the content."""
        given = self.reasoning_format
        return template_reasoning(template) if given == "auto" else None if given == "none" else given


def flag_of(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


def is_address(host: str) -> bool:
    """Whether a host can be listened on: numbers alone must be an IP address, and a name may be one.

    >>> [is_address(host) for host in ("300.1.1.1", "127.0.0.1", "::1", "node7", "")]
    [False, True, True, True, True]
    """
    if host.strip("0123456789.") or not host:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
