"""What comes to the store of ranks from the network: to its server, and to a rank from whoever says to be the server.

The bytes of a connection are a file here. Every byte is covered by a proof or a tag: whatever is changed on the way is refused, with
nothing done but what the frames before it asked for. Sealed cases come from someone who knows the secret and sends messages that fit
nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from petatron.mesh.launch.encrypted_channel import MAGIC, ChannelError, ClientChannel, ServerChannel
from petatron.mesh.launch.rendezvous_store_protocol import Operation, decode_fields, encode_request
from petatron.mesh.launch.rendezvous_store_table import StoreTable
from tests.fuzz.kind import Case, Door, Files, Kind, Refused

_SECRET = "correct horse battery"
_NONCE = bytes(range(32))
_FROM_RANK, _FROM_SERVER = "rank.bin", "server.bin"
_REQUESTS = [
    encode_request(operation, bytes((number,)) * 16, fields)
    for number, (operation, fields) in enumerate(
        [
            (Operation.SET, (b"present/1", b"2", b"x", b"\xff\x00")),
            (Operation.ADD, (b"told", b"1")),
            (Operation.COMPARE_SET, (b"failed", b"", b"{}")),
            (Operation.GET, (b"present/1", b"told")),
            (Operation.CHECK, (b"admitted",)),
            (Operation.APPEND, (b"x", b"!")),
            (Operation.WAIT, (b"x",)),
            (Operation.DELETE, (b"present/1",)),
            (Operation.COUNT, ()),
            (Operation.STATUS, ()),
        ]
    )
]
_LENGTH = struct.Struct(">H")
_MOST_BYTES = 1 << 20
_CHUNKS = {"at once": _MOST_BYTES, "byte by byte": 1, "by nines": 9}


def make(name: str) -> Kind:
    answers = _answers(_REQUESTS)
    inner = {_FROM_RANK: _join(_REQUESTS), _FROM_SERVER: _join(answers)}
    server = {f"server, {how}": _server_door(size) for how, size in _CHUNKS.items()}
    rank = {f"rank, {how}": _rank_door(size) for how, size in _CHUNKS.items()}
    return Kind(
        name,
        _seal(inner),
        doors=server | rank,
        inner=inner,
        seal=_seal,
        reads=dict.fromkeys(server, (_FROM_RANK,)) | dict.fromkeys(rank, (_FROM_SERVER,)),
        covered=_is_covered,
    )


def _is_covered(case: Case) -> bool:
    return not case.sealed


def _server() -> ServerChannel:
    channel = ServerChannel(_SECRET)
    channel._nonce = _NONCE
    channel.outgoing[:] = MAGIC + _NONCE
    return channel


def _rank() -> ClientChannel:
    channel = ClientChannel(_SECRET)
    channel._nonce = _NONCE[::-1]
    return channel


def _pass_on(source: Any, target: Any) -> bytes:
    sent = bytes(source.outgoing)
    source.outgoing.clear()
    target.receive(sent)
    return sent


def _seal(inner: Files) -> Files:
    """The bytes of both directions, with a handshake that is right and tags that fit the messages."""
    server, rank = _server(), _rank()
    from_server = _pass_on(server, rank)
    from_rank = _pass_on(rank, server)
    from_server += _pass_on(server, rank)
    for message in _split(inner[_FROM_RANK]):
        rank.send(message)
    for message in _split(inner[_FROM_SERVER]):
        server.send(message)
    return {_FROM_RANK: from_rank + rank.outgoing, _FROM_SERVER: from_server + server.outgoing}


def _join(messages: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(message)) + message for message in messages)


def _split(content: bytes) -> list[bytes]:
    """Messages by their lengths; what is left is one too, however it was changed."""
    messages: list[bytes] = []
    content = content[:_MOST_BYTES]
    while len(content) > _LENGTH.size:
        size = _LENGTH.unpack_from(content)[0]
        messages.append(content[_LENGTH.size : _LENGTH.size + size])
        content = content[_LENGTH.size + size :]
    return messages


def _table(answers: list[bytes]) -> StoreTable:
    return StoreTable(lambda session, message: answers.append(message), lambda session: (b"0", b"", b"127.0.0.1"))


def _answers(requests: Sequence[bytes]) -> list[bytes]:
    answers: list[bytes] = []
    table = _table(answers)
    for request in requests:
        table.request("rank", request)
    return answers


def _states() -> list[dict[bytes, bytes]]:
    """What the table holds after each number of requests."""
    table = _table([])
    states = [dict(table._values)]
    for request in _REQUESTS:
        table.request("rank", request)
        states.append(dict(table._values))
    return states


def _chunks(folder: Path, file: str, size: int) -> list[bytes]:
    path = folder / file
    if path.is_symlink() or not path.is_file():
        raise Refused("no connection")
    with path.open("rb") as connection:
        content = connection.read(_MOST_BYTES)
    return [content[at : at + size] for at in range(0, len(content), size)]


def _server_door(size: int) -> Door:
    states = _states()

    def door(folder: Path, scratch: Path) -> Any:
        answers, channel = list[bytes](), _server()
        table, count = _table(answers), 0
        try:
            for chunk in _chunks(folder, _FROM_RANK, size):
                for payload in channel.receive(chunk):
                    table.request("rank", payload)
                    count += 1
        except ChannelError as refused:
            # Tags are checked before anything is done, so a wrong one leaves the table as the messages before it did.
            if "on its way" in str(refused) or not channel.is_established:
                assert table._values in states, "a frame without a right tag changed the store"
            raise
        if count < len(_REQUESTS):
            raise Refused("it ended early, and so does the server's connection")
        return table._values, answers[: len(_REQUESTS)]

    return door


def _rank_door(size: int) -> Door:
    def door(folder: Path, scratch: Path) -> Any:
        channel, answers = _rank(), list[list[bytes]]()
        for chunk in _chunks(folder, _FROM_SERVER, size):
            answers += [decode_fields(payload) for payload in channel.receive(chunk)]
        if len(answers) < len(_REQUESTS):
            raise Refused("it ended early, and the rank connects again")
        return answers[: len(_REQUESTS)]

    return door
