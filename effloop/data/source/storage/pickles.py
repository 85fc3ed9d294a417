"""Reads pickles as data: nothing in them is imported, called or made, whatever they hold.

Read are numbers, text, bytes, lists, tuples, dicts and what numpy writes for its arrays (`pickled_arrays`), of the
protocols 0 to 5, as CPython's pickletools describes them. Everything else is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from effloop.data.source.storage.pickle_machine import ALLOWED, MARK, Machine, Pickled, refused
from effloop.errors import DataError

Value = Any
"""None, bool, int, float, str, `Bytes`, `Array`, and lists, tuples and dicts of them; keys of a dict are str, int or
bytes. Lists may contain themselves: code that reads a value goes only as deep as it has to."""

MOST_OPERATIONS = 1 << 22
"""Of one pickle: a list of 50,000 numbers has 100,000. Each takes up to 80 bytes of memory."""


def read_pickle(data: Pickled, start: int = 0, end: int | None = None, most: int = MOST_OPERATIONS) -> Value:
    """The value of a pickle, in memory and time that are linear in its size.

    Args:
        data: holds it; a `Bytes` of the value is a place in there.
        start: its first byte.
        end: where it ends at the latest; None is the end of `data`.
        most: operations that it may have.

    Raises:
        DataError: damaged, cut, or holding anything else; the message doesn't say where the pickle is.
    """
    machine = Machine(data, start, len(data) if end is None else end)
    for _ in range(most):
        code = machine.unsigned(1)
        if code == _STOP:
            return machine.pop()
        operation = _OPERATIONS.get(code)
        if operation is None:
            raise _other(machine, code)
        operation(machine)
    raise DataError(f"holds a pickle of more than {most:,} operations; allowed are as many")


def _other(machine: Machine, code: int) -> DataError:
    """The error about an operation that isn't read."""
    if code == _INST:
        return refused(machine.name(), machine.name())
    if code in _REFUSED:
        return DataError(f"holds {_REFUSED[code]}, which is never made: {ALLOWED}")
    return machine.damaged(f"0x{code:02x} is no operation", back=1)


_STOP, _INST = 0x2E, 0x69
_Operation = Callable[[Machine], object]


def _constant(value: Any) -> _Operation:
    return lambda machine: machine.push(value)


_OPERATIONS: dict[int, _Operation] = {
    0x80: lambda m: m.unsigned(1),  # PROTO
    0x95: lambda m: m.unsigned(8),  # FRAME, which only says how much to read ahead
    ord("("): _constant(MARK),
    ord("0"): Machine.drop,  # POP
    ord("1"): Machine.marked,  # POPMARK
    ord("2"): Machine.twice,  # DUP
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("I"): Machine.integer,
    ord("J"): Machine.signed,  # BININT
    ord("K"): lambda m: m.push(m.unsigned(1)),
    ord("M"): lambda m: m.push(m.unsigned(2)),
    ord("L"): Machine.long_integer,
    0x8A: lambda m: m.binary_integer(1),
    0x8B: lambda m: m.binary_integer(4),
    ord("F"): Machine.number,
    ord("G"): Machine.binary_number,
    ord("S"): Machine.quoted,  # STRING, Python 2's
    ord("T"): lambda m: m.blob(4),
    ord("U"): lambda m: m.blob(1),
    ord("B"): lambda m: m.blob(4),
    ord("C"): lambda m: m.blob(1),
    0x8E: lambda m: m.blob(8),
    0x96: lambda m: m.blob(8),  # BYTEARRAY8
    ord("V"): Machine.text_line,
    ord("X"): lambda m: m.read_text(4),
    0x8C: lambda m: m.read_text(1),
    0x8D: lambda m: m.read_text(8),
    ord("]"): lambda m: m.push([]),
    ord("a"): Machine.append,
    ord("e"): Machine.appends,
    ord("l"): lambda m: m.push(m.marked()),
    ord(")"): _constant(()),
    ord("t"): lambda m: m.push(tuple(m.marked())),
    0x85: lambda m: m.push(tuple(m.last(1))),
    0x86: lambda m: m.push(tuple(m.last(2))),
    0x87: lambda m: m.push(tuple(m.last(3))),
    ord("}"): lambda m: m.push({}),
    ord("d"): Machine.make_dict,
    ord("s"): Machine.set_item,
    ord("u"): lambda m: m.update(m.marked()),
    ord("p"): lambda m: m.store(m.digits()),
    ord("q"): lambda m: m.store(m.unsigned(1)),
    ord("r"): lambda m: m.store(m.unsigned(4)),
    0x94: lambda m: m.store(m.kept()),
    ord("g"): lambda m: m.recall(m.digits()),
    ord("h"): lambda m: m.recall(m.unsigned(1)),
    ord("j"): lambda m: m.recall(m.unsigned(4)),
    ord("c"): lambda m: m.look_up(m.name(), m.name()),
    0x93: Machine.look_up_on_stack,
    ord("R"): Machine.reduce,
    ord("b"): Machine.build,
}

_REFUSED = {
    ord("P"): "a persistent id",
    ord("Q"): "a persistent id",
    ord("o"): "an object (OBJ)",
    0x81: "an object (NEWOBJ)",
    0x92: "an object (NEWOBJ_EX)",
    0x82: "an object of an extension code",
    0x83: "an object of an extension code",
    0x84: "an object of an extension code",
    0x8F: "a set",
    0x90: "a set",
    0x91: "a set",
    0x97: "a buffer outside of the pickle",
    0x98: "a buffer outside of the pickle",
}
