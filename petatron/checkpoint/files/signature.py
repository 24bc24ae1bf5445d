"""Signatures of checkpoints: they prove who made one, where digests only detect damage.

`manifest.sig` next to a step's manifest is an Ed25519 signature of the manifest's bytes. The manifest contains a digest of every
rank's table, and the tables of a signed step contain a SHA-256 of every file in addition to the digest that finds damage; so the
signature covers all of it. Keys are OpenSSH or PEM files without a passphrase: a run has nobody to ask.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import not_a_file_reason, read_limited_bytes, reading_untrusted

SIGNATURE_FILE = "manifest.sig"
SignFunction = Callable[[bytes], bytes]
_FORMAT = "petatron signature"
_CONTEXT = (
    b"petatron checkpoint manifest\0"  # domain separation: nothing else that the key signs can pass for a manifest
)
_MAX_SIGNATURE_BYTES = 10_000
_MAX_KEY_FILE_BYTES = 1 << 20
_SSH_TYPE = b"ssh-ed25519"
_SSH_TYPES = (b"ssh-", b"ecdsa-sha2-", b"sk-")
_PEM_BEGIN = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----")
_MAX_SHOWN_PROBLEMS = 8
_MAKE_KEY = "Make one with `ssh-keygen -t ed25519 -N ''`."


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
        body = {
            "format": _FORMAT,
            "algorithm": "ed25519",
            "key": base64.b64encode(public).decode(),
            "signature": base64.b64encode(private.sign(_CONTEXT + manifest)).decode(),
        }
        return (json.dumps(body) + "\n").encode()

    return sign


def read_signature(source: Path) -> Signature | None:
    """Reads the signature of a step, if it has one."""
    path = source / SIGNATURE_FILE
    if not os.path.lexists(path):
        return None
    if (reason := not_a_file_reason(path)) is not None:
        raise _unreadable_signature(path, reason)
    try:
        body = json.loads(read_limited_bytes(path, _MAX_SIGNATURE_BYTES))
    except OSError as error:
        raise _unreadable_signature(path, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _unreadable_signature(path, "is not JSON") from error
    if not isinstance(body, Mapping) or body.get("format") != _FORMAT or body.get("algorithm") != "ed25519":
        raise _unreadable_signature(path, "has another format")
    key, value = (_decoded(body.get(name)) for name in ("key", "signature"))
    if (len(key), len(value)) != (32, 64):
        raise _unreadable_signature(path, "has no key of 32 bytes and signature of 64 in it")
    return Signature(key, value)


def _unreadable_signature(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read as a signature: it {why}. Copy the checkpoint again.")


def _decoded(text: object) -> bytes:
    """Returns the bytes of a text in base64, and none for anything else."""
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (ValueError, binascii.Error):
        return b""


def signature_problem(source: Path, manifest: bytes, trusted_keys: Sequence[bytes]) -> str | None:
    """Tells why a step is not signed by any of the trusted keys, or None."""
    try:
        signature = read_signature(source)
    except CheckpointError as error:
        return str(error)
    if signature is None:
        return f"{source} is not signed: there is no {SIGNATURE_FILE}. Whoever trained it signs it with --sign-key."
    if not _is_valid(signature, manifest):
        return f"{source / SIGNATURE_FILE} is not a signature of this manifest: one of them was changed. Do not use the checkpoint."
    if signature.public_key not in trusted_keys:
        known = ", ".join(map(key_fingerprint, trusted_keys))
        return (
            f"{source} is signed by {signature.fingerprint}, which is not a trusted key ({known}). Ask whose key it is."
        )
    return None


def _is_valid(signature: Signature, manifest: bytes) -> bool:
    library = _import_cryptography()
    try:
        library.hazmat.primitives.asymmetric.ed25519.Ed25519PublicKey.from_public_bytes(signature.public_key).verify(
            signature.value, _CONTEXT + manifest
        )
    except library.exceptions.InvalidSignature:
        return False
    return True


def read_public_keys(path: Path) -> list[bytes]:
    """Reads the keys of a file: PEM blocks, and OpenSSH lines such as `ssh-ed25519 AAAA... name`, in any number and order.

    One entry that is no Ed25519 key is an error: a list that is trusted in part is not what its owner meant.
    """
    library, content = _import_cryptography(), _read_key_file(path)[0]
    keys, problems = [], []
    for line, entry in _key_entries(content):
        key = _public_key(library, entry)
        if isinstance(key, str):
            problems.append(f"line {line} {key}")
        else:
            keys.append(key)
    if problems:
        more = f" (and {len(problems) - _MAX_SHOWN_PROBLEMS} more lines)" if len(problems) > _MAX_SHOWN_PROBLEMS else ""
        raise CheckpointError(
            f"{path} is not a list of Ed25519 public keys: {'; '.join(problems[:_MAX_SHOWN_PROBLEMS])}{more}. Give the .pub file of a "
            "key, or several of them in one file."
        )
    if not keys:
        raise CheckpointError(f"{path} has comments and no public key. Give the .pub file of a key.")
    return keys


def _key_entries(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields each PEM block and each other line that says something, with the number of its first line."""
    block, first = [], 0
    for number, line in enumerate(content.splitlines(), 1):
        text = line.strip()
        if not block and (not text or text.startswith(b"#")):
            continue
        if not block and not text.startswith(b"-----BEGIN"):
            yield number, text
            continue
        first = first if block else number
        block.append(text)
        if text.startswith(b"-----END"):
            yield first, b"\n".join(block) + b"\n"
            block = []
    if block:
        yield first, b"\n".join(block)


