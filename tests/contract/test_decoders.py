"""What every registered decoder has to do. Pillow is the reference."""

import io
import mmap
import multiprocessing
import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from images import FORMATS, HEIC, OTHERS, chunk, encode, exif, photo, png, ycck
from PIL import Image, ImageOps
from plans import pairwise

from effloop.data.decode import DecodeConfig, Decoder, decoders
from effloop.data.image.encoded import EncodedImages
from effloop.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("error")  # a decoder warns of nothing

PHOTO = photo()


def build(name: str, **options: int) -> Decoder:
    try:
        return decoders.build(DecodeConfig(name, **options))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(params=decoders.names())
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return build(request.param)


@pytest.fixture
def pillow() -> Decoder:
    return build("pillow")


def reference(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.dtype == np.uint8
    assert got.shape == wanted.shape
    assert np.abs(got.astype(int) - wanted).mean() <= 2


def outcome(decoder: Decoder, data: bytes) -> str | np.ndarray:
    """Pixels, or the line that refuses them."""
    try:
        return decoder.decode(data)
    except DataError as error:
        line = str(error)
    assert "\n" not in line
    assert line.startswith("is ")
    return line


def assert_same_outcome(got: str | np.ndarray, wanted: str | np.ndarray) -> None:
    assert type(got) is type(wanted), f"got {got!r}, pillow {wanted!r}"
    if isinstance(wanted, str):
        assert got == wanted
    else:
        assert_close(got, wanted)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_plain(decoder, fmt, mode):
    data = encode(PHOTO, fmt, mode)
    pixels = decoder.decode(data)
    assert_close(pixels, reference(data))
    assert decoder.size(data) == pixels.shape[:2] == PHOTO.shape[:2]
    if fmt in ("PNG", "BMP"):
        expected = np.asarray(Image.fromarray(PHOTO).convert(mode).convert("RGB"))
        np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize(
    ("size", "subsampling", "option"),
    pairwise([(1, 1), (7, 13), (16, 16), (33, 250)], ["4:4:4", "4:2:2", "4:2:0"], ["", "progressive", "restart"]),
)
def test_jpeg_kinds(decoder, size, subsampling, option):
    options = {"": {}, "progressive": {"progressive": True}, "restart": {"restart_marker_blocks": 3}}[option]
    data = encode(photo(*size), "JPEG", subsampling=subsampling, **options)
    assert_close(decoder.decode(data), reference(data))
    assert decoder.size(data) == size


@pytest.mark.parametrize("fmt", OTHERS)
def test_what_only_pillow_reads(decoder, fmt):
    data = encode(PHOTO, fmt)
    wanted = reference(data)
    np.testing.assert_array_equal(decoder.decode(data), wanted)
    np.testing.assert_array_equal(decoder.decode(memoryview(data), (3, 5, 20, 30)), wanted[3:23, 5:35])
    assert decoder.size(data) == PHOTO.shape[:2]


def test_heic(decoder):
    pytest.importorskip("pi_heif")
    y, x = np.mgrid[:16, :24]
    wanted = np.stack([10 * x, 15 * y, np.full_like(x, 128)], axis=-1)
    assert decoder.size(HEIC) == (16, 24)
    assert np.abs(decoder.decode(HEIC, (1, 2, 12, 20)) - wanted[1:13, 2:22]).mean() < 6
    with pytest.raises(DataError, match="is an image in HEIF format that can't be decoded"):
        decoder.decode(HEIC[:-40])


@pytest.mark.filterwarnings("ignore:Using JPEG reconstruction")
@pytest.mark.parametrize("lossless_jpeg", [True, False])
def test_jpeg_xl(decoder, lossless_jpeg, tmp_path):
    """A whole JPEG in it has the tag that turns it; of others the pixels are upright, whatever EXIF says."""
    pytest.importorskip("pillow_jxl")
    (tmp_path / "turned.jpg").write_bytes(encode(PHOTO, "JPEG", exif=exif(6), quality=95))
    with Image.open(tmp_path / "turned.jpg") as image:
        wanted = np.asarray(ImageOps.exif_transpose(image) if lossless_jpeg else image)
        image.save(tmp_path / "new.jxl", lossless_jpeg=lossless_jpeg, exif=image.info["exif"])
    found = decoder.decode((tmp_path / "new.jxl").read_bytes())
    assert np.abs(found.astype(int) - wanted).mean() < 4


def test_the_first_frame_of_a_sequence(decoder):
    frames, file = [Image.fromarray(PHOTO), Image.fromarray(PHOTO[::-1].copy())], io.BytesIO()
    frames[0].save(file, "AVIF", save_all=True, append_images=frames[1:])
    assert np.abs(decoder.decode(file.getvalue()).astype(int) - PHOTO).mean() < 20


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "CMYK", "LAB", "F"])
def test_modes_of_tiff(decoder, mode):
    data = encode(PHOTO, "TIFF", mode)
    np.testing.assert_array_equal(decoder.decode(data), reference(data))


