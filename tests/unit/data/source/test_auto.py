import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from plans import line, open_source, write_as

from effloop.data.source import sources
from effloop.data.source.folder import FolderSource
from effloop.data.source.formats.memmap import PATH, EmbeddedSource, MemmapSource
from effloop.errors import ConfigError, DataError


def test_nothing_means_the_photographs_that_come_along():
    assert type(open_source("auto")) is EmbeddedSource


def test_a_folder(photos):
    assert type(open_source("auto", photos)) is FolderSource


@pytest.mark.parametrize("embedded", [True, False])
def test_a_file_of_effloops(photos, tmp_path, embedded):
    path = PATH if embedded else write_as("memmap", photos, tmp_path / "file")
    source = open_source("auto", path, "val")
    assert type(source) is MemmapSource
    assert source.where == f"{path}:val"


def test_an_unknown_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    have = ", ".join(name for name in sources.names() if name not in ("auto", "embedded", "hf"))
    wanted = f"data.root: '{file}' is in no format that EffLoop knows; have {have}: set data=FORMAT"
    with pytest.raises(ConfigError, match=line(wanted)):
        open_source("auto", file)


def test_nothing_there(tmp_path):
    with pytest.raises(ConfigError, match="is not there"):
        open_source("auto", tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["memmap", "hdf5", "parquet", "pth"])
def test_an_unreadable_file(photos, name):
    folder = Path(tempfile.mkdtemp())
    file = write_as(name, photos, folder / "file")
    if name == "parquet":
        file = file / "data/train-00000-of-00001.parquet"
    folder.chmod(0o755)
    open_source("auto", file)
    file.chmod(0)
    former = os.geteuid()
    if former == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(DataError, match=line(f"{file} can't be read: Permission denied")):
            open_source("auto", file)
    finally:
        os.seteuid(former)
        shutil.rmtree(folder)


def test_names_are_those_of_the_format(photos, tmp_path):
    path = tmp_path / "set.npz"
    pixels = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
    np.savez(path, front=pixels, back=pixels, kind=np.array([0, 1]))
    source = open_source("auto", path, ".", image="back", label="kind")
    assert source.labels.tolist() == [0, 1]
    for root, options, message in (
        (path, {"label": ["a", "b"]}, r"data\.label: \['a', 'b'\] is for tables, but the data is data=npz; set one"),
        (
            photos,
            {"image": "x"},
            r"data\.image: x is for beton, csv, .*zarr, but the data is data=folder; leave it out",
        ),
        (
            None,
            {"label": "x"},
            r"data\.label: x is for .*, but the data is data=embedded; leave it out, or set data\.label=null where",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            open_source("auto", root, **options)


@pytest.mark.parametrize("file", ["dataset_dict.json", "data-00000-of-00001.arrow"])
def test_what_datasets_saved_to_the_disk(file, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=r"is what save_to_disk of .* wrote, which isn't read; write each split"):
        open_source("auto", tmp_path)