def _public_key(library: Any, entry: bytes) -> bytes | str:
    """Returns the raw bytes of a key, or what an entry is instead, as a predicate of its line."""
    pem = _PEM_BEGIN.match(entry)
    if pem is not None and pem.group(1).endswith(b"PRIVATE KEY"):
        return "begins a private key, which nobody else should have"
    kind = entry.split()[0]
    if pem is None and not kind.startswith(_SSH_TYPES):
        if any(word.startswith(_SSH_TYPES) for word in entry.split()):
            return "has options before the key, which mean nothing here: begin it with ssh-ed25519"
        return "is no public key"
    if pem is None and kind != _SSH_TYPE:
        return f"has a key of type {printable(kind.decode(errors='replace'), max_chars=40)}, not Ed25519"
    try:
        formats = library.hazmat.primitives.serialization
        key = (formats.load_ssh_public_key if pem is None else formats.load_pem_public_key)(entry)
    except (ValueError, library.exceptions.UnsupportedAlgorithm):
        return "has a key that is damaged" if pem is None else "begins a key that is damaged, or of another kind"
    if not isinstance(key, library.hazmat.primitives.asymmetric.ed25519.Ed25519PublicKey):
        return "has a key that is not Ed25519"
    return key.public_bytes_raw()


def _private_key(path: Path) -> Any:
    library, (content, mode) = _import_cryptography(), _read_key_file(path)
    forms = _PEM_BEGIN.findall(content)
    if not any(form.endswith(b"PRIVATE KEY") for form in forms):
        if content.split()[0].startswith(_SSH_TYPES) or any(form.endswith(b"PUBLIC KEY") for form in forms):
            raise CheckpointError(
                f"{path} holds a public key, and signing takes the private one: the file without .pub."
            )
        raise CheckpointError(f"{path} holds no private key. {_MAKE_KEY}")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise CheckpointError(f"{path} is a private key that others may read. Make it yours alone: chmod 600 {path}")
    formats, ssh = library.hazmat.primitives.serialization, b"OPENSSH PRIVATE KEY" in forms
    read = formats.load_ssh_private_key if ssh else formats.load_pem_private_key
    try:
        key = read(content, password=None)
    except TypeError as error:
        raise CheckpointError(
            f"{path} has a passphrase, for which a run cannot ask. Give a key without one."
        ) from error
    except (ValueError, library.exceptions.UnsupportedAlgorithm) as error:
        raise CheckpointError(f"{path} holds a private key that is damaged, or of another kind. {_MAKE_KEY}") from error
    if not isinstance(key, library.hazmat.primitives.asymmetric.ed25519.Ed25519PrivateKey):
        raise CheckpointError(f"{path} holds a key that is not Ed25519. {_MAKE_KEY}")
    return key


def _read_key_file(path: Path) -> tuple[bytes, int]:
    """Returns the content of a key file, which is not empty, and its mode."""
    if (reason := not_a_file_reason(path)) is not None:
        raise _key_file_error(path, reason)
    with reading_untrusted(path, _key_file_error):
        content, mode = read_limited_bytes(path, _MAX_KEY_FILE_BYTES), path.stat().st_mode
    if not content.strip():
        raise _key_file_error(path, "is empty")
    return content, mode


def _key_file_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} {why}. Give the file of an Ed25519 key.")


def _import_cryptography() -> Any:
    """Imports the package with the modules in use."""
    try:
        import cryptography.exceptions
        import cryptography.hazmat.primitives.asymmetric.ed25519
        import cryptography.hazmat.primitives.serialization
    except ImportError as error:
        raise CheckpointError(
            "Signatures need the package cryptography, which is not installed: pip install 'petatron[sign]'."
        ) from error
    return cryptography