@pytest.mark.parametrize("name", decoders.names())
@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
def test_orientation_is_obeyed(name, fmt):
    decoder, stored = build(name), build(name, exif=False)
    for orientation in range(1, 9):
        data = encode(PHOTO, fmt, exif=exif(orientation))
        with Image.open(io.BytesIO(data)) as image:
            wanted = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        got = decoder.decode(data)
        assert_close(got, wanted)
        assert decoder.size(data) == got.shape[:2]
        np.testing.assert_array_equal(decoder.decode(data, (9, 8, 30, 40)), got[9:39, 8:48])
        np.testing.assert_array_equal(np.sort(got, None), np.sort(stored.decode(data), None))  # turned, and no more


@pytest.mark.parametrize("exif", [False, True])
def test_damaged_orientation_is_none(exif):
    wanted = build("auto").decode(encode(PHOTO, "JPEG"))
    for block in (b"", b"II*\0", b"MM\0*\0\0\0\x08\xff\xff", b"II*\0\xff\xff\xff\x7f broken", b"\xff" * 40):
        data = encode(PHOTO, "JPEG", exif=b"Exif\0\0" + block)
        np.testing.assert_array_equal(build("auto", exif=exif).decode(data), wanted)
        webp = encode(PHOTO, "WEBP", exif=b"Exif\0\0" + block)
        np.testing.assert_array_equal(build("auto", exif=exif).decode(webp), build("auto").decode(webp))


def test_headers_of_several_at_once_have_the_same_orientation(decoder):
    """C reads those of most JPEGs, whatever their EXIF data are; here also damaged ones."""
    rng, whole = np.random.default_rng(0), []
    for orientation in range(10):
        block = Image.Exif()
        block.endian = "<>"[orientation % 2]
        block[0x010F], block[0x0112] = "a maker", orientation
        whole.append(encode(PHOTO[:16, :16], "JPEG", exif=block))
    images = [bytearray(data) for data in 30 * whole]
    for data in images[10:]:
        data[int(rng.integers(30, 76))] = rng.integers(0, 9)
    found = decoder.read_infos(EncodedImages.of(images))
    wanted = [decoder.read_info(data) for data in images]
    assert [*found] == wanted
    assert {info.orientation for info in wanted} == {*range(1, 9)}


@pytest.mark.parametrize("orientation", [3, 6])  # 3 keeps the size, so that only pixels tell
@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP"])
def test_orientation_is_ignored(decoder, fmt, orientation):
    decoder = decoders.build(replace(decoder.config, exif=False))  # type: ignore[attr-defined]
    turned, plain = encode(PHOTO, fmt, exif=exif(orientation)), encode(PHOTO, fmt)
    assert turned != plain
    np.testing.assert_array_equal(decoder.decode(turned), decoder.decode(plain))
    assert decoder.size(turned) == PHOTO.shape[:2]


def rgb(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[:, :, None], 3, axis=2).astype(np.uint8)


