"""Copies of images, planted into a dataset for an audit to find."""

import io
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps


class Copy(NamedTuple):
    """A planted copy; the paths are relative to the dataset's folder."""

    kind: str
    original: Path  # of an image that was there
    path: Path


def _crop(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    width, height = (max(1, round(side * 0.9)) for side in image.size)
    left, top = int(rng.integers(image.width - width + 1)), int(rng.integers(image.height - height + 1))
    return image.crop((left, top, left + width, top + height))


def _logo(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A white box with a ring, a quarter of the width and an eighth of the height, in a corner."""
    width, height, ring = *image.size, min(image.width // 6, image.height // 10)
    left, top = int(rng.choice([width // 20, width * 7 // 10])), int(rng.choice([height // 20, height * 33 // 40]))
    draw = ImageDraw.Draw(image)
    draw.rectangle((left, top, left + width // 4, top + height // 8), "white")
    draw.ellipse((left + 2, top + 2, left + 2 + ring, top + 2 + ring), outline="navy", width=ring // 5 + 1)
    return image


EDITS: dict[str, Callable[[Image.Image, np.random.Generator], Image.Image]] = {
    "re-saved": lambda image, rng: image,
    "half": lambda image, rng: image.resize((image.width // 2 or 1, image.height // 2 or 1)),
    "cropped": _crop,
    "mirrored": lambda image, rng: ImageOps.mirror(image),
    "turned": lambda image, rng: image.rotate(int(rng.choice([90, 270])), expand=True),
    "brighter": lambda image, rng: ImageEnhance.Brightness(image).enhance(1.1),
    "grey": lambda image, rng: image.convert("L"),
    "logo": _logo,
}
KINDS = ("equal bytes", "equal pixels", *EDITS)


def plant(source: Path, folder: Path, count: int, kinds: Sequence[str] = KINDS, seed: int = 0) -> list[Copy]:
    """Copy a dataset, SPLIT/LABEL/... or SPLIT/{images,masks}/..., and add a copy of each of `count` of its images.

    The kinds come in turns, and those of a kind go in turns into the same split or another, with the same label or
    another. Edited ones are JPEGs, of quality 60 if re-saved and else of 90.
    """
    shutil.copytree(source, folder)
    copies = []
    found = (path.relative_to(folder) for path in sorted(folder.glob("*/*/**/*")) if path.is_file())
    images = [path for path in found if path.parts[1] != "masks"]
    splits, labels = (sorted({path.parts[level] for path in images}) for level in (0, 1))
    for turn, place in enumerate(np.random.default_rng(seed).permutation(len(images))[:count]):
        (way, number), original = divmod(turn, len(kinds)), images[place]
        kind, (split, label, *inner) = kinds[number], original.parts[:-1]
        split = splits[(splits.index(split) + way % 2) % len(splits)]
        label = labels[(labels.index(label) + way // 2 % 2) % len(labels)]
        name = f"{original.stem}_{kind.replace(' ', '_')}{'.jpg' if kind in EDITS else original.suffix}"
        copies.append(Copy(kind, original, Path(split, label, *inner, name)))
        path, drawn = folder / copies[-1].path, (seed, turn)  # a mask gets the image's box
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_copy((folder / original).read_bytes(), kind, np.random.default_rng(drawn)))
        mask, its = (image.parents[1] / "masks" / f"{image.stem}.png" for image in (folder / original, path))
        if mask.exists():
            values = Image.open(mask).convert("P")  # of which resizing makes no new values
            edit = kind if kind in ("half", "cropped", "mirrored", "turned") else "re-saved"
            EDITS[edit](values, np.random.default_rng(drawn)).save(its)
    return copies


def _copy(data: bytes, kind: str, rng: np.random.Generator) -> bytes:
    if kind == "equal bytes":
        return data
    if kind == "equal pixels" and data.startswith(b"\xff\xd8"):
        return data[:2] + b"\xff\xfe\0\x08copied" + data[2:]
    image, file, quality = Image.open(io.BytesIO(data)), io.BytesIO(), 60 if kind == "re-saved" else 90
    if kind == "equal pixels":
        image.save(file, image.format, compress_level=1, lossless=True, exif=image.getexif())
    else:
        EDITS[kind](ImageOps.exif_transpose(image).convert("RGB"), rng).save(file, "JPEG", quality=quality)
    return file.getvalue()
