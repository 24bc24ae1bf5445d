"""An authenticated and encrypted channel between two processes that know one secret, as bytes in and bytes out.

The store of a launch holds what makes a process a rank: the addresses at which gloo listens, and NCCL's unique id with the number that its
bootstrap asks for. So what passes here has to be kept from whoever can reach the port or read the network, and nobody without the
secret may add to it, change it or send it again. Python's `ssl` knows pre-shared keys from 3.13 on only, and certificates
would need a library and a place to keep them; hence this channel, from `hashlib` and `hmac` alone.

Handshake (all lengths are fixed, so that a wrong one is refused as soon as its first wrong byte is read):

    server -> client   magic, Ns: 16 bytes that name the server and 16 random bytes
    client -> server   magic, 32 random bytes Nc, HMAC(K, "client proof")
    server -> client   HMAC(K, "server proof")

with K = HMAC-SHA256(key = Ns | Nc, message = the secret), which is the extraction step of HKDF (RFC 5869). The client proves itself
first: whoever connects without the secret gets random bytes and nothing that depends on it. Both ends contribute a nonce, so
recorded bytes are of no use in another connection, and the two proofs and the keys of the two directions come from different labels,
so that nothing can be sent back to its sender. By the name of the server, which is proven with the rest of Ns, a rank that connects again
notices another run with the same secret at the same address.

Frames: 4 bytes length and 16 bytes of HMAC-SHA256 over it, the ciphertext and 16 bytes over that. Encrypt-then-MAC: both cover the number
of the frame in its direction too, and are checked before anything is waited for or decrypted; a frame that is left out, repeated, moved
or changed ends the connection. The keystream is SHAKE-256 of the direction's key and the frame's number, of the length needed: a sponge
whose input begins with a secret key is a pseudorandom function without the extension problem of SHA-2, and key and number never occur
twice.

Not given: secrecy of old recordings against whoever learns the secret later (there is no Diffie-Hellman exchange), and secrecy of a
secret that can be guessed, since whoever records a handshake can try candidates.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct

from petatron.base.errors import LaunchError

MAGIC = b"petatr01"
MAX_FRAME_BYTES = 16 << 20
_NONCE_BYTES, _PROOF_BYTES, _TAG_BYTES = 32, 32, 16
IDENTITY_BYTES = 16
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class ChannelError(LaunchError):
    """The other end does not know the secret, or what it sent was changed on its way."""


class _Keys:
    """The keys and proofs of one connection."""

    def __init__(self, secret: str, server_nonce: bytes, client_nonce: bytes) -> None:
        self._root = hmac.digest(server_nonce + client_nonce, secret.encode(), "sha256")

    def derive(self, label: str) -> bytes:
        return hmac.digest(self._root, label.encode(), "sha256")


class _FrameCipher:
    """Seals or opens the frames of one direction, which are numbered from zero."""

    def __init__(self, keys: _Keys, direction: str) -> None:
        self._stream_key, self._tag_key = keys.derive(f"{direction} stream"), keys.derive(f"{direction} tag")
        self._number = 0

    def seal(self, payload: bytes) -> bytes:
        """Returns the next frame."""
        head, body = _LENGTH.pack(len(payload)), self._xor(payload)
        frame = head + self._tag(b"head", head) + body + self._tag(b"body", body)
        self._number += 1
        return frame

    def open_head(self, head: bytes) -> int:
        """Returns the length of the next frame's ciphertext."""
        self._verify(b"head", head[: _LENGTH.size], head[_LENGTH.size :])
        return _LENGTH.unpack_from(head)[0]

    def open_body(self, body: bytes, tag: bytes) -> bytes:
        """Returns the payload of the next frame."""
        self._verify(b"body", body, tag)
        payload = self._xor(body)
        self._number += 1
        return payload

    def _verify(self, part: bytes, content: bytes, tag: bytes) -> None:
        if not hmac.compare_digest(tag, self._tag(part, content)):
            raise ChannelError(f"Frame {self._number} of the rendezvous was changed, repeated or left out on its way.")

    def _xor(self, payload: bytes) -> bytes:
        size = len(payload)
        stream = hashlib.shake_256(self._stream_key + _NUMBER.pack(self._number)).digest(size)
        return (int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")).to_bytes(size, "big")

    def _tag(self, part: bytes, content: bytes) -> bytes:
        return hmac.digest(self._tag_key, part + _NUMBER.pack(self._number) + content, "sha256")[:_TAG_BYTES]


class _Channel:
    """One end: `receive` takes bytes from the network and returns payloads, `outgoing` collects bytes for it."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._nonce = os.urandom(_NONCE_BYTES)
        self._incoming = bytearray()
        self.outgoing: bytearray = bytearray()
        self._sealer: _FrameCipher | None = None
        self._opener: _FrameCipher | None = None
        self._body_bytes: int | None = None
        """The length of the frame whose head has been read."""

    @property
    def is_established(self) -> bool:
        """Whether the other end has proven that it knows the secret."""
        return self._opener is not None

    def receive(self, data: bytes) -> list[bytes]:
        """Returns the payloads that are complete with these bytes; raises when they are not from a holder of the secret."""
        self._incoming += data
        if self._opener is None and not self._continue_handshake():
            return []
        payloads: list[bytes] = []
        while (payload := self._next_payload()) is not None:
            payloads.append(payload)
        return payloads

    def send(self, payload: bytes) -> None:
        """Appends the payload to `outgoing`; only after the handshake."""
        assert self._sealer is not None, "nothing is sent before the handshake is over"
        if len(payload) > MAX_FRAME_BYTES:
            raise ChannelError(f"A message of {len(payload):,} bytes exceeds {MAX_FRAME_BYTES:,}, the most of one.")
        self.outgoing += self._sealer.seal(payload)

    def _continue_handshake(self) -> bool:
        raise NotImplementedError

    def _take(self, size: int) -> bytes | None:
        """Removes and returns the first bytes received, once there are that many."""
        if len(self._incoming) < size:
            return None
        taken = bytes(self._incoming[:size])
        del self._incoming[:size]
        return taken

    def _check_magic(self) -> None:
        head = bytes(self._incoming[: len(MAGIC)])
        if not MAGIC.startswith(head):
            raise ChannelError("What came is not the rendezvous of Petatron.")

    def _next_payload(self) -> bytes | None:
        assert self._opener is not None
        if self._body_bytes is None:
            head = self._take(_LENGTH.size + _TAG_BYTES)
            if head is None:
                return None
            self._body_bytes = self._opener.open_head(head)
            if self._body_bytes > MAX_FRAME_BYTES:
                raise ChannelError(f"A frame announces {self._body_bytes:,} bytes; the most is {MAX_FRAME_BYTES:,}.")
        body = self._take(self._body_bytes + _TAG_BYTES)
        if body is None:
            return None
        self._body_bytes = None
        return self._opener.open_body(body[:-_TAG_BYTES], body[-_TAG_BYTES:])


class ServerChannel(_Channel):
    """The end of the server, which `identity` names."""

    def __init__(self, secret: str, identity: bytes = bytes(IDENTITY_BYTES)) -> None:
        super().__init__(secret)
        self._nonce = identity + self._nonce[IDENTITY_BYTES:]
        self.outgoing += MAGIC + self._nonce

    def _continue_handshake(self) -> bool:
        self._check_magic()
        answer = self._take(len(MAGIC) + _NONCE_BYTES + _PROOF_BYTES)
        if answer is None:
            return False
        keys = _Keys(self._secret, self._nonce, answer[len(MAGIC) : -_PROOF_BYTES])
        if not hmac.compare_digest(answer[-_PROOF_BYTES:], keys.derive("client proof")):
            raise ChannelError("Whoever connected does not know the secret of this run.")
        self.outgoing += keys.derive("server proof")
        self._sealer, self._opener = _FrameCipher(keys, "server"), _FrameCipher(keys, "client")
        return True


class ClientChannel(_Channel):
    """The end of a rank."""

    def __init__(self, secret: str) -> None:
        super().__init__(secret)
        self._keys: _Keys | None = None
        self.server_identity: bytes = b""
        """The name of the server; true once the channel is established."""

    def _continue_handshake(self) -> bool:
        if self._keys is None:
            self._check_magic()
            greeting = self._take(len(MAGIC) + _NONCE_BYTES)
            if greeting is None:
                return False
            self.server_identity = greeting[len(MAGIC) : len(MAGIC) + IDENTITY_BYTES]
            self._keys = _Keys(self._secret, greeting[len(MAGIC) :], self._nonce)
            self.outgoing += MAGIC + self._nonce + self._keys.derive("client proof")
        proof = self._take(_PROOF_BYTES)
        if proof is None:
            return False
        if not hmac.compare_digest(proof, self._keys.derive("server proof")):
            raise ChannelError("Whoever listens there does not know the secret of this run.")
        self._sealer, self._opener = _FrameCipher(self._keys, "client"), _FrameCipher(self._keys, "server")
        return True
