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
