"""The steps that an exported file names, followed by another program with Pillow, give what the model was given."""

from typing import Any

import numpy as np
import pytest
from images import encode, photo
from PIL import Image
from runs import composed

from effloop.assemble.loader import loader_of
from effloop.data.source.files import Images
from effloop.inference.export import preprocessing

SHAPES = [(50, 80), (81, 50), (60, 60), (99, 41)]


def followed(pixels: np.ndarray, steps: dict[str, dict[str, Any]]) -> np.ndarray:
    image = Image.fromarray(pixels)
    if steps["decode"]["channels"] == "grey":
        image = image.convert("L")
    size = {"height": image.height, "width": image.width}
    if crop := steps.get("crop"):
        names = {**size, **crop}
        for name in ("side", "unit", "rows", "columns", "top", "left"):
            if name in crop:
                names[name] = calculated(crop[name], names)
        rows, columns = names.get("rows", names.get("side")), names.get("columns", names.get("side"))
        image = image.crop((names["left"], names["top"], names["left"] + columns, names["top"] + rows))
    target = steps.get("pad", steps["resize"])
    names = {"image_height": image.height, "image_width": image.width, **{key: target[key] for key in size}}
    if "pad" in steps:
        names["scale"] = calculated(steps["resize"]["scale"], names)
        shape = calculated(steps["resize"]["width"], names), calculated(steps["resize"]["height"], names)
    else:
        shape = target["width"], target["height"]
    image = image.resize(shape, Image.Resampling.BILINEAR)
    if pad := steps.get("pad"):
        names |= {"resized_height": image.height, "resized_width": image.width}
        inside, value = image, pad["value"]
        image = Image.new(inside.mode, (pad["width"], pad["height"]), value if inside.mode == "L" else (value,) * 3)
        image.paste(inside, (calculated(pad["left"], names), calculated(pad["top"], names)))
    return np.asarray(image).reshape(target["height"], target["width"], -1)


def calculated(formula: str, names: dict[str, Any]) -> Any:
    return eval(formula.partition(", a half")[0], {}, names)


@pytest.mark.parametrize("size", ["24", "[24,40]", "[30,20]"])
@pytest.mark.parametrize("evaluation", ["crop", "letterbox", "squash"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.slow
def test_another_program_can_follow_them(tmp_path, size, evaluation, channels):
    ratio = ["augment.eval_ratio=0.8"] if evaluation == "crop" else []
    config = composed(f"image_size={size}", f"augment.eval={evaluation}", *ratio, f"data.channels={channels}")
    config.data.mean = config.data.std = None
    pixels = [photo(*shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    loader = loader_of(config, Images([b"image"] * len(SHAPES), "here", [encode(each, "PNG") for each in pixels]))
    (batch,) = loader.epoch(0)
    steps = {step["step"]: step for step in preprocessing(config)}
    assert steps["resize"]["antialias"]
    for image, found in zip(pixels, batch.images.permute(0, 2, 3, 1).numpy(), strict=True):
        difference = np.abs(found.astype(int) - followed(image, steps).astype(int))
        assert difference.max() <= 1
