"""Mutations of pickles, as programs: their operations repeated, left out, exchanged, with other arguments, and attacks put in between."""

from __future__ import annotations

import pickle
import pickletools
import random

from tests.fuzz.mutate.octets import Mutated, NotOfThisFormat, put_number

ATTACKS = (
    b"cos\nsystem\n(X\x02\x00\x00\x00idtR0",
    b"cbuiltins\neval\n(X\x03\x00\x00\x001+1tR0",
    b"cbuiltins\n__import__\n(X\x02\x00\x00\x00ostR0",
    b"\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R0",
    b"ctorch\nload\n(X\x0b\x00\x00\x00/etc/passwdtR0",
    b"(ios\nsystem\n0",
    b")" + b"2\x86" * 60 + b"0",  # a tuple of two of itself, sixty times over
    b")" + b"\x85" * 20_000 + b"0",  # a tuple in a tuple in a tuple
    b"]" + b"2a" * 3 + b"0",  # a list that contains itself
    b"(" * 20_000 + b"1" * 20_000,
    b"]r\xff\xff\xff\x7f0",  # a place in the memo beyond all others
    b"]r\xff\xff\xff\x0f0",
    b"\x8b\xff\xff\xff\x7f",  # an integer of 2 GiB
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",  # bytes without end
    b"B\xff\xff\xff\x7f",
    b"X\xff\xff\xff\x7f",
    b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"Pabc\n0",
    b"\x82\x01",
    b"I" + b"9" * 5000 + b"\n0",
    b"}(I1\nI2\nu0",
    b"\x97",
    b"N}b",  # state for what has none
)


def mutate(content: bytes, rng: random.Random) -> Mutated:
    """One operation changed."""
    try:
        found = list(pickletools.genops(content))
    except Exception as error:  # pickletools raises whatever it meets
        raise NotOfThisFormat from error
    starts = [place for _, _, place in found if place is not None]
    ends = [*starts[1:], len(content)]
    at = rng.randrange(len(starts))
    begin, end = starts[at], ends[at]
    what = rng.choice(("attack", "attack", "drop", "repeat", "swap", "argument", "argument", "code", "wrap", "string"))
    name = f"{what} at operation {at} ({found[at][0].name})"
    if what == "attack":
        attack = rng.choice(ATTACKS)
        return content[:begin] + attack + content[begin:], f"{name}: {attack[:16]!r}"
    if what == "drop":
        return content[:begin] + content[end:], name
    if what == "repeat":
        last = min(len(starts) - 1, at + rng.choice((0, 1, 5)))
        return content[:begin] + content[begin : ends[last]] * rng.choice((2, 3, 300)) + content[ends[last] :], name
    if what == "swap":
        other = rng.randrange(len(starts))
        first, second = sorted((at, other))
        a, b = content[starts[first] : ends[first]], content[starts[second] : ends[second]]
        if first != second:
            return content[: starts[first]] + b + content[ends[first] : starts[second]] + a + content[
                ends[second] :
            ], name
    if what == "code":
        return content[:begin] + bytes(
            [rng.choice(b"()NR0121}]aAbBcCdeghijIJKlLMoOpPqQrstuVUX\x80\x81\x82\x85\x86\x87\x8a\x93\x94\x95")]
        ) + content[begin + 1 :], name
    if what == "wrap":
        return pickle.dumps(
            [1, "x", None][rng.randrange(3)], rng.choice((0, 2, 4))
        ) + content, "another pickle before it"
    if what == "string":
        texts = [n for n, (_, argument, _) in enumerate(found) if isinstance(argument, str)]
        if texts:
            n = rng.choice(texts)
            return content[: starts[n]] + _string(rng) + content[ends[n] :], f"another string at operation {n}"
    numbers = [
        n
        for n, (_, argument, _) in enumerate(found)
        if isinstance(argument, int) and not isinstance(argument, bool) and ends[n] - starts[n] in (2, 3, 5, 9)
    ]
    if not numbers:
        raise NotOfThisFormat
    n = rng.choice(numbers)
    return put_number(
        content, starts[n] + 1, ends[n] - starts[n] - 1, rng
    ), f"another number at operation {n} ({found[n][0].name})"


def _string(rng: random.Random) -> bytes:
    text = rng.choice(
        (
            "",
            "os",
            "system",
            "../../outside/secret.txt",
            "/etc/passwd",
            "__0_0.distcp",
            "x" * 5000,
            "\x1b[31m",
            "decoder.layers.999999999.x",
            "embedding",
            "a\x00b",
            "9" * 4500,
        )
    ).encode()
    return b"X" + len(text).to_bytes(4, "little") + text
