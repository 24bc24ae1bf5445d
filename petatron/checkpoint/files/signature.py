"""Signatures of checkpoints: they prove who made one, where digests only detect damage.

`manifest.sig` next to a step's manifest is an Ed25519 signature of the manifest's bytes. The manifest contains a digest of every
rank's table, and the tables of a signed step contain a SHA-256 of every file in addition to the CRC-32 that finds damage; so the
signature covers all of it. Keys are OpenSSH or PEM files without a passphrase: a run has nobody to ask.
"""

from __future__ import annotations

import base64
import hashlib
import json
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError

SIGNATURE_FILE = "manifest.sig"
SignFunction = Callable[[bytes], bytes]
_FORMAT = "petatron signature"
_CONTEXT = (
    b"petatron checkpoint manifest\0"  # domain separation: nothing else that the key signs can pass for a manifest
)
_MAX_FILE_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class Signature:
    """A claimed public key and its signature."""

    public_key: bytes
    value: bytes

    @property
    def fingerprint(self) -> str:
        return key_fingerprint(self.public_key)


def key_fingerprint(key: bytes) -> str:
    """Returns the fingerprint of a public key.

    >>> key_fingerprint(bytes(32))
    'SHA256:Zmh6rfhivXdsj8GLjp+OIAiXFIVu4jOzkCpZHQ1fKSU'
    """
    return f"SHA256:{base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip('=')}"


def open_signer(path: Path) -> SignFunction:
    """Returns a function that signs a manifest with the private key in a file, giving the content of `manifest.sig`."""
    private = _private_key(path)
    public = private.public_key().public_bytes_raw()

    def sign(manifest: bytes) -> bytes:
        value = private.sign(_CONTEXT + manifest)
        body = {
            "format": _FORMAT,
            "algorithm": "ed25519",
            "key": _base64_text(public),
            "signature": _base64_text(value),
        }
        return (json.dumps(body) + "\n").encode()

    return sign


def read_signature(source: Path) -> Signature | None:
    """Reads the signature of a step, if it has one."""
    path = source / SIGNATURE_FILE
    if not path.is_file():
        return None
    try:
        body = json.loads(path.open("rb").read(_MAX_FILE_BYTES))
        if body["format"] != _FORMAT or body["algorithm"] != "ed25519":
            raise ValueError("it has another format")
        key, value = (base64.b64decode(body[name], validate=True) for name in ("key", "signature"))
        if (len(key), len(value)) != (32, 64):
            raise ValueError("its key or signature has a wrong length")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as a signature: {error}. Copy the checkpoint again.") from error
    return Signature(key, value)


def signature_problem(source: Path, manifest: bytes, trusted_keys: Sequence[bytes]) -> str | None:
    """Tells why a step is not signed by any of the trusted keys, or None."""
    try:
        found = read_signature(source)
    except CheckpointError as error:
        return str(error)
    if found is None:
        return f"{source} is not signed: there is no {SIGNATURE_FILE}. Whoever trained it signs it with --sign-key."
    if not _is_valid(found, manifest):
        return f"{source / SIGNATURE_FILE} is not a signature of this manifest: one of them was changed. Do not use the checkpoint."
    if found.public_key not in trusted_keys:
        known = ", ".join(map(key_fingerprint, trusted_keys))
        return f"{source} is signed by {found.fingerprint}, which is not a trusted key ({known}). Ask whose key it is."
    return None


def _is_valid(found: Signature, manifest: bytes) -> bool:
    library = _import_cryptography()
    try:
        library.ed25519.Ed25519PublicKey.from_public_bytes(found.public_key).verify(found.value, _CONTEXT + manifest)
    except library.invalid_signature:
        return False
    return True


def read_public_keys(path: Path) -> list[bytes]:
    """Reads the keys of a file: one in PEM, or OpenSSH lines such as `ssh-ed25519 AAAA... name`."""
    library, content = _import_cryptography(), _read_key_file(path)
    try:
        if content.lstrip().startswith(b"-----BEGIN"):
            keys = [library.serialization.load_pem_public_key(content)]
        else:
            lines = [line for line in content.splitlines() if line.strip() and not line.startswith(b"#")]
            keys = [library.serialization.load_ssh_public_key(line) for line in lines]
    except (ValueError, library.unsupported_algorithm) as error:
        raise CheckpointError(
            f"{path} holds no public key that can be read: {error}. Give the .pub file of a key."
        ) from error
    if not keys or not all(isinstance(key, library.ed25519.Ed25519PublicKey) for key in keys):
        raise CheckpointError(f"{path} holds a key that is not Ed25519. Make one with `ssh-keygen -t ed25519`.")
    return [key.public_bytes_raw() for key in keys]


def _private_key(path: Path) -> Any:
    library, content = _import_cryptography(), _read_key_file(path)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise CheckpointError(f"{path} is a private key that others may read. Make it yours alone: chmod 600 {path}")
    ssh = b"OPENSSH PRIVATE KEY" in content[:100]
    read = library.serialization.load_ssh_private_key if ssh else library.serialization.load_pem_private_key
    try:
        key = read(content, password=None)
    except TypeError as error:
        raise CheckpointError(
            f"{path} has a passphrase, for which a run cannot ask. Give a key without one."
        ) from error
    except (ValueError, library.unsupported_algorithm) as error:
        raise CheckpointError(
            f"{path} holds no private key that can be read: {error}. Make one with `ssh-keygen -t ed25519`."
        ) from error
    if not isinstance(key, library.ed25519.Ed25519PrivateKey):
        raise CheckpointError(f"{path} holds a key that is not Ed25519. Make one with `ssh-keygen -t ed25519`.")
    return key


def _read_key_file(path: Path) -> bytes:
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file. Give the file of an Ed25519 key.")
    with path.open("rb") as file:
        return file.read(_MAX_FILE_BYTES)


@dataclass(frozen=True, slots=True)
class _CryptographyModules:
    """The parts of `cryptography` in use."""

    ed25519: Any
    serialization: Any
    invalid_signature: type[Exception]
    unsupported_algorithm: type[Exception]


def _import_cryptography() -> _CryptographyModules:
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise CheckpointError(
            "Signatures need the package cryptography, which is not installed: pip install 'petatron[sign]'."
        ) from error
    return _CryptographyModules(ed25519, serialization, InvalidSignature, UnsupportedAlgorithm)


def _base64_text(content: bytes) -> str:
    return base64.b64encode(content).decode()
