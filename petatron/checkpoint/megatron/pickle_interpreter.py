"""Reads a pickle as data, with an interpreter that can call nothing and whose work is bounded by the size of the file.

A pickle is a program for a stack machine with a memo. Python's own machine looks names up and calls them, and a few bytes can make
it use gigabytes or run for ever: a memo index that makes it allocate as many slots, a tuple of a tuple of itself that takes 2^60
steps to hash. This machine does neither. A name becomes a `GlobalName`; `PickleResolver` decides the result of calling it, for all
but a few names an `InertObject`, which stores its arguments and can do nothing. The bounds:

    every opcode reads at least a byte and does constant work, or work in proportion to what it pops off the stack
    the memo is a dictionary, so an index costs nothing; containers are counted against the size of the file
    only texts and integers of 60 bits are hashed by value, whose hashes nobody can make collide; other keys by identity
    nothing is copied because it is referenced again: a state is stored, not merged

Opcodes that `pickle` does not write in binary protocols (2 to 5) are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

_MAX_MARKS = 1000
_MAX_NAME_BYTES = 256
_MAX_INTEGER_BYTES = 64
_MAX_KEY = 1 << 60
_FREE_CONTAINERS = 10_000
_BYTES_PER_CONTAINER = 6  # half of what a file of many small chunks has, for each of two counts
_STOP = 0x2E
_UINT32, _INT32 = struct.Struct("<I").unpack_from, struct.Struct("<i").unpack_from
_FLOAT64 = struct.Struct(">d").unpack


class PickleError(ValueError):
    """The bytes are not a supported pickle."""


class GlobalName:
    """A global name in a pickle, never resolved to the object."""

    __slots__ = ("full",)

    def __init__(self, full: str) -> None:
        self.full = full


class InertObject:
    """Stands for an object: stores its class name, arguments and state, and can do nothing."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: Any) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def fields(self) -> Mapping[str, Any]:
        """Returns what would be the object's attributes."""
        return self.state if isinstance(self.state, dict) else {}


class PickleResolver(Protocol):
    """Resolves the names and storages of a kind of file."""

    def find_class(self, full: str) -> Any:
        """Resolves a name when it is referenced."""
        ...

    def call(self, name: GlobalName, arguments: Any) -> Any:
        """Returns the result of calling a name, in constant time."""
        ...

    def persistent_load(self, identity: Any) -> Any:
        """Loads an object stored outside the pickle."""
        ...


def read_pickle(data: bytes, resolver: PickleResolver) -> Any:
    """Returns the value of a pickle; `PickleError` (or an IndexError or TypeError of a malformed stack) if it is none."""
    if not data.endswith(b"."):
        raise PickleError("it is cut short")
    return _PickleMachine(data, resolver, 0).run()


def read_pickle_at(data: bytes, begin: int, resolver: PickleResolver) -> tuple[Any, int]:
    """Returns the value of a pickle that begins inside other bytes, and the position after it."""
    machine = _PickleMachine(data, resolver, begin)
    return machine.run(), machine.at


