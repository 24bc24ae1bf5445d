"""Names say what a thing is: words that could name anything, and words that the field spells otherwise, are not names here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import PACKAGE, SOURCES, nodes_of

VAGUE = frozenset({"found", "one", "each", "own", "whole", "words"})
OTHER_WORDS = {
    "facts": "metadata or properties",
    "verb": "subcommand",
    "verbs": "subcommands",
    "letters": "layer pattern, or characters",
}
SPEAKS_OF_SPECULATION = re.compile(r"draft", re.IGNORECASE)
SPEAKS_OF_ATTENTION = re.compile(r"sink(?!horn)", re.IGNORECASE)
BRITISH = re.compile(
    r"(?:quant|normal|minim|synchron|special|serial|orthogonal|initial|material|util|vector|summar|recogn|penal|optim|final|factor)"
    r"is(?:e|es|ed|er|ers|ing|ation)\b|colour|neighbour|licence\b|behaviour|favour",
    re.IGNORECASE,
)
ODD_PHRASES = re.compile(r"each of so many|by as many|with each of two values in their place")


def names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Every name that code gives: variables, parameters, attributes, functions, classes."""
    for node in nodes:
        match node:
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.arg():
                yield node.lineno, node.arg
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case _:
                pass


@cache
def parts(name: str) -> set[str]:
    """
    >>> sorted(parts("_ParamFacts")), sorted(parts("step_facts"))
    (['facts', 'param'], ['facts', 'step'])
    """
    return set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def problems(source: str, given: Iterable[tuple[int, str]]) -> list[str]:
    lines = []
    for line, name in given:
        if name.strip("_").lower() in VAGUE:
            lines.append(f"{line}: {name} could be anything: name the thing")
        lines += [f"{line}: {name}: say {OTHER_WORDS[part]}" for part in sorted(parts(name) & OTHER_WORDS.keys())]
    for line, text in enumerate(source.splitlines(), 1):
        if british := BRITISH.search(text.replace('"licence"', "")):  # a key of older files
            lines.append(f"{line}: {british.group()}: American spelling")
        if odd := ODD_PHRASES.search(text):
            lines.append(f"{line}: {odd.group()!r}: subject, verb, object")
    return lines


@cache
def names_of(path: Path) -> tuple[tuple[int, str], ...]:
    return tuple(names(nodes_of(path)))


def problems_of_text(source: str) -> list[str]:
    return problems(source, names(ast.walk(ast.parse(source))))


def test_names_of_the_package():
    wrong = [f"{path}:{line}" for path in SOURCES for line in problems(path.read_text(), names_of(path))]
    assert not wrong, "\n".join(wrong)


def test_draft_is_speculation_and_sink_is_attention():
    """A temporary file is no draft, and what takes metrics or gradients is no sink."""
    speculation = ("infer", "serve", "cli/generation", "models/decoder", "validate")
    attention = ("kernels", "layers", "models", "checkpoint/megatron", "parallel/context", "estimate", "validate")
    wrong = []
    for path in SOURCES:
        room = path.relative_to(PACKAGE).as_posix()
        for line, name in names_of(path):
            if SPEAKS_OF_SPECULATION.search(name) and not room.startswith(speculation):
                wrong.append(f"{path}:{line} {name}")
            if SPEAKS_OF_ATTENTION.search(name) and not room.startswith(attention):
                wrong.append(f"{path}:{line} {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "found = 1",
        "def f(own): pass",
        "for each in (): pass",
        "self._words = 2",
        "class ParamFacts: pass",
        "layer_letters = 3",
        "x = 1  # normalised",
        "'colour'",
        '"""A tensor for each of so many ranks."""',
    ],
)
def test_such_words_are_noticed(line: str):
    assert problems_of_text(line)


@pytest.mark.parametrize("line", ["one_hot = 1", "found_steps = ()", "x = 'noise'", "own_rank = 0", "rowwise = 3"])
def test_other_words_stay(line: str):
    assert not problems_of_text(line)
