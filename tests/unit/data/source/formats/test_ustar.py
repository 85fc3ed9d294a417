from __future__ import annotations

import mmap
import random
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from archives import edited, make, pairs, with_checksum
from plans import line

from effloop.data.source.formats import ustar
from effloop.errors import DataError


def walk(path: Path) -> list[tuple[str, bytes]]:
    """Names and contents of all members."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return [
        (name.decode(errors="replace"), data[offset : offset + size])
        for name, offset, size in ustar.members(data, str(path))
    ]


def refusal(path: Path) -> str:
    """The one line that walking fails with."""
    with pytest.raises(DataError) as caught:
        walk(path)
    return str(caught.value)


def test_header_is_what_tarfile_writes() -> None:
    rng = random.Random(0)
    names = ["/".join("x" * rng.randint(1, 90) for _ in range(rng.randint(1, 4))) for _ in range(500)]
    for name in names:
        info = tarfile.TarInfo(name)
        info.size = rng.randrange(1 << 33)
        try:
            theirs = info.tobuf(tarfile.USTAR_FORMAT)
        except ValueError:
            assert not ustar.fits(name.encode())
            continue
        ours = ustar.header(name.encode(), info.size)
        assert (ours == theirs) or len(name) > 100  # a long name may be cut at another slash
        read = tarfile.TarInfo.frombuf(ours, "utf-8", "strict")
        assert (read.name, read.size, read.type) == (name, info.size, b"0")


def test_sizes_in_binary_and_in_records(tmp_path: Path) -> None:
    binary = edited(b"a.jpg", 0, 124, b"\x80" + (3).to_bytes(11, "big"))
    record = b"10 size=1\n"
    parts = [binary, b"abc", edited(b"pax", len(record), 156, b"x"), record, ustar.header(b"a.cls", 0), b"7", ustar.END]
    (tmp_path / "train.tar").write_bytes(b"".join(part + bytes(ustar.padding(len(part))) for part in parts))
    assert walk(tmp_path / "train.tar") == [("a.jpg", b"abc"), ("a.cls", b"7")]


OUT = "leads out of the archive; write it again with relative paths"
PLAIN = "write the archive again with plain files only"


@pytest.mark.parametrize(
    ("name", "fields", "wanted"),
    [
        ("../a.jpg", {}, f"'../a.jpg' {OUT}"),
        ("a/../../b.jpg", {}, f"'a/../../b.jpg' {OUT}"),
        ("/etc/passwd", {}, f"'/etc/passwd' {OUT}"),
        ("a.jpg", {"type": tarfile.LNKTYPE, "linkname": "b"}, f"'a.jpg' is a hard link; {PLAIN}"),
        ("a.jpg", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, f"'a.jpg' is a symbolic link; {PLAIN}"),
        ("a.jpg", {"type": tarfile.CHRTYPE}, f"'a.jpg' is a device; {PLAIN}"),
        ("a.jpg", {"type": tarfile.BLKTYPE}, f"'a.jpg' is a device; {PLAIN}"),
        ("a.jpg", {"type": tarfile.FIFOTYPE}, f"'a.jpg' is a pipe; {PLAIN}"),
        ("a.jpg", {"type": tarfile.GNUTYPE_SPARSE}, f"'a.jpg' is a sparse file; {PLAIN}"),
        ("a.jpg", {"pax_headers": {"GNU.sparse.major": "1"}}, f"'a.jpg' is a sparse file; {PLAIN}"),
        ("a.jpg", {"type": b"Q"}, f"'a.jpg' is of the unknown kind b'Q'; {PLAIN}"),
        ("a.jpg", {"pax_headers": {"path": "../b"}}, f"'../b' {OUT}"),
    ],
)
def test_refused_members(tmp_path: Path, name: str, fields: dict[str, object], wanted: str) -> None:
    shard = make(tmp_path / "train.tar", [(name, b"")], tarfile.PAX_FORMAT, **fields)
    assert refusal(shard) == f"{shard}: {wanted}"


def test_every_altered_byte_of_a_header_is_found(tmp_path: Path) -> None:
    shard = make(tmp_path / "train.tar", pairs("a", "b"))
    whole = shard.read_bytes()
    for at in (2048, 3072):  # of b.jpg and b.cls; the bytes before end the walk with their own message
        assert whole[at : at + 2] == b"b."
        for place in range(at, at + 512):
            shard.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
            if whole[place] in b" \0" and place - at in range(148, 156):
                continue  # a space or a zero behind the checksum's digits
            wanted = f"{shard} is damaged at byte {at:,}: the header there doesn't match its checksum; get it again"
            with pytest.raises(DataError, match=line(wanted)):
                walk(shard)


def test_cut_anywhere(tmp_path: Path) -> None:
    shard = make(tmp_path / "train.tar", pairs("a", "b"))
    whole = shard.read_bytes()
    end = whole.rindex(b"1") // 512 * 512 + 512
    for length in (*range(1, end + 1024, 171), *range(512, end + 1024, 512)):
        shard.write_bytes(whole[:length])
        with pytest.raises(DataError, match=f"^{shard} is cut"):
            walk(shard)
    shard.write_bytes(whole[: end + 1024])
    assert walk(shard) == pairs("a", "b")


def test_messages_of_cut_archives(tmp_path: Path) -> None:
    shard = make(tmp_path / "train.tar", [("a.jpg", bytes(range(1, 200)) * 10), ("a.cls", b"1")])
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1024])
    assert refusal(shard) == (
        f"{shard} is cut: 'a.jpg' is 1,990 bytes at byte 512, but the file has 1,024; get it again"
    )
    shard.write_bytes(whole[:2560])
    assert refusal(shard) == f"{shard} is cut at byte 2,560: no two blocks of zeros end it; get it again"
    shard.write_bytes(whole[: 2560 + 1024 + 512])
    assert refusal(shard) == f"{shard} is cut at byte 4,096: no two blocks of zeros end it; get it again"


def test_zeros_in_the_middle(tmp_path: Path) -> None:
    shard = make(tmp_path / "train.tar", pairs("a", "b"))
    whole = shard.read_bytes()
    wanted = "a block of zeros ends the archive, but more follows (archives joined by cat?); get it again"
    for data, at in ((whole[:2048] + bytes(512) + whole[2560:], 2048), (whole + whole, 4096)):
        shard.write_bytes(data)
        assert refusal(shard) == f"{shard} is damaged at byte {at:,}: {wanted}"


def test_made_up_headers_raise_nothing_else(tmp_path: Path) -> None:
    """Headers whose checksum is right and whose fields are not, and long names and records of nonsense."""
    rng = random.Random(0)
    names = ["é" * 120, "x/" * 100 + "b"]
    for fmt in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        shard = make(tmp_path / f"train-{fmt}.tar", pairs("a", *names), fmt)
        whole, taken = shard.read_bytes(), 0
        for _ in range(200):
            data = bytearray(whole)
            at = rng.randrange(12) * 512
            for _ in range(rng.choice((1, 1, 3))):
                data[at + rng.choice((rng.randrange(512), 124, 156, 135))] = rng.choice(
                    (0, 0x80, 0xFF, rng.randrange(256))
                )
            data[at : at + 512] = with_checksum(bytes(data[at : at + 512]))
            shard.write_bytes(data)
            with suppress(DataError):
                walk(shard)
                taken += 1
        assert 20 < taken < 180  # some of them change nothing that is read


def test_negative_size(tmp_path: Path) -> None:
    shard = tmp_path / "train.tar"
    shard.write_bytes(edited(b"a.jpg", 0, 124, b"-0000001000\0") + ustar.END)
    wanted = "is damaged at byte 0: the header there doesn't match its checksum; get it again"
    assert refusal(shard) == f"{shard} {wanted}"


def test_folders_of_before_ustar(tmp_path: Path) -> None:
    shard = tmp_path / "train.tar"
    shard.write_bytes(edited(b"folder/", 0, 156, b"\0") + ustar.header(b"folder/a", 0) + ustar.END)
    assert walk(shard) == [("folder/a", b"")]


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        (b"x", b"nonsense", "a list of attributes that can't be read"),
        (b"x", b"99 path=a\n", "a list of attributes that can't be read"),
        (b"x", b"-9 path=a\n", "a list of attributes that can't be read"),
        (b"g", b"0 path=a\n", "a list of attributes that can't be read"),
        (b"x", b"11 size=-1\n", "the size b'-1'"),
        (b"L", bytes((1 << 20) + 1), "a long name or a list of attributes of 1,048,577 bytes"),
    ],
)
def test_bad_extensions_of_headers(tmp_path: Path, kind: bytes, text: bytes, wanted: str) -> None:
    shard = tmp_path / "train.tar"
    rest = text + bytes(ustar.padding(len(text))) + ustar.header(b"a.jpg", 0) + ustar.END
    shard.write_bytes(edited(b"long", len(text), 156, kind) + rest)
    at = 0 if "size b" not in wanted else 1024
    assert refusal(shard) == f"{shard} is damaged at byte {at:,}: {wanted}; get it again"
