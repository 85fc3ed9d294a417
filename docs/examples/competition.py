"""Lay photographs in class folders out as a competition does: `python competition.py clothes kaggle`.

kaggle/train.csv (id,label), kaggle/train/, kaggle/test.csv (id), kaggle/test/, kaggle/sample_submission.csv; and
kaggle/solution.csv, which a competition keeps for itself.
"""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path


def write(file: Path, *rows: list[str]) -> None:
    """A table."""
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows(rows)


photographs, out = Path(sys.argv[1]), Path(sys.argv[2])
labels: dict[str, list[list[str]]] = {}
for split, name in (("train", "train"), ("val", "test")):
    (out / name).mkdir(parents=True)
    labels[name] = []
    for number, path in enumerate(sorted(photographs.glob(f"{split}/*/*.jpg"), key=lambda path: path.name)):
        shutil.copy(path, out / name / f"{number:05}.jpg")
        labels[name].append([f"{number:05}", path.parent.name])

some = labels["train"][0][1]
write(out / "train.csv", ["id", "label"], *labels["train"])
write(out / "test.csv", ["id"], *[[number] for number, _ in labels["test"]])
write(out / "sample_submission.csv", ["id", "label"], *[[number, some] for number, _ in labels["test"]])
write(out / "solution.csv", ["id", "label"], *labels["test"])
