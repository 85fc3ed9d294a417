"""What an audit keeps of an image."""

from __future__ import annotations

import numpy as np

SIDE = 32
"""Height and width of the thumbnails that images are compared by, in pixels."""

CODE = 64
"""Bytes of what is kept of a thumbnail."""

RECORD = np.dtype(
    [
        ("state", np.uint8),  # 0 not looked at, 1 decoded, 2 can't be decoded
        ("turn", np.uint8),  # EXIF orientation as stored, 1 to 8
        ("grey", np.bool_),  # without colours
        ("height", np.uint32),  # pixels, as stored
        ("width", np.uint32),
        ("bytes", np.uint32),  # of the file, at most 2^32 - 1
        ("extra", np.uint32),  # of them, those of another image within it, such as a camera's thumbnail
        ("digest", np.uint64),  # of all bytes
        ("code", np.int8, CODE),  # of the thumbnail, `copies.describe`
        ("looks", np.float32, 8),  # of it, `odd.measure`
    ]
)
"""What is kept of an image: 123 bytes."""