class _PickleMachine:
    """Holds the stack, the memo and the read position."""

    __slots__ = ("at", "data", "marks", "memo", "objects_left", "resolver", "stack")

    def __init__(self, data: bytes, resolver: PickleResolver, begin: int) -> None:
        self.data, self.resolver, self.at = data, resolver, begin
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.objects_left = _FREE_CONTAINERS + len(data) // _BYTES_PER_CONTAINER

    def run(self) -> Any:
        """Executes the pickle. The frequent opcodes are inlined here; the table has the others."""
        data, stack, marks, memo, push = self.data, self.stack, self.marks, self.memo, self.stack.append
        called, handlers = self.resolver.call, _HANDLERS
        at, left = self.at, self.objects_left
        while left >= 0 and self.objects_left >= 0:
            opcode = data[at]
            at += 1
            if opcode == 0x94:  # memoize
                memo[len(memo)] = stack[-1]
            elif opcode == 0x6A:  # get by four bytes
                push(memo[_UINT32(data, at)[0]])
                at += 4
            elif opcode == 0x68:  # get by one byte
                push(memo[data[at]])
                at += 1
            elif opcode == 0x72:  # put by four bytes
                memo[_UINT32(data, at)[0]] = stack[-1]
                at += 4
            elif opcode == 0x4B:  # number of one byte
                push(data[at])
                at += 1
            elif opcode == 0x4D:  # number of two bytes
                push(data[at] + 256 * data[at + 1])
                at += 2
            elif opcode == 0x28:  # mark
                if len(marks) >= _MAX_MARKS:
                    raise PickleError("it is nested too deeply")
                marks.append(len(stack))
            elif opcode == 0x29:  # empty tuple
                push(())
            elif opcode == 0x81 or opcode == 0x52:  # new object, call
                arguments, name = stack.pop(), stack.pop()
                if type(name) is not GlobalName:
                    raise PickleError(f"it calls a {type(name).__name__}")
                push(called(name, arguments))
                left -= 1
            elif opcode == 0x85:  # tuple of one
                stack[-1] = (stack[-1],)
                left -= 1
            elif opcode == 0x86:  # tuple of two
                last = stack.pop()
                stack[-1] = (stack[-1], last)
                left -= 1
            elif opcode == 0x62:  # state of an object
                state = stack.pop()
                if type(stack[-1]) is InertObject:
                    stack[-1].state = state
            elif opcode == 0x7D:  # empty dictionary
                push({})
                left -= 1
            elif opcode == 0x4A:  # number of four bytes
                push(_INT32(data, at)[0])
                at += 4
            elif opcode == _STOP:
                self.at = at
                return stack.pop()
            else:
                self.at = at
                handlers[opcode](self)
                at = self.at
        raise PickleError("it makes more objects than a file of its size should")

    # What opcodes share

    def read_bytes(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise PickleError("it is cut short")
        content = self.data[self.at : end]
        self.at = end
        return content

    def read_uint(self, num_bytes: int) -> int:
        return int.from_bytes(self.read_bytes(num_bytes), "little")

    def read_line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + _MAX_NAME_BYTES)
        if end < 0:
            raise PickleError("a name in it has no end")
        line = self.data[self.at : end].decode()
        self.at = end + 1
        return line

    def items_since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def push_container(self, value: Any) -> None:
        self.objects_left -= 1
        self.stack.append(value)

    # Opcodes

    def unsupported_opcode(self) -> None:
        raise PickleError(f"it has the opcode {self.data[self.at - 1]:#04x}, which is not understood")

    def proto(self) -> None:
        if self.read_uint(1) > 5:
            raise PickleError("it is of a later protocol")

    def pop(self) -> None:
        self.stack.pop()

    def pop_mark(self) -> None:
        self.items_since_mark()

    def duplicate(self) -> None:
        self.stack.append(self.stack[-1])

    def empty_list(self) -> None:
        self.push_container([])

    def tuple_since_mark(self) -> None:
        self.push_container(tuple(self.items_since_mark()))

    def tuple3(self) -> None:
        third, second, first = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.push_container((first, second, third))

    def list_since_mark(self) -> None:
        self.push_container(self.items_since_mark())

    def dict_since_mark(self) -> None:
        items = self.items_since_mark()
        self.push_container({})
        self._set_items(items)

    def append(self) -> None:
        self._extend([self.stack.pop()])

    def appends(self) -> None:
        self._extend(self.items_since_mark())

    def _extend(self, values: list[Any]) -> None:
        """An inert object may be a list or a dictionary of some class: its items are dropped, as nobody reads them."""
        target = self.stack[-1]
        if type(target) is list:
            target.extend(values)
        elif type(target) is not InertObject:
            raise PickleError("it appends to what is no list")

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def set_items(self) -> None:
        self._set_items(self.items_since_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is InertObject:
            return
        if type(target) is not dict or len(items) % 2:
            raise PickleError("it sets items of what is no dictionary")
        values = iter(items)
        for key, value in zip(values, values):
            kind = type(key)
            if kind is not str and kind is not InertObject and not (kind is int and -_MAX_KEY < key < _MAX_KEY):
                key = InertObject("key", key)
            target[key] = value

    def global_name(self) -> None:
        module = self.read_line()
        self.stack.append(self.resolver.find_class(f"{module}.{self.read_line()}"))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str or len(name) + len(module) > 2 * _MAX_NAME_BYTES:
            raise PickleError("a name in it is no text")
        self.stack.append(self.resolver.find_class(f"{module}.{name}"))

    def persistent_id(self) -> None:
        self.push_container(self.resolver.persistent_load(self.stack.pop()))

    def long(self) -> None:
        count = self.read_uint(1)
        if count > _MAX_INTEGER_BYTES:
            raise PickleError("a number in it is too large")
        self.stack.append(int.from_bytes(self.read_bytes(count), "little", signed=True))

    def binfloat(self) -> None:
        self.stack.append(_FLOAT64(self.read_bytes(8))[0])

    def frame(self) -> None:
        self.read_bytes(8)

    def put(self) -> None:
        self.memo[self.read_uint(1)] = self.stack[-1]


def _push_constant(value: Any) -> Callable[[_PickleMachine], None]:
    def push(machine: _PickleMachine) -> None:
        machine.stack.append(value)

    return push


def _push_text(length_bytes: int, encoding: str = "utf-8") -> Callable[[_PickleMachine], None]:
    def push(machine: _PickleMachine) -> None:
        machine.stack.append(machine.read_bytes(machine.read_uint(length_bytes)).decode(encoding, "surrogatepass"))

    return push


def _push_bytes(length_bytes: int) -> Callable[[_PickleMachine], None]:
    def push(machine: _PickleMachine) -> None:
        machine.stack.append(machine.read_bytes(machine.read_uint(length_bytes)))

    return push


_M = _PickleMachine
_HANDLERS: list[Callable[[_PickleMachine], None]] = [_M.unsupported_opcode] * 256
for _code, _handler in {
    b"\x80": _M.proto, b"\x95": _M.frame, b"1": _M.pop_mark, b"0": _M.pop, b"2": _M.duplicate, b"q": _M.put,
    b"N": _push_constant(None), b"\x88": _push_constant(True), b"\x89": _push_constant(False), b"\x8a": _M.long, b"G": _M.binfloat,
    b"X": _push_text(4), b"\x8c": _push_text(1), b"\x8d": _push_text(8), b"U": _push_text(1, "latin-1"), b"T": _push_text(4, "latin-1"),
    b"B": _push_bytes(4), b"C": _push_bytes(1), b"\x8e": _push_bytes(8), b"\x96": _push_bytes(8), b"]": _M.empty_list,
    b"\x8f": _M.empty_list, b"\x87": _M.tuple3, b"t": _M.tuple_since_mark, b"l": _M.list_since_mark,
    b"d": _M.dict_since_mark, b"\x91": _M.tuple_since_mark, b"a": _M.append, b"e": _M.appends, b"\x90": _M.appends,
    b"s": _M.set_item, b"u": _M.set_items, b"c": _M.global_name, b"\x93": _M.stack_global,
    b"Q": _M.persistent_id,
}.items():  # fmt: skip
    _HANDLERS[_code[0]] = _handler
