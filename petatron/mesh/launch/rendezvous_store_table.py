"""The key-value table of the rendezvous store, without sockets: keys with bytes, counters, and requests that wait for keys.

Requests and answers are encoded in `rendezvous_store_protocol.py`. A client whose connection broke before the answer came sends the request
again with the same identifier; the table remembers its answers to requests that are not idempotent and repeats them, so that a counter
counts once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from petatron.mesh.launch.encrypted_channel import ChannelError
from petatron.mesh.launch.rendezvous_store_protocol import IDENTIFIER_BYTES, Operation, decode_fields, encode_fields

_MAX_REMEMBERED = 65_536
_REMEMBERED = (Operation.ADD, Operation.COMPARE_SET, Operation.APPEND)


class StoreTable:
    """The keys and values, and who waits for which keys. Sessions are any hashable objects, one per connection."""

    def __init__(self, answer: Callable[[object, bytes], None], status: Callable[[object], Sequence[bytes]]) -> None:
        """`answer` sends a message to a session; `status` returns the fields of that operation for a session."""
        self._answer, self._status = answer, status
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[object, tuple[list[bytes], bool]] = {}
        self._sessions_of: dict[bytes, set[object]] = {}
        self._remembered: OrderedDict[bytes, bytes] = OrderedDict()

    def request(self, session: object, message: bytes) -> None:
        """Answers a request, now or when the keys that it waits for are set."""
        try:
            operation = Operation(message[0])
        except (ValueError, IndexError):
            raise ChannelError("A message to the rendezvous store has no known operation.") from None
        identifier, fields = message[1 : 1 + IDENTIFIER_BYTES], decode_fields(message[1 + IDENTIFIER_BYTES :])
        if operation in (Operation.GET, Operation.WAIT):
            self._wait(session, fields, with_values=operation is Operation.GET)
        elif operation is Operation.STATUS:
            self._answer(session, encode_fields(self._status(session)))
        elif operation not in _REMEMBERED:
            self._answer(session, self._apply(operation, fields))
        else:
            if identifier not in self._remembered:
                self._remembered[identifier] = self._apply(operation, fields)
                if len(self._remembered) > _MAX_REMEMBERED:
                    self._remembered.popitem(last=False)
            self._answer(session, self._remembered[identifier])

    def forget(self, session: object) -> None:
        """Forgets a session that is gone."""
        keys, _ = self._waiting.pop(session, ([], False))
        for key in keys:
            if key in self._sessions_of:
                self._sessions_of[key].discard(session)
                if not self._sessions_of[key]:
                    del self._sessions_of[key]

    def _apply(self, operation: Operation, fields: list[bytes]) -> bytes:
        try:
            return encode_fields(self._execute(operation, fields))
        except (ValueError, IndexError) as error:
            raise ChannelError(
                f"A message to the rendezvous store does not fit its operation {operation.name}: {error}."
            ) from None

    def _execute(self, operation: Operation, fields: list[bytes]) -> Sequence[bytes]:
        """Executes an operation on the table, and returns the fields of its answer."""
        values = self._values
        if operation is Operation.SET:
            for key, value in zip(fields[::2], fields[1::2], strict=True):
                self._set(key, value)
            return ()
        if operation is Operation.CHECK:
            return (b"1" if all(key in values for key in fields) else b"0",)
        if operation is Operation.ADD:
            key, amount = fields
            total = b"%d" % (int(values.get(key, b"0")) + int(amount))
            self._set(key, total)
            return (total,)
        if operation is Operation.COMPARE_SET:
            key, expected, desired = fields
            if values.get(key, b"") == expected:
                self._set(key, desired)
            return (values.get(key, expected),)
        if operation is Operation.DELETE:
            (key,) = fields
            return (b"0" if values.pop(key, None) is None else b"1",)
        if operation is Operation.APPEND:
            key, value = fields
            self._set(key, values.get(key, b"") + value)
            return ()
        assert operation is Operation.COUNT
        return (b"%d" % len(values),)

    def _set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for session in list(self._sessions_of.get(key, ())):
            self._answer_if_complete(session)

    def _wait(self, session: object, keys: list[bytes], *, with_values: bool) -> None:
        if session in self._waiting:
            raise ChannelError("A connection to the rendezvous store has a second request while the first one waits.")
        self._waiting[session] = (keys, with_values)
        for key in keys:  # also those that are set: they may be deleted before the others come
            self._sessions_of.setdefault(key, set()).add(session)
        self._answer_if_complete(session)

    def _answer_if_complete(self, session: object) -> None:
        keys, with_values = self._waiting[session]
        if not all(key in self._values for key in keys):
            return
        self.forget(session)
        self._answer(session, encode_fields([self._values[key] for key in keys] if with_values else []))
