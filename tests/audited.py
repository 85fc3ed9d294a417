"""An audit of images with hostile names, whose findings are made up."""

import os
from pathlib import Path

from folders import HOSTILE
from images import encode, exif, photo
from runs import composed

from effloop.audit.findings import KINDS, Finding, Place
from effloop.audit.page import Audit
from effloop.data.source.splits import open_split

LABEL = HOSTILE.replace("/", "\N{DIVISION SLASH}")
NAMES = (
    "=1+1.jpg",
    "a\nb.jpg",
    os.fsdecode(b"\xff.jpg"),
    "-1.jpg",
    "\N{RIGHT-TO-LEFT OVERRIDE}gpj.jpg",
    f"{LABEL}.jpg",
)


def make_audit(root: Path) -> Audit:
    """Two splits of two classes with these names, each kind found, of leaks more than a page has, and one image not
    decodable.
    """
    for split in ("train", "val"):
        for label in ("=cat", LABEL):
            (root / split / label).mkdir(parents=True)
            for number, name in enumerate(NAMES):
                turned = {"exif": exif(6)} if number == 1 else {}
                data = encode(photo(300 if number else 20, 200, seed=number), "JPEG", **turned)
                (root / split / label / name).write_bytes(data)
    (root / "train" / LABEL / NAMES[0]).write_bytes(b"\xff\xd8\xff")
    config = composed(f"data.root='{root}'")
    splits = {split: open_split(config.data, split) for split in ("train", "val")}
    places = [Place(split, sample) for sample in range(2 * len(NAMES)) for split in ("val", "train")]
    findings = [Finding("leak", (*places[:9],), HOSTILE, 1 / number, (places[1],)) for number in range(1, 50)]
    findings += [Finding(kind, (*places[n : n + 3],), f"={HOSTILE}", 0.5) for n, kind in enumerate([*KINDS][1:-1])]
    findings.append(Finding([*KINDS][-1], (), HOSTILE))
    return Audit(config, splits, findings, {"leak": "without them top1 is 71.2% instead of 74.8%"})
