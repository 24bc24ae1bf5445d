"""Mutations inside archives, packed again: torch's files (a pickle and tensors in a zip), gzip, and tars."""

from __future__ import annotations

import gzip
import io
import random
import warnings
import zipfile
import zlib

from tests.fuzz.mutate import octets, pickles
from tests.fuzz.mutate.octets import Mutated, NotOfThisFormat

_MOST_PLAIN_BYTES = 32 << 20
_TAR_BLOCK = 512
_TAR_FIELDS = {
    "name": (0, 100),
    "size": (124, 136),
    "type": (156, 157),
    "link": (157, 257),
    "magic": (257, 265),
    "prefix": (345, 500),
}


def mutate_torch(content: bytes, rng: random.Random) -> Mutated:
    """A member changed, missing, there twice, compressed or under another name."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
    except Exception as error:  # the library raises whatever it meets
        raise NotOfThisFormat from error
    if not members:
        raise NotOfThisFormat
    program = next((n for n, (name, _) in enumerate(members) if name.endswith("data.pkl")), 0)
    at = program if rng.random() < 0.6 else rng.randrange(len(members))
    name, old = members[at]
    how, packing = name.rpartition("/")[2], zipfile.ZIP_STORED
    what = rng.choice(("content", "content", "content", "content", "drop", "twice", "packed", "bomb", "name"))
    if what == "content":
        members[at] = (name, (pickles.mutate if at == program else octets.mutate)(old, rng)[0])
    elif what == "drop":
        del members[at]
    elif what == "twice":
        members.insert(rng.randrange(len(members) + 1), (name, octets.mutate(old, rng)[0]))
    elif what == "packed":
        packing = zipfile.ZIP_DEFLATED
    elif what == "bomb":
        members[at], packing = (name, bytes(4 << 20)), zipfile.ZIP_DEFLATED
    else:
        members[at] = (rng.choice(("../" * 4 + name, "/" + name, name.upper(), name + "\x00", "x")), old)
    return _zipped(members, packing), f"{what} of {how}"


def _zipped(members: list[tuple[str, bytes]], packing: int) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", packing, compresslevel=1) as archive:
        warnings.simplefilter("ignore")  # a name twice is what we want
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, packing)
    return out.getvalue()


def mutate_tar(content: bytes, rng: random.Random) -> Mutated:
    """A field of a header, with a checksum that fits, a block that goes or is there twice, or an extended header of some length."""
    headers = [
        at for at in range(0, len(content) - _TAR_BLOCK + 1, _TAR_BLOCK) if content[at + 257 : at + 262] == b"ustar"
    ]
    if not headers:
        raise NotOfThisFormat
    at = rng.choice(headers)
    what = rng.choice(("field", "field", "field", "block", "extended", "zeros", "repeat"))
    if what == "block":
        return content[:at] + content[at + _TAR_BLOCK :], f"without the block at {at}"
    if what == "zeros":
        return content[:at] + bytes(_TAR_BLOCK * rng.choice((1, 2))) + content[at:], f"zeros at {at}"
    if what == "repeat":
        return content[:at] + content[at : at + 2 * _TAR_BLOCK] * 50 + content[at:], f"a file 50 times at {at}"
    header = bytearray(content[at : at + _TAR_BLOCK])
    if what == "extended":
        record = rng.choice(
            (b"19 path=../../x.txt\n", b"9999999 path=x\n", b"x", b"0 path=a\n", b"12 size=9999\n", b"\xff" * 40, b"")
        )
        header[124:136] = b"%011o\x00" % rng.choice((len(record), 1 << 20, 1 << 30))
        header[156:157] = rng.choice((b"x", b"g", b"L", b"K"))
        block = record.ljust(_TAR_BLOCK, b"\x00")
        return content[:at] + _with_checksum(header) + block + content[at:], f"an extended header at {at}"
    field, (start, end) = rng.choice(sorted(_TAR_FIELDS.items()))
    values = (
        b"", b"\x00", b"0", b"1", b"5", b"g", b"77777777777", b"-1", b"8", b"\x80" + b"\x00" * 7 + b"\x01", b"\xff" * 12, b"00000001000",
        b"../x.txt", b"a.json", b".txt", b"\xff.txt", b"\x1b[31m.json", b"ustar  \x00",
    )  # fmt: skip
    header[start:end] = rng.choice(values)[: end - start].ljust(end - start, b"\x00")
    return content[:at] + _with_checksum(header) + content[at + _TAR_BLOCK :], f"{field} of the header at {at}"


def _with_checksum(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\x00 " % sum(header)
    return bytes(header)


def mutate_gzip(content: bytes, rng: random.Random) -> Mutated:
    """More members, rubbish behind the last, a long run of one byte, or another checksum."""
    try:
        with gzip.open(io.BytesIO(content)) as file:
            plain = file.read(
                _MOST_PLAIN_BYTES
            )  # what earlier mutations have blown up stays small enough to be mutated
    except (OSError, EOFError, zlib.error) as error:
        raise NotOfThisFormat from error
    what = rng.choice(("members", "rubbish", "bomb", "checksum", "size", "plain"))
    if what == "members":  # a reader may take as long as all that it unpacks takes
        return content * (50 if rng.random() < 0.5 and 50 * len(plain) < _MOST_PLAIN_BYTES else 2), "more members"
    if what == "rubbish":
        return content + octets.mutate(b"\x00" * 8, rng)[0], "rubbish behind it"
    if what == "bomb":
        return gzip.compress(plain + b'{"text": "' + b"a" * (4 << 20), 1, mtime=0), "a line of 4 MiB"
    if what == "plain":
        return plain, "not compressed"
    at = len(content) - (8 if what == "checksum" else 4)
    return octets.put_number(content, at, 4, rng), f"another {what}"
