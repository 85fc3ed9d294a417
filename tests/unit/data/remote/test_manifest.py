"""Which names of a store are names of local files."""

import pytest

from effloop.data.remote.location import Location
from effloop.data.remote.manifest import RemoteFile, manifest_of
from effloop.errors import DataError


@pytest.mark.parametrize("name", ["a//b.tar", "./a.tar", "a/./b.tar", "../a.tar", "/a.tar", "a\\b.tar", "x.tar/b.tar"])
def test_names_of_which_two_would_be_one_file_are_refused(name):
    files = [RemoteFile(f"set/{each}", 1, "v") for each in ("x.tar", name)]
    with pytest.raises(DataError, match="which can't be a local file's name; rename it"):
        manifest_of(Location.of("s3://b/set"), files, alone=False, base="set/")


def test_files_that_are_named_and_missing():
    there = [RemoteFile("train-0.tar", 1, "v")]
    with pytest.raises(DataError, match=r"names files that aren't there: s3://b/train-1\.tar and 1 more; correct it$"):
        manifest_of(Location.of("s3://b/train-{0..2}.tar"), there, alone=False, base="")
