"""Grey images of one channel: what every decoder, recipe and model makes of them; and 16-bit grey."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encode, photo, png
from PIL import Image
from runs import composed

from effloop.batch import ImageSize
from effloop.data.augment import augments
from effloop.data.augment.base import Augment
from effloop.data.decode import Decoder, decoders
from effloop.data.image.header import pnm_header
from effloop.data.image.pixels import batch_to_grey, to_grey, to_rgb
from effloop.data.random import sample_keys
from effloop.errors import ConfigError, DataError
from effloop.model import models
from effloop.model.base import take_grey

RECIPES = sorted(path.stem for path in Path(__file__).parents[2].glob("configs/augment/*.yaml"))


def decoder(name: str, channels: int = 1, **options: Any) -> Decoder:
    return decoders.build_for(channels, decoders[name].config(name=name, **options))


def shade() -> np.ndarray:
    return np.asarray(Image.fromarray(photo()).convert("L"))


IMAGES = {
    "JPEG": encode(photo(), "JPEG", quality=90),
    "JPEG with large chroma": encode(photo(), "JPEG", subsampling=0),
    "progressive JPEG": encode(photo(), "JPEG", progressive=True),
    "CMYK JPEG": encode(photo(), "JPEG", "CMYK"),
    "grey JPEG": encode(shade(), "JPEG"),
    "PNG": encode(photo(), "PNG"),
    "grey PNG": encode(shade(), "PNG"),
    "PNG with alpha": encode(photo(), "PNG", "RGBA"),
    "grey PNG with alpha": encode(photo(), "PNG", "LA"),
    "WEBP": encode(photo(), "WEBP", quality=80),
    "BMP": encode(photo(), "BMP"),
    "GIF": encode(photo(), "GIF", "P"),
    "PPM": pnm_header(67, 53, 3) + photo().tobytes(),
    "PGM": pnm_header(67, 53, 1) + shade().tobytes(),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_decoders_give_the_luminance_of_a_jpeg_and_pillows_grey_of_others(kind):
    image = Image.open(io.BytesIO(IMAGES[kind]))
    image.draft("L", None)  # libjpeg gives the luminance as it is stored
    wanted = np.asarray(image.convert("L"))[:, :, None]
    for name in decoders:
        found = decoder(name).decode(IMAGES[kind])
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, wanted, err_msg=name)
        part = decoder(name).decode(IMAGES[kind], (11, 7, 30, 41))
        np.testing.assert_array_equal(part, wanted[11:41, 7:48], err_msg=name)


def test_regions_and_scaled_jpegs_are_grey_too():
    large = encode(photo(700, 900), "JPEG", quality=95, restart_marker_rows=1)
    for name in ("turbojpeg", "opencv", "pillow"):
        wanted = decoder(name, region=False).decode(large)[300:400, 200:333]
        np.testing.assert_array_equal(decoder(name).decode(large, (300, 200, 100, 133)), wanted)
    scaled = decoder("turbojpeg", dct_scaling=True).decode(large, (0, 0, 640, 640), (80, 80))
    assert scaled.shape == (80, 80, 1)


DEEP = np.arange(60, dtype=np.uint16).reshape(6, 10) * 91  # up to 5,369: 12 bits and a few above


def deep_files() -> dict[str, bytes]:
    files = {"PNG": png(10, 6, 16, 0, DEEP.astype(">u2").tobytes())}
    files["PGM"] = b"P5\n10 6\n65535\n" + DEEP.astype(">u2").tobytes()
    files["TIFF"] = encode(DEEP, "TIFF")
    return files


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (None, DEEP >> 8),
        ([0, 4095], np.round(DEEP.clip(0, 4095) * (255 / 4095))),
        ([1000, 1100.5], np.round((DEEP.clip(1000, 1100.5) - 1000) * (255 / 100.5))),
        ("auto", np.round(DEEP * (255 / DEEP.max()))),
    ],
    ids=str,
)
def test_sixteen_bits_are_cut_or_scaled_by_a_window(channels, window, wanted):
    for kind, data in deep_files().items():
        for name in decoders:
            found = decoder(name, channels, window=window).decode(data)
            assert found.shape == (6, 10, channels)
            for channel in range(channels):
                np.testing.assert_array_equal(found[:, :, channel], wanted, err_msg=f"{kind} by {name}")


def test_a_window_leaves_images_of_8_bits_as_they_are():
    for kind in ("grey JPEG", "grey PNG", "PGM"):
        plain, scaled = (decoder("auto", window=window).decode(IMAGES[kind]) for window in (None, [10, 20]))
        np.testing.assert_array_equal(plain, scaled)


def test_a_window_of_numbers_that_are_not_finite():
    levels = np.linspace(2, 4, 60, dtype=np.float32).reshape(6, 10)
    wanted = np.round((levels - 2) * (255 / 2))
    levels[0, 1], levels[0, 2], levels[-1, -2] = np.nan, -np.inf, np.inf
    wanted[0, 1:3], wanted[-1, -2] = 0, 255
    with warnings.catch_warnings(action="error"):
        for window in ("auto", [2, 4]):
            found = decoder("auto", window=window).decode(encode(levels, "TIFF"))
            np.testing.assert_array_equal(found[:, :, 0], wanted)
        nothing = decoder("auto", window="auto").decode(encode(np.full((2, 3), np.nan, np.float32), "TIFF"))
    assert not nothing.any()


@pytest.mark.parametrize("kind", [2, 4, 6])
def test_a_window_refuses_colours_and_alpha_of_16_bits(kind):
    data = png(10, 6, 16, kind, np.repeat(DEEP, {2: 3, 4: 2, 6: 4}[kind], axis=1).astype(">u2").tobytes())
    for name in decoders:
        assert decoder(name).decode(data).shape == (6, 10, 1)
        with pytest.raises(DataError, match=r"^is (RGB|LA|RGBA) of 16 bits, and decode.window=auto is for grey"):
            decoder(name, window="auto").decode(data)
    if kind == 2:
        with pytest.raises(DataError, match="is RGB of 16 bits"):
            decoder("auto", window=[0, 9]).decode(b"P6\n10 6\n4095\n" + bytes(360))


SIZE = ImageSize(24, 40)


def augmented(augment: Augment, pixels: list[np.ndarray]) -> torch.Tensor:
    keys = sample_keys(3, 1, np.arange(len(pixels)))
    draws = augment.draw(keys, np.array([each.shape[:2] for each in pixels]))
    out = np.empty((len(pixels), *augment.size, pixels[0].shape[2]), np.uint8)
    for row, (image, (top, left, height, width)) in enumerate(zip(pixels, draws.boxes.tolist(), strict=True)):
        augment.apply(image[top : top + height, left : left + width], draws, row, out[row])
    return augment.on_device(torch.from_numpy(out).permute(0, 3, 1, 2), keys)[0]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.slow
def test_recipes_do_with_grey_what_they_do_with_grey_in_three_channels(name, device):
    if name.startswith(("albumentations", "torchvision")) and device == "gpu":
        return  # they have no device part, and say so
    config = composed(f"augment={name}", f"augment.device={device}").augment
    if name == "segmentation":  # which pads with a colour where an image is smaller than the crop
        config.ops["crop"].update(ratio=[1.0, 2.0], base=64)
    grey = [to_grey(photo(60 + seed, 90 - seed, seed=seed)) for seed in range(6)]
    if name == "native_pad_crop":  # which doesn't resize
        grey = [to_grey(photo(*SIZE, seed=seed)) for seed in range(6)]
    one, three = (augments.build_for(channels, config, size=SIZE, train=True) for channels in (1, 3))
    found, wanted = augmented(one, grey), augmented(three, [to_rgb(each) for each in grey])
    assert found.shape == (6, 1, *SIZE)
    assert torch.equal(found, batch_to_grey(wanted))
    assert not torch.equal(found[0], found[1])


def test_grey_of_a_batch_is_pillows():
    pixels = np.stack([photo(20, 30, seed) for seed in range(3)])
    wanted = np.stack([to_grey(each) for each in pixels])
    assert torch.equal(
        batch_to_grey(torch.from_numpy(pixels).permute(0, 3, 1, 2)).permute(0, 2, 3, 1), torch.from_numpy(wanted)
    )


@pytest.mark.parametrize("name", ["cnn", "small_resnet", "efficientnet_lite0", "mobilenet_v3_small", "googlenet"])
def test_models_give_for_grey_what_they_give_for_grey_in_three_channels(name):
    config, outputs = composed(f"model={name}").model, []
    image = torch.rand(2, 1, 64, 64)
    for channels in (1, 3):
        torch.manual_seed(0)
        model = models.build(config, num_classes=4, image_size=64, channels=channels).eval()
        if channels == 3 and name == "googlenet":
            model.transform_input = False  # type: ignore[assignment]
        outputs.append(model(image.expand(-1, channels, -1, -1)))
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)


def test_a_model_without_a_convolution_of_colours_says_so():
    with pytest.raises(ConfigError, match=r"^data\.channels: 1, but the model has no convolution of three input"):
        take_grey(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2)))
