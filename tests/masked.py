"""Images with masks, for tests."""

from pathlib import Path

import numpy as np
from images import encode, photo
from numpy.typing import NDArray
from PIL import Image

NAMES = ("sky", "tree", "cät")
KEYS = ("a.png", "in/b.jpg", "c c.jpg", "d.jpg")


def mask_of(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """(H, W) uint8: blocks of the values 0 to 2, and some of 255."""
    generator = np.random.default_rng(seed)
    blocks = generator.choice(np.array([0, 0, 1, 2, 255], np.uint8), (height // 4 + 1, width // 4 + 1))
    return np.kron(blocks, np.ones((4, 4), np.uint8))[:height, :width]


def make_masks(root: Path, counts: dict[str, int] | None = None, names: bool = True) -> Path:
    """ROOT/SPLIT/{images,masks} of small photographs: grey masks and ones with a palette in turns."""
    for split, count in (counts or {"train": len(KEYS), "val": 2}).items():
        for number in range(count):
            key = KEYS[number] if count <= len(KEYS) else f"{number:04}.jpg"
            size = (30 + number % 5, 40)
            write_pair(root / split, key, photo(*size, number), mask_of(*size, number), palette=number % 2 == 1)
    if names:
        (root / "classes.txt").write_text("".join(f"{name}\n" for name in NAMES))
    return root


def write_pair(
    folder: Path, key: str, image: NDArray[np.uint8], mask: NDArray[np.uint8], *, palette: bool = False
) -> Path:
    """FOLDER/images/KEY and its mask, whose path is returned."""
    path, mask_path = folder / "images" / key, (folder / "masks" / key).with_suffix(".png")
    for each in (path, mask_path):
        each.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(image, "PNG" if key.endswith("png") else "JPEG"))
    drawn = Image.fromarray(mask)
    if palette:
        drawn.putpalette([(7 * value) % 256 for value in range(768)])
    drawn.save(mask_path, "PNG")
    return mask_path
