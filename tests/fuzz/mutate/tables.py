"""Mutations of binary tables: the index of a dataset, the sources of its documents, and numpy's arrays."""

from __future__ import annotations

import random
import struct

from tests.fuzz.mutate.octets import Mutated, NotOfThisFormat, put_number
from tests.fuzz.mutate.texts import WORDS

_HEADER = struct.Struct("<9sQBQQ")


def mutate_index(content: bytes, rng: random.Random) -> Mutated:
    """A field of the header, a length, an offset or a document boundary; sometimes many of them alike."""
    if len(content) < _HEADER.size:
        raise NotOfThisFormat
    _, _, _, sequences, boundaries = _HEADER.unpack(content[: _HEADER.size])
    parts = {
        "lengths": (34, 4, sequences),
        "offsets": (34 + 4 * sequences, 8, sequences),
        "documents": (34 + 12 * sequences, 8, boundaries),
    }
    what = rng.choice(("header", *parts, *parts))
    if what == "header":
        at, width = rng.choice(((9, 8), (17, 1), (18, 8), (26, 8)))
        return put_number(content, at, width, rng), f"header at {at}"
    start, width, count = parts[what]
    if not 0 < count <= (len(content) - start) // width:
        raise NotOfThisFormat
    chosen = range(count) if rng.random() < 0.1 else [rng.randrange(count)]
    for number in chosen:
        content = put_number(content, start + width * number, width, rng)
    return content, f"{what}: {len(chosen)} of {count}"


def mutate_sources(content: bytes, rng: random.Random) -> Mutated:
    """A number of the header, a line, the end of an id, a file, or the list of files."""
    if len(content) < 32:
        raise NotOfThisFormat
    documents, id_bytes = struct.unpack("<QQ", content[16:32])
    names = 32 + 20 * documents + id_bytes
    what = rng.choice(("header", "line", "id", "file", "names"))
    if what == "header":
        at, width = rng.choice(((8, 4), (12, 4), (16, 8), (24, 8)))
        return put_number(content, at, width, rng), f"header at {at}"
    if not documents or names > len(content):
        raise NotOfThisFormat
    if what == "names":
        listed = rng.choice(
            ("[]", "[1, 2]", "{}", '["a"]', '["\\ud800", "\\u001b[2J"]', "[" * 5000, '["x", "y", "z"]', "")
        )
        return content[:names] + listed.encode(), f"files {listed[:20]!r}"
    offset, width = {"line": (0, 8), "id": (8, 8), "file": (16, 4)}[what]
    number = rng.randrange(documents)
    return put_number(content, 32 + 20 * number + offset, width, rng), f"{what} of document {number}"


def mutate_npy(content: bytes, rng: random.Random) -> Mutated:
    """The text of the header (dtype, order, shape), its length, or an element."""
    if content[:6] != b"\x93NUMPY" or len(content) < 12:
        raise NotOfThisFormat
    length = int.from_bytes(content[8:10], "little")
    what = rng.choice(("length", "header", "header", "element", "element", "all"))
    if what == "length":
        return put_number(content, 8, 2, rng), "header length"
    if what == "header":
        header = content[10 : 10 + length].decode("latin1")
        old = rng.choice(("'<i4'", "'<i8'", "False", "(", ",)", "}", "shape", "descr", "'fortran_order'"))
        new = rng.choice(("'|O'", "'<f8'", "'<i2'", "True", "(0, ", "(99999999999, ", "(-1, ", *WORDS))
        changed = header.replace(old, new, 1).encode("latin1", "replace")
        return content[:8] + (len(changed) % 65536).to_bytes(2, "little") + changed + content[
            10 + length :
        ], f"header {old} -> {new[:20]!r}"
    start = 10 + length
    places = range(start, len(content) - 7, 8)
    if not places:
        raise NotOfThisFormat
    if what == "all":
        return content[:start] + bytes(len(content) - start), "all elements 0"
    return put_number(content, rng.choice(places), rng.choice((4, 8)), rng), "an element"
