"""Damaged files of OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from effloop.errors import EffLoopError
from effloop.inference.formats import OpenVino, one_line_errors


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text(path.read_text()[:1000]), r"can't be read: RuntimeError: (?!Exception from)"),
        (lambda path: path.with_suffix(".bin").unlink(), r"weights in model.bin, which is not there; copy both"),
        (lambda path: path.with_suffix(".bin").write_bytes(b"short"), "Incorrect weights in bin file"),
    ],
)
@pytest.mark.nightly
def test_damaged(
    damage: Callable[[Path], object], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line that says what is wrong, and none by C++."""
    path = tmp_path / "model.xml"
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval().requires_grad_(False)
    OpenVino().save(OpenVino().convert(model, torch.zeros(2, 3, 2, 2)), path, "{}")
    assert OpenVino().read_metadata(path) == "{}"
    damage(path)
    capfd.readouterr()
    with pytest.raises(EffLoopError, match=message) as raised, one_line_errors(f"{path} can't be read"):
        OpenVino().read_metadata(path)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")