@cache
def unusual() -> dict[str, tuple[bytes, np.ndarray]]:
    """name -> (file, the pixels that it has to become)."""
    height, width = PHOTO.shape[:2]
    wide = np.random.default_rng(1).integers(0, 65536, (height, width, 4)).astype(">u2")
    alpha = np.dstack([PHOTO, PHOTO[:, :, 0]])
    palette = Image.fromarray(PHOTO).convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
    looked_up = np.asarray(palette.convert("RGB"))
    indices, colours = np.asarray(palette), bytes(palette.getpalette() or b"")[: 3 * 64]
    bits = PHOTO[:, :48, 0] > 127
    cmyk = encode(PHOTO, "JPEG", "CMYK")
    frames = [Image.fromarray(photo(seed=seed)) for seed in range(3)]
    apng, webp = io.BytesIO(), io.BytesIO()
    frames[0].save(apng, "PNG", save_all=True, append_images=frames[1:])
    frames[0].save(webp, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    plte = chunk(b"PLTE", colours)
    half_seen = plte + chunk(b"tRNS", bytes(range(0, 256, 4)))
    return {
        "grey 16": (png(width, height, 16, 0, wide[:, :, 0].tobytes()), rgb(wide[:, :, 0] >> 8)),
        "RGB 16": (png(width, height, 16, 2, wide[:, :, :3].tobytes()), (wide[:, :, :3] >> 8).astype(np.uint8)),
        "RGBA 16": (png(width, height, 16, 6, wide.tobytes()), (wide[:, :, :3] >> 8).astype(np.uint8)),
        "palette": (png(width, height, 8, 3, indices.tobytes(), plte), looked_up),
        "palette, tRNS": (png(width, height, 8, 3, indices.tobytes(), half_seen), looked_up),
        "RGB, tRNS": (png(width, height, 8, 2, PHOTO.tobytes(), chunk(b"tRNS", bytes(6))), PHOTO),
        "grey, tRNS": (
            png(width, height, 8, 0, PHOTO[:, :, 0].tobytes(), chunk(b"tRNS", b"\0\7")),
            rgb(PHOTO[:, :, 0]),
        ),
        "RGBA": (encode(alpha, "PNG"), PHOTO),
        "LA": (png(width, height, 8, 4, alpha[:, :, [0, 3]].tobytes()), rgb(PHOTO[:, :, 0])),
        "1 bit": (png(48, height, 1, 0, np.packbits(bits, axis=1).tobytes()), rgb(bits * 255)),
        "PNM 16": (b"P5\n6 1\n65535\n" + wide[0, :6, 0].tobytes(), rgb(wide[:1, :6, 0] >> 8)),
        "BMP palette": (encode(indices, "BMP"), rgb(indices)),
        "CMYK": (cmyk, reference(cmyk)),
        "YCCK": (ycck(cmyk), reference(ycck(cmyk))),
        "APNG": (apng.getvalue(), np.asarray(frames[0])),
        "animated WebP": (webp.getvalue(), np.asarray(frames[0])),
        "WebP alpha": (encode(np.dstack([PHOTO, indices]), "WEBP", lossless=True, exact=True), PHOTO),
        "ICC": (encode(PHOTO, "PNG", icc_profile=b"not a profile"), PHOTO),
        "gamma": (png(width, height, 8, 2, PHOTO.tobytes(), chunk(b"gAMA", b"\0\0\x27\x10")), PHOTO),
    }


@pytest.mark.parametrize("kind", unusual())
def test_unusual_equals_to_the_bit(decoder, kind):
    data, expected = unusual()[kind]
    np.testing.assert_array_equal(decoder.decode(data), expected)
    assert decoder.size(data) == expected.shape[:2]


@pytest.mark.parametrize("fmt", FORMATS)
def test_box_is_a_crop_of_the_whole(decoder, fmt):
    data = encode(PHOTO, fmt)
    whole = decoder.decode(data)
    for top, left, height, width in ((0, 0, 67, 53), (3, 5, 20, 30), (66, 52, 1, 1), (0, 40, 67, 13)):
        got = decoder.decode(data, (top, left, height, width))
        np.testing.assert_array_equal(got, whole[top : top + height, left : left + width])


def test_box_outside_is_a_bug(decoder):
    for box in ((-1, 0, 5, 5), (0, -1, 5, 5), (0, 0, 68, 5), (0, 0, 5, 54), (3, 3, 0, 5), (3, 3, 5, 0)):
        with pytest.raises(ValueError, match="not inside an image of 67 x 53"):
            decoder.decode(encode(PHOTO, "JPEG"), box)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_kind_of_buffer(decoder, fmt):
    data = encode(PHOTO, fmt)
    wanted = decoder.decode(data)
    with tempfile.TemporaryFile() as file:
        file.write(b"odd" + data + b"behind")
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        sample = memoryview(mapped)[3 : 3 + len(data)]
        np.testing.assert_array_equal(decoder.decode(sample), wanted)
        assert decoder.size(sample) == PHOTO.shape[:2]
    for kind in (bytearray, memoryview):
        np.testing.assert_array_equal(decoder.decode(kind(data)), wanted)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"a text file\nof two lines", r"is not an image that Pillow reads; starts with b'a text file\\n'"),
        (b"BMore than a text, and long enough for a header", "is not an image that Pillow reads"),
        (b"GIF89a" + bytes(40), "is an image in GIF format that can't be read: "),
        (encode(PHOTO, "GIF")[:900], r"is an image in GIF format that can't be decoded: image file is truncated"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),  # would run Ghostscript
        (b"RIFF" + bytes(40), "is not an image that Pillow reads"),
        (bytes(100), "is not an image that Pillow reads"),
        (encode(PHOTO, "JPEG")[:20], "is a truncated JPEG: ends after 20 bytes, within its header"),
        (encode(PHOTO, "JPEG")[:-300], r"is a truncated JPEG: ends after [\d,]+ bytes without its end marker"),
        (encode(PHOTO, "PNG")[:-300], r"is a truncated PNG: ends after [\d,]+ bytes without its end marker"),
        (encode(PHOTO, "WEBP")[:-300], r"is a truncated WEBP: ends after [\d,]+ bytes"),
        (encode(PHOTO, "BMP")[:-300], "is a truncated BMP: ends after 10,474 bytes"),
        (encode(PHOTO, "JPEG").replace(b"\xff\xda", b"\xff\xd9", 1), "is a damaged JPEG: "),
        (encode(PHOTO, "PNG")[:90] + b"x" + encode(PHOTO, "PNG")[91:] + b"more", "is a damaged PNG: "),
        (png(0, 5, 8, 2), "is a damaged PNG: its header says 5 x 0 pixels"),
        (encode(PHOTO, "PPM")[:-1], "is a truncated PNM: ends after 10,665 bytes"),
    ],
)
def test_refuses_in_one_line(decoder, data, line):
    with pytest.raises(DataError, match="^" + line) as caught:
        decoder.decode(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"exif": exif(3)}])
