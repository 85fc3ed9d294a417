"""Samples that a plan loads many at once, by C code: the pixels and the errors that it has one by one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import encode, photo
from jpegs import by_opencv
from numpy.typing import NDArray
from plans import make_plan, native_config, open_source, pairwise

from effloop.batch import ImageSize
from effloop.data.augment.native.augment import NativeAugment
from effloop.data.decode import decoders
from effloop.data.decode.base import Resizes
from effloop.data.decode.turbojpeg import use_libjpeg
from effloop.data.image.header import pnm_header
from effloop.data.in_progress import NONE, in_progress
from effloop.data.plan import Plan
from effloop.errors import DataError

if not use_libjpeg():
    pytest.skip("Pillow brings no libjpeg-turbo", allow_module_level=True)

Pixels = NDArray[np.uint8]


class OneByOne(NativeAugment):
    """The same, which leaves nothing to C code."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fast_path = False


def raw(pixels: Pixels) -> bytes:
    return pnm_header(*pixels.shape) + pixels.tobytes()


KINDS: tuple[tuple[str, Callable[[Pixels], bytes]], ...] = (
    ("jpg", lambda pixels: by_opencv(pixels, quality=92)),
    ("jpg", lambda pixels: by_opencv(pixels, "4:4:4", quality=95)),
    ("jpg", lambda pixels: encode(pixels, "JPEG", progressive=True)),
    ("jpg", lambda pixels: encode(pixels, "JPEG", restart_marker_blocks=1)),
    ("jpg", lambda pixels: encode(pixels, "JPEG", "L")),
    ("jpg", lambda pixels: encode(pixels, "JPEG", "CMYK")),
    ("png", lambda pixels: encode(pixels, "PNG")),
    ("ppm", raw),
    ("pgm", lambda pixels: raw(pixels[:, :, :1])),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind several times, of sizes that some crops shrink to a third, and some to less than a quarter."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(45):
        ending, write = KINDS[number % len(KINDS)]
        path = root / "train" / "ab"[number % 2] / f"{number:02}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(write(photo(90 + 7 * number, 380 - 5 * number, number)))
    return root


RECIPES = {
    "crop": {"crop": {"op": "RandomResizedCrop"}},
    "crop, flip": {"crop": {"op": "RandomResizedCrop", "scale": [0.02, 1]}, "flip": {"op": "RandomHorizontalFlip"}},
    "colours": {
        "crop": {"op": "RandomResizedCrop"},
        "flip": {"op": "RandomHorizontalFlip"},
        "jitter": {"op": "ColorJitter", "brightness": 0.4},
    },
    "colours between": {
        "crop": {"op": "RandomResizedCrop"},
        "jitter": {"op": "ColorJitter", "brightness": 0.4},
        "flip": {"op": "RandomHorizontalFlip"},
    },
    "as it is": {"crop": {"op": "RandomCrop"}, "flip": {"op": "RandomHorizontalFlip"}},
    "padded": {"crop": {"op": "RandomCrop", "padding": 4}},
    "two frames": {"crop": {"op": "RandomResizedCrop", "size": 70}, "end": {"op": "CenterCrop"}},
}


def plans(root: Path, recipe: str, *, channels: int = 3, train: bool = True, scaled: bool = False) -> tuple[Plan, Plan]:
    """The plan as it is, and one that loads samples one by one."""
    config = native_config(ops=RECIPES[recipe])
    made = []
    for augment in (NativeAugment, OneByOne):
        decoder = decoders.build(decoders["auto"].config(name="auto", dct_scaling=scaled), channels)
        plan = make_plan(open_source("folder", root), decoder, batch=45)
        made.append(replace(plan, augment=augment(config, size=ImageSize.of(64), train=train, channels=channels)))
    return made[0], made[1]


def loaded(plan: Plan) -> Pixels:
    """(45, 64, 64, C), in one run."""
    (request,) = plan.requests(0)
    batch = plan.empty_batch(request)
    assert not plan.fill(request, batch.images, 0, 45)
    return batch.images.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize(("recipe", "scaled", "channels"), pairwise([*RECIPES], [False, True], [3, 1]))
def test_many_at_once_are_the_same(folder, recipe, scaled, channels):
    for train in (True, False) if recipe == "crop" else (True,):  # evaluation has no recipe
        at_once, each = map(loaded, plans(folder, recipe, channels=channels, train=train, scaled=scaled))
        np.testing.assert_array_equal(at_once, each)


@pytest.mark.parametrize("name", decoders.names())
def test_most_are_done_at_once(folder, name):
    """Else the test above would compare nothing."""
    plan = replace(plans(folder, "crop, flip")[0], decoder=decoders.build(decoders[name].config(name=name)))
    done, _ = at_once(plan)
    assert done.sum() >= (20 if name in ("auto", "turbojpeg") else 4)  # raw pixels alone


def at_once(plan: Plan) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which samples of an epoch C code decodes, resizes and flips, and all of them."""
    (request,) = plan.requests(0)
    prepared, images = plan.prepare(0, request.ids), plan.empty_batch(request).images
    draws = prepared.draws
    wanted = Resizes(draws.boxes, draws.flips, plan.augment.at_least, plan.output.pixels(images))
    in_progress.begin_run(prepared.ids)
    return plan.decoder.decode_resized(prepared.encoded, prepared.infos, wanted), prepared.ids


def test_the_sample_is_named_while_it_is_loaded(folder):
    cell = np.array([NONE], np.int64)
    in_progress.share(cell)
    plan, _ = plans(folder, "crop")
    _, ids = at_once(plan)
    assert cell[0] == ids[-1]
    in_progress.end()
    assert cell[0] == NONE


def test_damaged_files_have_the_same_outcome(folder, tmp_path):
    rng = np.random.default_rng(0)
    for path in sorted(folder.rglob("*.*")):
        data = bytearray(path.read_bytes())
        for at in rng.integers(0, len(data), rng.integers(1, 6)).tolist():
            data[at] ^= 1 << int(rng.integers(8))
        target = tmp_path / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data[: rng.integers(len(data) // 2, 2 * len(data))])
    found = [outcomes(plan) for plan in plans(tmp_path, "crop, flip")]
    assert found[0] == found[1]
    assert {type(each) for each in found[0]} == {bytes, str}


def outcomes(plan: Plan) -> list[bytes | str]:
    """Each sample's pixels, or what is wrong with it."""
    (request,) = plan.requests(0)
    batch, found = plan.empty_batch(request), list[bytes | str]()
    for row in range(45):
        try:
            plan.fill(request, batch.images, row, row + 1)
            found.append(batch.images[row].numpy().tobytes())
        except DataError as error:
            found.append(str(error))
    return found
