"""What every format that can be written has to do with masks: keep them to the bit."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from images import encode, exif, photo
from masked import KEYS, NAMES, make_masks, mask_of, write_pair
from plans import READ_BY, Listed, open_source

from effloop.cli.main import main
from effloop.data.image.header import read_header
from effloop.data.image.mask import decode_mask, encode_mask, resize_mask
from effloop.data.source import Kind, Source
from effloop.data.source.storage.targets import Targets
from effloop.data.source.storage.writing import Dataset, Record, writers
from effloop.errors import DataError

FORMATS = sorted(writers)
SCANNED = ("lmdb", "recordio", "tar", "tfrecord")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(tmp_path_factory.mktemp("masks") / "set")


def write(name: str, folder: Path, path: Path) -> Path:
    """Images and masks of a folder in a format."""
    splits = {}
    for split in ("train", "val"):
        source = opened("folder", folder, split)
        masks = [encode_mask(decode_mask(source.read_mask(index), source.mask_format)) for index in range(len(source))]
        splits[split] = Listed(
            Record(source.raw_key(index), 0, source.read(index), source.target_rows[index].tobytes(), mask=mask)
            for index, mask in enumerate(masks)
        )
    writers[name](path, Dataset(NAMES, splits, {"payload": "original"}, Targets(Kind.masks, NAMES)))
    return path


def opened(name: str, root: Path, split: str = "train") -> Source:
    return open_source("masks" if name == "folder" else READ_BY.get(name, name), root, split)


def masks_of(source: Source) -> dict[str, bytes]:
    """{key without its extension: the mask's classes}."""
    return {
        source.key(index).rpartition(".")[0]: decode_mask(source.read_mask(index), source.mask_format).tobytes()
        for index in range(len(source))
    }


@pytest.mark.parametrize("name", FORMATS)
def test_there_and_back(name, folder, tmp_path):
    there, back = write(name, folder, tmp_path / "there"), tmp_path / "back"
    original, source = opened("folder", folder), opened(name, there)
    assert source.kind is Kind.masks
    assert source.classes == original.classes == NAMES
    assert source.targets.shape == (4, 0)
    assert masks_of(source) == masks_of(original)
    assert source.fingerprint() == original.fingerprint()
    assert [source.raw_key(index) for index in range(4)] == [original.raw_key(index) for index in range(4)]
    assert masks_of(opened(name, there, "val")) == masks_of(opened("folder", folder, "val"))
    assert type(open_source("auto", there)) is type(source)
    source.verify_index()
    copy = pickle.loads(pickle.dumps(source))
    assert masks_of(copy) == masks_of(source)
    if name == "memmap":
        assert main(["verify", f"data.root={there}"]) == 0
        assert main(["convert", f"data.root={there}", "to=memmap", f"out={back}"]) == 0
        assert back.read_bytes() == there.read_bytes()


@pytest.mark.parametrize("name", SCANNED)
def test_without_the_index(name, folder, tmp_path):
    write(name, folder, tmp_path / "set")
    (tmp_path / "set/train.index").unlink()
    with pytest.raises(DataError, match=r"has masks, which are in train\.index beside its files"):
        opened(name, tmp_path / "set")


def test_re_encoded(folder, tmp_path):
    """Masks are resized as their images are, each pixel to the nearest."""
    assert main(["convert", f"data.root={folder}", "to=lmdb", f"out={tmp_path / 'set'}", "max_side=20"]) == 0
    source = opened("lmdb", tmp_path / "set")
    for index in range(len(KEYS)):
        header = read_header(source.read(index))
        mask = decode_mask(source.read_mask(index))
        assert mask.shape == (header.height, header.width)
        assert max(mask.shape) == 20
        number = [key.encode() for key in KEYS].index(source.raw_key(index))
        np.testing.assert_array_equal(mask, resize_mask(mask_of(30 + number, 40, number), *mask.shape))
    assert main(["verify", f"data.root={tmp_path / 'set'}"]) == 0


def test_a_name_that_is_no_line(tmp_path):
    with pytest.raises(DataError, match=r"the class ' a' can't be a line of classes\.txt"):
        writers["folder"](tmp_path / "set", Dataset((" a", "b"), {}, {}, Targets(Kind.masks, (" a", "b"))))


def test_masks_of_images_that_exif_turns(tmp_path, capsys):
    for split in ("train", "val"):
        write_pair(tmp_path / "set" / split, "a.jpg", photo(30, 40), mask_of(40, 30, 0))
        (tmp_path / "set" / split / "images/a.jpg").write_bytes(encode(photo(30, 40), "JPEG", exif=exif(6)))
    words = [f"data.root={tmp_path / 'set'}", "to=lmdb", f"out={tmp_path / 'lmdb'}"]
    assert main(["convert", *words, "decode.exif=false"]) == 2
    line = "set decode.exif=true or false, as the mask was drawn: on the image turned by its EXIF tag, or stored"
    assert line in capsys.readouterr().err
    assert main(["convert", *words]) == 0
    assert main(["verify", f"data.root={tmp_path / 'lmdb'}"]) == 0
