"""The outermost ASGI middleware: counts requests, checks their key, bounds body and time, and turns every failure into an error object."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from petatron.base.log import get_logger
from petatron.serve.http.api_error import ApiError, to_api_error
from petatron.serve.http.metrics import ServerMetrics
from petatron.serve.http.run_generations import DEADLINE, KEY_NAME, ClientLeft
from petatron.serve.serve_options import ServeOptions

OPEN_PATHS = ("/", "/health", "/healthz", "/readyz")
"""Need no key: they tell nothing of the model, and probes and browsers have none."""
_BODY_TIMEOUT_S, _GRACE_S = 60.0, 2.0
_CLIENT_CLOSED = 499
_BODY_METHODS = ("POST", "PUT", "PATCH", "DELETE")
_BODY_READ = "petatron.body_read"
_log = get_logger(__name__)


class HostCheck:
    """Checks the Host header of requests, against DNS rebinding.

    The page of another site whose name is made to resolve to this machine is same-origin to its browser, and could use a server that
    has no key. Its requests have that name as their Host. An IP address as the Host is safe, and so is none, since browsers send one.

    >>> check = HostCheck("127.0.0.1", ("Model.example",))
    >>> [check.is_allowed(host) for host in (b"localhost:8000", b"[::1]:8000", b"10.0.0.7", b"model.example", b"evil.example", b"")]
    [True, True, True, True, False, True]
    """

    def __init__(self, bound: str, allowed: Sequence[str]) -> None:
        local = ("localhost", bound, socket.gethostname(), socket.getfqdn())
        self._names = frozenset(name.lower().rstrip(".") for name in (*local, *allowed) if name)

    def is_allowed(self, host: bytes) -> bool:
        if not host or "*" in self._names:
            return True
        name = host.decode("latin-1").lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name.rstrip(".") in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class RequestGuard:
    """A plain ASGI middleware: those of starlette's base class hide a client's disconnect from what they wrap."""

    def __init__(self, app: ASGIApp, *, options: ServeOptions, metrics: ServerMetrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._keys = [hashlib.sha256(key.encode()).digest() for key in options.api_keys]
        self._hosts = HostCheck(options.host.strip("[]"), options.allowed_hosts)
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-content-type-options", b"nosniff"))
            await send(message)

        self._running += 1
        try:
            await self._answer(scope, receive, counted_send)
        except ClientLeft:
            status = status or _CLIENT_CLOSED
        except Exception as error:
            answer = to_api_error(error)
            if answer.status == 500:
                _log.error("a request failed", exc_info=error)
            if not status:
                response = answer.response()
                if not scope.get(_BODY_READ):  # what is left of it is not waited for
                    response.headers["Connection"] = "close"
                await response(scope, receive, counted_send)
        finally:
            self._running -= 1
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status or _CLIENT_CLOSED)).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._options.limits
        if self._running > limits.max_connections:
            raise ApiError(503, "The server has too many requests open. Try again later.", code="too_many_connections")
        self._check_host(scope)
        if self._keys and scope["path"] not in OPEN_PATHS:
            self._check_key(scope)
        deadline_s = asyncio.get_running_loop().time() + limits.request_timeout_s
        scope[DEADLINE] = deadline_s
        # Generation ends at the deadline with an answer that says so; this is for whatever else may take long.
        async with asyncio.timeout_at(deadline_s + _GRACE_S):
            # What takes no body gets none: nobody without a key has one kept here.
            takes_body = scope["method"] in _BODY_METHODS and scope["path"] not in OPEN_PATHS
            await self._app(scope, await self._read_body(scope, receive) if takes_body else receive, send)

    def _check_host(self, scope: Scope) -> None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or not self._hosts.is_allowed(hosts[0] if hosts else b""):
            text = "This server is not known by the name in the Host header. Start it with --allowed-host NAME to allow it."
            raise ApiError(421, text, code="misdirected_request")

    def _check_key(self, scope: Scope) -> None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All are compared, each in constant time: neither the key nor which of them it was can be timed.
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        scope[KEY_NAME] = digest.hex()[:32]
        if scheme.lower() != b"bearer" or not any(matches):
            text = "Send this server's API key in the header Authorization: Bearer KEY."
            raise ApiError(401, text, code="invalid_api_key")

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """Reads the whole body and returns a `receive` that gives it; a body that is too long is not read to its end."""
        most = self._options.limits.max_body_bytes
        text = f"The body is longer than the {most} bytes that this server takes."
        too_long = ApiError(413, text, code="body_too_large")
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > most:
            raise too_long
        parts, size = [], 0
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise too_long
                if not message.get("more_body", False):
                    break
        scope[_BODY_READ] = True
        body: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def receive_again() -> Message:
            return body.pop() if body else await receive()

        return receive_again
