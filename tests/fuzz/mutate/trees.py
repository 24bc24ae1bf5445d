"""Mutations of JSON values, and of what has JSON inside: lines of it, and the header of safetensors.

The tree is changed and written again. What JSON's own writer refuses (a key twice, numbers of thousands of digits, nesting without
end) is put into the text in the place of a marker.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.fuzz.mutate.octets import Mutated, NotOfThisFormat, put_number

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 1e308, 1e-308, float("nan"), float("inf"), 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64,
    -(1 << 63),
    10**9, 10**12, 10**30, "", "x", "0", "-1", "1e9", "nan", "true", "null", "None", "../../outside/secret.txt", "/etc/passwd", "a\x00b",
    "\x1b[31mred\x1b[0m",
    "\ud800", "\u202e", "💥", "x" * 5000, [], {}, [[]], [None], {"": None}, [0] * 300, [[0, 0]], ["x"], {"a": {"b": {}}},
)  # fmt: skip
RAW = (
    "9" * 5000, "-" + "9" * 400, "1e400", "1" + "0" * 310, "[" * 50_000 + "]" * 50_000, '{"a":' * 50_000 + "1" + "}" * 50_000, "NaN",
    "-Infinity", "01", "'x'", "",
    '"\\ud800"', '"' + "\\u0041" * 2000 + '"', "[1,]", "0.1e-99999", '"unfinished',
)  # fmt: skip
_MARK = "\x01raw\x01"


def mutate_json(content: bytes, rng: random.Random) -> Mutated:
    """One node of the tree changed."""
    try:
        tree = json.loads(content)
        tree, raw, done = _changed(tree, rng)
        text = json.dumps(tree, ensure_ascii=rng.random() < 0.7, indent=rng.choice((None, None, 1)))
    except (ValueError, RecursionError) as error:
        raise NotOfThisFormat from error
    if raw is not None:
        text = text.replace(json.dumps(_MARK), raw, 1)
    return text.encode("utf-8", "surrogatepass"), done


def mutate_lines(content: bytes, rng: random.Random) -> Mutated:
    """One line changed as JSON, or lines exchanged, repeated, joined."""
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    what = rng.randrange(5)
    if what < 2:
        lines[at], done = mutate_json(lines[at], rng)
        return b"\n".join(lines), f"line {at}: {done}"
    if what == 2:
        return b"\n".join(
            [*lines[:at], *lines[at : at + 1] * rng.choice((2, 500)), *lines[at + 1 :]]
        ), f"line {at} repeated"
    if what == 3:
        ends = rng.choice((b"\r\n", b"\r", b" ", b"\n\n\n", b"\xe2\x80\xa8", b"\x00\n"))
        return ends.join(lines), f"line ends {ends!r}"
    return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\x1f\x8b", b"(\xb5/\xfd")) + content, "another beginning"


def mutate_safetensors(content: bytes, rng: random.Random) -> Mutated:
    """The header changed, with its length corrected or not; or the length."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise NotOfThisFormat
    if rng.random() < 0.2:
        return put_number(content, 0, 8, rng), "header length"
    header, done = mutate_json(content[8 : 8 + length], rng)
    size = len(header) if rng.random() < 0.9 else length
    return size.to_bytes(8, "little") + header + content[8 + length :], f"header: {done}"


# One change


def _changed(tree: Any, rng: random.Random) -> tuple[Any, str | None, str]:
    """The tree with one node changed, raw text for its marker if there is one, and what was done."""
    places = list(_nodes(tree))
    if not places:
        return rng.choice(VALUES), None, "another value"
    holder, key = rng.choice(places)
    name = str(key)[:40]
    what = rng.choice(
        (
            "value",
            "value",
            "value",
            "tweak",
            "tweak",
            "tweak",
            "drop",
            "rename",
            "add",
            "swap",
            "wrap",
            "repeat",
            "raw",
            "root",
        )
    )
    if what == "value":
        holder[key] = rng.choice(VALUES)
    elif what == "tweak":
        holder[key] = _tweaked(holder[key], rng)
    elif what == "drop":
        del holder[key]
    elif what == "rename" and isinstance(holder, dict):
        holder[rng.choice((f"{name}_", name[:-1], name.upper(), "", "__class__", "../x", f"{name}\x1b[31m"))] = (
            holder.pop(key)
        )
    elif what == "add" and isinstance(holder, dict):
        holder[rng.choice(("extra", "__metadata__", "auto_map", "\x1b[2J", name + " "))] = rng.choice(VALUES)
    elif what == "swap":
        other, place = rng.choice(places)
        holder[key], other[place] = other[place], json.loads(json.dumps(holder[key]))
    elif what == "wrap":
        holder[key] = rng.choice(([holder[key]], {"x": holder[key]}, json.dumps(holder[key])))
    elif what == "repeat" and isinstance(holder, list):
        holder[key:key] = [holder[key]] * rng.choice((1, 2, 1000))
    elif what == "root":
        return rng.choice((*VALUES, holder[key], [tree])), None, "another root"
    else:
        holder[key] = _MARK
        return tree, rng.choice(RAW), f"raw text at {name}"
    return tree, None, f"{what} at {name}"


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key or index), with few of a long list."""
    stack = [tree]
    while stack:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else range(min(len(node), 8)) if isinstance(node, list) else ()
        for key in keys:
            yield node, key
            stack.append(node[key])


def _tweaked(value: Any, rng: random.Random) -> Any:
    """A value nearby: the same in another type, a little more or less, a part of it."""
    if isinstance(value, bool) or value is None:
        return rng.choice((not value, int(bool(value)), str(value), [value]))
    if isinstance(value, int):
        return rng.choice(
            (
                value + 1,
                value - 1,
                -value,
                value * 2,
                value // 2,
                float(value) if abs(value) < 1 << 60 else 0.0,
                str(value),
                value * 10**6,
                bool(value),
            )
        )
    if isinstance(value, float):
        return rng.choice(
            (-value, value * 2, int(value) if abs(value) < 1e18 else 0, str(value), value * 1e300, float("nan"))
        )
    if isinstance(value, str):
        return rng.choice(
            (
                value[:-1],
                value + "x",
                value * 2,
                value.upper(),
                f" {value}",
                value.replace("/", "//"),
                f"../{value}",
                f"/{value}",
                [value],
                value.replace("0", "1"),
            )
        )
    if isinstance(value, list):
        return rng.choice(
            (
                value[:-1],
                value + value[:1],
                value[::-1],
                [*value, *value],
                value * 50,
                dict.fromkeys(map(str, range(3)), value[:1]),
                [],
            )
        )
    return rng.choice((list(value), dict(reversed(value.items())), {}, list(value.values()), dict.fromkeys(value)))