def test_truncated_jpeg_is_never_silent(decoder, options):
    data = encode(PHOTO, "JPEG", **options)
    for end in {*range(1, len(data), 41), *range(len(data) - 12, len(data))}:
        assert isinstance(outcome(decoder, data[:end]), str), f"took the first {end} of {len(data)} bytes"


@pytest.mark.parametrize("fmt", ["PNG", "WEBP", "BMP"])
def test_truncated_is_refused_or_whole(decoder, pillow, fmt):
    data = encode(PHOTO, fmt)
    whole = decoder.decode(data)
    for end in {*range(1, len(data), len(data) // 40), *range(len(data) - 16, len(data))}:
        got = outcome(decoder, data[:end])
        assert_same_outcome(got, outcome(pillow, data[:end]))
        if not isinstance(got, str):  # a PNG whose pixels are all there
            np.testing.assert_array_equal(got, whole)


def test_bytes_behind_the_end_do_no_harm(decoder):
    for fmt in FORMATS:
        data = encode(PHOTO, fmt)
        np.testing.assert_array_equal(decoder.decode(data + bytes(100)), decoder.decode(data))


@pytest.mark.parametrize(
    ("fmt", "mode"),
    [("JPEG", "L"), ("JPEG", "RGB"), ("JPEG", "CMYK")]
    + [(fmt, mode) for fmt in ("PNG", "WEBP", "BMP") for mode in ("L", "RGB", "P", "RGBA")]
    + [("GIF", "P"), ("TIFF", "RGB")],
)
def test_damage_has_the_same_outcome_everywhere(decoder, pillow, fmt, mode):
    whole = encode(photo(24, 31), fmt, mode)
    rng = np.random.default_rng(len(whole))
    for turn in range(60):
        data = bytearray(whole)
        at = rng.integers(len(data) if turn % 2 else min(len(data), 500))
        data[at] ^= 1 << int(rng.integers(8))
        assert_same_outcome(outcome(decoder, bytes(data)), outcome(pillow, bytes(data)))


@pytest.mark.parametrize("name", decoders.names())
def test_pixel_limit(name):
    bomb = png(60_000, 60_000, 8, 2)
    assert len(bomb) < 100
    for call in (build(name).decode, build(name).size):
        with pytest.raises(DataError, match=r"60000 x 60000 .* 3,600,000,000 pixels; allowed are 178,956,970"):
            call(bomb)
    data = encode(PHOTO, "JPEG")
    assert build(name, max_pixels=67 * 53).decode(data).shape == PHOTO.shape
    with pytest.raises(DataError, match=r"3,551 pixels; allowed are 3,550; .*decode.max_pixels=3551"):
        build(name, max_pixels=67 * 53 - 1).decode(data)
    with pytest.raises(ConfigError, match=r"decode.max_pixels: 0 is not allowed"):
        DecodeConfig(name, max_pixels=0)


def test_pillows_own_limit_says_nothing(decoder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)  # 3,551 are a warning, and here an error
    for fmt, mode in (("JPEG", "L"), ("PNG", "RGB"), ("BMP", "L")):
        assert decoder.decode(encode(PHOTO, fmt, mode)).shape == PHOTO.shape


def test_pickles(decoder):
    data = encode(PHOTO, "JPEG")
    copy = pickle.loads(pickle.dumps(decoder))
    assert type(copy) is type(decoder)
    np.testing.assert_array_equal(copy.decode(data), decoder.decode(data))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(method):
    data = [encode(PHOTO, fmt) for fmt in FORMATS]
    built = [build(name) for name in decoders]
    wanted = [[decoder.decode(file) for file in data] for decoder in built]
    with multiprocessing.get_context(method).Pool(1) as pool:  # one for all: to spawn takes half a second
        for decoder, pixels in zip(built, wanted, strict=True):
            np.testing.assert_array_equal(pool.map_async(decoder.decode, data).get(timeout=120), pixels)


@pytest.mark.parametrize("size", [(1, 1_100_000), (70_000, 1)])
def test_long_images(decoder: Decoder, size: tuple[int, int]) -> None:  # OpenCV's PNG takes 1,000,000 columns
    pixels = np.zeros((*size, 3), np.uint8)
    pixels[-1, -1] = 1, 2, 3
    got = decoder.decode(encode(pixels, "PNG", compress_level=1))
    assert got.shape == pixels.shape
    assert got[-1, -1].tolist() == [1, 2, 3]


def test_threads(decoder):
    data = [encode(photo(seed=seed), FORMATS[seed % 4]) for seed in range(64)]
    with ThreadPoolExecutor(4) as pool:
        for got, file in zip(pool.map(decoder.decode, data), data, strict=True):
            np.testing.assert_array_equal(got, decoder.decode(file))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_raw_pixels_are_a_view(decoder, mode):
    data = encode(PHOTO, "PPM", mode)
    wanted = reference(data)
    np.testing.assert_array_equal(decoder.decode(data), wanted)
    region = decoder.decode(memoryview(data), (3, 5, 20, 30))
    np.testing.assert_array_equal(region, wanted[3:23, 5:35])
    if mode == "RGB":
        assert np.shares_memory(region, np.frombuffer(data, np.uint8))
