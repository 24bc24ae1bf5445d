"""Mutations of lines of text, of CSV, and of YAML, whose scalars, anchors and tags have surprises of their own."""

from __future__ import annotations

import random
import re

from tests.fuzz.mutate.octets import Mutated, NotOfThisFormat

WORDS = (
    "", "0", "-1", "1", "7", "99999999999999999999", "1e9", "nan", "inf", "-0", "0x10", "٣", "release", "step-00000099", "../../outside",
    "/etc/passwd", "a b", "\x00", "\x1b[2J",
    "x" * 5000, "9" * 5000, "\u202e", "%s", "~", "'", '"', "\\", "\r",
)  # fmt: skip
SCALARS = (
    *WORDS, "null", "true", "yes", ".inf", "-.inf", ".nan", "1_000", "0o17", "0b1", "1:30:00", "2020-01-01",
    "2001-12-14t21:59:43.10-05:00", "!!python/object/apply:os.system [id]",
    "!!python/name:os.system", "!!binary aGk=", "!!set {a, b}", "!!int x", "!!float 1", "!!timestamp 2020-13-45", "!unknown x", "&a [*a]",
    "*missing", "&a x", "{a: 1}", "[1, 2]", "[", "{",
    "{a: *a}", "|\n  text", ">-\n  text", "? [a]\n: b", "<<: {a: 1}", "=", "@x", "`x`", "- x", "1 # x", "[" * 3000, "{a: " * 2000,
    "[" * 400 + "]" * 400, '"\\ud800"', '"\\x1b[31m"',
    "0." + "1" * 400, "1e400", "!!float 1e999999", "!!int 0b" + "1" * 400,
)  # fmt: skip
_LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
_LONGEST = 1 << 23
_SCALAR = re.compile(r"(?m)^(\s*(?:- )?[\w.-]+:[ \t]+)(\S.*)$")


def mutate(content: bytes, rng: random.Random) -> Mutated:
    """A word or a line becomes another one, goes, or is there twice."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise NotOfThisFormat from error
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    what = rng.choice(("word", "word", "drop", "repeat", "swap", "join", "number"))
    if what == "word":
        words = lines[at].split(" ")
        words[rng.randrange(len(words))] = rng.choice(WORDS)
        lines[at] = " ".join(words)
    elif what == "drop":
        del lines[at]
    elif what == "repeat":
        lines[at:at] = [lines[at]] * min(rng.choice((1, 2, 1000)), max(_LONGEST // (len(lines[at]) + 1), 1))
    elif what == "swap":
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    elif what == "join":
        return rng.choice(("\r\n", " ", "", "\t", "\x0c")).join(lines).encode(), "other line ends"
    else:
        lines[at] = re.sub(r"\d+", lambda match: rng.choice(("0", "-1", match[0] + "0", "9" * 30, "1.5")), lines[at])
    return "\n".join(lines).encode("utf-8", "surrogatepass"), f"{what} at line {at}"


def mutate_csv(content: bytes, rng: random.Random) -> Mutated:
    """Quotes, delimiters and line ends where none were, other names of columns, or what plain text may become."""
    if rng.random() < 0.3:
        return mutate(content, rng)
    lines = content.split(b"\n")
    what = rng.choice(("mark", "mark", "mark", "header", "long", "ends", "wide"))
    if what == "header":
        names = lines[0].split(b",")
        names[rng.randrange(len(names))] = rng.choice(
            (b"", b"text", b"\xff", b'"', b"x" * 3000, b"\x1b[31m", b"\xef\xbb\xbftext")
        )
        return b"\n".join([b",".join(names), *lines[1:]]), "another name"
    if what == "long":
        return content + b'"' + b"a" * (6 << 20), "a quote without an end"
    if what == "ends":
        return content.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\n\n", b"\x00\n", b"\x0b"))), "other line ends"
    if what == "wide":
        lines.insert(rng.randrange(len(lines)), b"," * rng.choice((1, 100, 100_000)))
        return b"\n".join(lines), "a line of delimiters"
    at, mark = (
        rng.randrange(len(content) + 1),
        rng.choice((b'"', b'""', b'"""', b",", b"\n", b"\r", b"\x00", b"\xff", b"\t", b"\\")),
    )
    return content[:at] + mark + content[at:], f"{mark!r} at {at}"


def mutate_yaml(content: bytes, rng: random.Random) -> Mutated:
    """A scalar becomes another one, or the lines change their place or depth."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise NotOfThisFormat from error
    scalars = list(_SCALAR.finditer(text))
    what = rng.choice(("scalar", "scalar", "scalar", "indent", "key", "laughs", "lines", "head"))
    if what == "scalar" and scalars:
        match, new = rng.choice(scalars), rng.choice(SCALARS)
        return (text[: match.start(2)] + new + text[match.end(2) :]).encode(
            "utf-8", "surrogatepass"
        ), f"scalar {new[:30]!r}"
    if what == "key" and scalars:
        match, new = rng.choice(scalars), rng.choice(SCALARS)
        return (text[: match.start(1)] + new + ": " + text[match.start(2) :]).encode(
            "utf-8", "surrogatepass"
        ), f"key {new[:30]!r}"
    if what == "laughs":
        return (_LAUGHS + text if rng.random() < 0.5 else f"{text}\n{_LAUGHS}").encode(), "aliases of aliases"
    if what == "head":
        return (
            rng.choice(("%YAML 9.9\n---\n", "---\na: 1\n---\n", "\ufeff", "\t", "...\n", "%TAG ! tag:x,2000:\n--- "))
            + text
        ).encode(), "another head"
    if what == "indent":
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        lines[at] = rng.choice(
            (
                f"  {lines[at]}",
                lines[at].lstrip(),
                f"\t{lines[at]}",
                f"- {lines[at]}",
                f"{lines[at]}:",
                f"? {lines[at]}",
                f"{lines[at]} {lines[at]}",
            )
        )
        return "\n".join(lines).encode(), f"indent at line {at}"
    return mutate(content, rng)
