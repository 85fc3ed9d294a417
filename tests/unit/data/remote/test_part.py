"""A file whose parts are fetched one by one."""

import pytest

from effloop.data.remote.cache import DONE
from effloop.data.remote.manifest import RemoteFile
from effloop.data.remote.part import Part


@pytest.mark.parametrize("boot", [None, "another", ""])
def test_parts_are_known_until_the_machine_starts_again(boot, tmp_path):
    file, path = RemoteFile("a.tar", 10, "v"), tmp_path / "a"
    part = Part(file, path, 4)
    part.write(b"0123", 0)
    assert not part.chunk_done(0, 4)
    part.close()
    done = path.with_name(path.name + DONE)
    if boot is not None:
        done.write_text("\n".join([boot, *done.read_text().splitlines()[1:], ""]))
    again = Part(file, path, 4)
    assert again.missing == [(0, 4), (4, 8), (8, 10)][boot is None :]
    assert not again.chunk_done(4, 8)
    again.close()
    last = Part(file, path, 4)  # what a second start has added is known as well
    assert len(last.missing) == (1 if boot is None else 2)
    last.close()
