"""Pickles are read as data. What is hostile is refused in one line, and nothing in it is run."""

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from effloop.data.source.formats.pickles import Array, unpickle
from effloop.errors import DataError

CANARY = "canary"


def plain(value: Any) -> Any:
    """What pickle.loads would have given."""
    if isinstance(value, Array):
        return value.values
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def read(data: bytes) -> Any:
    return plain(unpickle(data))


PLAIN = (
    b"\xff\xd8\xff'\n\\" * 3,
    [7, -5, 1 << 40, -(1 << 63), 3.5, True, False, None],
    "text \u20ac \n\\",
    {"a": b"x" * 300, 3: [], b"k": (1,), "nested": {"list": [[1, (2, 3, 4, 5)]]}},
    b"",
    bytearray(b"z\xff"),
    np.int64(-9),
    np.float32(1.5),
)
ARRAYS = [
    np.arange(12, dtype=np.uint8).reshape(3, 4),
    np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
    np.arange(3, dtype=">i2"),
    np.zeros((0, 3)),
    np.array(True),
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol(protocol):
    assert read(pickle.dumps(PLAIN, protocol)) == PLAIN
    for array in ARRAYS:
        found = read(pickle.dumps({"data": array}, protocol))["data"]
        assert found.dtype == array.dtype
        assert not found.size or not found.flags.writeable
        np.testing.assert_array_equal(found, array)


def test_what_python_2_wrote():
    """As cPickle did: text in quotes, or with its length; the arrays of CIFAR are such."""
    assert read(b"(S'a\\n\\'\\\\'\nI01\nL3L\nF0.5\nlp0\n.") == [b"a\n'\\", True, 3, 0.5]
    assert read(b"(dp0\nS'labels'\np1\n(lp2\nI6\naI9\nas.") == {b"labels": [6, 9]}
    dtype = (
        b"cnumpy\ndtype\nq\x03(U\x02u1q\x04K\x00K\x01tRq\x05(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87R"
    made = b"\x80\x02}U\x04data" + array + b"(K\x01K\x02K\x03\x86" + dtype + b"\x89U\x06abcdeftbs."
    assert read(made)[b"data"].tolist() == [[97, 98, 99], [100, 101, 102]]


class Payload:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (CANARY,)


def calls(name: str, protocol: int = 0) -> bytes:
    """A pickle that calls MODULE.NAME with a shell's command."""
    module, _, function = name.rpartition(".")
    if protocol < 4:
        return f"c{module}\n{function}\n(S'mkdir {CANARY}'\ntR.".encode()
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, function, f"mkdir {CANARY}"))
    return (
        b"\x80\x04"
        + texts[: 4 + len(module) + len(function)]
        + b"\x93"
        + texts[4 + len(module) + len(function) :]
        + b"\x85R."
    )


COMMANDS = [
    "os.system",
    "posix.system",
    "builtins.eval",
    "__builtin__.apply",
    "pickle.loads",
    "functools.partial",
    "copyreg._reconstructor",
    "_codecs.decode",
    "numpy.load",
    "torch.storage._load_from_bytes",
    "collections.OrderedDict",
]


def repeated(function: bytes, args: bytes, count: int) -> bytes:
    """A pickle that calls a function with the same arguments again and again."""
    return function + b"q\x00" + args + b"q\x01](" + b"h\x00h\x01R" * count + b"e."


_TEXT = b"X\x00\x10\x00\x00" + b"a" * 4096
HOSTILE: dict[str, bytes] = {
    **{name: calls(name) for name in COMMANDS},
    "os.system by protocol 4": calls("os.system", 4),
    **{f"protocol {n}": pickle.dumps(Payload(), n) for n in range(6)},
    "within a dict": pickle.dumps({"data": [{"x": ((Payload(),),)}]}),
    "as a key": pickle.dumps({Payload(): 1}),
    "an attribute of what is allowed": b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
    "named and dropped": b"cos\nsystem\n0N.",
    "a name with control characters": b"cos\x1b[31m\nsystem\n.",
    "INST": b"(S'x'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'x'\no.",
    "OBJ of what is allowed": b"(cnumpy\nndarray\no.",
    "EXT1": b"\x80\x02\x82\x01)R.",
    "PERSID": b"Pfile:///etc/passwd\n.",
    "calls a text": b"S'os.system'\n(S'x'\ntR.",
    "another codec": b"c_codecs\nencode\n(Vx\nVzip\ntR.",
    "bytes of a size": b"cbuiltins\nbytes\n(J\xff\xff\xff\x7ftR.",
    "another class of arrays": b"cnumpy\nmatrix\n.",
    "array of objects": pickle.dumps(np.array([Payload()], object)),
    "dtype with fields": pickle.dumps(np.zeros(2, "u1,f4")),
    "state of a dict": b"}}b.",
    "state of a function": b"c_codecs\nencode\nN}S'__defaults__'\nNs\x86b.",
    "state of a dtype": b"cnumpy\ndtype\n(Vu1\nI00\nI01\ntR}b.",
    "text without end": b"X\xff\xff\xff\xffx.",
    "array of another size": pickle.dumps(np.zeros(8, np.uint8), 2).replace(b"K\x08\x85", b"K\x09\x85"),
    "set": pickle.dumps({1, 2}),
    "frozenset": pickle.dumps({frozenset([1]): 2}),
    "tuples in each other as a key": b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.",
    "a key that takes forever": b")q\x00"
    + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))
    + b"}h\x3cNs.",
    "such keys of several items": b"}((((tttN(tNu.",
    "such a key of a dict": b"((((tttNd.",
    "a number too long to be shown": pickle.dumps((b"image", 1 << 20_000), 2),
    "bytearray without end": b"\x80\x05\x96" + b"\xff" * 5 + b"\0\0\0x.",
    "bytes of a text, again and again": repeated(b"c_codecs\nencode\n", _TEXT + b"\x85", 1000),
    "numbers of bytes, again and again": repeated(
        b"cnumpy.core.multiarray\nscalar\n", b"cnumpy\ndtype\n(VS4096\ntRB" + _TEXT[1:] + b"\x86", 1000
    ),
    "stack underflow": b"\x85.",
    "no pickle": b"\xff\xd8\xff\xe0",
    "empty": b"",
}


def test_the_payload_is_a_real_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE["protocol 4"])
    assert Path(CANARY).is_dir()


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_and_not_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        unpickle(HOSTILE[name])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    assert name not in COMMANDS or f"holds {name}, which is never run" in str(error.value)
    assert not [*tmp_path.iterdir()]


def test_cut_anywhere():
    samples = [pickle.dumps((PLAIN, ARRAYS[0]), protocol) for protocol in range(6)]
    for whole in samples:
        for length in range(len(whole) - 1):
            with pytest.raises(DataError):
                unpickle(whole[:length])


def test_2000_mutations():
    """Flipped bits, bytes left out and put in: refused with a line, or read as data; nothing else is raised."""
    rng = random.Random(7)
    samples = [pickle.dumps((PLAIN, ARRAYS), protocol) for protocol in range(6)]
    refused = list[str]()
    for number in range(2000):
        data = bytearray(samples[number % 6])
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.choice((0, 1, 1, 2))] = rng.choice((b"", rng.randbytes(1), rng.choice(data).to_bytes()))
        try:
            read(bytes(data))
        except DataError as error:
            refused.append(str(error))
    assert len(refused) > 500
    assert not [line for line in refused if "\n" in line]
