import json
import multiprocessing
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arrays import Bomb, rezip, save, slices, write
from plans import line, open_source, read_bytes, write_as, write_records

from effloop.data.source.storage.columns import Comparing, comparing
from effloop.errors import DataError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write("pth", tmp_path / "set.pth")


def test_plain_torch_reads_it(photos, tmp_path):
    path, folder = write_as("pth", photos, tmp_path / "set.pth"), open_source("folder", photos)
    content = torch.load(path, weights_only=True)
    train = {name: tensor.numpy() for name, tensor in content["splits"]["train"].items()}
    assert json.loads(content["header"])["train"]["fingerprint"] == folder.fingerprint()
    assert train["label"].tolist() == folder.labels.tolist()
    assert slices(train["key_end"], train["key"]) == [folder.raw_key(index) for index in range(len(folder))]
    assert slices(train["end"], train["payload"]) == [read_bytes(folder, index) for index in range(len(folder))]


def in_a_child(function: Callable[..., Any], *args: Any) -> Any:
    """Call it in a forked process, whose limits are its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)


def test_file_larger_than_the_memory(tmp_path):
    """torch.load(mmap=True) takes as much as the file has, if only on paper; that is refused beyond the memory."""
    records = [(b"%d" % i, 0, bytes(1 << 22)) for i in range(16)]
    path = write_records("pth", tmp_path / "set.pth", ["a"], train=records)
    refused, read = in_a_child(_read_with_little_memory, path)
    assert "Cannot allocate memory" in refused
    assert read == 16


def _read_with_little_memory(path: Path) -> tuple[str, int]:
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    most = int(used.split()[1]) * 1024 + (32 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        torch.load(path, mmap=True, weights_only=True)
    except RuntimeError as error:
        source = open_source("pth", path)
        return str(error), sum(len(read_bytes(source, index)) >> 22 for index in range(len(source)))
    return "", 0


def test_nothing_is_run(path):
    content = {"header": "{}", "splits": {}, "more": Bomb()}
    save(path, content)
    wanted = (
        f"{path} holds more than tensors, numbers and text, and is not run; save tensors of images and labels alone, "
        "or convert the images again"
    )
    with pytest.raises(DataError, match=line(wanted)):
        open_source("pth", path)
    with pytest.raises(AssertionError, match="unpickled"):
        torch.load(path, weights_only=False)
    save(path, torch.nn.Linear(2, 3))
    with pytest.raises(DataError, match=line(wanted)):
        open_source("pth", path)


def changed(how: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Loads it, changes the tensors of the split `train`, and saves it again, as anybody would."""

    def change(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        how(content["splits"]["train"])
        save(path, content)

    return change


def photo(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("photo.jpg", b"...")


def end(found: Any) -> Callable[[Path], object]:
    return changed(lambda train: train.update(end=found))


NOT_OURS = "{path} is damaged, or not of torch.save since 1.6: it is compressed, or has no data.pkl; save it anew"
NO_IMAGES = "{path} has no array that looks like images; it has %s: set data.image=NAME"
NOT_WHOLE = "{path}:train/%s is not the whole of a record of the archive; convert it again"
DESCRIBES_NOTHING = "{path} is damaged: its header doesn't describe its splits; convert it again"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (lambda path: save(path, torch.nn.Linear(2, 3).state_dict()), NO_IMAGES % "weight, bias"),
    "a list": (lambda path: save(path, [1.5, "a"]), NO_IMAGES % "none"),
    "no splits": (lambda path: save(path, {"header": "{}"}), NO_IMAGES % "none"),
    "no header": (lambda path: save(path, {"header": {}, "splits": {}}), DESCRIBES_NOTHING),
    "half a header": (
        lambda path: save(path, {**torch.load(path, weights_only=True), "header": "{"}),
        DESCRIBES_NOTHING,
    ),
    "compressed": (lambda path: rezip(path, zipfile.ZIP_DEFLATED), NOT_OURS),
    "another zip": (photo, NOT_OURS),
    "sparse": (end(torch.zeros(3, dtype=torch.uint8).to_sparse()), "{path}:train/end is torch.uint8; convert it again"),
    "no tensor": (end([3, 3, 503]), "{path}:train/end is no tensor; convert it again"),
    "labels as torch has them": (
        changed(lambda train: train.update(label=train["label"].long())),
        "{path}:train is damaged: its array 'label' is 1-dimensional uint64, not 1-dimensional uint8 or uint16 or "
        "uint32; convert it again",
    ),
    "a slice": (end(torch.arange(4)[1:]), NOT_WHOLE % "end"),
    "expanded": (end(torch.arange(1).expand(3)), NOT_WHOLE % "end"),
    # torch.load computes offsets by how torch.save lays out an archive; another's are not believed.
    "packed again": (rezip, NOT_WHOLE % "payload"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_can_not_be_mapped(what, path):
    how, message = BROKEN[what]
    how(path)
    with pytest.raises(DataError, match=line(message.format(path=path))):
        open_source("pth", path)


def test_negative_end(path):
    end(torch.tensor([-2, 3, 503]))(path)
    with comparing(Comparing.kept):
        source = open_source("pth", path)
    with pytest.raises(
        DataError, match=line("is damaged: bytes 0 to 18,446,744,073,709,551,614 are not inside the 503 that are there")
    ):
        read_bytes(source, 0)
