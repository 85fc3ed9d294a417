import pytest
from plans import line, open_source

from effloop.data.decode import decoders
from effloop.data.source.formats.memmap import PATH, EmbeddedSource
from effloop.errors import ConfigError, DataError


def test_folder_instead_of_a_file(tmp_path):
    wanted = f"data.root: '{tmp_path}' is a folder; data=memmap reads one file: set data.root=FILE"
    with pytest.raises(ConfigError, match=line(wanted)):
        open_source("memmap", tmp_path)


def test_index_of_a_folder_is_no_dataset(photos, tmp_path):
    open_source("folder", photos, index_dir=str(tmp_path / "cache"))
    (index,) = (tmp_path / "cache").iterdir()
    with pytest.raises(DataError, match="has no split 'train'; it has none"):
        open_source("memmap", index)


@pytest.mark.parametrize(("split", "count"), [("train", 1515), ("val", 341)])
def test_every_photograph_is_whole(split, count):
    source = open_source("embedded", split=split)
    assert isinstance(source, EmbeddedSource)
    assert len(source) == count
    assert source.classes == (
        *("dress", "hat", "longsleeve", "outwear", "pants"),
        *("shirt", "shoes", "shorts", "skirt", "t-shirt"),
    )
    assert set(source.labels.tolist()) == set(range(10))
    decoder = decoders.build(decoders["auto"].config(name="auto"))
    for index in range(count):
        source.verify(index)
        assert min(decoder.decode(source.read(index)).shape[:2]) == 96
        assert source.key(index).startswith(source.classes[source.labels[index]] + "/")


def test_it_stays_small_enough_for_a_package():
    assert PATH.stat().st_size <= 8 * 2**20


def test_it_has_no_root(tmp_path):
    wanted = f"data.root: '{tmp_path}' is not used by data=embedded; drop it, or set data=auto"
    with pytest.raises(ConfigError, match=line(wanted)):
        open_source("embedded", tmp_path)
